//! Metrics of plugins over the rollouts of a training step: time, fuel, rejections, range used, and which parts move the total.

use crate::environment::{Outcome, WeightedReward};
use querl_plugin::{CallReport, Observer};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Collects until the metrics are taken.
#[derive(Debug, Default)]
pub(crate) struct PluginStatistics {
    calls: Mutex<BTreeMap<String, Usage>>,
    step: Mutex<Step>,
}

#[derive(Debug, Default)]
struct Step {
    usage: BTreeMap<String, Usage>,
    rewards: BTreeMap<String, RewardStatistics>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Usage {
    time_s: f64,
    fuel: u64,
}

#[derive(Debug, Default)]
struct RewardStatistics {
    range_width: f64,
    n_rejected: u64,
    totals: Vec<f64>,
    /// Values of each component, with the totals of their episodes.
    components: BTreeMap<String, Vec<(f64, f64)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PluginStatistics {
    /// Counts the calls of a host.
    pub(crate) fn observer(self: &Arc<Self>) -> Observer {
        let statistics = self.clone();
        Arc::new(move |report: &CallReport<'_>| {
            let mut calls = lock(&statistics.calls);
            let usage = match calls.get_mut(report.plugin) {
                Some(usage) => usage,
                None => calls.entry(report.plugin.to_owned()).or_default(),
            };
            usage.time_s += report.wall.as_secs_f64();
            usage.fuel = usage.fuel.saturating_add(report.fuel);
        })
    }

    /// Forgets calls of anything but the batch of rollouts that comes now.
    pub(crate) fn begin_batch(&self) {
        lock(&self.calls).clear();
    }

    /// Adds the calls since [`begin_batch`](Self::begin_batch) and the results of each reward.
    pub(crate) fn add_batch(&self, rewards: &[WeightedReward], by_reward: &[Vec<Outcome>]) {
        let mut step = lock(&self.step);
        for (plugin, Usage { time_s, fuel }) in std::mem::take(&mut *lock(&self.calls)) {
            let usage = step.usage.entry(plugin).or_default();
            *usage = Usage { time_s: usage.time_s + time_s, fuel: usage.fuel.saturating_add(fuel) };
        }
        for (reward, outcomes) in rewards.iter().zip(by_reward) {
            let range = reward.model.range();
            let found = step.rewards.entry(reward.label.clone()).or_default();
            found.range_width = range.max - range.min;
            for outcome in outcomes {
                let Ok(score) = outcome else {
                    found.n_rejected += 1;
                    continue;
                };
                found.totals.push(score.total);
                for component in &score.components {
                    let values = found.components.entry(component.name.clone()).or_default();
                    values.push((component.value, score.total));
                }
            }
        }
    }

    /// The metrics of the step that ends here.
    pub(crate) fn take(&self) -> BTreeMap<String, f64> {
        let Step { usage, rewards } = std::mem::take(&mut *lock(&self.step));
        let mut metrics = BTreeMap::new();
        for (plugin, Usage { time_s, fuel }) in usage {
            metrics.insert(format!("plugin/{plugin}/time_s"), time_s);
            metrics.insert(format!("plugin/{plugin}/fuel"), fuel as f64);
        }
        for (label, RewardStatistics { range_width, n_rejected, totals, components }) in rewards {
            metrics.insert(format!("plugin/{label}/rejected"), n_rejected as f64);
            let (min, max) = totals
                .iter()
                .fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), total| (min.min(*total), max.max(*total)));
            if !totals.is_empty() {
                metrics.insert(format!("plugin/{label}/range_used"), (max - min) / range_width);
            }
            for (component, values) in components {
                metrics.extend(correlation(&values).map(|value| (format!("plugin/{label}/corr/{component}"), value)));
            }
        }
        metrics
    }
}

/// Pearson correlation; `None` where one side is constant.
fn correlation(pairs: &[(f64, f64)]) -> Option<f64> {
    let n = pairs.len() as f64;
    let mean = |value: fn(&(f64, f64)) -> f64| pairs.iter().map(value).sum::<f64>() / n;
    let (mean_x, mean_y) = (mean(|pair| pair.0), mean(|pair| pair.1));
    let sum = |value: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|(x, y)| value(x - mean_x, y - mean_y)).sum::<f64>();
    let (xx, yy, xy) = (sum(&|x, _| x * x), sum(&|_, y| y * y), sum(&|x, y| x * y));
    let is_constant = |squares: f64, mean: f64| squares <= n * (1e-12 * mean.abs().max(1e-12)).powi(2);
    (!is_constant(xx, mean_x) && !is_constant(yy, mean_y)).then(|| (xy / (xx * yy).sqrt()).clamp(-1.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::testing::ShopReward;
    use querl_core::records::{Rejection, Reward, RewardComponent};
    use std::time::Duration;

    fn scored(total: f64, win: f64) -> Outcome {
        let component = |name: &str, value| RewardComponent { name: name.into(), value };
        Ok(Reward { total, components: vec![component("win", win), component("bias", 0.1)] })
    }

    /// Pearson correlation of (0, 1, 0.5) and (-0.5, 0.5, 0.25): numpy.corrcoef gives 0.9607689228305226.
    #[test]
    fn metrics_of_a_step_are_those_of_its_batches_and_are_taken_once() {
        let statistics = Arc::new(PluginStatistics::default());
        let observer = statistics.observer();
        let report = |plugin, fuel| CallReport {
            plugin,
            function: "rewards.score-batch",
            n_items: 1,
            fuel,
            wall: Duration::from_millis(250),
            memory_bytes: 0,
            failed: false,
        };
        let rewards = [WeightedReward { label: "r".into(), model: Arc::new(ShopReward("r")), weight: 1.0 }];
        observer(&report("r", 9));
        let rejected = || Err(Rejection { code: "x".into(), detail: String::new() });
        for outcomes in [vec![scored(-0.5, 0.0), rejected()], vec![scored(0.5, 1.0), scored(0.25, 0.5)]] {
            statistics.begin_batch();
            observer(&report("r", 100));
            observer(&report("p", 5));
            statistics.add_batch(&rewards, &[outcomes]);
        }
        let metrics = statistics.take();
        let expected = [
            ("plugin/p/fuel", 10.0),
            ("plugin/p/time_s", 0.5),
            ("plugin/r/corr/win", 0.960_768_922_830_522_6),
            ("plugin/r/fuel", 200.0),
            ("plugin/r/range_used", 0.5),
            ("plugin/r/rejected", 1.0),
            ("plugin/r/time_s", 0.5),
        ];
        assert_eq!(metrics.keys().map(String::as_str).collect::<Vec<_>>(), expected.map(|(name, _)| name));
        for (name, value) in expected {
            assert!((metrics[name] - value).abs() < 1e-12, "{name}: {}", metrics[name]);
        }
        assert!(statistics.take().is_empty());
    }

    #[test]
    fn a_constant_has_no_correlation() {
        assert_eq!(correlation(&[(0.1, 1.0), (0.1, 2.0), (0.1, 3.0)]), None);
        assert_eq!(correlation(&[(1.0, 2.0)]), None);
        assert_eq!(correlation(&[(1.0, 3.0), (2.0, 1.0)]), Some(-1.0));
    }
}

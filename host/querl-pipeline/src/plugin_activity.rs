//! Activity of plugins while rollouts are scored: time and fuel of calls, and the results of rewards.

use crate::environment::{Outcome, WeightedReward};
use querl_core::ports::{PluginActivity, RewardResults};
use querl_plugin::{CallReport, Observer};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Meter of time and fuel of all calls of a plugin host since the last reading.
#[derive(Debug, Default)]
pub(crate) struct CallMeter(Mutex<BTreeMap<String, PluginActivity>>);

impl CallMeter {
    pub(crate) fn observer(self: &Arc<Self>) -> Observer {
        let meter = self.clone();
        Arc::new(move |report: &CallReport<'_>| {
            let mut plugins = meter.plugins();
            let activity = match plugins.get_mut(report.plugin) {
                Some(activity) => activity,
                None => plugins.entry(report.plugin.to_owned()).or_default(),
            };
            activity.time_s += report.wall.as_secs_f64();
            activity.fuel = activity.fuel.saturating_add(report.fuel);
        })
    }

    pub(crate) fn take(&self) -> BTreeMap<String, PluginActivity> {
        std::mem::take(&mut *self.plugins())
    }

    fn plugins(&self) -> MutexGuard<'_, BTreeMap<String, PluginActivity>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Results of each reward plugin on a batch of episodes, by the plugin's label.
pub(crate) fn results<'a>(
    rewards: &'a [WeightedReward],
    by_reward: &'a [Vec<Outcome>],
) -> impl Iterator<Item = (String, PluginActivity)> + 'a {
    rewards.iter().zip(by_reward).map(|(reward, outcomes)| {
        let range = reward.model.range();
        let mut results = RewardResults { range_width: range.max - range.min, ..RewardResults::default() };
        for outcome in outcomes {
            let Ok(score) = outcome else {
                results.n_rejected += 1;
                continue;
            };
            results.totals.push(score.total);
            for component in &score.components {
                let values = results.components.entry(component.name.clone()).or_default();
                values.push((component.value, score.total));
            }
        }
        (reward.label.clone(), PluginActivity { results: Some(results), ..PluginActivity::default() })
    })
}

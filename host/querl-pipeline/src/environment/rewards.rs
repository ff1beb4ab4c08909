//! Several reward plugins make one score.

use querl_core::ports::{PluginFault, RewardModel};
use querl_core::records::{Episode, Rejection, Reward, RewardComponent};
use std::sync::Arc;

/// One reward plugin and its weight in the sum.
#[derive(Clone)]
pub struct WeightedReward {
    /// What its parts are called in metrics, episodes and reports; unlike that of the others of a run.
    pub label: String,
    /// The plugin.
    pub model: Arc<dyn RewardModel>,
    /// Its weight.
    pub weight: f64,
}

/// One score per episode, in order: the weighted sum of the plugins' totals.
///
/// Components keep the plugin's own values, unweighted; with several plugins their names are `LABEL/component`, beside each
/// plugin's `LABEL/total`. An episode that one plugin rejects is rejected, with that plugin's code.
///
/// # Errors
/// A plugin broke its contract.
pub fn score(rewards: &[WeightedReward], episodes: &[Episode]) -> Result<Vec<Result<Reward, Rejection>>, PluginFault> {
    let mut sums: Vec<Result<Reward, Rejection>> =
        episodes.iter().map(|_| Ok(Reward { total: 0.0, components: Vec::new() })).collect();
    for reward in rewards {
        let scores = reward.model.score_batch(episodes)?;
        sums = sums.into_iter().zip(scores).map(|(sum, score)| add(sum, score, reward, rewards.len())).collect();
    }
    Ok(sums)
}

fn add(
    sum: Result<Reward, Rejection>,
    score: Result<Reward, Rejection>,
    reward: &WeightedReward,
    n_plugins: usize,
) -> Result<Reward, Rejection> {
    let mut sum = sum?;
    let name = &reward.label;
    let score =
        score.map_err(|rejection| Rejection { detail: format!("{name}: {}", rejection.detail), ..rejection })?;
    sum.total += reward.weight * score.total;
    if n_plugins == 1 {
        sum.components = score.components;
    } else {
        let named = score.components.into_iter();
        sum.components.extend(named.map(|part| RewardComponent { name: format!("{name}/{}", part.name), ..part }));
        sum.components.push(RewardComponent { name: format!("{name}/total"), value: score.total });
    }
    Ok(sum)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::testing::{Shop, ShopReward, query, request, rewritten};
    use super::*;

    fn episode() -> Episode {
        let (shop, row) = (Shop::default(), query("a"));
        shop.scorer().score(&[request(&row, "good", rewritten("poor"))]).unwrap().scored.remove(0).episode
    }

    fn weighted(name: &'static str, weight: f64) -> WeightedReward {
        WeightedReward { label: name.into(), model: Arc::new(ShopReward(name)), weight }
    }

    #[test]
    fn one_plugin_keeps_its_component_names() {
        let reward = score(&[weighted("a", 2.0)], &[episode()]).unwrap().remove(0).unwrap();
        assert_eq!((reward.total, reward.components[0].name.as_str()), (1.4, "top1"));
    }

    #[test]
    fn several_plugins_are_summed_by_weight_and_named() {
        let rewards = [weighted("a", 1.0), weighted("b", 0.5)];
        let reward = score(&rewards, &[episode()]).unwrap().remove(0).unwrap();
        assert!((reward.total - 1.05).abs() < 1e-12, "{reward:?}");
        let names: Vec<_> = reward.components.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(names, ["a/top1", "a/total", "b/top1", "b/total"]);
    }
}

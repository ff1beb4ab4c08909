//! Recorded outcomes brought to the scale of one plugin.
//!
//! A run adds its reward plugins' totals by weight. A single plugin's replay is compared with its own part of that sum, where the
//! record names it, and without the weight, where the run's configuration names one.

use querl_core::config::Config;
use querl_core::records::{Reward, RewardComponent};
use querl_eval::{Outcome, PluginSide};

/// Ends the name of a component that holds a plugin's own total.
const TOTAL: &str = "/total";

/// Changes `outcomes` so that `plugin`'s compare with them; returns what a reader should know of it.
pub(super) fn made_comparable(
    outcomes: &mut [Option<Outcome>],
    plugin: &PluginSide,
    config: Option<&Config>,
) -> Vec<String> {
    let plugins = summed(outcomes);
    if !plugins.is_empty() {
        return vec![of_sum(outcomes, &plugins, &plugin.id)];
    }
    let Some([reward]) = config.map(|config| config.plugins.rewards.as_slice()) else { return Vec::new() };
    let mut notes = Vec::new();
    if reward.weight != 1.0 && reward.weight != 0.0 {
        scored(outcomes).for_each(|one| one.total /= reward.weight);
        notes
            .push(format!("recorded totals are divided by the weight that the run gave its plugin, {}", reward.weight));
    }
    if !reward.settings.is_empty() && plugin.settings.is_empty() {
        let settings: Vec<String> =
            reward.settings.iter().map(|(key, value)| format!("--settings '{key}={value}'")).collect();
        notes.push(format!(
            "the run gave its plugin settings, this replay gives none; the same ones are: {}",
            settings.join(" ")
        ));
    }
    notes
}

fn scored(outcomes: &mut [Option<Outcome>]) -> impl Iterator<Item = &mut Reward> {
    outcomes.iter_mut().filter_map(|outcome| outcome.as_mut()?.as_mut().ok())
}

/// Ids of the plugins whose sum the totals are; none where one plugin made them alone.
fn summed(outcomes: &[Option<Outcome>]) -> Vec<String> {
    let first = outcomes.iter().find_map(|outcome| outcome.as_ref()?.as_ref().ok());
    let names = first.into_iter().flat_map(|reward| &reward.components);
    names.filter_map(|part| Some(part.name.strip_suffix(TOTAL)?.to_owned())).collect()
}

/// Takes `id`'s part where the sum has one.
fn of_sum(outcomes: &mut [Option<Outcome>], plugins: &[String], id: &str) -> String {
    let all = plugins.join(", ");
    if !plugins.iter().any(|plugin| plugin == id) {
        return format!("recorded totals are weighted sums of {all}; {id} alone is compared with the sum");
    }
    for outcome in outcomes.iter_mut() {
        let Some(Ok(reward)) = outcome else { continue };
        match part(reward, id) {
            Some(part) => *reward = part,
            None => *outcome = None,
        }
    }
    format!("recorded totals are weighted sums of {all}; {id} is compared with its own part of them, unweighted")
}

/// One plugin's total and components out of a sum.
fn part(sum: &Reward, id: &str) -> Option<Reward> {
    let own = |name: &str| name.strip_prefix(id)?.strip_prefix('/').map(str::to_owned);
    let parts =
        sum.components.iter().filter_map(|part| Some(RewardComponent { name: own(&part.name)?, ..part.clone() }));
    let (totals, components): (Vec<_>, Vec<_>) = parts.partition(|part| part.name == TOTAL[1..]);
    Some(Reward { total: totals.last()?.value, components })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn plugin(id: &str) -> PluginSide {
        let (id, version, digest) = (id.to_owned(), "1.0.0".to_owned(), String::new());
        PluginSide { id, version, digest, settings: Default::default(), range: (-1.0, 1.0) }
    }

    fn sum() -> Vec<Option<Outcome>> {
        let parts = [("a/win", 0.5), ("a/total", 0.25), ("b/length", 9.0), ("b/total", 1.0)];
        let components = parts.map(|(name, value)| RewardComponent { name: name.into(), value }).to_vec();
        vec![Some(Ok(Reward { total: 0.75, components })), None]
    }

    #[test]
    fn a_plugin_is_compared_with_its_own_part_of_a_sum() {
        let mut outcomes = sum();
        let notes = made_comparable(&mut outcomes, &plugin("a"), None);
        let reward = outcomes[0].as_ref().unwrap().as_ref().unwrap();
        assert_eq!((reward.total, reward.components.len(), reward.components[0].name.as_str()), (0.25, 1, "win"));
        assert!(notes[0].contains("weighted sums of a, b; a is compared with its own part"), "{notes:?}");
    }

    #[test]
    fn a_plugin_that_was_not_in_the_sum_is_compared_with_all_of_it() {
        let mut outcomes = sum();
        let notes = made_comparable(&mut outcomes, &plugin("c"), None);
        assert_eq!(outcomes, sum());
        assert!(notes[0].ends_with("c alone is compared with the sum"), "{notes:?}");
    }
}

//! The named parts of the totals.

use super::Scored;
use super::distribution::mean;
use querl_core::records::Reward;
use serde::Serialize;
use std::collections::BTreeMap;

/// One part, over the episodes that both sides scored. A part may be absent from some: no judge was asked, for example.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComponentChange {
    /// As the plugins call it.
    pub name: String,
    /// Episodes that have it before.
    pub n_before: usize,
    /// Its mean over those.
    pub before: Option<f64>,
    /// Episodes that have it after.
    pub n_after: usize,
    /// Its mean over those.
    pub after: Option<f64>,
    /// Episodes that have it before and after.
    pub n_both: usize,
    /// Mean of after minus before over those.
    pub change: Option<f64>,
}

#[derive(Default)]
struct Values {
    before: Vec<f64>,
    after: Vec<f64>,
    change: Vec<f64>,
}

/// In the order of their names.
pub(super) fn changes(scored: &[Scored<'_>]) -> Vec<ComponentChange> {
    let mut values: BTreeMap<&str, Values> = BTreeMap::new();
    for one in scored {
        let before = one.before.map_or(&[][..], |reward| &reward.components);
        before.iter().for_each(|part| values.entry(&part.name).or_default().before.push(part.value));
        for part in &one.after.components {
            let found = values.entry(&part.name).or_default();
            found.after.push(part.value);
            found.change.extend(one.before.and_then(|reward| part_of(reward, &part.name)).map(|old| part.value - old));
        }
    }
    let change = |(name, values): (&str, Values)| ComponentChange {
        name: name.to_owned(),
        n_before: values.before.len(),
        before: mean(&values.before),
        n_after: values.after.len(),
        after: mean(&values.after),
        n_both: values.change.len(),
        change: mean(&values.change),
    };
    values.into_iter().map(change).collect()
}

/// The value of one part.
pub(super) fn part_of(reward: &Reward, name: &str) -> Option<f64> {
    reward.components.iter().find(|part| part.name == name).map(|part| part.value)
}

//! Which episodes answer the same query, and which of those a policy's update compared with each other.

use super::correlation::{Pairs, graded};
use super::{ReplayEpisode, Scored};
use querl_core::records::Episode;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// Pairs of answers to one query, by whether their order changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Order {
    /// Pairs of one step: several samples of one query, whose advantages depend on their order.
    pub same_step: Pairs,
    /// Pairs of any steps.
    pub any_step: Pairs,
}

/// For each episode, which query it answers.
pub(super) struct Groups {
    queries: Vec<String>,
    rollouts: Vec<String>,
}

impl Groups {
    pub(super) fn new(episodes: &[ReplayEpisode<'_>]) -> Self {
        let (mut queries, mut rollouts) = (Vec::with_capacity(episodes.len()), Vec::with_capacity(episodes.len()));
        for one in episodes {
            let (query, rollout) = match parts(&one.episode.id) {
                Some((phase, query)) => (query.to_owned(), format!("{phase}/{query}")),
                None => (asked(one.episode), format!("{}/{}", one.step, asked(one.episode))),
            };
            queries.push(query);
            rollouts.push(rollout);
        }
        Self { queries, rollouts }
    }

    /// The query that `scored` answers.
    pub(super) fn query(&self, scored: &Scored<'_>) -> &str {
        &self.queries[scored.index]
    }

    /// Queries among `scored`.
    pub(super) fn n_queries(&self, scored: &[Scored<'_>]) -> usize {
        scored.iter().map(|one| self.query(one)).collect::<std::collections::HashSet<_>>().len()
    }

    pub(super) fn order(&self, scored: &[Scored<'_>]) -> Order {
        Order { same_step: pairs(&self.rollouts, scored), any_step: pairs(&self.queries, scored) }
    }
}

/// Of `step-000012/ab12cd34/0`: `step-000012` and `ab12cd34`; `None` for an id of another form.
fn parts(id: &str) -> Option<(&str, &str)> {
    let mut parts = id.split('/');
    let (phase, query, sample) = (parts.next()?, parts.next()?, parts.next()?);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_run_id = phase.split_once('-').is_some_and(|(_, step)| is_number(step)) && is_number(sample);
    (is_run_id && !query.is_empty() && parts.next().is_none()).then_some((phase, query))
}

/// Query and context as one text: another context is another question.
fn asked(episode: &Episode) -> String {
    format!("{}\0{}\0{}", episode.query, episode.context.user_profile, episode.context.history_summary)
}

/// Pairs within groups, over all groups.
fn pairs(groups: &[String], scored: &[Scored<'_>]) -> Pairs {
    let mut by_group: HashMap<&str, (Vec<f64>, Vec<f64>)> = HashMap::new();
    for one in scored {
        let Some(before) = one.before else { continue };
        let (befores, afters) = by_group.entry(&groups[one.index]).or_default();
        befores.push(before.total);
        afters.push(one.after.total);
    }
    let mut all = Pairs::default();
    by_group.values().for_each(|(befores, afters)| all += Pairs::of(&graded(befores), &graded(afters)));
    all
}

/// Indices of the items of each key, by key.
pub(super) fn by_key<K: Ord>(keys: impl Iterator<Item = K>) -> BTreeMap<K, Vec<usize>> {
    let mut indices: BTreeMap<K, Vec<usize>> = BTreeMap::new();
    keys.enumerate().for_each(|(index, key)| indices.entry(key).or_default().push(index));
    indices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_a_run_name_the_query_and_others_do_not() {
        assert_eq!(parts("step-000012/ab12cd34/0"), Some(("step-000012", "ab12cd34")));
        assert_eq!(parts("val-000000/ab12cd34/11"), Some(("val-000000", "ab12cd34")));
        for id in ["a", "step-000012/ab12cd34", "step-000012/ab/cd/0", "step/ab/0", "step-1/ab/x", "step-1//0"] {
            assert_eq!(parts(id), None, "{id}");
        }
    }
}

//! The input of a replay comparison: episodes with their outcomes before and after, counts by outcome, and groups.

use super::statistics::{Pairs, rounded};
use querl_core::ports::RewardRange;
use querl_core::records::{Episode, Rejection, Reward};
use serde::Serialize;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The reward of an episode, or the rejection with its reason.
pub type Outcome = Result<Reward, Rejection>;

/// An episode with its outcomes before and after.
#[derive(Debug, Clone, Copy)]
pub struct ReplayEpisode<'a> {
    /// Line of the episode in `episodes.jsonl`, from 1.
    pub line: usize,
    /// Training step in which the episode was generated.
    pub step: u64,
    /// Query, rewrites and retrieval results of the episode.
    pub episode: &'a Episode,
    /// Outcome before; `None` if the episode has no recorded outcome.
    pub before: Option<&'a Outcome>,
    /// Outcome after, from the plugin under evaluation.
    pub after: &'a Outcome,
}

/// Source of the rewards of one side of the comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Side {
    /// The rewards recorded in `episodes.jsonl`.
    Recorded,
    /// A reward plugin that scored the episodes again.
    Plugin(PluginSide),
}

/// A reward plugin and its settings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PluginSide {
    /// Plugin id.
    pub id: String,
    /// Plugin version.
    pub version: String,
    /// SHA-256 of the WebAssembly component, in hexadecimal.
    pub digest: String,
    /// The settings given by the user; all others have the plugin's defaults.
    pub settings: BTreeMap<String, serde_json::Value>,
    /// Minimum and maximum total reward that the plugin declares under these settings.
    pub range: (f64, f64),
}

impl PluginSide {
    pub(super) fn spans_zero(&self) -> bool {
        self.range.0 < 0.0 && self.range.1 > 0.0
    }

    /// Minimum and maximum of a declared reward range.
    pub fn range(range: RewardRange) -> (f64, f64) {
        (range.min, range.max)
    }
}

/// An episode that both sides scored (or only the side after, if no episode was scored before).
#[derive(Debug, Clone, Copy)]
pub(super) struct ScoredEpisode<'a> {
    pub(super) index: usize,
    pub(super) recorded: ReplayEpisode<'a>,
    /// Reward before; `None` for all episodes if no episode was scored before.
    pub(super) before: Option<&'a Reward>,
    pub(super) after: &'a Reward,
}

impl ScoredEpisode<'_> {
    pub(super) fn change(&self) -> Option<f64> {
        Some(self.after.total - self.before?.total)
    }
}

/// Episodes scored by both sides; if no episode was scored before, all episodes scored after.
pub(super) fn scored_by_both<'a>(episodes: &[ReplayEpisode<'a>]) -> Vec<ScoredEpisode<'a>> {
    let any_before = episodes.iter().any(|one| matches!(one.before, Some(Ok(_))));
    let scored = |(index, recorded): (usize, &ReplayEpisode<'a>)| {
        let before = recorded.before.and_then(|outcome| outcome.as_ref().ok());
        let after = recorded.after.as_ref().ok()?;
        (before.is_some() || !any_before).then_some(ScoredEpisode { index, recorded: *recorded, before, after })
    };
    episodes.iter().enumerate().filter_map(scored).collect()
}

/// Number of episodes by the outcomes before and after.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    pub(crate) n_episodes: usize,
    pub(crate) n_scored_by_both: usize,
    pub(crate) rejected_only_after: BTreeMap<String, usize>,
    pub(crate) rejected_only_before: BTreeMap<String, usize>,
    /// Episodes rejected before and after, by the rejection code after.
    pub(crate) rejected_by_both: BTreeMap<String, usize>,
    /// Number of episodes without a recorded outcome that were scored after.
    pub(crate) n_scored_without_record: usize,
    /// Episodes without a recorded outcome that were rejected after, by rejection code.
    pub(crate) rejected_without_record: BTreeMap<String, usize>,
}

impl Counts {
    pub(super) fn of(episodes: &[ReplayEpisode<'_>]) -> Self {
        let mut counts = Self { n_episodes: episodes.len(), ..Self::default() };
        episodes.iter().for_each(|episode| counts.add(episode));
        counts
    }

    fn add(&mut self, one: &ReplayEpisode<'_>) {
        let count = |codes: &mut BTreeMap<String, usize>, outcome: &Outcome| {
            let code = outcome.as_ref().err().map_or("", |rejection| &rejection.code);
            *codes.entry(code.to_owned()).or_default() += 1;
        };
        match (one.before, one.after) {
            (Some(Ok(_)), Ok(_)) => self.n_scored_by_both += 1,
            (Some(Ok(_)), after) => count(&mut self.rejected_only_after, after),
            (Some(before), Ok(_)) => count(&mut self.rejected_only_before, before),
            (Some(_), after) => count(&mut self.rejected_by_both, after),
            (None, Ok(_)) => self.n_scored_without_record += 1,
            (None, after) => count(&mut self.rejected_without_record, after),
        }
    }

    /// Table rows (label, number of episodes, rejection codes); rows about missing records only if they are not 0.
    pub(super) fn rows(&self) -> Vec<(&'static str, usize, String)> {
        let sum = |codes: &BTreeMap<String, usize>| codes.values().sum::<usize>();
        let always = [
            ("episodes", self.n_episodes, String::new()),
            ("scored by both", self.n_scored_by_both, String::new()),
            ("rejected only before", sum(&self.rejected_only_before), listed(&self.rejected_only_before)),
            ("rejected only after", sum(&self.rejected_only_after), listed(&self.rejected_only_after)),
            ("rejected by both", sum(&self.rejected_by_both), listed(&self.rejected_by_both)),
        ];
        let rare = [
            ("scored, without a recorded outcome", self.n_scored_without_record, String::new()),
            (
                "rejected, without a recorded outcome",
                sum(&self.rejected_without_record),
                listed(&self.rejected_without_record),
            ),
        ];
        always.into_iter().chain(rare.into_iter().filter(|row| row.1 > 0)).collect()
    }
}

fn listed(codes: &BTreeMap<String, usize>) -> String {
    let mut codes: Vec<_> = codes.iter().collect();
    codes.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
    codes.iter().map(|(code, n)| format!("{code} {n}")).collect::<Vec<_>>().join(", ")
}

/// Changes in the order of pairs of responses to the same query.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Order {
    /// Pairs from the same training step: samples of one query, whose order determines their advantages.
    pub(crate) same_step: Pairs,
    /// Pairs from the same or different training steps.
    pub(crate) any_step: Pairs,
}

/// Query and rollout group (query and step) of each episode.
pub(super) struct Groups {
    queries: Vec<String>,
    rollouts: Vec<String>,
}

impl Groups {
    pub(super) fn new(episodes: &[ReplayEpisode<'_>]) -> Self {
        let (mut queries, mut rollouts) = (Vec::with_capacity(episodes.len()), Vec::with_capacity(episodes.len()));
        for one in episodes {
            let (query, rollout) = match id_parts(&one.episode.id) {
                Some((phase, query)) => (query.to_owned(), format!("{phase}/{query}")),
                None => {
                    let query = one.episode.query_key();
                    let rollout = format!("{}/{query}", one.step);
                    (query, rollout)
                }
            };
            queries.push(query);
            rollouts.push(rollout);
        }
        Self { queries, rollouts }
    }

    pub(super) fn query(&self, scored: &ScoredEpisode<'_>) -> &str {
        &self.queries[scored.index]
    }

    pub(super) fn n_queries(&self, scored: &[ScoredEpisode<'_>]) -> usize {
        scored.iter().map(|one| self.query(one)).collect::<BTreeSet<_>>().len()
    }

    pub(super) fn order(&self, scored: &[ScoredEpisode<'_>]) -> Order {
        Order { same_step: pairs_within(&self.rollouts, scored), any_step: pairs_within(&self.queries, scored) }
    }
}

/// `step-000012` and `ab12cd34` of the id `step-000012/ab12cd34/0`; `None` for an id of another form.
fn id_parts(id: &str) -> Option<(&str, &str)> {
    let mut parts = id.split('/');
    let (phase, query, sample) = (parts.next()?, parts.next()?, parts.next()?);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_run_id = phase.split_once('-').is_some_and(|(_, step)| is_number(step)) && is_number(sample);
    (is_run_id && !query.is_empty() && parts.next().is_none()).then_some((phase, query))
}

/// The first episode of each query, with the number of episodes of the query. Only ids of a run name the query: hand-written episodes are
/// all kept, since their authors know them by their ids.
pub(super) fn first_of_queries<T>(episodes: impl IntoIterator<Item = T>, id: impl Fn(&T) -> &str) -> Vec<(T, usize)> {
    let mut found = Vec::<(T, usize)>::new();
    let mut places = HashMap::<String, usize>::new();
    for episode in episodes {
        let id = id(&episode);
        let query = id_parts(id).map_or(id, |(_, query)| query).to_owned();
        match places.entry(query) {
            Entry::Occupied(place) => found[*place.get()].1 += 1,
            Entry::Vacant(place) => {
                place.insert(found.len());
                found.push((episode, 1));
            }
        }
    }
    found
}

/// The number of episodes of a query that changed: `largest of 3, `; empty for one.
pub(super) fn largest_of(n_changed: usize) -> String {
    if n_changed > 1 { format!("largest of {n_changed}, ") } else { String::new() }
}

fn pairs_within(groups: &[String], scored: &[ScoredEpisode<'_>]) -> Pairs {
    let mut by_group: HashMap<&str, (Vec<f64>, Vec<f64>)> = HashMap::new();
    for one in scored {
        let Some(before) = one.before else { continue };
        let (befores, afters) = by_group.entry(&groups[one.index]).or_default();
        befores.push(before.total);
        afters.push(one.after.total);
    }
    let mut all = Pairs::default();
    by_group.values().for_each(|(befores, afters)| all += Pairs::of(&rounded(befores), &rounded(afters)));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_query_of_a_run_has_one_episode_and_other_ids_are_kept() {
        let ids = ["step-000001/q/0", "a", "step-000002/q/3", "step-000001/r/0", "b", "val-000002/q/0"];
        let expected = [("step-000001/q/0", 3), ("a", 1), ("step-000001/r/0", 1), ("b", 1)];
        assert_eq!(first_of_queries(ids, |id| id), expected);
    }

    #[test]
    fn ids_of_a_run_name_the_query_and_others_do_not() {
        assert_eq!(id_parts("step-000012/ab12cd34/0"), Some(("step-000012", "ab12cd34")));
        assert_eq!(id_parts("val-000000/ab12cd34/11"), Some(("val-000000", "ab12cd34")));
        for id in ["a", "step-000012/ab12cd34", "step-000012/ab/cd/0", "step/ab/0", "step-1/ab/x", "step-1//0"] {
            assert_eq!(id_parts(id), None, "{id}");
        }
    }
}

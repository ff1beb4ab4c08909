//! The audited episodes: scored rollouts of training, with their queries and the windows of steps that are compared.

use querl_core::episodes::RecordedEpisode;
use querl_core::records::{Episode, Reward, Split};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Minimum number of training steps for an audit; with fewer the late window would have less than two.
pub(super) const LEAST_STEPS: usize = 8;

/// A policy changes most in its first steps: the early window has this share of the steps, if that has [`EARLY_EPISODES`].
const EARLY_SHARE: f64 = 0.08;
const EARLY_EPISODES: usize = 128;

/// A range of training steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Window {
    /// First and last step, both inclusive.
    pub(crate) steps: (u64, u64),
    pub(crate) n_episodes: usize,
}

impl Window {
    pub(super) fn contains(&self, step: u64) -> bool {
        (self.steps.0..=self.steps.1).contains(&step)
    }
}

/// One scored rollout.
#[derive(Debug, Clone, Copy)]
pub(super) struct AuditRow<'a> {
    pub(super) recorded: &'a RecordedEpisode,
    pub(super) reward: &'a Reward,
    /// Index of the query with its profile and history, in [`AuditRows::queries`].
    pub(super) query: usize,
    /// Index of the set of gold passages, or of the query if no gold passages are known. Paraphrases share one index.
    pub(super) target: usize,
}

impl AuditRow<'_> {
    pub(super) fn episode(&self) -> &Episode {
        &self.recorded.episode
    }
}

pub(super) struct AuditRows<'a> {
    pub(super) rows: Vec<AuditRow<'a>>,
    /// Names of the queries (query, profile and history): the clusters of the bootstrap.
    pub(super) queries: Vec<String>,
    pub(super) n_steps: usize,
    /// Four windows of training steps: early, two in the middle, late; empty with fewer than [`LEAST_STEPS`] steps.
    pub(super) windows: Vec<Window>,
    pub(super) has_gold: bool,
}

impl<'a> AuditRows<'a> {
    /// The scored training episodes.
    pub(super) fn of(episodes: &'a [RecordedEpisode]) -> Self {
        Self::scored(episodes.iter().filter(|one| !is_validation(one)))
    }

    /// The scored validation episodes of queries with gold passages.
    pub(super) fn of_validation(episodes: &'a [RecordedEpisode]) -> Self {
        Self::scored(episodes.iter().filter(|one| is_validation(one) && !one.episode.gold_ids.is_empty()))
    }

    fn scored(episodes: impl Iterator<Item = &'a RecordedEpisode>) -> Self {
        let (mut queries, mut targets) = (Indices::default(), Indices::default());
        let row = |recorded: &'a RecordedEpisode| {
            let reward = recorded.outcome.as_ref()?.as_ref().ok()?;
            let (query, target) = (recorded.episode.query_key(), target_key(&recorded.episode));
            Some(AuditRow { recorded, reward, query: queries.of(query), target: targets.of(target) })
        };
        let rows: Vec<AuditRow<'a>> = episodes.filter_map(row).collect();
        let mut by_step: BTreeMap<u64, usize> = BTreeMap::new();
        rows.iter().for_each(|row| *by_step.entry(row.recorded.step).or_default() += 1);
        let by_step: Vec<(u64, usize)> = by_step.into_iter().collect();
        let has_gold = rows.iter().any(|row| !row.episode().gold_ids.is_empty());
        Self { rows, queries: queries.names(), n_steps: by_step.len(), windows: windows(&by_step), has_gold }
    }

    pub(super) fn early(&self) -> Option<&Window> {
        self.windows.first()
    }

    pub(super) fn late(&self) -> Option<&Window> {
        self.windows.last()
    }

    /// Indices of the rows of a window.
    pub(super) fn within<'b>(&'b self, window: &'b Window) -> impl Iterator<Item = usize> + 'b {
        (0..self.rows.len()).filter(move |index| window.contains(self.rows[*index].recorded.step))
    }
}

fn is_validation(recorded: &RecordedEpisode) -> bool {
    // Files of format 2 have no split.
    recorded.episode.split == Some(Split::Val) || recorded.episode.id.starts_with("val-")
}

fn target_key(episode: &Episode) -> String {
    if episode.gold_ids.is_empty() {
        return episode.query_key();
    }
    let gold: BTreeSet<&str> = episode.gold_ids.iter().map(String::as_str).collect();
    gold.into_iter().collect::<Vec<_>>().join("\0")
}

/// `by_step`: steps in order with their numbers of episodes.
fn windows(by_step: &[(u64, usize)]) -> Vec<Window> {
    let n = by_step.len();
    if n < LEAST_STEPS {
        return Vec::new();
    }
    let window = |steps: &[(u64, usize)]| {
        let (first, last) = (steps.first()?.0, steps.last()?.0);
        Some(Window { steps: (first, last), n_episodes: steps.iter().map(|step| step.1).sum() })
    };
    let mut n_early = ((n as f64 * EARLY_SHARE).ceil() as usize).max(1);
    while n_early < n / 4 && by_step[..n_early].iter().map(|step| step.1).sum::<usize>() < EARLY_EPISODES {
        n_early += 1;
    }
    let ranges = [0..n_early, n / 4..n / 2, n / 2..n - n / 4, n - n / 4..n];
    ranges.into_iter().filter_map(|range| window(&by_step[range])).collect()
}

/// Assigns indices to names in the order of their first appearance.
#[derive(Default)]
struct Indices(BTreeMap<String, usize>);

impl Indices {
    fn of(&mut self, name: String) -> usize {
        let n = self.0.len();
        *self.0.entry(name).or_insert(n)
    }

    fn names(self) -> Vec<String> {
        let mut names: Vec<(usize, String)> = self.0.into_iter().map(|(name, index)| (index, name)).collect();
        names.sort();
        names.into_iter().map(|(_, name)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_early_window_is_short_and_the_late_one_a_quarter() {
        let steps: Vec<(u64, usize)> = (0..100).map(|step| (step, 64)).collect();
        let found: Vec<(u64, u64)> = windows(&steps).iter().map(|window| window.steps).collect();
        assert_eq!(found, [(0, 7), (25, 49), (50, 74), (75, 99)]);
        let sparse: Vec<(u64, usize)> = (0..20).map(|step| (step, 16)).collect();
        assert_eq!(windows(&sparse)[0], Window { steps: (0, 4), n_episodes: 80 }, "at most a quarter");
        assert!(windows(&steps[..7]).is_empty());
    }
}

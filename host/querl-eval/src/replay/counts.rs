//! Who scored how many episodes, and why the others have no score.

use super::{Outcome, ReplayEpisode};
use querl_core::records::{Candidate, Judgement};
use serde::Serialize;
use std::collections::BTreeMap;

/// Episodes by what the two sides did with them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// All of them.
    pub n_episodes: usize,
    /// Scored before and after.
    pub n_scored_by_both: usize,
    /// Scored before, rejected after: codes after.
    pub rejected_only_after: BTreeMap<String, usize>,
    /// Rejected before, scored after: codes before.
    pub rejected_only_before: BTreeMap<String, usize>,
    /// Rejected before and after: codes after.
    pub rejected_by_both: BTreeMap<String, usize>,
    /// No outcome was recorded; scored after.
    pub n_scored_without_record: usize,
    /// No outcome was recorded; rejected after: codes after.
    pub rejected_without_record: BTreeMap<String, usize>,
    /// Rejected before, scored after, although a retrieval or judgement failed: a run drops such an episode before it asks a
    /// plugin.
    pub n_scored_despite_failure: usize,
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
            (Some(before), Ok(_)) => {
                count(&mut self.rejected_only_before, before);
                let sides = [&one.episode.policy, &one.episode.baseline];
                self.n_scored_despite_failure += usize::from(sides.into_iter().any(has_failure));
            }
            (Some(_), after) => count(&mut self.rejected_by_both, after),
            (None, Ok(_)) => self.n_scored_without_record += 1,
            (None, after) => count(&mut self.rejected_without_record, after),
        }
    }

    /// Label, number and codes, for tables; rows that matter only where they are not 0 are left out then.
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

    pub(super) fn notes(&self) -> Option<String> {
        (self.n_scored_despite_failure > 0).then(|| {
            format!(
                "of the episodes that were rejected before, {} with a failed retrieval or judgement are scored after; a run \
                 drops such episodes before it asks a plugin",
                self.n_scored_despite_failure
            )
        })
    }
}

fn has_failure(candidate: &Candidate) -> bool {
    candidate.retrieval.is_err() || matches!(candidate.judgement, Judgement::Failed(_))
}

/// The most frequent code first.
fn listed(codes: &BTreeMap<String, usize>) -> String {
    let mut codes: Vec<_> = codes.iter().collect();
    codes.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
    codes.iter().map(|(code, n)| format!("{code} {n}")).collect::<Vec<_>>().join(", ")
}

//! The episodes that are shown one by one.

use super::Scored;
use super::change::DRAW_TOLERANCE;
use super::components::part_of;
use super::signs::Sign;
use querl_core::records::{Candidate, retrieval_quality};
use serde::Serialize;

/// Parts of the total that are named beside an episode.
const N_PARTS: usize = 3;

/// An episode whose total moved.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChangedEpisode {
    /// Its id.
    pub id: String,
    /// 1-based line in the file of episodes.
    pub line: usize,
    /// Training step that made it.
    pub step: u64,
    /// What the user typed.
    pub query: String,
    /// The policy's rewrite.
    pub policy: String,
    /// The teacher's rewrite.
    pub baseline: String,
    /// Retrieval quality of the policy's rewrite; `None` where retrieval failed.
    pub policy_quality: Option<f64>,
    /// Retrieval quality of the teacher's rewrite; `None` where retrieval failed.
    pub baseline_quality: Option<f64>,
    /// Total before.
    pub before: f64,
    /// Total after.
    pub after: f64,
    /// The parts that moved most, the largest move first; at most three.
    pub parts: Vec<ChangedPart>,
}

/// A part of a total that moved.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChangedPart {
    /// As the plugins call it.
    pub name: String,
    /// `None` where the total before has no such part.
    pub before: Option<f64>,
    /// `None` where the total after has no such part.
    pub after: Option<f64>,
}

impl ChangedPart {
    /// How far it moved; a part that came or went moved by all of it.
    fn size(&self) -> f64 {
        (self.after.unwrap_or(0.0) - self.before.unwrap_or(0.0)).abs()
    }

    fn is_changed(&self) -> bool {
        self.before.is_some() != self.after.is_some() || self.size() > DRAW_TOLERANCE
    }
}

/// The `n` largest changes of sign, and the `n` largest changes of all.
pub(super) fn pick(scored: &[Scored<'_>], n: usize) -> (Vec<ChangedEpisode>, Vec<ChangedEpisode>) {
    let size = |one: &Scored<'_>| one.change().map_or(0.0, f64::abs);
    let mut moved: Vec<&Scored<'_>> = scored.iter().filter(|one| size(one) > DRAW_TOLERANCE).collect();
    // Stable: equal changes stay in the order of the file.
    moved.sort_by(|a, b| size(b).total_cmp(&size(a)));
    let flips =
        moved.iter().filter(|one| one.before.is_some_and(|before| Sign::of(before.total) != Sign::of(one.after.total)));
    let flips = flips.take(n).filter_map(|one| ChangedEpisode::new(one)).collect();
    (flips, moved.iter().take(n).filter_map(|one| ChangedEpisode::new(one)).collect())
}

impl ChangedEpisode {
    fn new(one: &Scored<'_>) -> Option<Self> {
        let episode = one.recorded.episode;
        Some(Self {
            id: episode.id.clone(),
            line: one.recorded.line,
            step: one.recorded.step,
            query: episode.query.clone(),
            policy: episode.policy.rewrite.clone(),
            baseline: episode.baseline.rewrite.clone(),
            policy_quality: quality(&episode.policy),
            baseline_quality: quality(&episode.baseline),
            before: one.before?.total,
            after: one.after.total,
            parts: parts(one),
        })
    }
}

fn quality(candidate: &Candidate) -> Option<f64> {
    candidate.retrieval.as_deref().ok().map(retrieval_quality)
}

fn parts(one: &Scored<'_>) -> Vec<ChangedPart> {
    let Some(before) = one.before else { return Vec::new() };
    let after = one.after;
    let gone = before.components.iter().filter(|part| part_of(after, &part.name).is_none());
    let names = after.components.iter().chain(gone).map(|part| &part.name);
    let part =
        |name: &String| ChangedPart { name: name.clone(), before: part_of(before, name), after: part_of(after, name) };
    let mut parts: Vec<ChangedPart> = names.map(part).filter(ChangedPart::is_changed).collect();
    parts.sort_by(|a, b| b.size().total_cmp(&a.size()));
    parts.truncate(N_PARTS);
    parts
}

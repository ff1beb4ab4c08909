//! What another reward would have said of recorded episodes.
//!
//! In: episodes, each with an outcome before (as recorded, or of another plugin) and an outcome after. Out: [`Replay`], which
//! is the JSON form, and from it a text for a terminal and a page for a browser. Every comparison is over the episodes that both
//! sides scored; the others are counted with the reasons. Where nothing was scored before, the totals after stand alone.

mod change;
mod changed;
mod components;
mod correlation;
mod counts;
mod distribution;
mod groups;
mod numbers;
mod page;
mod signs;
mod text;
pub(crate) mod width;

pub use change::{Change, StepMeans, Third};
pub use changed::{ChangedEpisode, ChangedPart};
pub use components::ComponentChange;
pub use correlation::{Correlation, Pairs};
pub use counts::Counts;
pub use distribution::{Distribution, Histogram};
pub use groups::Order;
pub use page::replay_html;
pub use signs::{Sign, SignCounts, SignMove, Signs};
pub use text::replay_text;

use crate::bootstrap::Bootstrap;
use groups::Groups;
use querl_core::ports::RewardRange;
use querl_core::records::{Episode, Rejection, Reward};
use serde::Serialize;
use std::collections::BTreeMap;

/// A score, or why there is none.
pub type Outcome = Result<Reward, Rejection>;

/// One episode with what both sides say of it.
#[derive(Debug, Clone, Copy)]
pub struct ReplayEpisode<'a> {
    /// 1-based line in the file of episodes.
    pub line: usize,
    /// Training step that made it.
    pub step: u64,
    /// What was scored.
    pub episode: &'a Episode,
    /// What is compared with; `None` where no outcome was recorded.
    pub before: Option<&'a Outcome>,
    /// What is looked at.
    pub after: &'a Outcome,
}

/// Whose scores one side's are.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Side {
    /// Those in the file of episodes.
    Recorded,
    /// A plugin's.
    Plugin(PluginSide),
}

/// A plugin as it was asked.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PluginSide {
    /// As it says itself.
    pub id: String,
    /// As it says itself.
    pub version: String,
    /// Of the component, hexadecimal.
    pub digest: String,
    /// As given; what is not here is the plugin's default.
    pub settings: BTreeMap<String, serde_json::Value>,
    /// As it declares, under these settings: least and greatest total.
    pub range: (f64, f64),
}

impl PluginSide {
    fn spans_zero(&self) -> bool {
        self.range.0 < 0.0 && self.range.1 > 0.0
    }

    /// The declared range.
    pub fn range(range: RewardRange) -> (f64, f64) {
        (range.min, range.max)
    }
}

/// How to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayOptions {
    /// Episodes shown one by one.
    pub n_shown: usize,
    /// Of the bootstrap.
    pub seed: u64,
    /// Of the bootstrap; at least 1.
    pub n_resamples: usize,
}

/// What would have changed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Replay {
    /// Version of this form: [`Replay::FORMAT`].
    pub format: u32,
    /// Whose scores are compared with.
    pub before: Side,
    /// Whose scores are looked at.
    pub after: Side,
    /// What a reader should know before the figures, one sentence each.
    pub notes: Vec<String>,
    /// Who scored how many.
    pub counts: Counts,
    /// Where the totals lie.
    pub totals: Totals,
    /// How far the totals moved.
    pub change: Change,
    /// How alike the totals are.
    pub correlation: Correlation,
    /// Pairs of answers to one query: what a policy's advantages depend on.
    pub order: Order,
    /// Who wins against the teacher by the sign of the total; `None` where a declared range does not span 0.
    pub signs: Option<Signs>,
    /// Who wins against the teacher by retrieval quality, which no plugin changes; of all episodes where both sides were
    /// retrieved.
    pub retrieval: SignCounts,
    /// The parts of the totals, by name.
    pub components: Vec<ComponentChange>,
    /// Episodes whose total changed its sign, the largest change first.
    pub flips: Vec<ChangedEpisode>,
    /// Episodes whose total changed most, whatever its sign.
    pub largest_changes: Vec<ChangedEpisode>,
    /// Of the bootstrap.
    pub n_resamples: usize,
}

impl Replay {
    /// The form written today.
    pub const FORMAT: u32 = 1;

    /// What is shown one by one: the changes of sign where there are any, else the largest changes.
    fn shown(&self) -> (&'static str, &[ChangedEpisode]) {
        if self.flips.is_empty() {
            ("largest changes", &self.largest_changes)
        } else {
            ("changes of sign, the largest first", &self.flips)
        }
    }
}

/// Totals of the episodes that both sides scored.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Totals {
    /// `None` where nothing was scored before.
    pub before: Option<Distribution>,
    /// `None` where nothing was scored by both.
    pub after: Option<Distribution>,
    /// Both, in the same bins.
    pub histogram: Option<Histogram>,
}

/// An episode that both sides scored.
#[derive(Debug, Clone, Copy)]
struct Scored<'a> {
    /// Position in the list of all episodes.
    index: usize,
    recorded: ReplayEpisode<'a>,
    /// Absent throughout where nothing was scored before.
    before: Option<&'a Reward>,
    after: &'a Reward,
}

impl Scored<'_> {
    /// After minus before.
    fn change(&self) -> Option<f64> {
        Some(self.after.total - self.before?.total)
    }
}

/// Compares. `notes` are sentences of the caller's for the reader; this adds its own.
pub fn replay(
    episodes: &[ReplayEpisode<'_>],
    before: Side,
    after: PluginSide,
    mut notes: Vec<String>,
    options: ReplayOptions,
) -> Replay {
    let scored = scored_by_both(episodes);
    let groups = Groups::new(episodes);
    let bootstrap = Bootstrap { seed: options.seed, n_resamples: options.n_resamples };
    let befores: Vec<f64> = scored.iter().filter_map(|one| Some(one.before?.total)).collect();
    let afters: Vec<f64> = scored.iter().map(|one| one.after.total).collect();
    let signs_hint = signs::without_meaning(&before, &after);
    let (flips, largest_changes) = changed::pick(&scored, options.n_shown);
    let (counts, change) = (Counts::of(episodes), Change::of(&scored, &groups, bootstrap));
    notes.extend(counts.notes());
    notes.extend(change.too_few_queries());
    notes.extend(signs_hint.clone());
    Replay {
        format: Replay::FORMAT,
        before,
        after: Side::Plugin(after),
        notes,
        counts,
        totals: Totals {
            before: Distribution::of(&befores),
            after: Distribution::of(&afters),
            histogram: Histogram::of(&befores, &afters),
        },
        change,
        correlation: Correlation::of(&befores, &afters[..befores.len()]),
        order: groups.order(&scored),
        signs: signs_hint.is_none().then(|| Signs::of(&scored)),
        retrieval: signs::by_retrieval(episodes),
        components: components::changes(&scored),
        flips: if signs_hint.is_none() { flips } else { Vec::new() },
        largest_changes,
        n_resamples: options.n_resamples,
    }
}

/// Episodes scored on both sides; where nothing was scored before, those scored after.
fn scored_by_both<'a>(episodes: &[ReplayEpisode<'a>]) -> Vec<Scored<'a>> {
    let any_before = episodes.iter().any(|one| matches!(one.before, Some(Ok(_))));
    let scored = |(index, recorded): (usize, &ReplayEpisode<'a>)| {
        let before = recorded.before.and_then(|outcome| outcome.as_ref().ok());
        let after = recorded.after.as_ref().ok()?;
        (before.is_some() || !any_before).then_some(Scored { index, recorded: *recorded, before, after })
    };
    episodes.iter().enumerate().filter_map(scored).collect()
}

//! Replay: comparison of two reward functions on recorded episodes.
//!
//! Input: episodes, each with an outcome before (recorded, or of a plugin) and an outcome after. Output: [`Replay`], which is the
//! JSON form, and from it a text for a terminal and a page for a browser. Comparisons are over the episodes that both sides scored;
//! the others are counted by reason. Where nothing was scored before, only the totals after are reported.

mod changes;
mod episodes;
mod page;
mod scores;
mod statistics;
#[cfg(test)]
mod tests;
mod text;

pub use episodes::{Outcome, PluginSide, ReplayEpisode, Side};
pub use page::replay_html;
pub use scores::{BriefOutcome, OutcomeChange, OutcomeChanges, ScoreSummary};
pub(crate) use statistics::Histogram;
pub use text::replay_text;

use crate::bootstrap::Bootstrap;
use changes::{Change, ChangedEpisode, ComponentChange, SignCounts, Signs};
use episodes::{Counts, Groups, Order, scored_by_both};
use serde::Serialize;
use statistics::{Correlation, Distribution};

/// Options of [`replay()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayOptions {
    /// Number of queries in the list of changed episodes.
    pub n_shown: usize,
    /// Seed of the bootstrap.
    pub seed: u64,
    /// Bootstrap resamples, at least 1.
    pub n_resamples: usize,
}

/// The comparison of two rewards on the same episodes; its JSON form is the output of `querl plugin replay`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Replay {
    pub(crate) format: u32,
    pub(crate) before: Side,
    pub(crate) after: Side,
    /// Warnings about the comparison, one sentence each.
    pub(crate) notes: Vec<String>,
    pub(crate) counts: Counts,
    pub(crate) totals: Totals,
    pub(crate) change: Change,
    pub(crate) correlation: Correlation,
    /// Changes in the order of pairs of responses to the same query, which determines advantages.
    pub(crate) order: Order,
    /// Wins of the policy against the teacher by the sign of the total reward; `None` if a declared range does not span 0.
    pub(crate) signs: Option<Signs>,
    /// Wins of the policy against the teacher by retrieval quality, which no plugin changes, over all episodes with a successful
    /// retrieval for both rewrites.
    pub(crate) retrieval: SignCounts,
    pub(crate) components: Vec<ComponentChange>,
    /// Number of the least used reward components that are left out; omitted in the JSON if it is 0.
    #[serde(skip_serializing_if = "crate::evaluation::is_zero")]
    pub(crate) n_components_left_out: usize,
    /// One episode of each query whose total reward changed its sign, largest change first.
    pub(crate) flips: Vec<ChangedEpisode>,
    /// One episode of each query with the largest changes of the total reward.
    pub(crate) largest_changes: Vec<ChangedEpisode>,
    pub(crate) n_resamples: usize,
}

impl Replay {
    /// Version of the JSON form.
    pub const FORMAT: u32 = 1;

    /// The episodes to show: changes of sign; if there are none, the largest changes.
    fn shown(&self) -> (&'static str, &[ChangedEpisode]) {
        if self.flips.is_empty() {
            ("largest change of each query", &self.largest_changes)
        } else {
            ("largest change of sign of each query", &self.flips)
        }
    }
}

/// Distributions of the total reward over the episodes that both sides scored.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Totals {
    /// Distribution before; `None` if no episode was scored before.
    pub(crate) before: Option<Distribution>,
    /// Distribution after; `None` if no episode was scored by both sides.
    pub(crate) after: Option<Distribution>,
    /// Histograms before and after, in the same bins.
    pub(crate) histogram: Option<Histogram>,
}

/// Compares the outcomes of the episodes before and after. `notes` are warnings of the caller; the comparison adds its own.
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
    let no_signs = changes::why_no_signs(&before, &after);
    let (components, n_components_left_out) = changes::components(&scored);
    let (flips, largest_changes) = changes::largest(&scored, options.n_shown);
    let (counts, change) = (Counts::of(episodes), Change::of(&scored, &groups, bootstrap));
    notes.extend(change.too_few_queries());
    notes.extend(no_signs.clone());
    notes.extend(
        (n_components_left_out > 0)
            .then(|| format!("{n_components_left_out} less used parts of the totals are not listed")),
    );
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
        signs: no_signs.is_none().then(|| Signs::of(&scored)),
        retrieval: changes::by_retrieval(episodes),
        components,
        n_components_left_out,
        flips: if no_signs.is_none() { flips } else { Vec::new() },
        largest_changes,
        n_resamples: options.n_resamples,
    }
}

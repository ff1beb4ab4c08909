//! What the systems achieved on held-out queries, and how sure one can be of it.
//!
//! In: the records of the evaluation stage (one per system and query), metrics of training, facts about the run. Out: the
//! contents of `eval.json`, a table for a terminal and a page for a browser, as values and strings. Besides: recorded episodes with
//! the scores of two rewards, and what differs between these ([`replay()`]); and how well a classifier does
//! ([`classification`]). This crate refuses to know models, plugins, services and files: whoever calls it reads and writes.
//!
//! Three rules hold throughout:
//!
//! 1. **A failure is not a score.** A record without an answer, or whose retrieval failed, counts as a miss for top-1 accuracy
//!    and MRR (leaving it out would flatter the system), is left out of every other mean, and is counted apart.
//! 2. **Queries of one group are not independent.** Paraphrases of one need share their gold passages and mostly their fate, so
//!    the bootstrap draws whole groups, never single queries ([`Interval`]).
//! 3. **Systems are compared on the same queries.** A [`Difference`] is the mean over queries that both systems have a value
//!    for; its interval is much narrower than the two systems' own intervals suggest.

mod bootstrap;
pub mod classification;
mod error;
mod evaluation;
mod facts;
mod metric;
mod printable;
mod replay;
mod report;
mod table;

pub use bootstrap::Interval;
pub use error::EvalError;
pub use evaluation::{
    Difference, EvalOptions, Evaluation, Lookups, PAIRS, SYSTEMS, SeedsEvaluation, StyleEvaluation, StyleShift, Styles,
    SystemEvaluation, evaluate, evaluate_seeds,
};
pub use facts::{FunnelStep, Party, RunFacts, StageTiming};
pub use metric::Metric;
pub use replay::{
    Change, ChangedEpisode, ChangedPart, ComponentChange, Correlation, Counts, Distribution, Histogram, Order, Outcome,
    Pairs, PluginSide, Replay, ReplayEpisode, ReplayOptions, Side, Sign, SignCounts, SignMove, Signs, StepMeans, Third,
    Totals, replay, replay_html, replay_text,
};
pub use report::{ReportInput, report_html};
pub use table::{seeds_table, table};

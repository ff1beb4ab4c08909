//! Metrics, confidence intervals, comparisons and reports over held-out queries.
//!
//! Input: the records of the evaluation stage (one per system and query), training metrics and facts about the run. Output, as values
//! and strings: the contents of `eval.json`, a table for a terminal and a page for a browser. In addition: the comparison of two
//! rewards on recorded episodes ([`replay()`]), the audit of a training for reward hacking ([`audit()`]), and the metrics of a
//! classifier ([`classification`]). This crate must not depend on models, plugins, services and files; its callers read and write.
//!
//! 1. **A failure is not a score.** A record without an answer, or with a failed retrieval, counts as a miss for top-1 accuracy and
//!    MRR, since leaving it out would favour the system. It does not count in the other means, and is reported.
//! 2. **Queries of one group are not independent.** Paraphrases of one question share their gold passages, so the bootstrap draws
//!    whole groups ([`Interval`]).
//! 3. **Systems are compared on the same queries.** A [`Difference`] is the mean over the queries that have a value for both; its
//!    interval is much narrower than the intervals of the two systems suggest.

mod audit;
mod bootstrap;
pub mod classification;
mod comparison;
mod error;
mod evaluation;
mod facts;
mod metric;
mod page;
mod replay;
mod report;
mod table;
mod terms;
mod text;
mod verdict;

pub use audit::{Audit, AuditOptions, AuditPassage, AuditSources, audit, audit_html, audit_text};
pub use bootstrap::Interval;
pub use comparison::{ComparedSystem, Comparison, ComparisonOptions, ComparisonVerdict, GroupDifference, compare};
pub use error::EvalError;
pub use evaluation::{
    Controls, Difference, EvalOptions, Evaluation, Lookups, PAIRS, PassAtK, RewriteControls, SecondEvaluation,
    SeedsEvaluation, StyleEvaluation, StyleShift, Styles, SystemEvaluation, evaluate, evaluate_seeds,
};
pub use facts::{FunnelStep, RunFacts, ServiceName, StageTiming};
pub use metric::Metric;
pub use replay::{
    BriefOutcome, Outcome, OutcomeChange, OutcomeChanges, PluginSide, Replay, ReplayEpisode, ReplayOptions,
    ScoreSummary, Side, replay, replay_html, replay_text,
};
pub use report::{ReportInput, report_html};
pub use table::{seeds_table, table};
pub use terms::new_gold_terms;
pub use text::{cut, folded};
pub use verdict::rl_verdict;

//! Evaluation metrics: how each is computed from a record, and how it is formatted.

use crate::text::{plus, without_sign_of_zero};
use querl_core::records::{EvalRecord, Hit, SystemAnswer};
use serde::{Deserialize, Serialize};

/// An evaluation metric, in the order of the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Top-1 accuracy: share of queries whose first hit is a gold passage, 0 to 1. A failure is a miss. Queries without gold passages,
    /// and services that return no passage ids, do not count.
    Top1,
    /// Mean reciprocal rank (MRR) of the first gold passage among the hits, 0 if none is a hit. A failure counts as 0; exclusions as for
    /// top-1 accuracy.
    Mrr,
    /// Reranker score of the first hit, 0 to 1. Retrieval without hits counts as 0, the lower end of the scale; a failure does not count.
    Top1Score,
    /// Share of queries on which the rewrite retrieves better passages than the teacher's; a tie counts as one half.
    WinRate,
    /// Score of the judge, 0 to 5, over the judged answers.
    JudgeScore,
    /// Total reward, the weighted sum of the reward plugins, relative to the teacher's rewrite.
    Reward,
    /// Time to generate the rewrite, in milliseconds.
    LatencyMs,
    /// Price of 1000 rewrites in the configured currency.
    #[serde(rename = "cost_per_1000")]
    CostPer1000,
}

impl Metric {
    /// Every metric, in the order of the tables.
    pub const ALL: [Self; 8] = [
        Self::Top1,
        Self::Mrr,
        Self::Top1Score,
        Self::WinRate,
        Self::JudgeScore,
        Self::Reward,
        Self::LatencyMs,
        Self::CostPer1000,
    ];

    /// The metrics in which systems are compared by paired differences.
    pub const COMPARED: [Self; 6] =
        [Self::Top1, Self::Mrr, Self::Top1Score, Self::JudgeScore, Self::Reward, Self::WinRate];

    pub(crate) fn needs_retrieval(self) -> bool {
        matches!(self, Self::Top1 | Self::Mrr | Self::Top1Score | Self::WinRate)
    }

    /// The key in `eval.json`.
    pub fn name(self) -> &'static str {
        self.texts().0
    }

    /// Column head with the unit.
    pub(crate) fn label(self) -> &'static str {
        self.texts().1
    }

    pub(crate) fn explanation(self) -> &'static str {
        self.texts().2
    }

    fn texts(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Top1 => ("top1", "top-1 %", "first hit is a gold passage; a failure is a miss"),
            Self::Mrr => ("mrr", "MRR", "1 / rank of the first gold passage; a failure is a miss"),
            Self::Top1Score => ("top1_score", "top-1 score", "reranker score of the first hit, 0 to 1"),
            Self::WinRate => ("win_rate", "win rate %", "retrieval against the teacher's, a draw counts half"),
            Self::JudgeScore => ("judge_score", "judge (0-5)", "mean over the responses that were judged"),
            Self::Reward => ("reward", "reward", "the reward plugins' total against the teacher"),
            Self::LatencyMs => ("latency_ms", "latency ms", "time to write the rewrite"),
            Self::CostPer1000 => ("cost_per_1000", "cost / 1000", "price of 1000 rewrites, configured currency"),
        }
    }

    pub(crate) fn format(self, value: f64) -> String {
        self.number(value, "")
    }

    pub(crate) fn format_signed(self, value: f64) -> String {
        self.number(value, plus(value))
    }

    fn number(self, value: f64, sign: &str) -> String {
        let (shown, decimals) = match self {
            Self::Top1 | Self::WinRate => (100.0 * value, 1),
            Self::Mrr | Self::Top1Score | Self::Reward => (value, 3),
            Self::JudgeScore => (value, 2),
            Self::LatencyMs => (value, if value.abs() < 10.0 { 1 } else { 0 }),
            Self::CostPer1000 => (value, if value.abs() < 1.0 { 4 } else { 2 }),
        };
        without_sign_of_zero(format!("{sign}{shown:.decimals$}"))
    }

    /// The value of the metric for one record; `None` if it does not apply.
    pub(crate) fn value(self, record: &EvalRecord) -> Option<f64> {
        match self {
            Self::Top1 => reciprocal_rank(record).map(|rank| if rank == 1.0 { 1.0 } else { 0.0 }),
            Self::Mrr => reciprocal_rank(record),
            Self::Top1Score => hits(record).map(|hits| hits.first().map_or(0.0, |hit| hit.reranker_score)),
            Self::WinRate => answer(record)?.win,
            Self::JudgeScore => answer(record)?.candidate.judgement.score(),
            Self::Reward => answer(record)?.reward.as_ref().map(|reward| reward.total),
            Self::LatencyMs => answer(record)?.latency_ms,
            Self::CostPer1000 => answer(record)?.cost.map(|cost| 1000.0 * cost),
        }
    }
}

pub(crate) fn answer(record: &EvalRecord) -> Option<&SystemAnswer> {
    record.outcome.as_ref().ok()
}

/// The hits of a successful retrieval (maybe none); `None` for a failure.
pub(crate) fn hits(record: &EvalRecord) -> Option<&[Hit]> {
    answer(record)?.candidate.found()
}

/// The reason why a record has no hits: the code of the rejection, or the kind of the retrieval failure. `None` for a successful
/// retrieval.
pub(crate) fn failure_code(record: &EvalRecord) -> Option<String> {
    match &record.outcome {
        Err(rejection) => Some(rejection.code.clone()),
        Ok(answer) => {
            answer.candidate.retrieval_failure().map(|failure| format!("{RETRIEVAL_FAILED} {}", failure.kind))
        }
    }
}

/// Code of the rejection of a query that the teacher has no rewrite of: it is missing from a recording, or the call failed.
pub(crate) const TEACHER_FAILED: &str = "teacher_failed";

/// First word of the code of a failed retrieval.
pub(crate) const RETRIEVAL_FAILED: &str = "retrieval";

/// True if paired differences (first minus second system) leave a query out, in reports and in release checks: the teacher has no rewrite of
/// it, or retrieval failed for the second system, whose miss would be a gain of the first. A failure of the first system counts as its miss.
pub(crate) fn is_left_out([first, second]: [&EvalRecord; 2]) -> bool {
    let retrieval_failed = answer(second).is_some_and(|answer| answer.candidate.retrieval_failure().is_some());
    lacks_teacher([first, second]) || retrieval_failed
}

/// True if one of the two systems is the teacher, and it has no rewrite of the query.
pub(crate) fn lacks_teacher(records: [&EvalRecord; 2]) -> bool {
    records.iter().any(|record| matches!(&record.outcome, Err(rejection) if rejection.code == TEACHER_FAILED))
}

/// 1 / position of the first gold passage among the hits; 0 where there is none or the record failed; `None` without gold passages
/// and for a service that returns no passage ids.
pub(crate) fn reciprocal_rank(record: &EvalRecord) -> Option<f64> {
    querl_core::records::reciprocal_rank(hits(record).unwrap_or_default(), &record.query.gold_ids)
}

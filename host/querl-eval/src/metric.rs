//! The metrics: what each one reads from a record, and how it is written for people.

use querl_core::records::{EvalRecord, Hit, SystemAnswer};
use serde::{Deserialize, Serialize};

/// One figure of merit, in the order of the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Share of queries whose first hit is a gold passage, 0 to 1. A failure is a miss. Left out are queries without gold, and
    /// services that send no passage ids.
    Top1,
    /// Mean of 1 / rank of the first gold passage among the hits, 0 where none is there. Left out and failed as for top-1.
    Mrr,
    /// Reranker score of the first hit, 0 to 1. An empty answer counts as 0, the lower end of the scale; a failure is left out.
    Top1Score,
    /// Share of queries won against the teacher by retrieval quality, a draw counting one half.
    WinRate,
    /// The judge's score, 0 to 5, of the answers that were judged.
    JudgeScore,
    /// The reward plugins' total against the teacher's candidate.
    Reward,
    /// Milliseconds to write the rewrite.
    LatencyMs,
    /// Price of 1000 rewrites in the configured currency.
    #[serde(rename = "cost_per_1000")]
    CostPer1000,
}

impl Metric {
    /// All of them, in the order of the tables.
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

    /// Those that systems are compared by.
    pub const COMPARED: [Self; 6] =
        [Self::Top1, Self::Mrr, Self::Top1Score, Self::JudgeScore, Self::Reward, Self::WinRate];

    /// Whether it is read from what retrieval found.
    pub(crate) fn is_of_lookups(self) -> bool {
        matches!(self, Self::Top1 | Self::Mrr | Self::Top1Score | Self::WinRate)
    }

    /// As in `eval.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Top1 => "top1",
            Self::Mrr => "mrr",
            Self::Top1Score => "top1_score",
            Self::WinRate => "win_rate",
            Self::JudgeScore => "judge_score",
            Self::Reward => "reward",
            Self::LatencyMs => "latency_ms",
            Self::CostPer1000 => "cost_per_1000",
        }
    }

    /// As heads of tables say it, with the unit.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Top1 => "top-1 %",
            Self::Mrr => "MRR",
            Self::Top1Score => "top-1 score",
            Self::WinRate => "win rate %",
            Self::JudgeScore => "judge (0-5)",
            Self::Reward => "reward",
            Self::LatencyMs => "latency ms",
            Self::CostPer1000 => "cost / 1000",
        }
    }

    /// One sentence for a reader of the report.
    pub(crate) fn explanation(self) -> &'static str {
        match self {
            Self::Top1 => "first hit is a gold passage; a failure is a miss",
            Self::Mrr => "1 / rank of the first gold passage; a failure is a miss",
            Self::Top1Score => "reranker score of the first hit, 0 to 1",
            Self::WinRate => "retrieval against the teacher's, a draw counts half",
            Self::JudgeScore => "mean over the answers that were judged",
            Self::Reward => "the reward plugins' total against the teacher",
            Self::LatencyMs => "time to write the rewrite",
            Self::CostPer1000 => "price of 1000 rewrites, configured currency",
        }
    }

    /// A value as text, without its unit.
    pub(crate) fn format(self, value: f64) -> String {
        self.number(value, "")
    }

    /// A difference as text, with its sign.
    pub(crate) fn format_signed(self, value: f64) -> String {
        self.number(value, if value > 0.0 { "+" } else { "" })
    }

    fn number(self, value: f64, sign: &str) -> String {
        let (shown, decimals) = match self {
            Self::Top1 | Self::WinRate => (100.0 * value, 1),
            Self::Mrr | Self::Top1Score | Self::Reward => (value, 3),
            Self::JudgeScore => (value, 2),
            Self::LatencyMs => (value, if value.abs() < 10.0 { 1 } else { 0 }),
            Self::CostPer1000 => (value, if value.abs() < 1.0 { 4 } else { 2 }),
        };
        let text = format!("{sign}{shown:.decimals$}");
        // "-0.000" and "+0.000" would claim a direction that is not there.
        if text.bytes().any(|byte| (b'1'..=b'9').contains(&byte)) { text } else { text.replace(['+', '-'], "") }
    }

    /// The value of one record; `None` where the metric does not apply to it.
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

/// The answer, where there is one.
pub(crate) fn answer(record: &EvalRecord) -> Option<&SystemAnswer> {
    record.outcome.as_ref().ok()
}

/// The hits, where retrieval was reached and answered; an empty list is an answer.
pub(crate) fn hits(record: &EvalRecord) -> Option<&[Hit]> {
    answer(record)?.candidate.retrieval.as_deref().ok()
}

/// Why a record has no hits: a rejection's code, or the sort of retrieval failure. `None` where it has.
pub(crate) fn failure_code(record: &EvalRecord) -> Option<String> {
    match &record.outcome {
        Err(rejection) => Some(rejection.code.clone()),
        Ok(answer) => answer.candidate.retrieval.as_ref().err().map(|failure| format!("retrieval {}", failure.kind)),
    }
}

/// 1 / position of the first gold passage among the hits; 0 where it is not there or the record failed; `None` without gold, or
/// where the service sends no ids to tell gold by.
fn reciprocal_rank(record: &EvalRecord) -> Option<f64> {
    let gold = &record.query.gold_ids;
    let hits = hits(record).unwrap_or_default();
    if gold.is_empty() || hits.iter().any(|hit| hit.id.is_empty()) {
        return None;
    }
    let position = hits.iter().position(|hit| gold.contains(&hit.id));
    Some(position.map_or(0.0, |position| 1.0 / (position + 1) as f64))
}

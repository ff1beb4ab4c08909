//! Records of the pipeline. This file follows a query from its table to the dataset; [`Candidate`] and [`Episode`] are what rewards read,
//! [`EvalRecord`] is what the evaluation reads.
//!
//! "Failed", "empty" and "low" are different types: a failure is a [`CallFailure`], an empty result an empty list, a low score
//! a number. They are never converted into each other.

mod candidate;
mod columns;
mod episode;
mod evaluation;

pub use candidate::{Candidate, CandidateRef, FinishReason, Judgement, StyleProbability};
pub use columns::{ColumnValue, Columns, Scalar};
pub(crate) use episode::outcome_form;
pub use episode::{
    Episode, EpisodeRecord, EpisodeRef, HostCall, HostCallError, HostRequest, HostResponse, RejectedBy, Rejection,
    Reward, RewardComponent,
};
pub use evaluation::{EvalRecord, SampleCounts, SecondHits, SystemAnswer};

use crate::config::RewriteForm;
use serde::{Deserialize, Serialize};

/// One row of the query table.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct QueryRow {
    /// Digest of query, profile and history; stable across runs.
    pub id: String,
    /// 1-based row in the input table, header counted, as a spreadsheet shows it.
    pub row: usize,
    /// The user's query.
    pub original_query: String,
    /// User profile; may be empty.
    #[serde(default)]
    pub user_profile: String,
    /// Summary of the conversation; may be empty.
    #[serde(default)]
    pub history_summary: String,
    /// Ids of the passages that answer the query; empty if unknown.
    #[serde(default)]
    pub gold_ids: Vec<String>,
    /// Rows of one group (paraphrases of one query) are in the same split.
    pub group: String,
    /// What the edit `&` stands for in a run with learned expansions; `None` in other runs, and before `convert`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expansion: Option<String>,
}

impl QueryRow {
    /// User profile and conversation history.
    pub fn context(&self) -> Context {
        Context { user_profile: self.user_profile.clone(), history_summary: self.history_summary.clone() }
    }
}

/// Failure of an external call. Never converted into data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{kind}: {message}")]
pub struct CallFailure {
    /// Category.
    pub kind: FailureKind,
    /// One sentence with the request and the response; contains no secrets.
    pub message: String,
}

named_enum! {
    /// Categories of failures of an external call.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum FailureKind {
        /// No answer within the time limit.
        Timeout = "timeout",
        /// Not reachable, or the connection broke.
        Unreachable = "unreachable",
        /// Invalid credentials or no credit (401, 402, 403).
        Unauthorized = "unauthorized",
        /// The service rejected this request (other 4xx).
        Rejected = "rejected",
        /// Still rate limited after all retries (429).
        RateLimited = "rate limited",
        /// The service failed (5xx).
        ServerError = "server error",
        /// The response could not be parsed.
        InvalidResponse = "invalid response",
        /// The recording has no entry for this query.
        NotRecorded = "not recorded",
        /// Not called: the circuit breaker is open.
        Down = "down",
        /// Not called: the budget would be exceeded.
        OverBudget = "over budget",
    }
}

impl FailureKind {
    /// True if every further call would fail as well: the stage stops.
    pub fn is_fatal(self) -> bool {
        matches!(self, Self::Unauthorized | Self::Down | Self::OverBudget)
    }

    /// Drop code of a row whose call to `who` failed: `teacher_rate_limited`.
    pub fn code(self, who: &str) -> String {
        code_of(who, &self.to_string())
    }
}

/// Drop code of a row whose call to `who` failed with `kind`, the name of a [`FailureKind`]: `teacher_rate_limited`.
pub fn code_of(who: &str, kind: &str) -> String {
    format!("{who}_{}", kind.replace(' ', "_"))
}

impl std::fmt::Display for FailureKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A query with the teacher's rewrite, or the failure of that call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RewriteRecord {
    /// The query row.
    #[serde(flatten)]
    pub query: QueryRow,
    /// The teacher's rewrite.
    pub rewrite: Result<Completion, CallFailure>,
}

/// Text from a teacher or judge with token counts, cost and latency.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// The parsed text.
    pub text: String,
    /// Prompt tokens as reported by the service.
    pub prompt_tokens: Option<u64>,
    /// Completion tokens as reported by the service.
    pub completion_tokens: Option<u64>,
    /// Price in the configured currency; `None` if unknown.
    pub cost: Option<f64>,
    /// Wall-clock time of the call in milliseconds; `None` if not recorded.
    pub latency_ms: Option<f64>,
    /// Name of the fallback teacher that wrote the text; `None` for the teacher itself or a judge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

impl Completion {
    /// A text without token counts, cost, latency and source.
    pub fn of(text: impl Into<String>) -> Self {
        let text = text.into();
        Self { text, prompt_tokens: None, completion_tokens: None, cost: None, latency_ms: None, source: None }
    }
}

/// One retrieved passage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hit {
    /// Passage id; empty if the service sends none.
    #[serde(default)]
    pub id: String,
    /// Passage text.
    #[serde(default)]
    pub text: String,
    /// Relevance of the passage to the original query in its context, 0 to 1.
    pub reranker_score: f64,
    /// First-stage score (BM25 or similarity) on the scale of the index.
    pub retrieval_score: Option<f64>,
    /// Rank in the list of hits; 1 is the best.
    #[serde(default)]
    pub rank: u32,
}

/// Quality of a list of hits: `0.6 * top1 + 0.4 * mean(top 3)` of the reranker scores; 0 for an empty list.
///
/// Win rates compare this value (see [`win`]).
pub fn retrieval_quality(hits: &[Hit]) -> f64 {
    let Some(first) = hits.first() else { return 0.0 };
    let top = &hits[..hits.len().min(3)];
    let mean = top.iter().map(|hit| hit.reranker_score).sum::<f64>() / top.len() as f64;
    0.6 * first.reranker_score + 0.4 * mean
}

/// 1 / rank of the first gold passage among `hits`, 0 if none is a hit; `None` without gold passages and for hits without passage ids.
pub fn reciprocal_rank(hits: &[Hit], gold_ids: &[String]) -> Option<f64> {
    if gold_ids.is_empty() || hits.iter().any(|hit| hit.id.is_empty()) {
        return None;
    }
    let position = hits.iter().position(|hit| gold_ids.contains(&hit.id));
    Some(position.map_or(0.0, |position| 1.0 / (position + 1) as f64))
}

/// The logistic function `1 / (1 + e^-x)`.
pub fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `1` if `policy` has the better [`retrieval_quality`], `0` if `baseline` has, `0.5` for a tie.
pub fn win(policy: &[Hit], baseline: &[Hit]) -> f64 {
    let difference = retrieval_quality(policy) - retrieval_quality(baseline);
    if difference.abs() <= 1e-9 { 0.5 } else { f64::from(difference > 0.0) }
}

/// A query with the teacher's rewrite and its hits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ValidatedRecord {
    /// Query and rewrite.
    #[serde(flatten)]
    pub rewritten: RewriteRecord,
    /// Hits of the rewrite, best first; `None` without a rewrite.
    pub retrieval: Option<Result<Vec<Hit>, CallFailure>>,
}

impl ValidatedRecord {
    /// Reranker score of the best hit; `None` if retrieval failed, was not tried or found nothing.
    pub fn top1_score(&self) -> Option<f64> {
        let hits = self.retrieval.as_ref()?.as_ref().ok()?;
        hits.first().map(|hit| hit.reranker_score)
    }
}

/// Input of a filter plugin: a row whose rewrite and retrieval succeeded.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Id of the query row.
    pub id: String,
    /// The user's query.
    pub original_query: String,
    /// The teacher's rewrite.
    pub rewritten_query: String,
    /// User profile and conversation history.
    pub context: Context,
    /// Hits of the rewrite, best first.
    pub hits: Vec<Hit>,
    /// Further columns of the query's row, for filters that read them.
    #[serde(default, skip_serializing_if = "Columns::is_empty")]
    pub columns: Columns,
}

/// A filter's decision on one sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The row is part of the dataset.
    Keep,
    /// The row is dropped.
    Drop {
        /// Stable code for counting: `top1_below_threshold`.
        code: String,
        /// Human-readable explanation.
        detail: String,
    },
}

/// A chat message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// Text of the message.
    pub content: String,
}

/// A dialogue whose last turn, the assistant's, is scored for style.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dialogue {
    /// Id, unique in a run.
    pub id: String,
    /// All turns; the last is the assistant's.
    pub turns: Vec<Message>,
}

named_enum! {
    /// The three splits of a dataset.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Split {
        /// Training split.
        Train = "train",
        /// Validation split: early stopping and model selection.
        Val = "val",
        /// Test split: final evaluation only.
        Test = "test",
    }
}

impl Split {
    /// The name in the plugin contract and in `episodes.jsonl`.
    fn contract_name(self) -> &'static str {
        if self == Self::Val { "validation" } else { self.name() }
    }
}

/// One line of `train.jsonl`, `val.jsonl` or `test.jsonl`.
///
/// `messages` ends with the assistant's rewrite in rows that passed the filters. Rows of val and test whose teacher rewrite
/// failed or was dropped have no assistant message; dropping them would bias the evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DatasetRow {
    /// The conversation, with an assistant message at the end if the teacher's rewrite passed the filters.
    pub messages: Vec<Message>,
    /// Origin of the row.
    pub metadata: RowMetadata,
}

impl DatasetRow {
    /// The messages before the assistant's answer: the policy's prompt.
    pub fn prompt(&self) -> &[Message] {
        match self.messages.last() {
            Some(last) if last.role == "assistant" => &self.messages[..self.messages.len() - 1],
            _ => &self.messages,
        }
    }

    /// The teacher's rewrite if it passed the filters: the target of fine-tuning.
    pub fn target(&self) -> Option<&str> {
        self.messages.last().filter(|last| last.role == "assistant").map(|last| last.content.as_str())
    }
}

/// Metadata of a dataset row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RowMetadata {
    /// The query row.
    #[serde(flatten)]
    pub query: QueryRow,
    /// Reranker score of the best hit of the teacher's rewrite; `None` without a hit.
    pub top1_score: Option<f64>,
    /// Author of the rewrite: `recorded`, or the name of the model.
    pub source: String,
    /// Form of the assistant message; `None` in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewrite_form: Option<RewriteForm>,
    /// Failure or filter code of a row without an assistant message; `""` in the file for others, so that all rows have the same keys
    /// and types. Files of earlier versions lack the key there.
    #[serde(default, with = "empty_for_none")]
    pub dropped: Option<String>,
}

mod empty_for_none {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(text: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(text.as_deref().unwrap_or_default())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
        Ok(Option::<String>::deserialize(deserializer)?.filter(|text| !text.is_empty()))
    }
}

/// User profile and conversation history.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Context {
    /// User profile; empty if unknown.
    pub user_profile: String,
    /// Summary of the conversation so far; empty without earlier turns.
    pub history_summary: String,
}

impl Context {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(scores: &[f64]) -> Vec<Hit> {
        let hit = |(index, score): (usize, &f64)| Hit {
            id: format!("d{index}"),
            text: String::new(),
            reranker_score: *score,
            retrieval_score: None,
            rank: index as u32 + 1,
        };
        scores.iter().enumerate().map(hit).collect()
    }

    #[test]
    fn retrieval_quality_weighs_the_first_and_the_first_three() {
        assert!((retrieval_quality(&hits(&[0.9, 0.6, 0.3, 0.3])) - (0.54 + 0.24)).abs() < 1e-12);
        assert!((retrieval_quality(&hits(&[0.9])) - 0.9).abs() < 1e-12);
        assert_eq!(retrieval_quality(&[]), 0.0);
    }

    #[test]
    fn a_better_retrieval_wins_and_an_equal_one_draws() {
        let (low, high) = (hits(&[0.5]), hits(&[0.6]));
        assert_eq!((win(&high, &low), win(&low, &high), win(&low, &hits(&[0.5 + 1e-10]))), (1.0, 0.0, 0.5));
    }
}

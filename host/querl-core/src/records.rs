//! Pipeline records, in pipeline order.
//!
//! "Failed", "empty" and "low" are different types: a failure is a [`CallFailure`], an empty result an empty list, a low score
//! a number. They are never converted into each other.

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

/// Categories of failures of an external call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// No answer within the time limit.
    Timeout,
    /// Not reachable, or the connection broke.
    Unreachable,
    /// Invalid credentials or no credit (401, 402, 403).
    Unauthorized,
    /// The service rejected this request (other 4xx).
    Rejected,
    /// Still rate limited after all retries (429).
    RateLimited,
    /// The service failed (5xx).
    ServerError,
    /// The response could not be parsed.
    InvalidResponse,
    /// The recording has no entry for this query.
    NotRecorded,
    /// Not called: the circuit breaker is open.
    Down,
    /// Not called: the budget would be exceeded.
    OverBudget,
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

/// [`FailureKind::code`] for the kind as text.
pub fn code_of(who: &str, kind: &str) -> String {
    format!("{who}_{}", kind.replace(' ', "_"))
}

impl std::fmt::Display for FailureKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Timeout => "timeout",
            Self::Unreachable => "unreachable",
            Self::Unauthorized => "unauthorized",
            Self::Rejected => "rejected",
            Self::RateLimited => "rate limited",
            Self::ServerError => "server error",
            Self::InvalidResponse => "invalid response",
            Self::NotRecorded => "not recorded",
            Self::Down => "down",
            Self::OverBudget => "over budget",
        })
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
    #[serde(default)]
    pub prompt_tokens: Option<u64>,
    /// Completion tokens as reported by the service.
    #[serde(default)]
    pub completion_tokens: Option<u64>,
    /// Price in the configured currency; `None` if unknown.
    #[serde(default)]
    pub cost: Option<f64>,
    /// Wall-clock time of the call in milliseconds; `None` if not recorded.
    #[serde(default)]
    pub latency_ms: Option<f64>,
    /// Name of the model, if it was the fallback teacher.
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
    #[serde(default)]
    pub retrieval_score: Option<f64>,
    /// 1 is the best.
    #[serde(default)]
    pub rank: u32,
}

/// Quality of a list of hits: `0.6 * top1 + 0.4 * mean(top 3)` of the reranker scores; 0 for an empty list.
///
/// Source: the source plan's `_calc_retrieval_quality`. Win rates compare this.
pub fn retrieval_quality(hits: &[Hit]) -> f64 {
    let Some(first) = hits.first() else { return 0.0 };
    let top = &hits[..hits.len().min(3)];
    let mean = top.iter().map(|hit| hit.reranker_score).sum::<f64>() / top.len() as f64;
    0.6 * first.reranker_score + 0.4 * mean
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
    /// Score of the best hit; `None` if retrieval failed, was not tried or found nothing.
    pub fn top1_score(&self) -> Option<f64> {
        let hits = self.retrieval.as_ref()?.as_ref().ok()?;
        hits.first().map(|hit| hit.reranker_score)
    }
}

/// Input of a filter plugin: a row whose rewrite and retrieval succeeded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// The other columns of the row.
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

/// The three splits of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Training split.
    Train,
    /// Validation split: early stopping and model selection.
    Val,
    /// Test split: final evaluation only.
    Test,
}

impl Split {
    /// In the order of the files: train, val, test.
    pub const ALL: [Self; 3] = [Self::Train, Self::Val, Self::Test];

    /// `train`, `val`, `test`: the file stem and the name in `eval.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Val => "val",
            Self::Test => "test",
        }
    }

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
    /// Reranker score of the best hit of the teacher's rewrite.
    pub top1_score: Option<f64>,
    /// Author of the rewrite: `recorded`, or the name of the model.
    pub source: String,
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
    /// Empty if unknown.
    pub user_profile: String,
    /// Empty without earlier turns.
    pub history_summary: String,
}

impl Context {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Result of judging one rewrite.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Judgement {
    /// The judge's score.
    Scored {
        /// 综合得分, 0 to 5.
        score: f64,
        /// The judge's explanation.
        #[serde(default)]
        reason: String,
    },
    /// Not chosen for judging (see `judge.sample_rate`).
    #[default]
    NotSampled,
    /// The call failed or its answer could not be parsed.
    Failed(CallFailure),
}

impl Judgement {
    fn is_not_sampled(&self) -> bool {
        *self == Self::NotSampled
    }

    /// The score, if judged.
    pub fn score(&self) -> Option<f64> {
        match self {
            Self::Scored { score, .. } => Some(*score),
            _ => None,
        }
    }
}

/// One class of a style distribution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StyleProbability {
    /// Class name, such as `售前`.
    pub label: String,
    /// 0 to 1; a distribution sums to 1 within 1e-6.
    pub probability: f64,
}

/// Why generation ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum FinishReason {
    /// The end of sequence, or a stop string.
    Stop,
    /// The token limit.
    Length,
    /// A reason that a service names.
    Other(String),
}

impl From<String> for FinishReason {
    fn from(name: String) -> Self {
        match name.as_str() {
            "stop" => Self::Stop,
            "length" => Self::Length,
            _ => Self::Other(name),
        }
    }
}

impl From<FinishReason> for String {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => "stop".into(),
            FinishReason::Length => "length".into(),
            FinishReason::Other(name) => name,
        }
    }
}

/// A rewrite of the policy or the teacher with what is known of it. In JSON, fields without a value are left out.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(from = "CandidateForm")]
pub struct Candidate {
    /// The parsed rewrite; empty if the response contains none.
    pub rewrite: String,
    /// Hits, best first, or the failure of retrieval; `None` if the rewrite was not looked up.
    pub retrieval: Option<Result<Vec<Hit>, CallFailure>>,
    /// Result of the judge.
    pub judgement: Judgement,
    /// Style distribution; `None` if it was not computed.
    pub style: Option<Vec<StyleProbability>>,
    /// Number of generated tokens, end of sequence included; 0 if unknown.
    pub n_tokens: u32,
    /// Why generation ended; `None` if unknown.
    pub finish_reason: Option<FinishReason>,
}

/// A borrowed [`Candidate`], which may lack parts that it has.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct CandidateRef<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    pub rewrite: &'a str,
    #[serde(serialize_with = "retrieval_form::serialize", skip_serializing_if = "Option::is_none")]
    pub retrieval: Option<Result<&'a [Hit], &'a CallFailure>>,
    #[serde(skip_serializing_if = "Judgement::is_not_sampled")]
    pub judgement: &'a Judgement,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub style: Option<&'a [StyleProbability]>,
    #[serde(skip_serializing_if = "is_zero")]
    pub n_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<&'a FinishReason>,
}

impl<'a> From<&'a Candidate> for CandidateRef<'a> {
    fn from(candidate: &'a Candidate) -> Self {
        let Candidate { rewrite, retrieval, judgement, style, n_tokens, finish_reason } = candidate;
        Self {
            rewrite,
            retrieval: retrieval.as_ref().map(|retrieval| retrieval.as_deref()),
            judgement,
            style: style.as_deref(),
            n_tokens: *n_tokens,
            finish_reason: finish_reason.as_ref(),
        }
    }
}

impl Serialize for Candidate {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        CandidateRef::from(self).serialize(serializer)
    }
}

/// [`Candidate`] as it is read: files of format 2 have `truncated` instead of `finish_reason`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CandidateForm {
    #[serde(default)]
    rewrite: String,
    #[serde(default, deserialize_with = "retrieval_form::deserialize")]
    retrieval: Option<Result<Vec<Hit>, CallFailure>>,
    #[serde(default)]
    judgement: Judgement,
    #[serde(default)]
    style: Option<Vec<StyleProbability>>,
    #[serde(default)]
    n_tokens: u32,
    #[serde(default)]
    truncated: Option<bool>,
    #[serde(default)]
    finish_reason: Option<FinishReason>,
}

impl From<CandidateForm> for Candidate {
    fn from(form: CandidateForm) -> Self {
        let CandidateForm { rewrite, retrieval, judgement, style, n_tokens, truncated, finish_reason } = form;
        let of_format_2 = match truncated {
            Some(true) => Some(FinishReason::Length),
            Some(false) if n_tokens > 0 => Some(FinishReason::Stop),
            _ => None,
        };
        Self { rewrite, retrieval, judgement, style, n_tokens, finish_reason: finish_reason.or(of_format_2) }
    }
}

impl Candidate {
    /// A rewrite without hits and judgement.
    pub fn found_nothing(rewrite: String) -> Self {
        Self { rewrite, retrieval: Some(Ok(Vec::new())), ..Self::default() }
    }

    /// The hits, best first; empty if there are none, retrieval failed or was not tried.
    pub fn hits(&self) -> &[Hit] {
        self.found().unwrap_or_default()
    }

    /// The hits of a successful retrieval, best first.
    pub fn found(&self) -> Option<&[Hit]> {
        self.retrieval.as_ref()?.as_deref().ok()
    }

    /// Why retrieval failed.
    pub fn retrieval_failure(&self) -> Option<&CallFailure> {
        self.retrieval.as_ref()?.as_ref().err()
    }

    /// True if the token limit ended the generation.
    pub fn is_truncated(&self) -> bool {
        self.finish_reason == Some(FinishReason::Length)
    }
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// JSON form of a retrieval: `{"hits": [...]}` or `{"failed": {...}}`. Missing ranks are numbered from 1.
mod retrieval_form {
    use super::{CallFailure, Hit};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    type Retrieval = Option<Result<Vec<Hit>, CallFailure>>;

    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    enum Written<'a> {
        Hits(Vec<WrittenHit<'a>>),
        Failed(&'a CallFailure),
    }

    /// [`Hit`] without fields that have no value.
    #[derive(Serialize)]
    struct WrittenHit<'a> {
        #[serde(skip_serializing_if = "str::is_empty")]
        id: &'a str,
        text: &'a str,
        reranker_score: f64,
        #[serde(skip_serializing_if = "Option::is_none")]
        retrieval_score: Option<f64>,
        rank: u32,
    }

    impl<'a> From<&'a Hit> for WrittenHit<'a> {
        fn from(hit: &'a Hit) -> Self {
            let Hit { id, text, reranker_score, retrieval_score, rank } = hit;
            Self { id, text, reranker_score: *reranker_score, retrieval_score: *retrieval_score, rank: *rank }
        }
    }

    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Read {
        Hits(Vec<Hit>),
        Failed(CallFailure),
    }

    pub(super) fn serialize<S: Serializer>(
        retrieval: &Option<Result<&[Hit], &CallFailure>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let written = retrieval.map(|retrieval| match retrieval {
            Ok(hits) => Written::Hits(hits.iter().map(WrittenHit::from).collect()),
            Err(failure) => Written::Failed(failure),
        });
        written.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Retrieval, D::Error> {
        Ok(Option::<Read>::deserialize(deserializer)?.map(|read| match read {
            Read::Hits(mut hits) => {
                for (index, hit) in hits.iter_mut().enumerate().filter(|(_, hit)| hit.rank == 0) {
                    hit.rank = index as u32 + 1;
                }
                Ok(hits)
            }
            Read::Failed(failure) => Err(failure),
        }))
    }
}

/// A value of a table that is no list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum Scalar {
    Flag(bool),
    Number(f64),
    Text(String),
}

/// A value of a table. Cells of a text format such as CSV are text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum ColumnValue {
    Flag(bool),
    Number(f64),
    Text(String),
    Items(Vec<Scalar>),
}

impl Scalar {
    fn n_bytes(&self) -> usize {
        match self {
            Self::Flag(_) => 1,
            Self::Number(_) => 8,
            Self::Text(text) => text.len(),
        }
    }
}

impl ColumnValue {
    fn n_bytes(&self) -> usize {
        match self {
            Self::Flag(_) => 1,
            Self::Number(_) => 8,
            Self::Text(text) => text.len(),
            Self::Items(items) => items.iter().map(Scalar::n_bytes).sum(),
        }
    }
}

/// The named values of a query's row, in the order of the table, without cells that have no value. In JSON an object.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Columns(pub Vec<(String, ColumnValue)>);

impl Columns {
    /// Maximum number of columns that a plugin gets.
    pub const MAX: usize = 256;
    /// Maximum size of names and values of one row, in bytes.
    pub const MAX_BYTES: usize = 1 << 20;
    /// Maximum number of entries of a list.
    pub const MAX_ITEMS: usize = 1000;

    /// True without columns.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Size of names and values in bytes.
    pub fn n_bytes(&self) -> usize {
        self.0.iter().map(|(name, value)| name.len() + value.n_bytes()).sum()
    }
}

impl Serialize for Columns {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize_columns(&self.0, serializer)
    }
}

impl<'de> Deserialize<'de> for Columns {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Columns;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object from column names to texts, numbers, true, false or lists of these")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Columns, A::Error> {
                let mut columns = Vec::new();
                while let Some(column) = map.next_entry()? {
                    columns.push(column);
                }
                Ok(Columns(columns))
            }
        }

        deserializer.deserialize_map(Visitor)
    }
}

/// Input of a reward plugin: one response of the policy to one query. In JSON, fields without a value are left out.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Episode {
    /// Unique in a run: `step-000012/ab12cd34/0`.
    #[serde(default)]
    pub id: String,
    /// Shared by all samples of one query in one batch of rollouts: `step-000012/ab12cd34`.
    #[serde(default)]
    pub group_id: String,
    /// Index among the samples of the group, from 0.
    #[serde(default)]
    pub sample_index: u32,
    /// Training step of the rollout; `None` outside of training.
    #[serde(default)]
    pub step: Option<u64>,
    /// Split of the query's row; `None` if unknown.
    #[serde(default, deserialize_with = "split_form::deserialize")]
    pub split: Option<Split>,
    /// The user's query.
    pub query: String,
    /// User profile and conversation history.
    #[serde(default)]
    pub context: Context,
    /// Ids of the passages that answer the query; empty if unknown.
    #[serde(default)]
    pub gold_ids: Vec<String>,
    /// The other columns of the query's row.
    #[serde(default)]
    pub columns: Columns,
    /// The messages that the policy answered; `None` if unknown.
    #[serde(default)]
    pub prompt: Option<Vec<Message>>,
    /// The generated text before it is parsed; `None` if unknown.
    #[serde(default)]
    pub response: Option<String>,
    /// The policy's rewrite.
    pub policy: Candidate,
    /// The teacher's rewrite; `None` if the run has none.
    #[serde(default)]
    pub baseline: Option<Candidate>,
}

/// A borrowed [`Episode`], which may lack parts that it has: what a plugin gets of it. Its JSON is that of an episode without these parts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct EpisodeRef<'a> {
    pub id: &'a str,
    pub group_id: &'a str,
    pub sample_index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "split_form::serialize")]
    pub split: Option<Split>,
    pub query: &'a str,
    #[serde(skip_serializing_if = "Context::is_empty", serialize_with = "serialize_context")]
    pub context: &'a Context,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    pub gold_ids: &'a [String],
    #[serde(skip_serializing_if = "<[(String, ColumnValue)]>::is_empty", serialize_with = "serialize_columns")]
    pub columns: &'a [(String, ColumnValue)],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<&'a [Message]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response: Option<&'a str>,
    pub policy: CandidateRef<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baseline: Option<CandidateRef<'a>>,
}

impl<'a> From<&'a Episode> for EpisodeRef<'a> {
    fn from(episode: &'a Episode) -> Self {
        Self {
            id: &episode.id,
            group_id: &episode.group_id,
            sample_index: episode.sample_index,
            step: episode.step,
            split: episode.split,
            query: &episode.query,
            context: &episode.context,
            gold_ids: &episode.gold_ids,
            columns: &episode.columns.0,
            prompt: episode.prompt.as_deref(),
            response: episode.response.as_deref(),
            policy: (&episode.policy).into(),
            baseline: episode.baseline.as_ref().map(CandidateRef::from),
        }
    }
}

impl Serialize for Episode {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        EpisodeRef::from(self).serialize(serializer)
    }
}

fn serialize_columns<S: serde::Serializer>(
    columns: &[(String, ColumnValue)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(columns.iter().map(|(name, value)| (name, value)))
}

impl Episode {
    /// Group and index of an id `GROUP/INDEX`, as the ids of a run are; the whole id and 0 for another.
    pub fn group_of(id: &str) -> (&str, u32) {
        let parts = id.rsplit_once('/').and_then(|(group, index)| Some((group, index.parse().ok()?)));
        parts.unwrap_or((id, 0))
    }

    /// Both candidates with their names.
    pub fn candidates(&self) -> impl Iterator<Item = (&'static str, &Candidate)> {
        std::iter::once(("policy", &self.policy)).chain(self.baseline.iter().map(|baseline| ("baseline", baseline)))
    }
}

/// [`Context`] without fields that have no value.
fn serialize_context<S: serde::Serializer>(context: &Context, serializer: S) -> Result<S::Ok, S::Error> {
    let fields = [("user_profile", &context.user_profile), ("history_summary", &context.history_summary)];
    serializer.collect_map(fields.into_iter().filter(|(_, text)| !text.is_empty()))
}

/// JSON form of an episode's split: the names of the plugin contract; `validation` differs from [`Split::name`].
mod split_form {
    use super::Split;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(split: &Option<Split>, serializer: S) -> Result<S::Ok, S::Error> {
        split.map(Split::contract_name).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Split>, D::Error> {
        let name = Option::<String>::deserialize(deserializer)?;
        Ok(name.and_then(|name| Split::ALL.into_iter().find(|split| split.contract_name() == name)))
    }
}

/// A call of a plugin into a host function.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostRequest {
    /// Number of tokens of a text.
    CountTokens(String),
    /// Tokens of a text.
    SplitTokens(String),
    /// Words of a text.
    SegmentWords(String),
    /// One vector per text.
    Embed(Vec<String>),
    /// The judge's response to a conversation.
    AskJudge(Vec<Message>),
    /// The style distribution of a dialogue.
    ClassifyStyle(Vec<Message>),
}

/// The result of a [`HostRequest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostResponse {
    /// Of `CountTokens`.
    Count(u32),
    /// Of `SplitTokens` and `SegmentWords`.
    Texts(Vec<String>),
    /// Of `Embed`: vectors of length 1.
    Vectors(Vec<Vec<f32>>),
    /// Of `AskJudge`.
    Text(String),
    /// Of `ClassifyStyle`.
    Style(Vec<StyleProbability>),
}

/// Why a host function has no result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum HostCallError {
    /// The run has no such service or model.
    #[error("not configured")]
    NotConfigured,
    /// The call failed, or a recording has no result for it.
    #[error("{0}")]
    Failed(CallFailure),
}

/// A recorded call of a host function.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostCall {
    /// Name of the plugin that called.
    pub plugin: String,
    /// The call.
    pub request: HostRequest,
    /// Its result.
    pub response: Result<HostResponse, HostCallError>,
}

/// A reward plugin's score of one episode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reward {
    /// Score within the range that the plugin declares.
    pub total: f64,
    /// Named components, in the plugin's order.
    #[serde(default)]
    pub components: Vec<RewardComponent>,
}

/// One named component of a reward.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RewardComponent {
    /// Name, such as `judge`, `retrieval` or `win`.
    pub name: String,
    /// Finite value.
    pub value: f64,
}

/// Why an item has no score. Not a score of 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code}: {detail}")]
pub struct Rejection {
    /// Stable code for counting: `baseline_retrieval_failed`.
    pub code: String,
    /// Human-readable explanation.
    #[serde(default)]
    pub detail: String,
    /// Who rejected the item. In JSON only in the outcome of an episode: a plugin cannot set it.
    #[serde(skip)]
    pub by: RejectedBy,
}

/// Who rejected an item.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RejectedBy {
    /// A plugin, or the host while a plugin scored the item.
    #[default]
    Plugin,
    /// The host, which gave the item to no plugin.
    Host,
}

impl Rejection {
    /// The code of an episode that lacks the teacher's rewrite, which a reward requires.
    pub const BASELINE_MISSING: &str = "baseline_missing";

    /// A rejection by a plugin.
    pub fn new(code: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { code: code.into(), detail: detail.into(), by: RejectedBy::Plugin }
    }

    /// A rejection by the host, which gave the item to no plugin.
    pub fn by_host(code: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { by: RejectedBy::Host, ..Self::new(code, detail) }
    }
}

/// A dialogue whose last turn, the assistant's, is scored for style.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dialogue {
    /// Unique in a run.
    pub id: String,
    /// All turns; the last is the assistant's.
    pub turns: Vec<Message>,
}

/// A scored episode: one line of `episodes.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EpisodeRecord {
    /// Version of this line's format: [`EpisodeRecord::FORMAT`].
    pub format: u32,
    /// Training step of the rollout; 0 before the first update.
    #[serde(default)]
    pub step: u64,
    /// The input of the reward.
    pub episode: Episode,
    /// Calls of plugins into host functions while the episode was scored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<HostCall>,
    /// The score, or why the episode was dropped.
    #[serde(with = "outcome_form")]
    pub outcome: Result<Reward, Rejection>,
}

impl EpisodeRecord {
    /// Current format version. Version 2, which is read too, lacks groups, prompts, responses, columns and host calls, and writes
    /// `truncated` instead of `finish_reason`. Version 1 wrote retrievals and outcomes as `Ok` and `Err`.
    pub const FORMAT: u32 = 3;
}

/// JSON form of an outcome: `{"scored": {...}}` or `{"rejected": {...}}`.
pub(crate) mod outcome_form {
    use super::{RejectedBy, Rejection, Reward};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    enum Written<'a> {
        Scored(&'a Reward),
        Rejected { code: &'a str, detail: &'a str, by: RejectedBy },
    }

    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Read {
        Scored(Reward),
        Rejected {
            code: String,
            #[serde(default)]
            detail: String,
            /// Missing in files of earlier versions.
            by: Option<RejectedBy>,
        },
    }

    /// Who rejected, in a file of an earlier version: the codes of its host.
    fn by_code(code: &str) -> RejectedBy {
        match code {
            Rejection::BASELINE_MISSING | "deadline" | "style_model_failed" => RejectedBy::Host,
            "policy_retrieval_failed" | "baseline_retrieval_failed" => RejectedBy::Host,
            "policy_judge_failed" | "baseline_judge_failed" => RejectedBy::Host,
            _ => RejectedBy::Plugin,
        }
    }

    pub(crate) fn serialize<S: Serializer>(
        outcome: &Result<Reward, Rejection>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let written = match outcome {
            Ok(reward) => Written::Scored(reward),
            Err(Rejection { code, detail, by }) => Written::Rejected { code, detail, by: *by },
        };
        written.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Result<Reward, Rejection>, D::Error> {
        Ok(match Read::deserialize(deserializer)? {
            Read::Scored(reward) => Ok(reward),
            Read::Rejected { code, detail, by } => {
                let by = by.unwrap_or_else(|| by_code(&code));
                Err(Rejection { code, detail, by })
            }
        })
    }

    /// For an optional field; `#[serde(default)]` gives `None` if it is missing.
    pub(crate) fn optional<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Result<Reward, Rejection>>, D::Error> {
        deserialize(deserializer).map(Some)
    }
}

/// One system's answer to one held-out query: one line of `eval/records.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    /// One of [`EVAL_SYSTEMS`](crate::config::EVAL_SYSTEMS).
    pub system: String,
    /// The query row.
    pub query: QueryRow,
    /// The answer with its scores, or why there is none; such a query counts as a loss and is reported separately.
    pub outcome: Result<SystemAnswer, Rejection>,
}

/// One system's rewrite of a query with its scores.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SystemAnswer {
    /// Rewrite, hits and judgement.
    pub candidate: Candidate,
    /// Reward with the teacher as baseline; `None` without a teacher's rewrite, or if the plugin rejected the episode.
    pub reward: Option<Reward>,
    /// `1` win, `0.5` tie, `0` loss against the teacher by retrieval quality; `None` if not comparable.
    pub win: Option<f64>,
    /// Generation time in milliseconds; `None` if unknown.
    pub latency_ms: Option<f64>,
    /// Price of the rewrite in the configured currency; `None` if unknown.
    pub cost: Option<f64>,
    /// Style distribution of a second model that no reward uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit_style: Option<Vec<StyleProbability>>,
    /// Passages of a second retriever, which training never asked; `None` without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_retrieval: Option<SecondHits>,
    /// Share of the rewrite's words that are in a gold passage and not in the query, 0 to 1; `None` if the gold passages are unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_gold_terms: Option<f64>,
    /// Sampled responses of the system to the query; `None` if none were sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<SampleCounts>,
}

/// What a second retriever finds with a rewrite.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecondHits {
    /// Name of the retriever: `lexical`, `semantic` or [`Self::MODEL_OF_TRAINING`].
    pub retriever: String,
    /// Ids of the passages, best first.
    pub ids: Vec<String>,
}

impl SecondHits {
    /// Name of a semantic retriever whose embedding model is that of the first retriever.
    pub const MODEL_OF_TRAINING: &str = "semantic, the model of training";
}

/// Sampled responses to one query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleCounts {
    /// Number of samples, without those whose retrieval failed.
    pub n: usize,
    /// Samples whose first hit is a gold passage.
    pub n_gold_first: usize,
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

//! The records that flow through the pipeline, in pipeline order.
//!
//! "Failed", "empty" and "low" are three different things throughout: a failure is a [`CallFailure`], an empty answer is an
//! empty list, a low one is a number. Nothing turns one into another.

use serde::{Deserialize, Serialize};

/// One row of the query table, as read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QueryRow {
    /// Stable over runs: a digest of query, profile and history.
    pub id: String,
    /// 1-based row in the input table, header counted, as a spreadsheet shows it.
    pub row: usize,
    /// What the user typed.
    pub original_query: String,
    /// Who asks; may be empty.
    #[serde(default)]
    pub user_profile: String,
    /// What was said before; may be empty.
    #[serde(default)]
    pub history_summary: String,
    /// Ids of the passages that answer the query; empty where unknown.
    #[serde(default)]
    pub gold_ids: Vec<String>,
    /// Rows of one group (paraphrases of one need) share a split.
    pub group: String,
}

/// Why an outside call gave no answer. Never turned into data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{kind}: {message}")]
pub struct CallFailure {
    /// What sort of failure.
    pub kind: FailureKind,
    /// One sentence: what was asked of whom, what came back. Holds no secret.
    pub message: String,
}

/// The sorts of failure of an outside call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// No answer within the time limit.
    Timeout,
    /// Not reachable, or the connection broke.
    Unreachable,
    /// Refused for lack of valid credentials or of money (401, 402, 403).
    Unauthorized,
    /// The service refused this request (other 4xx).
    Rejected,
    /// Rate limit that outlasted the retries (429).
    RateLimited,
    /// The service failed (5xx).
    ServerError,
    /// An answer came that could not be understood.
    InvalidResponse,
    /// A recording has no entry for this query.
    NotRecorded,
    /// Not called any more: too many calls before it had no answer.
    Down,
    /// Not called: the budget would not cover it.
    OverBudget,
}

impl FailureKind {
    /// A failure that every further call would meet too: the stage stops instead of going on.
    pub fn is_fatal(self) -> bool {
        matches!(self, Self::Unauthorized | Self::Down | Self::OverBudget)
    }

    /// The code under which a row is dropped whose call to `who` failed so: `teacher_rate_limited`.
    pub fn code(self, who: &str) -> String {
        code_of(who, &self.to_string())
    }
}

/// As [`FailureKind::code`], of a kind in words.
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

/// A query with the teacher's rewrite of it, or why there is none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RewriteRecord {
    /// The query.
    #[serde(flatten)]
    pub query: QueryRow,
    /// The teacher's answer.
    pub rewrite: Result<Completion, CallFailure>,
}

/// A text from a teacher or judge, with what it cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// The text, as the plugin's parser left it.
    pub text: String,
    /// Tokens of the prompt, where the service said.
    #[serde(default)]
    pub prompt_tokens: Option<u64>,
    /// Tokens of the answer, where the service said.
    #[serde(default)]
    pub completion_tokens: Option<u64>,
    /// Price in the configured currency; `None` where unknown.
    #[serde(default)]
    pub cost: Option<f64>,
    /// Wall-clock time of the call in milliseconds; `None` for a recording that did not keep it.
    #[serde(default)]
    pub latency_ms: Option<f64>,
    /// Who answered, where it was not the one that was asked first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// One retrieved passage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hit {
    /// Id of the passage; empty where the service sends none.
    #[serde(default)]
    pub id: String,
    /// The passage.
    #[serde(default)]
    pub text: String,
    /// How well the passage answers the original query in its context, 0 to 1.
    pub reranker_score: f64,
    /// First-stage score (BM25 or similarity), where known; its scale is the index's own.
    #[serde(default)]
    pub retrieval_score: Option<f64>,
    /// 1 for the best.
    #[serde(default)]
    pub rank: u32,
}

/// One number for a list of hits: `0.6 * top1 + 0.4 * mean(top 3)` of the reranker scores; 0 where nothing was found.
///
/// Source: the source plan's `_calc_retrieval_quality`. Win rates compare this.
pub fn retrieval_quality(hits: &[Hit]) -> f64 {
    let Some(first) = hits.first() else { return 0.0 };
    let top = &hits[..hits.len().min(3)];
    let mean = top.iter().map(|hit| hit.reranker_score).sum::<f64>() / top.len() as f64;
    0.6 * first.reranker_score + 0.4 * mean
}

/// The logistic function: 0.5 for 0, towards 1 for large numbers.
pub fn logistic(number: f64) -> f64 {
    1.0 / (1.0 + (-number).exp())
}

/// `1` where `policy` has the better [`retrieval_quality`], `0` where `baseline` has, `0.5` for a draw.
pub fn win(policy: &[Hit], baseline: &[Hit]) -> f64 {
    let difference = retrieval_quality(policy) - retrieval_quality(baseline);
    if difference.abs() <= 1e-9 { 0.5 } else { f64::from(difference > 0.0) }
}

/// A query with the teacher's rewrite and what retrieval found with it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ValidatedRecord {
    /// Query and rewrite.
    #[serde(flatten)]
    pub rewritten: RewriteRecord,
    /// Hits of the rewrite, best first; `None` where there is no rewrite to look up.
    pub retrieval: Option<Result<Vec<Hit>, CallFailure>>,
}

impl ValidatedRecord {
    /// The best hit's score; `None` where retrieval failed, was not tried or found nothing.
    pub fn top1_score(&self) -> Option<f64> {
        let hits = self.retrieval.as_ref()?.as_ref().ok()?;
        hits.first().map(|hit| hit.reranker_score)
    }
}

/// What a filter plugin sees of one row: both rewrite and retrieval succeeded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Id of the query row.
    pub id: String,
    /// What the user typed.
    pub original_query: String,
    /// The teacher's rewrite.
    pub rewritten_query: String,
    /// Who asks, and what was said before.
    pub context: Context,
    /// Hits of the rewrite, best first.
    pub hits: Vec<Hit>,
}

/// A filter's word on one sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Goes into the dataset.
    Keep,
    /// Stays out, for a reason.
    Drop {
        /// Short, stable, countable: `top1_below_threshold`.
        code: String,
        /// For a person.
        detail: String,
    },
}

/// A chat message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

/// The three splits of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// For training.
    Train,
    /// For early stopping and choosing.
    Val,
    /// For the final table only.
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
}

/// One line of `train.jsonl`, `val.jsonl` or `test.jsonl`.
///
/// `messages` ends with the assistant's rewrite in rows that passed the filters. Rows of val and test whose teacher rewrite
/// failed or was dropped are kept without an assistant message: dropping them would flatter every system.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DatasetRow {
    /// The conversation; the last one is the assistant's where the teacher's rewrite passed.
    pub messages: Vec<Message>,
    /// Where it comes from.
    pub metadata: RowMetadata,
}

impl DatasetRow {
    /// The messages before the assistant's answer: what the policy is prompted with.
    pub fn prompt(&self) -> &[Message] {
        match self.messages.last() {
            Some(last) if last.role == "assistant" => &self.messages[..self.messages.len() - 1],
            _ => &self.messages,
        }
    }

    /// The teacher's rewrite where it passed the filters: the target of fine-tuning.
    pub fn target(&self) -> Option<&str> {
        self.messages.last().filter(|last| last.role == "assistant").map(|last| last.content.as_str())
    }
}

/// What stands beside the messages of a dataset row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RowMetadata {
    /// The query.
    #[serde(flatten)]
    pub query: QueryRow,
    /// Retrieval score of the best hit of the teacher's rewrite.
    pub top1_score: Option<f64>,
    /// Who wrote the rewrite: `recorded`, or the model's name.
    pub source: String,
    /// Why no assistant message: failure or filter code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped: Option<String>,
}

/// Who asks, and what was said before.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Context {
    /// Empty where unknown.
    pub user_profile: String,
    /// Empty where nothing was said.
    pub history_summary: String,
}

/// A judge's word on one rewrite.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Judgement {
    /// Judged.
    Scored {
        /// 综合得分, 0 to 5.
        score: f64,
        /// Why, in words.
        #[serde(default)]
        reason: String,
    },
    /// Not chosen for judging (see `judge.sample_rate`).
    #[default]
    NotSampled,
    /// Asked, and no usable answer came.
    Failed(CallFailure),
}

impl Judgement {
    /// The score where there is one.
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
    /// `售前` and so on.
    pub label: String,
    /// 0 to 1; a distribution sums to 1 within 1e-6.
    pub probability: f64,
}

/// One side of the competition: the policy's rewrite, or the teacher's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Candidate {
    /// The rewrite, parsed.
    pub rewrite: String,
    /// Its hits, best first, or why there are none.
    #[serde(with = "retrieval_form", default = "nothing_found")]
    pub retrieval: Result<Vec<Hit>, CallFailure>,
    /// What the judge said of it.
    #[serde(default)]
    pub judgement: Judgement,
    /// Style distribution, where a style model is configured.
    #[serde(default)]
    pub style: Option<Vec<StyleProbability>>,
    /// Tokens generated, end of sequence included; 0 where unknown.
    #[serde(default)]
    pub n_tokens: u32,
    /// True where the token limit cut the answer off.
    #[serde(default)]
    pub truncated: bool,
}

impl Candidate {
    /// A rewrite that found nothing, that nobody judged and of whose making nothing is known.
    pub fn found_nothing(rewrite: String) -> Self {
        let (retrieval, judgement) = (nothing_found(), Judgement::default());
        Self { rewrite, retrieval, judgement, style: None, n_tokens: 0, truncated: false }
    }
}

fn nothing_found() -> Result<Vec<Hit>, CallFailure> {
    Ok(Vec::new())
}

/// A retrieval as authors write it: `{"hits": [...]}` or `{"failed": {...}}`. Ranks that are left out are counted from 1.
mod retrieval_form {
    use super::{CallFailure, Hit};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    enum Written<'a> {
        Hits(&'a [Hit]),
        Failed(&'a CallFailure),
    }

    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Read {
        Hits(Vec<Hit>),
        Failed(CallFailure),
    }

    pub(super) fn serialize<S: Serializer>(
        retrieval: &Result<Vec<Hit>, CallFailure>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let written = match retrieval {
            Ok(hits) => Written::Hits(hits),
            Err(failure) => Written::Failed(failure),
        };
        written.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Result<Vec<Hit>, CallFailure>, D::Error> {
        Ok(match Read::deserialize(deserializer)? {
            Read::Hits(mut hits) => {
                for (index, hit) in hits.iter_mut().enumerate().filter(|(_, hit)| hit.rank == 0) {
                    hit.rank = index as u32 + 1;
                }
                Ok(hits)
            }
            Read::Failed(failure) => Err(failure),
        })
    }
}

/// Everything a reward plugin may look at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Episode {
    /// Unique in a run: `step-000012/ab12cd34/0`.
    pub id: String,
    /// What the user typed.
    pub query: String,
    /// Who asks, and what was said before.
    #[serde(default)]
    pub context: Context,
    /// Passages known to answer it; empty where unknown.
    #[serde(default)]
    pub gold_ids: Vec<String>,
    /// The policy's side.
    pub policy: Candidate,
    /// The teacher's side.
    pub baseline: Candidate,
}

/// A reward plugin's score of one episode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reward {
    /// Within the range that the plugin declares.
    pub total: f64,
    /// Named parts, in the plugin's order.
    #[serde(default)]
    pub components: Vec<RewardComponent>,
}

/// One named part of a reward.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RewardComponent {
    /// `judge`, `retrieval`, `win`.
    pub name: String,
    /// Finite.
    pub value: f64,
}

/// Why a plugin would not score one item. Not a score of 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code}: {detail}")]
pub struct Rejection {
    /// Short, stable, countable: `baseline_retrieval_failed`.
    pub code: String,
    /// For a person.
    #[serde(default)]
    pub detail: String,
}

/// A dialogue whose last turn, the assistant's, is to be scored for style.
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
    /// Training step that made it; 0 before the first update.
    #[serde(default)]
    pub step: u64,
    /// What was scored.
    pub episode: Episode,
    /// The score, or why the episode was dropped.
    #[serde(with = "outcome_form")]
    pub outcome: Result<Reward, Rejection>,
}

impl EpisodeRecord {
    /// The format written today. 1 wrote retrievals and outcomes as `Ok` and `Err`.
    pub const FORMAT: u32 = 2;
}

/// An outcome as it is recorded: `{"scored": {...}}` or `{"rejected": {...}}`.
pub(crate) mod outcome_form {
    use super::{Rejection, Reward};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    enum Written<'a> {
        Scored(&'a Reward),
        Rejected(&'a Rejection),
    }

    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Read {
        Scored(Reward),
        Rejected(Rejection),
    }

    pub(crate) fn serialize<S: Serializer>(
        outcome: &Result<Reward, Rejection>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let written = match outcome {
            Ok(reward) => Written::Scored(reward),
            Err(rejection) => Written::Rejected(rejection),
        };
        written.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Result<Reward, Rejection>, D::Error> {
        Ok(match Read::deserialize(deserializer)? {
            Read::Scored(reward) => Ok(reward),
            Read::Rejected(rejection) => Err(rejection),
        })
    }

    /// Of a line that has an outcome; `#[serde(default)]` stands for one that has none.
    pub(crate) fn optional<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Result<Reward, Rejection>>, D::Error> {
        deserialize(deserializer).map(Some)
    }
}

/// One system's answer to one held-out query: one line of `eval/records.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    /// `raw`, `teacher`, `sft` or `rl`.
    pub system: String,
    /// The query.
    pub query: QueryRow,
    /// The answer with its scores, or why there is none; such a query counts as lost for accuracy and is reported apart.
    pub outcome: Result<SystemAnswer, Rejection>,
}

/// What one system wrote for one query, and how it fared against the teacher.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SystemAnswer {
    /// Rewrite, hits, judgement.
    pub candidate: Candidate,
    /// Against the teacher's candidate; `None` where the teacher has none, or for a plugin's rejection.
    pub reward: Option<Reward>,
    /// `1` won, `0.5` drew, `0` lost against the teacher by retrieval quality; `None` where not comparable.
    pub win: Option<f64>,
    /// Time to write the rewrite in milliseconds; `None` where unknown or where nothing was written.
    pub latency_ms: Option<f64>,
    /// Price of the rewrite in the configured currency; `None` where unknown.
    pub cost: Option<f64>,
    /// What a second style model says of the rewrite, which no reward sees; `None` where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit_style: Option<Vec<StyleProbability>>,
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

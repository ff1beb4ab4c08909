//! Episodes: what a reward reads, its score or rejection, and the host functions that it called.

use super::columns::serialize_columns;
use super::{CallFailure, Candidate, CandidateRef, ColumnValue, Columns, Context, Message, Split, StyleProbability};
use serde::{Deserialize, Serialize};

/// Input of a reward plugin: one response of the policy to one query. In JSON, fields without a value are left out.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Episode {
    /// Id, unique in a run: `step-000012/ab12cd34/0`.
    #[serde(default)]
    pub id: String,
    /// Group id, shared by all samples of one query in one batch of rollouts: `step-000012/ab12cd34`.
    #[serde(default)]
    pub group_id: String,
    /// Index among the samples of the group, from 0.
    #[serde(default)]
    pub sample_index: u32,
    /// Training step of the rollout; `None` outside of training.
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
    /// Further columns of the query's row, for rewards that read them.
    #[serde(default)]
    pub columns: Columns,
    /// The messages that the policy answered; `None` if unknown.
    pub prompt: Option<Vec<Message>>,
    /// The generated text before it is parsed; `None` if unknown.
    pub response: Option<String>,
    /// The policy's rewrite.
    pub policy: Candidate,
    /// The teacher's rewrite; `None` if the run has none.
    pub baseline: Option<Candidate>,
}

/// A borrowed [`Episode`] with only the parts that a plugin reads. Its JSON is that of an episode without the other parts.
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

impl Episode {
    /// Splits an episode id `GROUP/INDEX` into group id and sample index; an id of another form gives the whole id and 0.
    pub fn group_of(id: &str) -> (&str, u32) {
        let parts = id.rsplit_once('/').and_then(|(group, index)| Some((group, index.parse().ok()?)));
        parts.unwrap_or((id, 0))
    }

    /// Key of query and context: the same query in another context counts as another query.
    pub fn query_key(&self) -> String {
        format!("{}\0{}\0{}", self.query, self.context.user_profile, self.context.history_summary)
    }

    /// The candidates with their names: `policy` and, if the episode has a teacher's rewrite, `baseline`.
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
    /// Embedding vectors, one per text.
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
    /// Result of `CountTokens`.
    Count(u32),
    /// Result of `SplitTokens` or `SegmentWords`.
    Texts(Vec<String>),
    /// Result of `Embed`: L2-normalised vectors.
    Vectors(Vec<Vec<f32>>),
    /// Result of `AskJudge`: the judge's response.
    Text(String),
    /// Result of `ClassifyStyle`: the probability of each class.
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
    /// The called function with its arguments.
    pub request: HostRequest,
    /// The result of the call.
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
    /// Value of the component; finite.
    pub value: f64,
}

/// Why an item (episode, sample, dialogue or response) has no score; never converted to a score of 0.
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
    /// The host; the item was not passed to a plugin.
    Host,
}

impl Rejection {
    /// Rejection code of an episode without the teacher's rewrite if a reward requires it.
    pub const BASELINE_MISSING: &str = "baseline_missing";

    /// A rejection by a plugin.
    pub fn new(code: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { code: code.into(), detail: detail.into(), by: RejectedBy::Plugin }
    }

    /// A rejection by the host of an item that was not passed to a plugin.
    pub fn by_host(code: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { by: RejectedBy::Host, ..Self::new(code, detail) }
    }
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

    /// Derives who rejected the item from the code, for files of earlier versions.
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

    /// Deserialises an optional outcome; `#[serde(default)]` gives `None` if the field is missing.
    pub(crate) fn optional<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Result<Reward, Rejection>>, D::Error> {
        deserialize(deserializer).map(Some)
    }
}

//! The values that several kinds of plugin share.

/// Who asks, and what was said before.
///
/// Implements `serde::Deserialize` in native tests only, not in a component.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "wasm32"), derive(serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct Context {
    /// 用户画像.
    pub user_profile: Option<String>,
    /// 历史摘要. `None` at the start of a conversation.
    pub history_summary: Option<String>,
}

/// One retrieved passage.
///
/// Implements `serde::Deserialize` in native tests only, not in a component.
#[derive(Debug, Clone, Default, PartialEq)]
#[cfg_attr(not(target_arch = "wasm32"), derive(serde::Deserialize), serde(deny_unknown_fields))]
pub struct Hit {
    /// Id of the passage.
    pub id: Option<String>,
    /// The passage.
    #[cfg_attr(not(target_arch = "wasm32"), serde(default))]
    pub text: String,
    /// How well the passage answers the original query in its context, 0 to 1.
    pub reranker_score: f64,
    /// First-stage score on the scale of the index.
    pub retrieval_score: Option<f64>,
    /// 1 for the best.
    #[cfg_attr(not(target_arch = "wasm32"), serde(default))]
    pub rank: u32,
}

/// Why an external call gave no result. Never a low value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CallFailure {
    /// Kind of the failure.
    pub kind: FailureKind,
    /// One sentence for a person.
    pub message: String,
}

/// Kinds of failure of an external call.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// No response within the time limit.
    Timeout,
    /// Not reachable, or the connection broke.
    Unreachable,
    /// Refused for lack of valid credentials.
    Unauthorized,
    /// The service refused this request.
    Rejected,
    /// A rate limit that outlasted the retries.
    RateLimited,
    /// The service failed.
    ServerError,
    /// A response came that could not be parsed.
    InvalidResponse,
    /// A recording has no entry for this request.
    NotRecorded,
    /// A kind that a later contract names.
    Other(String),
}

/// A judge's score of one rewrite.
#[derive(Debug, Clone, PartialEq)]
pub struct JudgeScore {
    /// 综合得分, 0 to 5.
    pub score: f64,
    /// Why, in words; may be empty.
    pub reason: String,
}

/// One class of a style distribution.
///
/// Implements `serde::Deserialize` in native tests only, not in a component.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(not(target_arch = "wasm32"), derive(serde::Deserialize), serde(deny_unknown_fields))]
pub struct StyleProbability {
    /// `售前` and so on.
    pub label: String,
    /// 0 to 1; a distribution sums to 1.
    pub probability: f64,
}

/// Why generation ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The end of sequence, or a stop string.
    Stop,
    /// The token limit.
    Length,
    /// A reason that a later contract names.
    Other(String),
}

/// The split of the query's row.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Split {
    Train,
    Validation,
    Test,
    Other(String),
}

/// A rewrite with what the host knows of it: the policy's, or the teacher's. `None` is unknown: not declared, or not there in this
/// episode.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Candidate {
    /// The parsed rewrite; never blank. `None` where the response contains none.
    pub rewrite: Option<String>,
    /// Hits, best first, or why there are none. An empty list is a result: nothing was found. `None` without a lookup.
    pub retrieval: Option<Result<Vec<Hit>, CallFailure>>,
    /// The judge's score, or why there is none. `None` where the rewrite was not judged.
    pub judgement: Option<Result<JudgeScore, CallFailure>>,
    /// Distribution over the classes of the run's style model.
    pub style: Option<Vec<StyleProbability>>,
    /// Tokens generated, end of sequence included.
    pub n_tokens: Option<u32>,
    /// Why generation ended.
    pub finish_reason: Option<FinishReason>,
}

impl Candidate {
    /// The rewrite. `side` is `policy` or `baseline`, for the code of the rejection.
    ///
    /// # Errors
    /// `SIDE_rewrite_missing`.
    pub fn rewrite(&self, side: &str) -> Result<&str, Rejection> {
        self.rewrite.as_deref().ok_or_else(|| missing(side, "rewrite"))
    }

    /// The hits, best first.
    ///
    /// # Errors
    /// `SIDE_retrieval_failed` or `SIDE_retrieval_missing`.
    pub fn hits(&self, side: &str) -> Result<&[Hit], Rejection> {
        match &self.retrieval {
            Some(Ok(hits)) => Ok(hits),
            Some(Err(failure)) => Err(failed(side, "retrieval", failure)),
            None => Err(missing(side, "retrieval")),
        }
    }

    /// The judge's score; `None` where the rewrite was not judged.
    ///
    /// # Errors
    /// `SIDE_judgement_failed`.
    pub fn judgement(&self, side: &str) -> Result<Option<&JudgeScore>, Rejection> {
        match &self.judgement {
            Some(Ok(judged)) => Ok(Some(judged)),
            Some(Err(failure)) => Err(failed(side, "judgement", failure)),
            None => Ok(None),
        }
    }

    /// The style distribution.
    ///
    /// # Errors
    /// `SIDE_style_missing`.
    pub fn style(&self, side: &str) -> Result<&[StyleProbability], Rejection> {
        self.style.as_deref().ok_or_else(|| missing(side, "style"))
    }
}

fn failed(side: &str, part: &str, failure: &CallFailure) -> Rejection {
    Rejection::new([side, "_", part, "_failed"].concat(), &*failure.message)
}

fn missing(side: &str, part: &str) -> Rejection {
    Rejection::new([side, "_", part, "_missing"].concat(), "")
}

/// A value that is no list.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Scalar {
    Text(String),
    Number(f64),
    Flag(bool),
}

/// A value of a table. A cell of a text format such as CSV is text.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum ColumnValue {
    Text(String),
    Number(f64),
    Flag(bool),
    Items(Vec<Scalar>),
}

impl ColumnValue {
    /// The text, of a text.
    pub fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// The number, also of a text that is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Text(text) => text.trim().parse().ok().filter(|number: &f64| number.is_finite()),
            _ => None,
        }
    }
}

/// A named value of the query's row.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// The header, unique in a row.
    pub name: String,
    /// Its value.
    pub value: ColumnValue,
}

/// Who speaks in a chat message.
///
/// Implements `serde::Deserialize` in native tests only, not in a component.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
#[cfg_attr(not(target_arch = "wasm32"), derive(serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Role {
    System,
    User,
    Assistant,
}

/// A chat message.
///
/// Implements `serde::Deserialize` in native tests only, not in a component.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "wasm32"), derive(serde::Deserialize), serde(deny_unknown_fields))]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// The text.
    pub content: String,
}

impl Message {
    /// A system message.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: Role::System, content: content.into() }
    }

    /// A user's message.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: Role::User, content: content.into() }
    }

    /// An assistant's message.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self { role: Role::Assistant, content: content.into() }
    }
}

/// Why a plugin gives no result for one item. The item is dropped and counted; it is not a result of 0.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {detail}")]
pub struct Rejection {
    /// 1 to 64 of `a` to `z`, `0` to `9`, `_`. Stable over versions, for counting.
    pub code: String,
    /// One sentence for a person. May be empty.
    pub detail: String,
}

impl Rejection {
    /// A rejection with a code for counting and a sentence for a person.
    pub fn new(code: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { code: code.into(), detail: detail.into() }
    }

    /// The rejection of a prompt's task that the plugin does not know.
    pub fn unknown_task(task: &crate::PromptTask) -> Self {
        Self::new("unknown_task", format!("the plugin has no prompt for {task:?}"))
    }
}

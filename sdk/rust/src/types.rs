//! Types that several kinds of plugin share.

/// Context of a query: the user's profile and a summary of the conversation so far.
///
/// Implements `serde::Deserialize` in native tests only, not in a component.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "wasm32"), derive(serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct Context {
    /// The user's profile (用户画像).
    pub user_profile: Option<String>,
    /// Summary of the conversation so far (历史摘要); `None` at its start.
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
    /// Text of the passage.
    #[cfg_attr(not(target_arch = "wasm32"), serde(default))]
    pub text: String,
    /// Relevance of the passage to the original query in its context by the reranker, 0 to 1.
    pub reranker_score: f64,
    /// Score of first-stage retrieval, on the scale of the index.
    pub retrieval_score: Option<f64>,
    /// Rank of the passage; 1 is the best.
    #[cfg_attr(not(target_arch = "wasm32"), serde(default))]
    pub rank: u32,
}

/// A failed external call (retrieval, judge or host function). Do not treat it as a low score or an empty list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CallFailure {
    /// Kind of the failure.
    pub kind: FailureKind,
    /// One sentence for people. Do not parse it: the wording may change.
    pub message: String,
}

/// Kind of failure of an external call.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// No response within the time limit.
    Timeout,
    /// The service is not reachable, or the connection broke.
    Unreachable,
    /// The service rejected the credentials.
    Unauthorized,
    /// The service refused this request.
    Rejected,
    /// The rate limit of the service was still exceeded after the retries.
    RateLimited,
    /// The service reported an error of its own.
    ServerError,
    /// The response could not be parsed.
    InvalidResponse,
    /// A recording has no entry for this request.
    NotRecorded,
    /// A kind of failure of a later version of the contract, by its name.
    Other(String),
}

/// A judge's score of one rewrite.
#[derive(Debug, Clone, PartialEq)]
pub struct JudgeScore {
    /// Overall score (综合得分), 0 to 5.
    pub score: f64,
    /// The judge's reason in words; may be empty.
    pub reason: String,
}

/// The probability of one style class.
///
/// Implements `serde::Deserialize` in native tests only, not in a component.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(not(target_arch = "wasm32"), derive(serde::Deserialize), serde(deny_unknown_fields))]
pub struct StyleProbability {
    /// Name of the class, for example `售前`.
    pub label: String,
    /// Probability, 0 to 1; those of all classes sum to 1.
    pub probability: f64,
}

/// Reason why generation ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The model generated the end-of-sequence token or a stop string.
    Stop,
    /// The token limit was reached.
    Length,
    /// A reason of a later version of the contract, by its name.
    Other(String),
}

/// Data split of the query's row.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Split {
    Train,
    Validation,
    Test,
    Other(String),
}

/// A rewrite of the policy or the teacher, with its retrieved passages, judge score and style. A field is `None` if the plugin does not
/// declare it as an input, or if it is unknown in this episode.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Candidate {
    /// The parsed rewrite, never blank; `None` if the response contains none.
    pub rewrite: Option<String>,
    /// Retrieved passages, best first, or the failure of retrieval. Empty if nothing was found or there is no rewrite; `None` if the run
    /// has no retrieval.
    pub retrieval: Option<Result<Vec<Hit>, CallFailure>>,
    /// The judge's score, or the failure of the judge; `None` if the rewrite was not judged.
    pub judgement: Option<Result<JudgeScore, CallFailure>>,
    /// Probability of each class by the run's style model.
    pub style: Option<Vec<StyleProbability>>,
    /// Number of generated tokens, end of sequence included.
    pub n_tokens: Option<u32>,
    /// Reason why generation ended.
    pub finish_reason: Option<FinishReason>,
}

impl Candidate {
    /// The rewrite. In this and the following methods `side` is `policy` or `baseline`, for the code of the rejection.
    ///
    /// # Errors
    /// The rejection `SIDE_rewrite_missing` if there is no rewrite.
    pub fn rewrite(&self, side: &str) -> Result<&str, Rejection> {
        self.rewrite.as_deref().ok_or_else(|| missing(side, "rewrite"))
    }

    /// The retrieved passages, best first; empty if nothing was found.
    ///
    /// # Errors
    /// The rejection `SIDE_retrieval_failed` if retrieval failed, `SIDE_retrieval_missing` if it is `None`.
    pub fn hits(&self, side: &str) -> Result<&[Hit], Rejection> {
        match &self.retrieval {
            Some(Ok(hits)) => Ok(hits),
            Some(Err(failure)) => Err(failed(side, "retrieval", failure)),
            None => Err(missing(side, "retrieval")),
        }
    }

    /// The judge's score; `None` if the rewrite was not judged.
    ///
    /// # Errors
    /// The rejection `SIDE_judgement_failed` if the judge failed.
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
    /// The rejection `SIDE_style_missing` if there is none.
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

/// A value that is not a list: text, number or boolean.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Scalar {
    Text(String),
    Number(f64),
    Flag(bool),
}

/// A value in a column of the query table. A cell of a text format such as CSV is text.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum ColumnValue {
    Text(String),
    Number(f64),
    Flag(bool),
    Items(Vec<Scalar>),
}

impl ColumnValue {
    /// The text, if the value is a text.
    pub fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// The number, if the value is a number or a text that is a finite number.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Text(text) => text.trim().parse().ok().filter(|number: &f64| number.is_finite()),
            _ => None,
        }
    }
}

/// A column of the query's row, with its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// Name in the header, unique in a row.
    pub name: String,
    /// Value in the query's row.
    pub value: ColumnValue,
}

/// Role of the speaker of a chat message.
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
    /// Role of the speaker.
    pub role: Role,
    /// Text of the message.
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

/// A plugin's reason for giving no result for one item. The item is dropped and counted; it does not get a score of 0.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {detail}")]
pub struct Rejection {
    /// Code of the reason, for counting: 1 to 64 of `a` to `z`, `0` to `9`, `_`. It should stay the same between versions.
    pub code: String,
    /// Explanation in one sentence; may be empty.
    pub detail: String,
}

impl Rejection {
    /// A rejection with a code for counting and a sentence for people.
    pub fn new(code: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { code: code.into(), detail: detail.into() }
    }

    /// A rejection of a prompt task that the plugin does not know.
    pub fn unknown_task(task: &crate::PromptTask) -> Self {
        Self::new("unknown_task", format!("the plugin has no prompt for {task:?}"))
    }
}

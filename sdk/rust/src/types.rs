//! The values that several kinds of plugin share.

/// Who asks, and what was said before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Context {
    /// 用户画像. Empty where unknown.
    pub user_profile: String,
    /// 历史摘要. Empty where nothing was said.
    pub history_summary: String,
}

/// One retrieved passage.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Hit {
    /// Id of the passage. Empty where the retrieval service sends none.
    pub id: String,
    /// The passage.
    pub text: String,
    /// How well the passage answers the original query in its context, 0 to 1.
    pub reranker_score: f64,
    /// First-stage score, where known; its scale is the index's own.
    pub retrieval_score: Option<f64>,
    /// 1 for the best.
    pub rank: u32,
}

/// Why an external call gave no answer. Never a low value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CallFailure {
    /// Kind of the failure.
    pub kind: FailureKind,
    /// One sentence for a person.
    pub message: String,
}

/// Kinds of failure of an external call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// No answer within the time limit.
    Timeout,
    /// Not reachable, or the connection broke.
    Unreachable,
    /// Refused for lack of valid credentials.
    Unauthorized,
    /// The service refused this request.
    Rejected,
    /// A rate limit that outlasted the retries.
    RateLimited,
    /// The service returned a server error.
    ServerError,
    /// The answer could not be parsed.
    InvalidResponse,
    /// A recording has no entry for this query.
    NotRecorded,
}

/// What a judge said of one rewrite.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Judgement {
    /// Judged.
    Scored {
        /// 综合得分, 0 to 5.
        score: f64,
        /// Why, in words.
        reason: String,
    },
    /// Not sampled for judging.
    #[default]
    NotSampled,
    /// The judge was called and gave no usable answer.
    Failed(CallFailure),
}

/// One class of a style distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct StyleProbability {
    /// `售前` and so on.
    pub label: String,
    /// 0 to 1; a distribution sums to 1.
    pub probability: f64,
}

/// One side of the competition: the policy's rewrite, or the teacher's.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The rewrite, parsed.
    pub rewrite: String,
    /// Its hits, best first, or why there are none. An empty list is an answer: nothing was found.
    pub retrieval: Result<Vec<Hit>, CallFailure>,
    /// The judge's score, or why there is none.
    pub judgement: Judgement,
    /// Style distribution, where a style model is configured.
    pub style: Option<Vec<StyleProbability>>,
    /// Tokens generated, end of sequence included; 0 where unknown.
    pub n_tokens: u32,
    /// True where the token limit cut the answer off.
    pub truncated: bool,
}

impl Default for Candidate {
    /// An empty rewrite without hits and judgement, as a start for tests.
    fn default() -> Self {
        Self {
            rewrite: String::new(),
            retrieval: Ok(Vec::new()),
            judgement: Judgement::NotSampled,
            style: None,
            n_tokens: 0,
            truncated: false,
        }
    }
}

/// Who speaks in a chat message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Role {
    System,
    User,
    Assistant,
}

/// A chat message.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// Why a plugin gives no answer for one item. The item is dropped and counted; it is not an answer of 0.
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
}

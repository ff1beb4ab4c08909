//! What must come back, and whether it did.

use crate::shown;
use crate::subject;
use querl_core::ports::ParsedJudgement;
use querl_core::records::{Message, Rejection, Reward, Verdict};
use serde_json::json;
use std::collections::BTreeMap;

/// A score, or a rejection.
#[derive(Debug, Clone, PartialEq)]
pub enum ScoreExpected {
    /// Scored.
    Score {
        /// The total.
        total: f64,
        /// By how much total and components may differ.
        tolerance: f64,
        /// By name; others may be there.
        components: BTreeMap<String, f64>,
    },
    /// Rejected with this code.
    Rejected(String),
}

/// A filter's word on one sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VerdictExpected {
    /// Kept.
    Keep,
    /// Dropped with this code.
    Drop(String),
}

/// A conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MessagesExpected {
    /// Each of these is in the text of a message.
    Contains(Vec<String>),
    /// These and no others.
    Messages(Vec<Message>),
}

/// A rewrite, or a rejection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RewriteExpected {
    /// Read as this.
    Rewrite(String),
    /// Rejected with this code.
    Rejected(String),
}

/// A judgement, or a rejection.
#[derive(Debug, Clone, PartialEq)]
pub enum JudgementExpected {
    /// Read as this.
    Judgement {
        /// The score.
        score: f64,
        /// The reason, where it is to be compared.
        reason: Option<String>,
    },
    /// Rejected with this code.
    Rejected(String),
}

/// What came back and what was expected, where they differ.
pub(super) struct Difference {
    pub(super) returned: String,
    pub(super) expected: String,
}

type Compared = Result<(), Difference>;

fn difference(returned: impl Into<String>, expected: impl Into<String>) -> Compared {
    Err(Difference { returned: returned.into(), expected: expected.into() })
}

fn code(code: &str, rejection: &Rejection) -> Compared {
    match rejection.code == code {
        true => Ok(()),
        false => difference(json!({"rejected": rejection}).to_string(), format!("rejected with `{code}`")),
    }
}

impl ScoreExpected {
    pub(super) fn compare(&self, scored: &Result<Reward, Rejection>) -> Compared {
        match (self, scored) {
            (Self::Rejected(expected), Err(rejection)) => code(expected, rejection),
            (Self::Score { total, tolerance, components }, Ok(reward)) => {
                let is_close = |value: f64, expected: f64| (value - expected).abs() <= *tolerance;
                let part = |name: &str| reward.components.iter().find(|part| part.name == name).map(|part| part.value);
                let parts_agree =
                    components.iter().all(|(name, value)| part(name).is_some_and(|part| is_close(part, *value)));
                match is_close(reward.total, *total) && parts_agree {
                    true => Ok(()),
                    false => difference(subject::scored(scored), self.in_words()),
                }
            }
            _ => difference(subject::scored(scored), self.in_words()),
        }
    }

    fn in_words(&self) -> String {
        match self {
            Self::Rejected(code) => format!("rejected with `{code}`"),
            Self::Score { total, tolerance, components } if components.is_empty() => {
                format!("total {total} within {tolerance:e}")
            }
            Self::Score { total, tolerance, components } => {
                format!("total {total} and components {} within {tolerance:e}", json!(components))
            }
        }
    }
}

impl VerdictExpected {
    pub(super) fn compare(&self, verdict: &Verdict) -> Compared {
        match (self, verdict) {
            (Self::Keep, Verdict::Keep) => Ok(()),
            (Self::Drop(expected), Verdict::Drop { code, .. }) if expected == code => Ok(()),
            (Self::Keep, _) => difference(json!(verdict).to_string(), "kept"),
            (Self::Drop(code), _) => difference(json!(verdict).to_string(), format!("dropped with `{code}`")),
        }
    }
}

impl MessagesExpected {
    pub(super) fn compare(&self, messages: &[Message]) -> Compared {
        let missing = |text: &&String| !messages.iter().any(|message| message.content.contains(text.as_str()));
        match self {
            Self::Messages(expected) if expected == messages => Ok(()),
            Self::Messages(expected) => difference(json!(messages).to_string(), json!(expected).to_string()),
            Self::Contains(texts) => match texts.iter().find(missing) {
                None => Ok(()),
                Some(text) => difference(json!(messages).to_string(), format!("`{text}` in a message")),
            },
        }
    }
}

impl RewriteExpected {
    pub(super) fn compare(&self, parsed: &Result<String, Rejection>) -> Compared {
        match (self, parsed) {
            (Self::Rewrite(expected), Ok(rewrite)) if expected == rewrite => Ok(()),
            (Self::Rejected(expected), Err(rejection)) => code(expected, rejection),
            (Self::Rewrite(expected), _) => difference(shown::compact(parsed), format!("`{expected}`")),
            (Self::Rejected(code), _) => difference(shown::compact(parsed), format!("rejected with `{code}`")),
        }
    }
}

impl JudgementExpected {
    pub(super) fn compare(&self, parsed: &Result<ParsedJudgement, Rejection>) -> Compared {
        let returned = || match parsed {
            Ok(judged) => json!({"score": judged.score, "reason": judged.reason}).to_string(),
            Err(rejection) => json!({"rejected": rejection}).to_string(),
        };
        match (self, parsed) {
            (Self::Rejected(expected), Err(rejection)) => code(expected, rejection),
            (Self::Judgement { score, reason }, Ok(judged))
                if judged.score == *score && reason.as_ref().is_none_or(|reason| *reason == judged.reason) =>
            {
                Ok(())
            }
            (Self::Judgement { score, reason: None }, _) => difference(returned(), format!("score {score}")),
            (Self::Judgement { score, reason: Some(reason) }, _) => {
                difference(returned(), format!("score {score}, reason `{reason}`"))
            }
            (Self::Rejected(code), _) => difference(returned(), format!("rejected with `{code}`")),
        }
    }
}

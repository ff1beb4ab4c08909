//! What must come back, and whether it did.

use crate::{JudgeScore, Message, Rejection, Score, Verdict};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Debug;

const TOLERANCE: f64 = 1e-9;

/// Expected and got, where they differ.
pub(super) type Compared = Result<(), String>;

fn compare(holds: bool, expected: impl Debug, got: impl Debug) -> Compared {
    if holds { Ok(()) } else { Err(format!("expected {expected:?}, got {got:?}")) }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScoreExpected {
    total: Option<f64>,
    tolerance: Option<f64>,
    #[serde(default)]
    components: BTreeMap<String, f64>,
    rejected: Option<String>,
}

impl ScoreExpected {
    /// # Errors
    /// It is neither a score nor a rejection, or both.
    pub(super) fn checked(self) -> Result<Self, String> {
        let bare = self.tolerance.is_none() && self.components.is_empty();
        match (self.total, &self.rejected) {
            (Some(_), None) => Ok(self),
            (None, Some(_)) if bare => Ok(self),
            _ => {
                Err("`expect`: expected either `total`, with or without `tolerance` and `components`, or `rejected`"
                    .into())
            }
        }
    }

    pub(super) fn compare(&self, said: &Result<Score, Rejection>) -> Compared {
        let tolerance = self.tolerance.unwrap_or(TOLERANCE);
        let is_close = |got: f64, expected: f64| (got - expected).abs() <= tolerance;
        match (said, self.total, &self.rejected) {
            (Err(rejection), _, Some(code)) => compare(rejection.code == *code, code, said),
            (Ok(score), Some(total), _) => {
                compare(is_close(score.total, total), total, score.total)?;
                self.components.iter().try_for_each(|(name, expected)| {
                    let got = score.component(name);
                    let holds = got.is_some_and(|got| is_close(got, *expected));
                    compare(holds, expected, got).map_err(|message| format!("component `{name}`: {message}"))
                })
            }
            (_, Some(total), _) => compare(false, total, said),
            _ => compare(false, &self.rejected, said),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum VerdictExpected {
    Keep,
    Drop(String),
}

pub(super) fn verdicts(expected: &[VerdictExpected], said: &[Verdict]) -> Compared {
    expected.iter().zip(said).zip(1..).try_for_each(|((expected, verdict), number)| {
        let holds = match (expected, verdict) {
            (VerdictExpected::Keep, Verdict::Keep) => true,
            (VerdictExpected::Drop(code), Verdict::Drop(reason)) => reason.code == *code,
            _ => false,
        };
        compare(holds, expected, verdict).map_err(|message| format!("sample {number}: {message}"))
    })
}

pub(super) enum MessagesExpected {
    Contains(Vec<String>),
    Messages(Vec<Message>),
}

impl MessagesExpected {
    pub(super) fn compare(&self, said: &[Message]) -> Compared {
        match self {
            Self::Messages(expected) => compare(expected == said, expected, said),
            Self::Contains(texts) => texts.iter().try_for_each(|text| {
                let holds = said.iter().any(|message| message.content.contains(text));
                compare(holds, format!("a message with {text}"), said)
            }),
        }
    }
}

pub(super) enum RewriteExpected {
    Rewrite(String),
    Rejected(String),
}

impl RewriteExpected {
    pub(super) fn compare(&self, said: &Result<String, Rejection>) -> Compared {
        match (self, said) {
            (Self::Rewrite(expected), Ok(rewrite)) => compare(rewrite == expected, expected, rewrite),
            (Self::Rejected(code), Err(rejection)) => compare(rejection.code == *code, code, rejection),
            (Self::Rewrite(expected) | Self::Rejected(expected), _) => compare(false, expected, said),
        }
    }
}

pub(super) enum JudgementExpected {
    Judgement(f64, Option<String>),
    Rejected(String),
}

impl JudgementExpected {
    pub(super) fn compare(&self, said: &Result<JudgeScore, Rejection>) -> Compared {
        match (self, said) {
            (Self::Judgement(score, reason), Ok(judged)) => {
                let holds = judged.score == *score && reason.as_ref().is_none_or(|reason| *reason == judged.reason);
                compare(holds, (score, reason), judged)
            }
            (Self::Rejected(code), Err(rejection)) => compare(rejection.code == *code, code, rejection),
            (Self::Judgement(score, _), _) => compare(false, score, said),
            (Self::Rejected(code), _) => compare(false, code, said),
        }
    }
}

//! Host functions that a plugin can call: tokenizer, word segmentation, text encoder, judge and style model of the run.
//!
//! A component imports the interfaces whose functions it calls, and its plugin.toml must list them
//! (`host_functions = ["tokens", "words"]`). Results are recorded with the episode, so that a replay gives the same score. In native
//! tests, [`testing::HostFunctions`](crate::testing::HostFunctions) replaces the functions.

use crate::{CallFailure, Message, Rejection, StyleProbability};

/// Why a host function gave no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The run has no such service or model: the host function is not configured.
    #[error("not configured")]
    NotConfigured,
    /// The call of the service or model failed.
    #[error("{0}")]
    Failed(CallFailure),
}

impl CallError {
    /// The rejection of an episode that cannot be scored without this call, with the code `WHO_not_configured` or `WHO_failed`.
    /// `who` is the name of the interface, for example `judge`.
    pub fn rejection(self, who: &str) -> Rejection {
        match self {
            Self::NotConfigured => Rejection::new([who, "_not_configured"].concat(), ""),
            Self::Failed(failure) => Rejection::new([who, "_failed"].concat(), failure.message),
        }
    }
}

#[cfg(not(target_arch = "wasm32"))]
use crate::testing::host as calls;

#[cfg(target_arch = "wasm32")]
use crate::__guest::host as calls;

/// Number of tokens of the text by the policy's tokenizer, without special tokens. Interface `tokens`; in rewards.
///
/// # Errors
/// No tokenizer, or a failed call.
pub fn count_tokens(text: &str) -> Result<u32, CallError> {
    calls::count_tokens(text)
}

/// The tokens of the text by the policy's tokenizer, as texts in order. Interface `tokens`; in rewards.
///
/// # Errors
/// No tokenizer, or a failed call.
pub fn split_tokens(text: &str) -> Result<Vec<String>, CallError> {
    calls::split_tokens(text)
}

/// The words of the text in order, in lower case, without white space and punctuation: jieba in search mode with the run's user
/// dictionary, so that a long word comes after the shorter words in it. Interface `words`; in rewards and filters.
///
/// # Errors
/// A failed call.
pub fn words(text: &str) -> Result<Vec<String>, CallError> {
    calls::words(text)
}

/// Embeds at most 64 texts, each as a query: one L2-normalised vector per text, so that a dot product is the cosine similarity. Interface
/// `similarity`; in rewards.
///
/// # Errors
/// No text encoder, or a failed call.
pub fn embed(texts: &[String]) -> Result<Vec<Vec<f32>>, CallError> {
    calls::embed(texts)
}

/// The response of the configured judge to these messages. Responses are cached, and calls count against the budget. Interface
/// `judge`; in rewards.
///
/// # Errors
/// No judge, or a failed call.
pub fn ask_judge(messages: &[Message]) -> Result<String, CallError> {
    calls::ask_judge(messages)
}

/// The probability of each style class, in the model's order, for the last turn of the assistant and the last turn of the user before it.
/// Interface `style-model`; in rewards and style scorers.
///
/// # Errors
/// No style model, or a failed call.
pub fn classify(turns: &[Message]) -> Result<Vec<StyleProbability>, CallError> {
    calls::classify(turns)
}

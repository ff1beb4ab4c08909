//! Calls of host functions in a component. The component imports only the interfaces whose functions the plugin calls.

use super::convert;
use super::imports::querl::plugin::{calls, judge, similarity, style_model, tokens, words as words_wit};
use crate::host::CallError;
use crate::{Message, StyleProbability};

fn call_error(error: calls::CallError) -> CallError {
    match error {
        calls::CallError::NotConfigured => CallError::NotConfigured,
        calls::CallError::Failed(failure) => CallError::Failed(convert::call_failure(failure)),
    }
}

pub(crate) fn count_tokens(text: &str) -> Result<u32, CallError> {
    tokens::count(text).map_err(call_error)
}

pub(crate) fn split_tokens(text: &str) -> Result<Vec<String>, CallError> {
    tokens::split(text).map_err(call_error)
}

pub(crate) fn words(text: &str) -> Result<Vec<String>, CallError> {
    words_wit::segment(text).map_err(call_error)
}

pub(crate) fn embed(texts: &[String]) -> Result<Vec<Vec<f32>>, CallError> {
    similarity::embed(texts).map_err(call_error)
}

pub(crate) fn ask_judge(messages: &[Message]) -> Result<String, CallError> {
    let messages: Vec<_> = messages.iter().cloned().map(convert::message_out).collect();
    judge::ask(&messages).map_err(call_error)
}

pub(crate) fn classify(turns: &[Message]) -> Result<Vec<StyleProbability>, CallError> {
    let turns: Vec<_> = turns.iter().cloned().map(convert::message_out).collect();
    let classes = style_model::classify(&turns).map_err(call_error)?;
    Ok(classes.into_iter().map(convert::style_probability).collect())
}

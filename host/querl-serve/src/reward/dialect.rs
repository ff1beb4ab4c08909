//! Parts that the request forms of several engines share: labels, prompts, and the text of a response.

use super::server::RewardOptions;
use crate::error::ErrorResponse;
use querl_core::records::Message;
use querl_core::scoring::{RewardQuery, RewardRequest};
use serde::Deserialize;
use serde_json::Value;

/// End-of-sequence and end-of-turn tokens. OpenRLHF decodes responses with special tokens, and slime by default, too; the environment
/// scores texts without them. Qwen; Llama 3; Llama 2 and Mistral; Gemma; Phi; DeepSeek.
const END_TOKENS: [&str; 8] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "</s>",
    "<end_of_turn>",
    "<|end|>",
    "<｜end▁of▁sentence｜>",
];

/// The text of a response without end-of-sequence tokens at its end.
pub(super) fn without_end_tokens(response: &str) -> &str {
    let mut text = response;
    while let Some(token) = END_TOKENS.iter().find(|token| text.ends_with(**token)) {
        text = &text[..text.len() - token.len()];
    }
    text
}

/// The request to score a response, made from an engine's label. `label_name`: the field of the label, for error messages.
pub(super) fn labelled(label: &Value, label_name: &str, response: &str) -> Result<RewardRequest, ErrorResponse> {
    let wrong = |problem: String| ErrorResponse::value(format!("{label_name}: {problem}"));
    Ok(RewardRequest {
        query: RewardQuery::of_label(label).map_err(wrong)?,
        response: response.to_owned(),
        truncated: false,
        n_tokens: 0,
        prompt: None,
        step: None,
        id: None,
        group_id: None,
        sample_index: None,
    })
}

/// The messages of a prompt; `None` if it is a text or has messages in another form.
pub(super) fn messages(prompt: &Value) -> Option<Vec<Message>> {
    match prompt.is_array() {
        true => Vec::<Message>::deserialize(prompt).ok().filter(|messages| !messages.is_empty()),
        false => None,
    }
}

pub(super) fn check_count(n_responses: usize, options: &RewardOptions) -> Result<(), ErrorResponse> {
    if n_responses <= options.max_responses {
        return Ok(());
    }
    let what = format!("{n_responses} responses in one request; expected at most {}", options.max_responses);
    Err(ErrorResponse::too_large(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_tokens_are_removed_only_at_the_end() {
        assert_eq!(without_end_tokens("胶原蛋白<|im_end|><|endoftext|>"), "胶原蛋白");
        assert_eq!(without_end_tokens("<|im_end|>胶原蛋白"), "<|im_end|>胶原蛋白");
        assert_eq!(without_end_tokens("</s>"), "");
    }
}

//! Responses of the policy: the answer in a response that thinks, and the rewrite in the answer.

use crate::config::{Config, RewriteForm};
use crate::edits::{EditParts, read_rewrite};
use crate::ports::{PluginFault, Prompts};
use crate::records::Rejection;

/// The end of a thinking block, as Qwen3 and other models write it.
pub const THINKING_END: &str = "</think>";

/// How a policy writes its rewrites.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResponseForm {
    /// Whole search text or edit of the query (`data.rewrite_form`).
    pub rewrite: RewriteForm,
    /// `model.enable_thinking`; with `Some(true)` the answer is what follows the thinking block.
    pub enable_thinking: Option<bool>,
}

impl ResponseForm {
    /// The response form of a configuration's policy.
    pub fn of(config: &Config) -> Self {
        Self { rewrite: config.data.rewrite_form, enable_thinking: config.model.enable_thinking }
    }

    /// The text to parse: the whole response, or with thinking on what follows the last `</think>`.
    ///
    /// # Errors
    /// Thinking is on and the response has no `</think>`: code `unfinished_thinking`.
    pub fn answer(self, response: &str) -> Result<&str, Rejection> {
        if self.enable_thinking != Some(true) {
            return Ok(response);
        }
        match response.rsplit_once(THINKING_END) {
            // The template inserts two line breaks here.
            Some((_, answer)) => Ok(answer.trim_start_matches('\n')),
            None => {
                let detail = "model.enable_thinking is true, and the response has no `</think>`";
                Err(Rejection::by_host("unfinished_thinking", detail))
            }
        }
    }

    /// Parses the rewrite in a response to the query of `parts` with the prompt plugin.
    ///
    /// # Errors
    /// The plugin broke its contract; the inner error is a rejection of the response.
    pub fn read(
        self,
        prompts: &dyn Prompts,
        parts: EditParts<'_>,
        response: &str,
    ) -> Result<Result<String, Rejection>, PluginFault> {
        match self.answer(response) {
            Ok(answer) => read_rewrite(self.rewrite, prompts, parts, answer),
            Err(rejection) => Ok(Err(rejection)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_thinking_on_the_answer_follows_the_thinking_block() {
        let with = |enable_thinking| ResponseForm { enable_thinking, ..ResponseForm::default() };
        let thought = "<think>\nwhich fish?\n</think>\n\nfish oil, daily";
        assert_eq!(with(Some(true)).answer(thought).unwrap(), "fish oil, daily");
        assert_eq!(with(Some(true)).answer("a</think>b</think>\n c\n").unwrap(), " c\n");
        for unfinished in ["<think>\nwhich fish?", "fish oil, daily", ""] {
            assert_eq!(with(Some(true)).answer(unfinished).unwrap_err().code, "unfinished_thinking", "{unfinished}");
        }
        for enable_thinking in [None, Some(false)] {
            assert_eq!(with(enable_thinking).answer(thought).unwrap(), thought);
        }
    }
}

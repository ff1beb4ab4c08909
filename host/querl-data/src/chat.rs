//! One chat completion at an OpenAI-compatible endpoint, for teacher and judge alike.

use crate::calls::{Answer, CallLimits, Caller, Secret};
use crate::error::DataError;
use querl_core::config::EndpointConfig;
use querl_core::records::{CallFailure, Completion, FailureKind, Message};
use serde_json::{Value, json};

/// An OpenAI-compatible endpoint with one model.
#[derive(Debug)]
pub(crate) struct ChatClient {
    caller: Caller,
    endpoint: EndpointConfig,
    model: String,
}

impl ChatClient {
    /// `section` is `teacher` or `judge`, for messages.
    ///
    /// # Errors
    /// The endpoint lacks an address, a model or its key.
    pub(crate) fn open(section: &str, endpoint: EndpointConfig) -> Result<Self, DataError> {
        let missing = |key: &str| DataError::setting(format!("{section}.{key}"), "is not set; kind `openai` needs it");
        let base_url = endpoint.base_url.as_deref().ok_or_else(|| missing("base_url"))?;
        let model = endpoint.model.clone().ok_or_else(|| missing("model"))?;
        let key = Secret::from_env(section, &endpoint.api_key_env)?;
        let url = format!("{}/chat/completions", base_url.trim_end_matches('/'));
        let limits = CallLimits::new(endpoint.max_concurrent, endpoint.timeout_s, endpoint.max_retries);
        Ok(Self { caller: Caller::new(&format!("{section}.base_url"), &url, key, limits)?, model, endpoint })
    }

    /// The model's name.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// Asks for one completion.
    ///
    /// # Errors
    /// The call failed, or its answer holds no text, or one that was cut off.
    pub(crate) async fn complete(&self, messages: &[Message]) -> Result<Completion, CallFailure> {
        let answer = self.caller.post(&self.body(messages)).await?;
        self.completion(&answer).map_err(|what| self.caller.failure(FailureKind::InvalidResponse, &what))
    }

    fn body(&self, messages: &[Message]) -> Value {
        let mut body = json!({"model": self.model, "messages": messages});
        let limit = if self.endpoint.legacy_max_tokens { "max_tokens" } else { "max_completion_tokens" };
        body[limit] = json!(self.endpoint.max_tokens);
        if let Some(temperature) = self.endpoint.temperature {
            body["temperature"] = json!(temperature);
        }
        body
    }

    fn completion(&self, answer: &Answer) -> Result<Completion, String> {
        let choice = answer.body.pointer("/choices/0").ok_or("the answer has no `choices`")?;
        let text = choice.pointer("/message/content").map(content_text).unwrap_or_default();
        check_ending(choice.get("finish_reason").and_then(Value::as_str), &text)?;
        let tokens = |name: &str| answer.body.pointer(&format!("/usage/{name}")).and_then(Value::as_u64);
        let (prompt_tokens, completion_tokens) = (tokens("prompt_tokens"), tokens("completion_tokens"));
        let cost = self.cost(prompt_tokens, completion_tokens);
        Ok(Completion { text, prompt_tokens, completion_tokens, cost, latency_ms: Some(answer.latency_ms) })
    }

    fn cost(&self, prompt_tokens: Option<u64>, completion_tokens: Option<u64>) -> Option<f64> {
        let prompt = prompt_tokens? as f64 * self.endpoint.price_prompt_per_million?;
        let completion = completion_tokens? as f64 * self.endpoint.price_completion_per_million?;
        Some((prompt + completion) / 1e6)
    }
}

/// Half an answer is none: its last words may be the ones that matter.
fn check_ending(finish_reason: Option<&str>, text: &str) -> Result<(), String> {
    match finish_reason {
        Some("length") => Err("the answer was cut off (finish_reason `length`); raise max_tokens".into()),
        Some("content_filter") => {
            let hint = "the endpoint's filter holds this text back";
            Err(format!("the answer was cut off (finish_reason `content_filter`); {hint}"))
        }
        reason if text.trim().is_empty() => {
            Err(format!("the answer holds no text (finish_reason `{}`)", reason.unwrap_or("unknown")))
        }
        _ => Ok(()),
    }
}

/// A text, or the texts of a list of parts.
fn content_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part.get("text")?.as_str()).collect(),
        _ => String::new(),
    }
}

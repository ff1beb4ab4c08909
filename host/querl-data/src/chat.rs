//! One chat completion at an OpenAI-compatible endpoint, for teacher and judge alike.

use crate::account::Usage;
use crate::calls::{CallLimits, Caller, Charge, Secret, estimated_tokens};
use crate::error::DataError;
use crate::outside::Outside;
use crate::provider::Rules;
use querl_core::config::EndpointConfig;
use querl_core::records::{CallFailure, Completion, FailureKind, Message};
use serde_json::{Value, json};

/// An OpenAI-compatible endpoint with one model.
#[derive(Debug)]
pub(crate) struct ChatClient {
    caller: Caller,
    endpoint: EndpointConfig,
    model: String,
    /// As the account calls it.
    provider: String,
    rules: Rules,
}

impl ChatClient {
    /// `section` is `teacher` or `judge`, for messages.
    ///
    /// # Errors
    /// The endpoint lacks an address, a model or its key.
    pub(crate) fn open(section: &str, endpoint: EndpointConfig, outside: &Outside) -> Result<Self, DataError> {
        let missing = |key: &str| DataError::setting(format!("{section}.{key}"), "is not set; kind `openai` needs it");
        let base_url = endpoint.base_url.as_deref().ok_or_else(|| missing("base_url"))?;
        let model = endpoint.model.clone().ok_or_else(|| missing("model"))?;
        let rules = Rules::of(section, &endpoint, base_url, &model)?;
        let key = Secret::open(section, endpoint.api_key_file.as_deref(), &endpoint.api_key_env)?;
        let url = format!("{}/chat/completions", base_url.trim_end_matches('/'));
        let limits = CallLimits::new(endpoint.max_concurrent, endpoint.timeout_s, endpoint.max_retries)
            .per_minute(endpoint.requests_per_minute, endpoint.tokens_per_minute);
        let caller = Caller::new(&format!("{section}.base_url"), &url, key, limits, outside)?;
        let provider = format!("{section} {model}");
        Ok(Self { caller: caller.named(&provider), model, endpoint, provider, rules })
    }

    /// As the account calls it.
    pub(crate) fn provider(&self) -> &str {
        &self.provider
    }

    /// What an answer depends on beside the messages.
    pub(crate) fn identity(&self) -> Value {
        json!({"base_url": self.endpoint.base_url, "body": self.body(&[])})
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
        let most_tokens = self.most_tokens(messages);
        let charge = Charge { n_tokens: most_tokens.0 + most_tokens.1, most: self.cost(most_tokens).unwrap_or(0.0) };
        let mut answer = self.caller.post(&self.body(messages), charge).await?;
        // An answer that is of no use is charged all the same.
        let usage = self.usage(messages, &answer.body);
        answer.bill.charged(usage);
        self.completion(&answer.body, usage, Some(answer.latency_ms))
            .map_err(|what| self.caller.failure(FailureKind::InvalidResponse, &what))
    }

    /// Of the prompt, and the most that an answer may have.
    pub(crate) fn most_tokens(&self, messages: &[Message]) -> (u64, u64) {
        (prompt_tokens(messages), u64::from(self.endpoint.max_tokens))
    }

    /// What is sent.
    pub(crate) fn body(&self, messages: &[Message]) -> Value {
        let mut body = json!({"model": self.model, "messages": messages});
        self.rules.add_parameters(&self.endpoint, &mut body);
        body
    }

    /// What stands in an answer's body, or why it is of no use.
    pub(crate) fn completion(&self, body: &Value, usage: Usage, latency_ms: Option<f64>) -> Result<Completion, String> {
        let choice = body.pointer("/choices/0").ok_or("the answer has no `choices`")?;
        let text = choice.pointer("/message/content").map(content_text).unwrap_or_default();
        check_ending(choice.get("finish_reason").and_then(Value::as_str), &text)?;
        let said = |tokens: u64| (!usage.is_estimated).then_some(tokens);
        Ok(Completion {
            text,
            prompt_tokens: said(usage.prompt_tokens),
            completion_tokens: said(usage.completion_tokens),
            cost: usage.cost,
            latency_ms,
            source: None,
        })
    }

    /// What the service says it counted; estimated where it says nothing.
    pub(crate) fn usage(&self, messages: &[Message], body: &Value) -> Usage {
        let said = |name: &str| body.pointer(&format!("/usage/{name}")).and_then(Value::as_u64);
        let text = body.pointer("/choices/0/message/content").map(content_text).unwrap_or_default();
        let counted = said("prompt_tokens").zip(said("completion_tokens"));
        let (prompt_tokens, completion_tokens) =
            counted.unwrap_or_else(|| (prompt_tokens(messages), estimated_tokens(&text)));
        let cost = self.cost((prompt_tokens, completion_tokens));
        Usage { prompt_tokens, completion_tokens, is_estimated: counted.is_none(), cost }
    }

    /// Of so many tokens of prompt and answer; `None` without prices.
    pub(crate) fn cost(&self, (prompt_tokens, completion_tokens): (u64, u64)) -> Option<f64> {
        let prompt = prompt_tokens as f64 * self.endpoint.price_prompt_per_million?;
        let completion = completion_tokens as f64 * self.endpoint.price_completion_per_million?;
        Some((prompt + completion) / 1e6)
    }
}

/// About how many tokens a conversation has: a Chinese character is one, other characters are four to a token, and a few stand
/// between messages. For quotas, for estimates, and where a service does not say.
pub fn prompt_tokens(messages: &[Message]) -> u64 {
    messages.iter().map(|message| estimated_tokens(&message.content) + 4).sum()
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

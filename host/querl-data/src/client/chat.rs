//! One chat completion at an OpenAI-compatible endpoint, for teacher and judge alike.

use crate::client::context::ServiceContext;
use crate::client::http::{CallLimits, Caller, CostBound, Refusal, Secret, estimated_tokens, server_message};
use crate::client::provider::ProviderRules;
use crate::client::spend::Usage;
use crate::error::DataError;
use querl_core::config::EndpointConfig;
use querl_core::records::{CallFailure, Completion, FailureKind, Message};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};

/// More than any answer has: a number beyond it counts nothing.
const MOST_TOKENS: u64 = 1_000_000_000;

/// An OpenAI-compatible endpoint with one model.
#[derive(Debug)]
pub(crate) struct ChatClient {
    caller: Caller,
    endpoint: EndpointConfig,
    model: String,
    provider: String,
    rules: ProviderRules,
    /// The warning about `max_tokens` was logged.
    is_warned: AtomicBool,
}

impl ChatClient {
    /// `section` is `teacher` or `judge`, for messages.
    pub(crate) fn open(section: &str, endpoint: EndpointConfig, services: &ServiceContext) -> Result<Self, DataError> {
        let missing = |key: &str| DataError::setting(format!("{section}.{key}"), "is not set; kind `openai` needs it");
        let base_url = endpoint.base_url.as_deref().ok_or_else(|| missing("base_url"))?;
        let model = endpoint.model.clone().ok_or_else(|| missing("model"))?;
        let rules = ProviderRules::of(section, &endpoint, base_url, &model)?;
        let key = Secret::open(section, endpoint.api_key_file.as_deref(), &endpoint.api_key_env)?;
        let url = format!("{}/chat/completions", base_url.trim_end_matches('/'));
        let limits = CallLimits::new(endpoint.max_concurrent, endpoint.timeout_s, endpoint.max_retries)
            .per_minute(endpoint.requests_per_minute, endpoint.tokens_per_minute);
        let caller = Caller::new(&format!("{section}.base_url"), &url, key, limits, services)?;
        let provider = format!("{section} {model}");
        let is_warned = AtomicBool::new(false);
        Ok(Self { caller: caller.named(&provider), model, endpoint, provider, rules, is_warned })
    }

    pub(crate) fn provider(&self) -> &str {
        &self.provider
    }

    pub(crate) fn identity(&self) -> Value {
        json!({"base_url": self.endpoint.base_url, "body": self.body(&[])})
    }

    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    pub(crate) async fn complete(&self, messages: &[Message]) -> Result<Completion, CallFailure> {
        let most_tokens = self.most_tokens(messages);
        let charge = CostBound { n_tokens: most_tokens.0 + most_tokens.1, most: self.cost(most_tokens).unwrap_or(0.0) };
        let mut answer = self.caller.post_checked(&self.body(messages), charge, &refusal).await?;
        // An answer that is of no use is charged all the same.
        let usage = self.usage(messages, &answer.body);
        answer.call_spend.charged(usage);
        self.completion(&answer.body, usage, Some(answer.latency_ms))
            .map_err(|what| self.caller.failure(FailureKind::InvalidResponse, &what))
    }

    pub(crate) fn most_tokens(&self, messages: &[Message]) -> (u64, u64) {
        (prompt_tokens(messages), u64::from(self.endpoint.max_tokens))
    }

    pub(crate) fn body(&self, messages: &[Message]) -> Value {
        let mut body = json!({"model": self.model, "messages": messages});
        self.rules.add_parameters(&self.endpoint, &mut body);
        body
    }

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

    pub(crate) fn usage(&self, messages: &[Message], body: &Value) -> Usage {
        let said = |name: &str| {
            body.pointer(&format!("/usage/{name}")).and_then(Value::as_u64).filter(|tokens| *tokens <= MOST_TOKENS)
        };
        let text = body.pointer("/choices/0/message/content").map(content_text).unwrap_or_default();
        let counted = said("prompt_tokens").zip(said("completion_tokens"));
        let (prompt_tokens, completion_tokens) =
            counted.unwrap_or_else(|| (prompt_tokens(messages), estimated_tokens(&text)));
        self.check_limit(completion_tokens);
        let cost = self.cost((prompt_tokens, completion_tokens));
        Usage { prompt_tokens, completion_tokens, is_estimated: counted.is_none(), cost }
    }

    /// What a budget and a quota reckon with rests on `max_tokens`: a service that does not keep it is named, once.
    fn check_limit(&self, completion_tokens: u64) {
        let max_tokens = u64::from(self.endpoint.max_tokens);
        if completion_tokens > max_tokens && !self.is_warned.swap(true, Ordering::Relaxed) {
            let provider = &self.provider;
            tracing::warn!(
                "{provider}: an answer has {completion_tokens} tokens, above max_tokens = {max_tokens}: this service does not keep the limit as it is named to it, and `budget` is no bound; set `provider`, or raise max_tokens"
            );
        }
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

/// How an answer that is whole may end, in the words of OpenAI, of text-generation-inference and of those that translate Anthropic's.
const WHOLE: [&str; 6] = ["", "stop", "eos", "eos_token", "stop_sequence", "end_turn"];
/// How one ends that the service broke off: DeepSeek's, vLLM's, OpenRouter's words.
const BROKEN_OFF: [&str; 3] = ["insufficient_system_resource", "abort", "error"];

/// A failure that came as a success: an error without an answer, as gateways send it, or an answer that the service broke off.
fn refusal(body: &Value) -> Option<Refusal> {
    let reason = body.pointer("/choices/0/finish_reason").and_then(Value::as_str).unwrap_or_default();
    if BROKEN_OFF.contains(&reason) {
        return Some(Refusal::aborted(format!("the answer was broken off (finish_reason `{reason}`)")));
    }
    let error = body.get("error").filter(|error| !error.is_null() && body.get("choices").is_none())?;
    let code = error.get("code").unwrap_or(&Value::Null);
    let status = code.as_u64().or_else(|| code.as_str()?.parse().ok()).and_then(|status| u16::try_from(status).ok());
    Some(Refusal::reported(status, format!("answered with an error: {}", server_message(&body.to_string()))))
}

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
        Some(other) if !WHOLE.contains(&other.to_lowercase().as_str()) => {
            Err(format!("the answer ended with finish_reason `{other}`, which does not say that it is whole"))
        }
        _ => Ok(()),
    }
}

fn content_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part.get("text")?.as_str()).collect(),
        _ => String::new(),
    }
}

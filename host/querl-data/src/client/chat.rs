//! Client of OpenAI-compatible chat completions, for teacher and judge; handles parameter names and unsupported parameters of different
//! providers.
//!
//! Sources: the providers' references of `chat/completions` (OpenAI, DeepSeek, Alibaba Cloud Model Studio, vLLM, llama.cpp's server,
//! Ollama).

use crate::client::ServiceContext;
use crate::client::http::{Call, CallLimits, Caller, CostBound, Refusal, Secret, estimated_tokens, server_message};
use crate::client::spend::Usage;
use crate::error::DataError;
use querl_core::config::{EndpointConfig, Provider, ReasoningEffort, ResponseFormat};
use querl_core::records::{CallFailure, Completion, FailureKind, Message};
use querl_core::text::printable;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};

/// Maximum length of a model's refusal in a message.
const MAX_REFUSAL_BYTES: usize = 300;

/// Token counts above this are implausible and ignored.
const MOST_TOKENS: u64 = 1_000_000_000;

/// Client of one model at an OpenAI-compatible endpoint.
#[derive(Debug)]
pub(crate) struct ChatClient {
    caller: Caller,
    endpoint: EndpointConfig,
    model: String,
    provider: String,
    rules: ProviderRules,
    section: String,
    /// The warning about `max_tokens` was logged.
    is_warned: AtomicBool,
    /// The warning about `tokens_per_minute` was logged.
    is_warned_of_rate: AtomicBool,
}

impl ChatClient {
    /// Opens the client without a request; `section` (`teacher` or `judge`) is named in messages.
    pub(crate) fn open(section: &str, endpoint: EndpointConfig, services: &ServiceContext) -> Result<Self, DataError> {
        let missing = |key: &str| DataError::setting(format!("{section}.{key}"), "is not set; kind `openai` needs it");
        let base_url = endpoint.base_url.as_deref().ok_or_else(|| missing("base_url"))?;
        let model = endpoint.model.clone().ok_or_else(|| missing("model"))?;
        let rules = ProviderRules::of(section, &endpoint, base_url, &model)?;
        let key = Secret::open(services, section, endpoint.api_key_file.as_deref(), &endpoint.api_key_env)?;
        let url = format!("{}/chat/completions", base_url.trim_end_matches('/'));
        let limits = CallLimits::new(endpoint.max_concurrent, endpoint.timeout_s, endpoint.max_retries)
            .per_minute(endpoint.requests_per_minute, endpoint.tokens_per_minute);
        let caller = Caller::new(&format!("{section}.base_url"), &url, key, limits, services)?;
        let provider = format!("{section} {model}");
        let (caller, section) = (caller.named(&provider), section.to_owned());
        let [is_warned, is_warned_of_rate] = [false; 2].map(AtomicBool::new);
        Ok(Self { caller, model, endpoint, provider, rules, section, is_warned, is_warned_of_rate })
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
        let max_cost = self.cost(most_tokens).unwrap_or(0.0);
        let bound = CostBound { n_tokens: most_tokens.0 + most_tokens.1, max_cost };
        if let Some(warning) = self.rate_warning(bound.n_tokens)
            && !self.is_warned_of_rate.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("{warning}");
        }
        let body = self.body(messages);
        let check = |body: &Value| refusal(body).or_else(|| self.unusable(messages, body));
        let mut response = self.caller.call(&Call::post("", &body), bound, &check).await?;
        // A completion that was cut off is charged, too.
        let usage = self.usage(messages, &response.body);
        response.call_spend.charged(usage);
        self.completion(&response.body, usage, Some(response.latency_ms))
            .map_err(|what| self.caller.failure(FailureKind::InvalidResponse, &what))
    }

    /// The reason why a response without any text is requested again. One whose finish reason explains that, or that is a refusal of the
    /// model, would have none again.
    fn unusable(&self, messages: &[Message], body: &Value) -> Option<Refusal> {
        let choice = body.pointer("/choices/0");
        let text = choice.and_then(|choice| choice.pointer("/message/content")).map(content_text).unwrap_or_default();
        let reason = choice.and_then(|choice| choice.get("finish_reason")?.as_str()).unwrap_or_default();
        let is_explained = !COMPLETE.contains(&reason.to_lowercase().as_str()) || refusal_text(body).is_some();
        if !text.trim().is_empty() || is_explained {
            return None;
        }
        let usage = self.usage(messages, body);
        let refusal = Refusal::unusable(self.completion(body, usage, None).err()?);
        Some(if usage.is_estimated { refusal } else { refusal.charged(usage) })
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
        let choice = body.pointer("/choices/0").ok_or("the answer has no `choices`, or none in it")?;
        let text = choice.pointer("/message/content").map(content_text).unwrap_or_default();
        if let Some(refused) = refusal_text(body).filter(|_| text.trim().is_empty()) {
            return Err(format!("the model refused to answer: {refused}"));
        }
        check_ending(choice.get("finish_reason").and_then(Value::as_str), &text)?;
        let counted = |tokens: u64| (!usage.is_estimated).then_some(tokens);
        Ok(Completion {
            text,
            prompt_tokens: counted(usage.prompt_tokens),
            completion_tokens: counted(usage.completion_tokens),
            cost: usage.cost,
            latency_ms,
            source: None,
        })
    }

    pub(crate) fn usage(&self, messages: &[Message], body: &Value) -> Usage {
        let reported = |name: &str| {
            body.pointer(&format!("/usage/{name}")).and_then(Value::as_u64).filter(|tokens| *tokens <= MOST_TOKENS)
        };
        let text = body.pointer("/choices/0/message/content").map(content_text).unwrap_or_default();
        let counted = reported("prompt_tokens").zip(reported("completion_tokens"));
        let (prompt_tokens, completion_tokens) =
            counted.unwrap_or_else(|| (prompt_tokens(messages), estimated_tokens(&text)));
        self.check_limit(completion_tokens);
        let cost = self.cost((prompt_tokens, completion_tokens));
        Usage { prompt_tokens, completion_tokens, is_estimated: counted.is_none(), cost }
    }

    /// The warning that the quota of tokens per minute is below one request, which then waits longer than a minute.
    fn rate_warning(&self, n_tokens: u64) -> Option<String> {
        let per_minute = self.endpoint.tokens_per_minute.map(u64::from).filter(|per_minute| *per_minute < n_tokens)?;
        let (section, max_tokens) = (&self.section, self.endpoint.max_tokens);
        let minutes = n_tokens as f64 / per_minute as f64;
        Some(format!(
            "{section}.tokens_per_minute is {per_minute}, and a request counts {n_tokens} tokens (max_tokens = {max_tokens} and its prompt): each waits about {minutes:.1} minutes; raise it, or lower {section}.max_tokens"
        ))
    }

    /// Warns once if the service ignores `max_tokens`, on which budget and token rate limit rely.
    fn check_limit(&self, completion_tokens: u64) {
        let max_tokens = u64::from(self.endpoint.max_tokens);
        if completion_tokens > max_tokens && !self.is_warned.swap(true, Ordering::Relaxed) {
            let provider = &self.provider;
            tracing::warn!(
                "{provider}: an answer has {completion_tokens} tokens, above max_tokens = {max_tokens}: this service ignores the limit under the name that is sent, and `budget` is no bound; set `provider`, or raise max_tokens"
            );
        }
    }

    /// Cost of (prompt, completion) tokens in the configured currency; `None` without configured prices.
    pub(crate) fn cost(&self, (prompt_tokens, completion_tokens): (u64, u64)) -> Option<f64> {
        let prompt = prompt_tokens as f64 * self.endpoint.price_prompt_per_million?;
        let completion = completion_tokens as f64 * self.endpoint.price_completion_per_million?;
        Some((prompt + completion) / 1e6)
    }
}

/// Estimated number of tokens of a conversation: 1 per Chinese character, 1 per four other characters, and 4 per message. Used for rate
/// limits and cost estimates, and as usage if a service reports none.
pub fn prompt_tokens(messages: &[Message]) -> u64 {
    messages.iter().map(|message| estimated_tokens(&message.content) + 4).sum()
}

/// Finish reasons of complete responses: OpenAI, text-generation-inference, and gateways to Anthropic's API.
const COMPLETE: [&str; 6] = ["", "stop", "eos", "eos_token", "stop_sequence", "end_turn"];
/// Finish reasons of responses that the service aborted: DeepSeek, vLLM, OpenRouter.
const ABORTED: [&str; 3] = ["insufficient_system_resource", "abort", "error"];

/// A failure under HTTP status 200: an error object without choices, as gateways send it, or an aborted response.
fn refusal(body: &Value) -> Option<Refusal> {
    let reason = body.pointer("/choices/0/finish_reason").and_then(Value::as_str).unwrap_or_default();
    if ABORTED.contains(&reason.to_lowercase().as_str()) {
        return Some(Refusal::aborted(format!("the answer was broken off (finish_reason `{reason}`)")));
    }
    let error = body.get("error").filter(|error| !error.is_null() && body.get("choices").is_none())?;
    let code = error.get("code").unwrap_or(&Value::Null);
    let status = code.as_u64().or_else(|| code.as_str()?.parse().ok()).and_then(|status| u16::try_from(status).ok());
    Some(Refusal::reported(status, format!("answered with an error: {}", server_message(&body.to_string()))))
}

/// The text of a model's refusal, which OpenAI's API sends in place of the content.
fn refusal_text(body: &Value) -> Option<String> {
    let text = body.pointer("/choices/0/message/refusal")?.as_str()?;
    Some(printable(text.trim(), MAX_REFUSAL_BYTES)).filter(|text| !text.is_empty())
}

fn check_ending(finish_reason: Option<&str>, text: &str) -> Result<(), String> {
    match finish_reason {
        Some("length") => Err("the answer was cut off (finish_reason `length`); raise max_tokens".into()),
        Some("content_filter") => {
            let hint = "the endpoint's filter blocked this text";
            Err(format!("the answer was cut off (finish_reason `content_filter`); {hint}"))
        }
        reason if text.trim().is_empty() => {
            Err(format!("the answer holds no text (finish_reason `{}`)", reason.unwrap_or("unknown")))
        }
        Some(other) if !COMPLETE.contains(&other.to_lowercase().as_str()) => {
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

/// Request parameters that one model at one endpoint supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProviderRules {
    limit: &'static str,
    thinking: ReasoningParameter,
}

/// How a request sets the reasoning effort.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReasoningParameter {
    /// `"reasoning_effort": "low"`.
    Effort,
    /// `"thinking": {"type": "enabled"}`.
    Type,
    Switch,
    /// `"chat_template_kwargs": {"enable_thinking": true}`.
    Template,
    Never,
}

impl ProviderRules {
    /// The parameters for `model` at `base_url`; `section` of the configuration is named in errors.
    pub(crate) fn of(section: &str, endpoint: &EndpointConfig, base_url: &str, model: &str) -> Result<Self, DataError> {
        let provider = detect_provider(endpoint.provider, base_url);
        let refuse = |key: &str, what: String| Err(DataError::setting(format!("{section}.{key}"), what));
        let thinks = provider == Provider::Openai && is_reasoning_model(model);
        if let Some(temperature) = endpoint.temperature.filter(|temperature| thinks && *temperature != 1.0) {
            return refuse(
                "temperature",
                format!("is {temperature:?}; `{model}` takes no other than its own, leave the key out"),
            );
        }
        let (limit, thinking) = match provider {
            Provider::Openai if thinks => ("max_completion_tokens", ReasoningParameter::Effort),
            Provider::Openai => ("max_completion_tokens", ReasoningParameter::Never),
            Provider::Deepseek => ("max_tokens", ReasoningParameter::Type),
            Provider::Qwen => ("max_tokens", ReasoningParameter::Switch),
            Provider::Vllm | Provider::LlamaCpp => ("max_tokens", ReasoningParameter::Template),
            Provider::Ollama => ("max_tokens", ReasoningParameter::Effort),
            // Servers ignore parameters that they do not know; nearly all know the older name.
            Provider::Auto | Provider::Other if is_reasoning_model(model) => {
                ("max_completion_tokens", ReasoningParameter::Effort)
            }
            Provider::Auto | Provider::Other => ("max_tokens", ReasoningParameter::Effort),
        };
        let effort = endpoint.reasoning_effort;
        if effort != ReasoningEffort::Unset && thinking == ReasoningParameter::Never {
            let effort = effort.name();
            return refuse(
                "reasoning_effort",
                format!("is {effort:?}; `{model}` is not a reasoning model, leave the key out"),
            );
        }
        Ok(Self { limit: if endpoint.legacy_max_tokens { "max_tokens" } else { limit }, thinking })
    }

    pub(crate) fn add_parameters(self, endpoint: &EndpointConfig, body: &mut Value) {
        body[self.limit] = json!(endpoint.max_tokens);
        if let Some(temperature) = endpoint.temperature {
            body["temperature"] = json!(temperature);
        }
        if endpoint.response_format == ResponseFormat::JsonObject {
            body["response_format"] = json!({"type": "json_object"});
        }
        let effort = endpoint.reasoning_effort;
        if effort == ReasoningEffort::Unset {
            return;
        }
        let thinks = effort != ReasoningEffort::None;
        match self.thinking {
            ReasoningParameter::Effort => body["reasoning_effort"] = json!(effort.name()),
            ReasoningParameter::Type => body["thinking"] = json!({"type": if thinks { "enabled" } else { "disabled" }}),
            ReasoningParameter::Switch => body["enable_thinking"] = json!(thinks),
            ReasoningParameter::Template => body["chat_template_kwargs"] = json!({"enable_thinking": thinks}),
            ReasoningParameter::Never => {}
        }
    }
}

fn detect_provider(provider: Provider, base_url: &str) -> Provider {
    if provider != Provider::Auto {
        return provider;
    }
    let rest = base_url.split_once("://").map_or(base_url, |(_, rest)| rest);
    let host = rest.split('/').next().unwrap_or_default().to_lowercase();
    let known = [
        ("api.openai.com", Provider::Openai),
        (".openai.azure.com", Provider::Openai),
        ("api.deepseek.com", Provider::Deepseek),
        ("dashscope", Provider::Qwen),
        (":11434", Provider::Ollama),
    ];
    known.into_iter().find(|(part, _)| host.contains(part)).map_or(Provider::Other, |(_, provider)| provider)
}

/// GPT-5 and the o series, snapshots included.
fn is_reasoning_model(model: &str) -> bool {
    !model.contains("-chat") && ["gpt-5", "o1", "o3", "o4"].iter().any(|start| model.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;
    fn parameters(settings: Value, base_url: &str, model: &str) -> Result<Value, String> {
        let config: querl_core::config::JudgeConfig = {
            let mut all = json!({"kind": "openai", "max_tokens": 9});
            all.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
            serde_json::from_value(all).unwrap()
        };
        let endpoint = config.endpoint();
        let rules = ProviderRules::of("teacher", &endpoint, base_url, model).map_err(|error| error.to_string())?;
        let mut body = json!({});
        rules.add_parameters(&endpoint, &mut body);
        Ok(body)
    }

    #[test]
    fn each_provider_gets_its_own_parameters() {
        let low = json!({"reasoning_effort": "low"});
        let cases = [
            ("https://api.openai.com/v1", "gpt-5-mini", json!({"max_completion_tokens": 9, "reasoning_effort": "low"})),
            ("https://api.deepseek.com/v1", "deepseek-chat", json!({"max_tokens": 9, "thinking": {"type": "enabled"}})),
            (
                "https://dashscope.aliyuncs.com/compatible-mode/v1",
                "qwen3-max",
                json!({"max_tokens": 9, "enable_thinking": true}),
            ),
            ("http://127.0.0.1:11434/v1", "qwen3:0.6b", json!({"max_tokens": 9, "reasoning_effort": "low"})),
            ("http://127.0.0.1:8000/v1", "m", json!({"max_tokens": 9, "reasoning_effort": "low"})),
            ("http://gateway:8000/v1", "gpt-5", json!({"max_completion_tokens": 9, "reasoning_effort": "low"})),
        ];
        for (base_url, model, expected) in cases {
            assert_eq!(parameters(low.clone(), base_url, model), Ok(expected), "{base_url}");
        }
        let named = json!({"provider": "vllm", "reasoning_effort": "none", "response_format": "json_object"});
        let expected = json!({"max_tokens": 9, "chat_template_kwargs": {"enable_thinking": false}, "response_format": {"type": "json_object"}});
        assert_eq!(parameters(named, "http://127.0.0.1:8000/v1", "m"), Ok(expected));
    }

    /// Regression: a quota below one request looked like a run that does nothing.
    #[test]
    fn a_token_quota_below_one_request_is_a_warning() {
        let config: querl_core::config::JudgeConfig = serde_json::from_value(json!({
            "kind": "openai", "model": "m", "base_url": "http://127.0.0.1:9/v1", "api_key_env": "", "max_tokens": 300,
            "tokens_per_minute": 100,
        }))
        .unwrap();
        let client = ChatClient::open("teacher", config.endpoint(), &ServiceContext::default()).unwrap();
        assert_eq!(client.rate_warning(100), None);
        let expected = "teacher.tokens_per_minute is 100, and a request counts 370 tokens (max_tokens = 300 and its prompt): each waits \
                        about 3.7 minutes; raise it, or lower teacher.max_tokens";
        assert_eq!(client.rate_warning(370).unwrap(), expected);
    }

    #[test]
    fn parameters_that_a_model_rejects_fail_before_a_call() {
        let openai = "https://api.openai.com/v1";
        let message = parameters(json!({"temperature": 0.3}), openai, "gpt-5").unwrap_err();
        assert_eq!(message, "teacher.temperature is 0.3; `gpt-5` takes no other than its own, leave the key out");
        assert!(parameters(json!({"temperature": 0.3}), openai, "gpt-4.1").is_ok());
        assert!(parameters(json!({"temperature": 1.0}), openai, "o3").is_ok());
        let message = parameters(json!({"reasoning_effort": "low"}), openai, "gpt-4.1").unwrap_err();
        let expected = "teacher.reasoning_effort is \"low\"; `gpt-4.1` is not a reasoning model, leave the key out";
        assert_eq!(message, expected);
    }
}

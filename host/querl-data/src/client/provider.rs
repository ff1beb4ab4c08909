//! Differences between providers of the OpenAI chat API: parameter names, and parameters that they reject.
//!
//! Sources: the providers' own references of `chat/completions` (OpenAI, DeepSeek, Alibaba Cloud Model Studio, vLLM, llama.cpp's
//! server, Ollama).

use crate::error::DataError;
use querl_core::config::{EndpointConfig, Provider, ReasoningEffort, ResponseFormat};
use serde_json::{Value, json};

/// The rules of one model at one endpoint.
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
    /// The rules for `model` at `base_url`; `section` is whose keys they are held to.
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
            // A limit that a server does not know by its name is no limit: nearly all know the older name.
            Provider::Auto | Provider::Other if is_reasoning_model(model) => {
                ("max_completion_tokens", ReasoningParameter::Effort)
            }
            Provider::Auto | Provider::Other => ("max_tokens", ReasoningParameter::Effort),
        };
        let effort = endpoint.reasoning_effort;
        if effort != ReasoningEffort::Unset && thinking == ReasoningParameter::Never {
            let effort = effort.as_str();
            return refuse("reasoning_effort", format!("is {effort:?}; `{model}` does not think, leave the key out"));
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
            ReasoningParameter::Effort => body["reasoning_effort"] = json!(effort.as_str()),
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

/// GPT-5 and the o series, under the names that they and their snapshots have.
fn is_reasoning_model(model: &str) -> bool {
    let chats = model.contains("-chat");
    !chats && ["gpt-5", "o1", "o3", "o4"].iter().any(|start| model.starts_with(start))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
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
    fn each_provider_is_spoken_to_in_its_own_words() {
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

    #[test]
    fn what_a_model_is_known_to_refuse_is_refused_before_a_call() {
        let openai = "https://api.openai.com/v1";
        let said = parameters(json!({"temperature": 0.3}), openai, "gpt-5").unwrap_err();
        assert_eq!(said, "teacher.temperature is 0.3; `gpt-5` takes no other than its own, leave the key out");
        assert!(parameters(json!({"temperature": 0.3}), openai, "gpt-4.1").is_ok());
        assert!(parameters(json!({"temperature": 1.0}), openai, "o3").is_ok());
        let said = parameters(json!({"reasoning_effort": "low"}), openai, "gpt-4.1").unwrap_err();
        assert_eq!(said, "teacher.reasoning_effort is \"low\"; `gpt-4.1` does not think, leave the key out");
    }
}

//! Vectors of texts by a service with OpenAI's embeddings interface, which vLLM, TEI, Ollama and others speak.

use crate::calls::{CallLimits, Caller, Secret};
use crate::error::DataError;
use crate::general_rag::excerpt;
use querl_core::config::EmbeddingConfig;
use querl_core::records::{CallFailure, FailureKind};
use serde_json::{Value, json};

/// A service that makes vectors of texts.
#[derive(Debug)]
pub(crate) struct EmbeddingService {
    caller: Caller,
    model: String,
    query_prefix: String,
}

impl EmbeddingService {
    /// The service that the configuration names.
    ///
    /// # Errors
    /// Its address or model is not set, or the variable of its key is not.
    pub(crate) fn open(config: &EmbeddingConfig) -> Result<Self, DataError> {
        let setting = "retrieval.embedding.url";
        let missing =
            |key: &str| DataError::setting(format!("retrieval.embedding.{key}"), "is not set; a service needs it");
        let url = config.url.as_deref().ok_or_else(|| missing("url"))?;
        let model = config.model.clone().ok_or_else(|| missing("model"))?;
        let key = Secret::from_env("retrieval.embedding", &config.api_key_env)?;
        let limits = CallLimits::new(config.max_concurrent, config.timeout_s, config.max_retries);
        Ok(Self { caller: Caller::new(setting, url, key, limits)?, model, query_prefix: config.query_prefix.clone() })
    }

    /// The vector of a query.
    ///
    /// # Errors
    /// The call failed, or what came is no vector.
    pub(crate) async fn query(&self, text: &str) -> Result<Vec<f32>, CallFailure> {
        let text = format!("{}{text}", self.query_prefix);
        let answer = self.caller.post(&json!({"model": self.model, "input": [text]})).await?.body;
        vector(&answer).ok_or_else(|| {
            let what = format!("no vector at `data[0].embedding`: {}", excerpt(&answer));
            self.caller.failure(FailureKind::InvalidResponse, &what)
        })
    }
}

fn vector(answer: &Value) -> Option<Vec<f32>> {
    let numbers = answer.pointer("/data/0/embedding")?.as_array().filter(|numbers| !numbers.is_empty())?;
    numbers.iter().map(|number| Some(number.as_f64()? as f32)).collect()
}

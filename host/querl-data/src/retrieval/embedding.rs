//! Vectors of queries for services that want one: by a model in this process, or by a service with OpenAI's embeddings interface,
//! which vLLM, TEI, Ollama and others speak.

use crate::client::context::ServiceContext;
use crate::client::http::{CallLimits, Caller, CostBound, Secret};
use crate::error::DataError;
use crate::retrieval::embedded::query_prefix;
use crate::retrieval::json::excerpt;
use crate::retrieval::local_model::LocalModelCalls;
use crate::retrieval::search::LocalModels;
use querl_core::config::{EmbeddingConfig, EmbeddingKind};
use querl_core::ports::Embedder;
use querl_core::records::{CallFailure, FailureKind};
use serde_json::{Value, json};
use std::sync::Arc;

/// Who makes the vector of a query.
pub(crate) enum QueryEmbedding {
    Service(Box<EmbeddingService>),
    Local { model: Arc<dyn Embedder>, query_prefix: String, work: LocalModelCalls },
}

impl QueryEmbedding {
    /// The one that the configuration names; `None` where it names none.
    pub(crate) fn open(
        config: &EmbeddingConfig,
        models: &LocalModels,
        services: &ServiceContext,
    ) -> Result<Option<Self>, DataError> {
        match (config.kind, &models.embedder) {
            (EmbeddingKind::None, _) => Ok(None),
            (EmbeddingKind::Openai, _) => Ok(Some(Self::Service(Box::new(EmbeddingService::open(config, services)?)))),
            (EmbeddingKind::Local, Some(model)) => Ok(Some(Self::Local {
                model: model.clone(),
                query_prefix: query_prefix(config, Some(model.as_ref())),
                work: LocalModelCalls::new("embedding model", config.max_concurrent, config.timeout_s),
            })),
            (EmbeddingKind::Local, None) => Err(DataError::setting("retrieval.embedding.path", "was not opened")),
        }
    }

    /// The vector of a query.
    pub(crate) async fn query(&self, text: &str) -> Result<Vec<f32>, CallFailure> {
        match self {
            Self::Service(service) => service.query(text).await,
            Self::Local { model, query_prefix, work } => {
                let (model, text) = (model.clone(), format!("{query_prefix}{text}"));
                let vectors = work.run(move || model.embed(&[&text])).await?;
                Ok(vectors.into_iter().next().unwrap_or_default())
            }
        }
    }
}

/// A service that makes vectors of texts.
#[derive(Debug)]
pub(crate) struct EmbeddingService {
    caller: Caller,
    model: String,
    query_prefix: String,
}

impl EmbeddingService {
    /// The service that the configuration names.
    pub(crate) fn open(config: &EmbeddingConfig, services: &ServiceContext) -> Result<Self, DataError> {
        let setting = "retrieval.embedding.url";
        let missing =
            |key: &str| DataError::setting(format!("retrieval.embedding.{key}"), "is not set; a service needs it");
        let url = config.url.as_deref().ok_or_else(|| missing("url"))?;
        let model = config.model.clone().ok_or_else(|| missing("model"))?;
        let key = Secret::open("retrieval.embedding", config.api_key_file.as_deref(), &config.api_key_env)?;
        let limits = CallLimits::new(config.max_concurrent, config.timeout_s, config.max_retries)
            .per_minute(config.requests_per_minute, None);
        let caller = Caller::new(setting, url, key, limits, services)?;
        Ok(Self { caller, model, query_prefix: query_prefix(config, None) })
    }

    /// The vector of a query.
    pub(crate) async fn query(&self, text: &str) -> Result<Vec<f32>, CallFailure> {
        let text = format!("{}{text}", self.query_prefix);
        let answer = self.caller.post(&json!({"model": self.model, "input": [text]}), CostBound::FREE).await?.body;
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

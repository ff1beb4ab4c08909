//! Retrieval by a service of another maker, through a mapping.

use crate::client::context::ServiceContext;
use crate::client::http::{Caller, CostBound, Refusal};
use crate::error::DataError;
use crate::retrieval::embedding::QueryEmbedding;
use crate::retrieval::general_rag::service_caller;
use crate::retrieval::mapping::{Mapping, RequestValues};
use crate::retrieval::search::{LocalModels, RetrievalBackend, RetrievalLimits, ServiceScores};
use async_trait::async_trait;
use querl_core::config::{RetrievalConfig, ServiceKind};
use querl_core::ports::RetrievalRequest;
use querl_core::records::{CallFailure, FailureKind, Hit};
use serde_json::Value;

/// A service that a mapping describes.
pub(crate) struct MappedService {
    caller: Caller,
    mapping: Mapping,
    embedding: Option<QueryEmbedding>,
    service: ServiceKind,
    tenant: String,
    kb_name: String,
    scores: ServiceScores,
}

impl MappedService {
    /// The service that the configuration names.
    pub(crate) fn open(
        config: &RetrievalConfig,
        tenant: &str,
        models: &LocalModels,
        services: &ServiceContext,
    ) -> Result<Self, DataError> {
        let (mapping, scores) = (Mapping::resolve(config)?, ServiceScores::of(config));
        if scores == ServiceScores::Required && !mapping.has_scores() {
            let problem = "is not set, and the service sends none that is known; set it, or retrieval.rerank";
            return Err(DataError::setting("retrieval.mapping.score", problem));
        }
        let embedding = match mapping.wants_embedding() {
            true => Some(QueryEmbedding::open(&config.embedding, models, services)?.ok_or_else(no_embedding)?),
            false => None,
        };
        Ok(Self {
            caller: service_caller(config, services)?,
            mapping,
            embedding,
            service: config.service,
            tenant: tenant.to_owned(),
            kb_name: config.kb_name.clone(),
            scores,
        })
    }
}

fn no_embedding() -> DataError {
    let problem = "has `{{embedding}}`, which retrieval.embedding makes; set its kind";
    DataError::setting("retrieval.mapping.request", problem)
}

#[async_trait]
impl RetrievalBackend for MappedService {
    async fn search(&self, request: &RetrievalRequest<'_>, limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure> {
        let embedding = match &self.embedding {
            Some(embedding) => Some(embedding.query(request.rewritten_query).await?),
            None => None,
        };
        let values = RequestValues { tenant: &self.tenant, kb_name: &self.kb_name, embedding: embedding.as_deref() };
        let check = |answer: &Value| self.mapping.failure(answer).map(|(status, what)| Refusal::reported(status, what));
        let body = self.mapping.body(&values, request, limits);
        let answer = self.caller.post_checked(&body, CostBound::FREE, &check).await?.body;
        let hits = self.mapping.hits(&answer, self.scores);
        let hits = hits.map_err(|what| self.caller.failure(FailureKind::InvalidResponse, &what))?;
        Ok(match self.scores {
            ServiceScores::Required => limits.apply(hits),
            // In the service's order, which is all there is to go by.
            ServiceScores::Replaced => hits.into_iter().take(limits.top_k).collect(),
        })
    }

    fn name(&self) -> &str {
        match self.service {
            ServiceKind::GeneralRag => "general_rag",
            ServiceKind::Dify => "dify",
            ServiceKind::Ragflow => "ragflow",
            ServiceKind::Chatchat | ServiceKind::Chatchat02 => "chatchat",
            ServiceKind::Elasticsearch => "elasticsearch",
            ServiceKind::Qdrant => "qdrant",
            ServiceKind::Custom => "custom service",
        }
    }
}

#[cfg(test)]
#[path = "mapped_service_tests.rs"]
mod tests;

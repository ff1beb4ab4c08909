//! Which retrieval the configuration names, and what all kinds have in common.

use crate::embedded::EmbeddedRetriever;
use crate::error::DataError;
use crate::general_rag::GeneralRag;
use crate::rerank::Reranked;
use crate::service::MappedService;
use async_trait::async_trait;
use querl_core::config::{RerankKind, RetrievalConfig, RetrievalKind, ServiceKind};
use querl_core::ports::{Embedder, PairScorer, RetrievalRequest, Retriever};
use querl_core::records::{CallFailure, Hit};
use std::sync::Arc;

/// How much a search may return.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SearchLimits {
    /// Passages at most.
    pub top_k: usize,
    /// Passages with a lower reranker score are left out, 0 to 1.
    pub score_threshold: f64,
}

/// Finds passages within limits that each request brings: what [`Retriever`] is with the limits of a configuration.
#[async_trait]
pub trait Search: Send + Sync {
    /// Passages for one rewrite, best reranker score first, ranks from 1. An empty list is an answer: nothing was found.
    ///
    /// # Errors
    /// The service failed, or what it sent cannot be understood.
    async fn search(&self, request: &RetrievalRequest<'_>, limits: SearchLimits) -> Result<Vec<Hit>, CallFailure>;

    /// How reports name it.
    fn name(&self) -> &str;
}

/// Whether a passage needs a score of the service that found it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scores {
    /// It is what passages are ranked by.
    Needed,
    /// A reranker's will replace it.
    Replaced,
}

impl Scores {
    /// What a configuration needs.
    pub(crate) fn of(config: &RetrievalConfig) -> Self {
        if config.rerank.kind == RerankKind::None { Self::Needed } else { Self::Replaced }
    }
}

/// Models in this process that a configuration names, opened by who knows models.
#[derive(Clone, Default)]
pub struct LocalModels {
    /// `retrieval.embedding` of kind `local`.
    pub embedder: Option<Arc<dyn Embedder>>,
    /// `retrieval.rerank` of kind `local`.
    pub scorer: Option<Arc<dyn PairScorer>>,
}

/// Opens the retrieval that the configuration names, for one tenant, with the limits that it sets.
///
/// # Errors
/// As [`open_search`].
pub fn open_retriever(
    config: &RetrievalConfig,
    tenant: &str,
    models: &LocalModels,
) -> Result<Arc<dyn Retriever>, DataError> {
    Ok(Arc::new(Limited { search: open_search(config, tenant, models)?, limits: SearchLimits::of(config) }))
}

/// Opens the retrieval that the configuration names, for one tenant.
///
/// # Errors
/// A setting that its kind needs is absent, or a file cannot be used. Whether a service answers shows at the first call.
pub fn open_search(config: &RetrievalConfig, tenant: &str, models: &LocalModels) -> Result<Arc<dyn Search>, DataError> {
    let found: Arc<dyn Search> = match (config.kind, config.service) {
        (RetrievalKind::Embedded, _) => Arc::new(EmbeddedRetriever::open(config, models)?),
        (RetrievalKind::Http, ServiceKind::GeneralRag) => Arc::new(GeneralRag::open(config, tenant)?),
        (RetrievalKind::Http, _) => Arc::new(MappedService::open(config, tenant, models)?),
    };
    Ok(match config.rerank.kind {
        RerankKind::None => found,
        RerankKind::Tei | RerankKind::Cohere | RerankKind::Local => {
            Arc::new(Reranked::open(&config.rerank, found, models)?)
        }
    })
}

impl SearchLimits {
    /// Those of a configuration.
    pub fn of(config: &RetrievalConfig) -> Self {
        Self { top_k: config.top_k, score_threshold: config.score_threshold }
    }

    /// Sorts hits by their reranker score, leaves out those beyond the limits and numbers the others. Of equal scores the hit
    /// that came first stays first.
    pub(crate) fn apply(self, mut hits: Vec<Hit>) -> Vec<Hit> {
        hits.retain(|hit| hit.reranker_score >= self.score_threshold);
        hits.sort_by(|a, b| b.reranker_score.total_cmp(&a.reranker_score));
        hits.truncate(self.top_k);
        for (hit, rank) in hits.iter_mut().zip(1..) {
            hit.rank = rank;
        }
        hits
    }
}

/// A search with the limits of a configuration.
struct Limited {
    search: Arc<dyn Search>,
    limits: SearchLimits,
}

#[async_trait]
impl Retriever for Limited {
    async fn retrieve(&self, request: RetrievalRequest<'_>) -> Result<Vec<Hit>, CallFailure> {
        self.search.search(&request, self.limits).await
    }

    fn name(&self) -> &str {
        self.search.name()
    }
}

//! What all kinds of retrieval have in common: the trait, its limits, and the models that it may use.

use async_trait::async_trait;
use querl_core::config::{RerankKind, RetrievalConfig};
use querl_core::ports::{Embedder, PairScorer, RetrievalRequest, Retriever};
use querl_core::records::{CallFailure, Hit};
use std::sync::Arc;

/// How much a search may return.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetrievalLimits {
    /// Passages at most.
    pub top_k: usize,
    /// Passages with a lower reranker score are left out, 0 to 1.
    pub score_threshold: f64,
}

/// Finds passages within limits that each request brings. The stages use the core port [`Retriever`], which has no limits:
/// [`FixedLimits`] implements it over a backend with the limits of the configuration; servers use the backend itself.
#[async_trait]
pub trait RetrievalBackend: Send + Sync {
    /// Passages for one rewrite, best reranker score first, ranks from 1. An empty list is a valid result.
    ///
    /// # Errors
    /// The service failed, or its response cannot be parsed.
    async fn search(&self, request: &RetrievalRequest<'_>, limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure>;

    /// Name in reports.
    fn name(&self) -> &str;
}

/// Whether a passage needs a score of the service that found it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServiceScores {
    Required,
    Replaced,
}

impl ServiceScores {
    pub(crate) fn of(config: &RetrievalConfig) -> Self {
        if config.rerank.kind == RerankKind::None { Self::Required } else { Self::Replaced }
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

impl RetrievalLimits {
    /// Those of a configuration.
    pub fn of(config: &RetrievalConfig) -> Self {
        Self { top_k: config.top_k, score_threshold: config.score_threshold }
    }

    /// Sorts hits by their reranker score, leaves out those beyond the limits and numbers the others. Of equal scores the hit
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

/// A [`Retriever`] over a backend, with the limits of a configuration.
pub(super) struct FixedLimits {
    pub(super) search: Arc<dyn RetrievalBackend>,
    pub(super) limits: RetrievalLimits,
}

#[async_trait]
impl Retriever for FixedLimits {
    async fn retrieve(&self, request: RetrievalRequest<'_>) -> Result<Vec<Hit>, CallFailure> {
        self.search.search(&request, self.limits).await
    }

    fn name(&self) -> &str {
        self.search.name()
    }
}

/// Finds nothing, and is not asked outside.
pub(super) struct NoRetrieval;

#[async_trait]
impl RetrievalBackend for NoRetrieval {
    async fn search(&self, _: &RetrievalRequest<'_>, _: RetrievalLimits) -> Result<Vec<Hit>, CallFailure> {
        Ok(Vec::new())
    }

    fn name(&self) -> &str {
        "none"
    }
}

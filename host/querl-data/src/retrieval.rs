//! Which retrieval the configuration names, and what all kinds have in common.

use crate::cache::{CacheTable, CachedRetriever};
use crate::embedded::EmbeddedRetriever;
use crate::error::DataError;
use crate::general_rag::GeneralRag;
use crate::outside::Outside;
use crate::rerank::Reranked;
use crate::service::MappedService;
use async_trait::async_trait;
use querl_core::config::{
    AuthScheme, EmbeddingConfig, RerankConfig, RerankKind, RetrievalConfig, RetrievalKind, ServiceKind,
};
use querl_core::ports::{Embedder, PairScorer, RetrievalRequest, Retriever};
use querl_core::records::{CallFailure, Hit};
use serde::Serialize;
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
    outside: &Outside,
) -> Result<Arc<dyn Retriever>, DataError> {
    let search = open_search(config, tenant, models, outside)?;
    let retriever = Arc::new(Limited { search, limits: SearchLimits::of(config) });
    Ok(match config.kind {
        RetrievalKind::Embedded | RetrievalKind::None => retriever,
        RetrievalKind::Http => cached(retriever, config, tenant, models, outside),
    })
}

/// Behind the cache.
fn cached(
    inner: Arc<dyn Retriever>,
    config: &RetrievalConfig,
    tenant: &str,
    models: &LocalModels,
    outside: &Outside,
) -> Arc<dyn Retriever> {
    let shelf = outside.shelf(CacheTable::Retrievals, "retrieval", &identity(config, tenant, models));
    Arc::new(CachedRetriever { inner, shelf })
}

/// What the answers of a service depend on: the whole section, but for limits of calls and what only an embedded index reads, with
/// models by what they are in place of where they are.
fn identity(config: &RetrievalConfig, tenant: &str, models: &LocalModels) -> impl Serialize {
    let unlimited = RerankConfig::default();
    let rerank = RerankConfig {
        api_key_env: String::new(),
        api_key_file: None,
        path: None,
        batch_size: unlimited.batch_size,
        max_concurrent: unlimited.max_concurrent,
        requests_per_minute: None,
        timeout_s: unlimited.timeout_s,
        max_retries: unlimited.max_retries,
        ..config.rerank.clone()
    };
    let unlimited = EmbeddingConfig::default();
    let embedding = EmbeddingConfig {
        api_key_env: String::new(),
        api_key_file: None,
        path: None,
        max_concurrent: unlimited.max_concurrent,
        requests_per_minute: None,
        timeout_s: unlimited.timeout_s,
        max_retries: unlimited.max_retries,
        ..config.embedding.clone()
    };
    let answering = RetrievalConfig {
        api_key_env: String::new(),
        api_key_file: None,
        auth: AuthScheme::Auto,
        knowledge_base: None,
        lexicon: None,
        user_dictionary: None,
        synonyms: None,
        index_dir: None,
        indexes_kept: 0,
        max_concurrent: 1,
        requests_per_minute: None,
        timeout_s: 1.0,
        max_retries: 0,
        rerank,
        embedding,
        ..config.clone()
    };
    let embedder = models.embedder.as_ref().map(|model| (model.digest().to_owned(), model.query_prefix().to_owned()));
    let scorer = models.scorer.as_ref().map(|model| model.digest().to_owned());
    (tenant.to_owned(), answering, embedder, scorer)
}

/// Opens the retrieval that the configuration names, for one tenant.
///
/// # Errors
/// A setting that its kind needs is absent, or a file cannot be used. Whether a service answers shows at the first call.
pub fn open_search(
    config: &RetrievalConfig,
    tenant: &str,
    models: &LocalModels,
    outside: &Outside,
) -> Result<Arc<dyn Search>, DataError> {
    let found: Arc<dyn Search> = match (config.kind, config.service) {
        (RetrievalKind::None, _) => return Ok(Arc::new(NoSearch)),
        (RetrievalKind::Embedded, _) => Arc::new(EmbeddedRetriever::open(config, models)?),
        (RetrievalKind::Http, ServiceKind::GeneralRag) => Arc::new(GeneralRag::open(config, tenant, outside)?),
        (RetrievalKind::Http, _) => Arc::new(MappedService::open(config, tenant, models, outside)?),
    };
    Ok(match config.rerank.kind {
        RerankKind::None => found,
        RerankKind::Tei | RerankKind::Cohere | RerankKind::Local => {
            Arc::new(Reranked::open(&config.rerank, config.top_k, found, models, outside)?)
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

/// Finds nothing, and is not asked outside.
struct NoSearch;

#[async_trait]
impl Search for NoSearch {
    async fn search(&self, _: &RetrievalRequest<'_>, _: SearchLimits) -> Result<Vec<Hit>, CallFailure> {
        Ok(Vec::new())
    }

    fn name(&self) -> &str {
        "none"
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

#[cfg(test)]
#[path = "retrieval_tests.rs"]
mod tests;

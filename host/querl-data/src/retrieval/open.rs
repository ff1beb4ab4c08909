//! Which retrieval the configuration names, and what all kinds have in common.

use crate::client::context::ServiceContext;
use crate::client::response_cache::{CacheTable, CachedRetriever, ServiceCache};
use crate::error::DataError;
use crate::retrieval::embedded::EmbeddedRetriever;
use crate::retrieval::general_rag::GeneralRag;
use crate::retrieval::mapped_service::MappedService;
use crate::retrieval::rerank::RerankedBackend;
use crate::retrieval::search::{FixedLimits, LocalModels, NoRetrieval, RetrievalBackend, RetrievalLimits};
use querl_core::config::{
    AuthScheme, EmbeddingConfig, RerankConfig, RerankKind, RetrievalConfig, RetrievalKind, ServiceKind,
};
use querl_core::ports::Retriever;
use serde::Serialize;
use std::sync::Arc;

/// Opens the retrieval that the configuration names, for one tenant, with the limits that it sets.
///
/// # Errors
/// As [`open_retrieval_backend`].
pub fn open_retriever(
    config: &RetrievalConfig,
    tenant: &str,
    models: &LocalModels,
    services: &ServiceContext,
) -> Result<Arc<dyn Retriever>, DataError> {
    let search = open_retrieval_backend(config, tenant, models, services)?;
    let retriever = Arc::new(FixedLimits { search, limits: RetrievalLimits::of(config) });
    Ok(match config.kind {
        RetrievalKind::Embedded | RetrievalKind::None => retriever,
        RetrievalKind::Http => cached(retriever, config, tenant, models, services),
    })
}

fn cached(
    inner: Arc<dyn Retriever>,
    config: &RetrievalConfig,
    tenant: &str,
    models: &LocalModels,
    services: &ServiceContext,
) -> Arc<dyn Retriever> {
    let service_cache =
        ServiceCache::open(services, CacheTable::Retrievals, "retrieval", &identity(config, tenant, models));
    Arc::new(CachedRetriever { inner, service_cache })
}

/// What the answers of a service depend on: the whole section, but for limits of calls and what only an embedded index reads, with
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
pub fn open_retrieval_backend(
    config: &RetrievalConfig,
    tenant: &str,
    models: &LocalModels,
    services: &ServiceContext,
) -> Result<Arc<dyn RetrievalBackend>, DataError> {
    let found: Arc<dyn RetrievalBackend> = match (config.kind, config.service) {
        (RetrievalKind::None, _) => return Ok(Arc::new(NoRetrieval)),
        (RetrievalKind::Embedded, _) => Arc::new(EmbeddedRetriever::open(config, models)?),
        (RetrievalKind::Http, ServiceKind::GeneralRag) => Arc::new(GeneralRag::open(config, tenant, services)?),
        (RetrievalKind::Http, _) => Arc::new(MappedService::open(config, tenant, models, services)?),
    };
    Ok(match config.rerank.kind {
        RerankKind::None => found,
        RerankKind::Tei | RerankKind::Cohere | RerankKind::Local => {
            Arc::new(RerankedBackend::open(&config.rerank, config.top_k, found, models, services)?)
        }
    })
}

#[cfg(test)]
#[path = "open_tests.rs"]
mod tests;

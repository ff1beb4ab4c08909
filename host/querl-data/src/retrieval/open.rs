//! Opens the retrieval of a configuration.

use crate::client::ServiceContext;
use crate::client::response_cache::{CacheTable, ServiceCache};
use crate::error::DataError;
use crate::retrieval::embedded::EmbeddedRetriever;
use crate::retrieval::rerank::RerankedBackend;
use crate::retrieval::services::{GeneralRag, MappedService};
use crate::retrieval::{LocalModels, NoRetrieval, RetrievalBackend, RetrievalLimits};
use async_trait::async_trait;
use querl_core::config::{
    AuthScheme, EmbeddingConfig, RerankConfig, RerankKind, RetrievalConfig, RetrievalKind, ServiceKind,
};
use querl_core::ports::{RetrievalRequest, Retriever};
use querl_core::records::{CallFailure, Hit};
use serde::Serialize;
use std::sync::Arc;

/// Opens the configured retrieval of a tenant, with the limits of the configuration and the response cache.
///
/// # Errors
/// As [`open_retrieval_backend`].
pub fn open_retriever(
    config: &RetrievalConfig,
    tenant: &str,
    models: &LocalModels,
    services: &ServiceContext,
) -> Result<Arc<dyn Retriever>, DataError> {
    let backend = open_retrieval_backend(config, tenant, models, services)?;
    let identity = || identity(config, tenant, models);
    let cache = (config.kind == RetrievalKind::Http)
        .then(|| ServiceCache::open(services, CacheTable::Retrievals, "retrieval", &identity()));
    Ok(Arc::new(ConfiguredRetriever { backend, limits: RetrievalLimits::of(config), cache }))
}

/// A retrieval backend with fixed limits; services have a cache.
struct ConfiguredRetriever {
    backend: Arc<dyn RetrievalBackend>,
    limits: RetrievalLimits,
    cache: Option<ServiceCache>,
}

#[async_trait]
impl Retriever for ConfiguredRetriever {
    async fn retrieve(&self, request: RetrievalRequest<'_>) -> Result<Vec<Hit>, CallFailure> {
        let search = self.backend.search(&request, self.limits);
        match &self.cache {
            Some(cache) => {
                let key = (request.original_query, request.context, request.rewritten_query);
                cache.get_or_call(&key, search).await
            }
            None => search.await,
        }
    }

    fn name(&self) -> &str {
        self.backend.name()
    }
}

/// Everything that a service's responses depend on except the request: the section without call limits, keys and the settings of the
/// embedded index, and the digests of local models.
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
        price_prompt_per_million: None,
        price_per_thousand_calls: None,
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
        price_prompt_per_million: None,
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
        price_per_thousand_calls: None,
        rerank,
        embedding,
        ..config.clone()
    };
    let embedder = models.embedder.as_ref().map(|model| (model.digest().to_owned(), model.query_prefix().to_owned()));
    let scorer = models.scorer.as_ref().map(|model| model.digest().to_owned());
    (tenant.to_owned(), answering, embedder, scorer)
}

/// Opens the configured retrieval of a tenant; the limits are part of each request.
///
/// # Errors
/// A setting of this kind of retrieval is missing, or a file cannot be read. Services are not called.
pub fn open_retrieval_backend(
    config: &RetrievalConfig,
    tenant: &str,
    models: &LocalModels,
    services: &ServiceContext,
) -> Result<Arc<dyn RetrievalBackend>, DataError> {
    let backend: Arc<dyn RetrievalBackend> = match (config.kind, config.service) {
        (RetrievalKind::None, _) => return Ok(Arc::new(NoRetrieval)),
        (RetrievalKind::Embedded, _) => Arc::new(EmbeddedRetriever::open(config, models)?),
        (RetrievalKind::Http, ServiceKind::GeneralRag) => Arc::new(GeneralRag::open(config, tenant, services)?),
        (RetrievalKind::Http, _) => Arc::new(MappedService::open(config, tenant, models, services)?),
    };
    Ok(match config.rerank.kind {
        RerankKind::None => backend,
        RerankKind::Tei | RerankKind::Cohere | RerankKind::Local => {
            Arc::new(RerankedBackend::open(config, backend, models, services)?)
        }
    })
}

//! Which retrieval the configuration names.

use crate::embedded::EmbeddedRetriever;
use crate::error::DataError;
use crate::general_rag::GeneralRag;
use querl_core::config::{RetrievalConfig, RetrievalKind};
use querl_core::ports::Retriever;
use std::sync::Arc;

/// Opens the retrieval that the configuration names, for one tenant.
///
/// # Errors
/// A setting that its kind needs is absent, or a file cannot be used. Whether a service answers shows at the first call.
pub fn open_retriever(config: &RetrievalConfig, tenant: &str) -> Result<Arc<dyn Retriever>, DataError> {
    Ok(match config.kind {
        RetrievalKind::Embedded => Arc::new(EmbeddedRetriever::open(config)?),
        RetrievalKind::Http => Arc::new(GeneralRag::open(config, tenant)?),
    })
}

//! Opening retrieval with the models that it uses in this process.

use crate::failure::Stop;
use querl_core::config::{EmbeddingKind, RerankKind, RetrievalConfig};
use querl_data::{DataError, LocalModels};
use querl_encoder::{CrossEncoder, EmbeddingModel, EncoderError};
use std::path::Path;
use std::sync::Arc;

/// The models that a configuration names with kind `local`.
///
/// # Errors
/// A directory is not that of such a model.
pub fn local_models(config: &RetrievalConfig) -> anyhow::Result<LocalModels> {
    let mut models = LocalModels::default();
    if config.embedding.kind == EmbeddingKind::Local {
        let path = required(config.embedding.path.as_deref(), "retrieval.embedding.path")?;
        models.embedder = Some(Arc::new(EmbeddingModel::open(path, None).map_err(unusable)?));
    }
    if config.rerank.kind == RerankKind::Local {
        let path = required(config.rerank.path.as_deref(), "retrieval.rerank.path")?;
        models.scorer = Some(Arc::new(CrossEncoder::open(path, None).map_err(unusable)?));
    }
    Ok(models)
}

fn required<'a>(path: Option<&'a Path>, key: &str) -> Result<&'a Path, DataError> {
    let problem = "is not set; a model of kind `local` needs it".to_owned();
    path.ok_or_else(|| DataError::Setting { key: key.to_owned(), problem })
}

fn unusable(error: EncoderError) -> Stop {
    Stop::usage(error.to_string())
}

//! Opening retrieval with the models that it uses in this process.

use crate::failure::Stop;
use querl_core::config::{EmbeddingKind, RerankKind, RetrievalConfig};
use querl_core::ports::{Embedder, PairScorer};
use querl_data::{DataError, LocalModels};
use querl_encoder::{CrossEncoder, EmbeddingModel, EncoderError};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opened models by folder, shared by several configurations.
#[derive(Default)]
pub struct ModelShelf {
    embedders: HashMap<ModelKey, Arc<dyn Embedder>>,
    scorers: HashMap<ModelKey, Arc<dyn PairScorer>>,
}

/// A folder, and where its texts are cut.
type ModelKey = (PathBuf, Option<usize>);

impl ModelShelf {
    /// The models that a configuration names with kind `local`.
    ///
    /// # Errors
    /// A directory is not that of such a model.
    pub fn models(&mut self, config: &RetrievalConfig) -> anyhow::Result<LocalModels> {
        let mut models = LocalModels::default();
        let (embedding, rerank) = (&config.embedding, &config.rerank);
        if embedding.kind == EmbeddingKind::Local {
            let path = required(embedding.path.as_deref(), "retrieval.embedding.path")?;
            let open =
                |path: &Path, cut| EmbeddingModel::open(path, cut).map(|model| Arc::new(model) as Arc<dyn Embedder>);
            models.embedder = Some(shared(&mut self.embedders, path, embedding.max_length, open)?);
        }
        if rerank.kind == RerankKind::Local {
            let path = required(rerank.path.as_deref(), "retrieval.rerank.path")?;
            let open =
                |path: &Path, cut| CrossEncoder::open(path, cut).map(|model| Arc::new(model) as Arc<dyn PairScorer>);
            models.scorer = Some(shared(&mut self.scorers, path, rerank.max_length, open)?);
        }
        Ok(models)
    }
}

/// The embedding model of a folder.
///
/// # Errors
/// The folder is not that of such a model.
pub(crate) fn embedding_model(path: &Path) -> anyhow::Result<Arc<dyn Embedder>> {
    let model = EmbeddingModel::open(path, None).map_err(Stop::usage)?;
    Ok(Arc::new(model))
}

/// The models of one configuration alone.
///
/// # Errors
/// As [`ModelShelf::models`].
pub fn local_models(config: &RetrievalConfig) -> anyhow::Result<LocalModels> {
    ModelShelf::default().models(config)
}

fn shared<T: ?Sized>(
    open_ones: &mut HashMap<ModelKey, Arc<T>>,
    path: &Path,
    max_length: Option<usize>,
    open: impl Fn(&Path, Option<usize>) -> Result<Arc<T>, EncoderError>,
) -> anyhow::Result<Arc<T>> {
    let key = (path.canonicalize().unwrap_or_else(|_| path.to_owned()), max_length);
    if let Some(model) = open_ones.get(&key) {
        return Ok(model.clone());
    }
    let model = open(path, max_length).map_err(Stop::usage)?;
    open_ones.insert(key, model.clone());
    Ok(model)
}

fn required<'a>(path: Option<&'a Path>, key: &str) -> Result<&'a Path, DataError> {
    let problem = "is not set; a model of kind `local` needs it".to_owned();
    path.ok_or_else(|| DataError::Setting { key: key.to_owned(), problem })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Regression: a server with ten knowledge bases held ten copies of one model.
    #[test]
    fn configurations_of_one_folder_share_its_model() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/encoders");
        let config = |folder: &str, max_length: Option<usize>| -> RetrievalConfig {
            serde_json::from_value(serde_json::json!({"kind": "embedded",
                "embedding": {"kind": "local", "path": golden.join(folder), "max_length": max_length},
                "rerank": {"kind": "local", "path": golden.join("bert-reranker")}}))
            .unwrap()
        };
        let mut shelf = ModelShelf::default();
        let first = shelf.models(&config("bert-cls", None)).unwrap();
        let again = shelf.models(&config("../encoders/bert-cls", None)).unwrap();
        assert!(Arc::ptr_eq(&first.embedder.clone().unwrap(), &again.embedder.unwrap()));
        assert!(Arc::ptr_eq(&first.scorer.unwrap(), &again.scorer.unwrap()));
        let shorter = shelf.models(&config("bert-cls", Some(16))).unwrap().embedder.unwrap();
        assert_ne!(shorter.digest(), first.embedder.unwrap().digest());
    }
}

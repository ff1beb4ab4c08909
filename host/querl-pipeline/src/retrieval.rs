//! Local models of retrieval (embedding model and cross-encoder), and the measured effect of the reranker.

use crate::failure::Stop;
use querl_core::config::{EmbeddingKind, RerankKind, RetrievalConfig};
use querl_core::ports::{Embedder, PairScorer};
use querl_core::records::Hit;
use querl_data::{DataError, LocalModels};
use querl_encoder::{CrossEncoder, EmbeddingModel, EncoderError};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Loaded embedding models and cross-encoders by folder, shared by several configurations.
#[derive(Default)]
pub struct ModelShelf {
    embedders: HashMap<ModelKey, Arc<dyn Embedder>>,
    scorers: HashMap<ModelKey, Arc<dyn PairScorer>>,
}

/// A model folder, and the maximum length of texts.
type ModelKey = (PathBuf, Option<usize>);

impl ModelShelf {
    /// Loads, or takes from the shelf, the local embedding model and cross-encoder of a retrieval configuration.
    ///
    /// # Errors
    /// A folder is not that of an embedding model or cross-encoder.
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

/// Loads the embedding model in a folder.
///
/// # Errors
/// The folder is not that of an embedding model.
pub(crate) fn embedding_model(path: &Path) -> anyhow::Result<Arc<dyn Embedder>> {
    let model = EmbeddingModel::open(path, None).map_err(Stop::usage)?;
    Ok(Arc::new(model))
}

/// Gold passages ranked first (gold@1) by the first stage of retrieval and by the reranker, over rows whose hits have both scores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RerankEffect {
    n_rows: usize,
    n_first_stage: usize,
    n_reranked: usize,
}

/// Minimum number of rows for a statement about the reranker.
const MIN_RERANKED_ROWS: usize = 30;
/// Loss of gold@1 by reranking, above which there is a warning.
const MAX_RERANK_LOSS: f64 = 0.02;

impl RerankEffect {
    /// Adds the hits of a row, best first. Rows without gold ids, and rows whose hits lack an id or a first-stage score, are ignored.
    /// Passages that the reranker dropped are not known, which favours the reranker.
    pub fn add(&mut self, gold_ids: &[String], hits: &[Hit]) {
        let scores: Option<Vec<f64>> = hits.iter().map(|hit| hit.retrieval_score).collect();
        let (Some(scores), Some(reranked)) = (scores, hits.first()) else { return };
        if gold_ids.is_empty() || hits.iter().any(|hit| hit.id.is_empty()) {
            return;
        }
        // On ties, the passage that the reranker ranks higher.
        let first = (1..hits.len()).fold(0, |best, other| if scores[other] > scores[best] { other } else { best });
        self.n_rows += 1;
        self.n_first_stage += usize::from(gold_ids.contains(&hits[first].id));
        self.n_reranked += usize::from(gold_ids.contains(&reranked.id));
    }

    /// A sentence with gold@1 before and after reranking; `None` for fewer than 30 rows.
    pub fn sentence(&self) -> Option<String> {
        let percent = |n: usize| 100.0 * n as f64 / self.n_rows as f64;
        (self.n_rows >= MIN_RERANKED_ROWS).then(|| {
            format!(
                "a gold passage is first in {:.1} % of {} rows by the scores of the first stage, and in {:.1} % after reranking",
                percent(self.n_first_stage),
                self.n_rows,
                percent(self.n_reranked)
            )
        })
    }

    /// A warning with [`Self::sentence`] and a remedy, if reranking lowers gold@1 by more than 2 points; `None` otherwise.
    pub fn warning(&self) -> Option<String> {
        const REMEDY: &str = "with the embedded index complete retrieval.lexicon, or leave it out, so that the order of the first stage \
                              holds; otherwise choose another retrieval.rerank, or leave it out";
        let loss = (self.n_first_stage as f64 - self.n_reranked as f64) / self.n_rows.max(1) as f64;
        let sentence = self.sentence().filter(|_| loss > MAX_RERANK_LOSS)?;
        Some(format!("{sentence}: reranking loses gold passages; {REMEDY}"))
    }
}

/// Loads the local embedding model and cross-encoder of one retrieval configuration.
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
mod tests {
    use super::*;

    /// Hits with these ids and first-stage scores, in the reranker's order.
    fn hits(found: &[(&str, Option<f64>)]) -> Vec<Hit> {
        let hit = |(rank, (id, retrieval_score)): (u32, &(&str, Option<f64>))| Hit {
            id: (*id).into(),
            text: String::new(),
            reranker_score: 0.5,
            retrieval_score: *retrieval_score,
            rank,
        };
        (1..).zip(found).map(hit).collect()
    }

    #[test]
    fn a_reranker_that_loses_gold_passages_is_reported_with_both_figures() {
        let gold = ["g".to_owned()];
        let (worse, equal) = (hits(&[("x", Some(1.0)), ("g", Some(2.0))]), hits(&[("g", Some(2.0)), ("x", Some(2.0))]));
        let effect = |n_worse: usize, n_equal: usize| {
            let mut effect = RerankEffect::default();
            (0..n_worse).for_each(|_| effect.add(&gold, &worse));
            (0..n_equal).for_each(|_| effect.add(&gold, &equal));
            effect
        };
        let warning = effect(10, 30).warning().unwrap();
        let expected = "a gold passage is first in 100.0 % of 40 rows by the scores of the first stage, and in 75.0 % after reranking: ";
        assert!(warning.starts_with(expected) && warning.contains("retrieval.lexicon"), "{warning}");
        // Too few rows, and a loss of 2 points.
        assert_eq!([effect(29, 0).warning(), effect(29, 0).sentence(), effect(1, 49).warning()], [None, None, None]);
        assert!(effect(0, 30).sentence().is_some() && effect(0, 30).warning().is_none());
    }

    #[test]
    fn rows_that_say_nothing_about_the_reranker_are_left_out() {
        let mut effect = RerankEffect::default();
        let gold = ["g".to_owned()];
        effect.add(&[], &hits(&[("x", Some(1.0)), ("g", Some(2.0))]));
        effect.add(&gold, &hits(&[("x", None), ("g", Some(2.0))]));
        effect.add(&gold, &hits(&[("", Some(1.0)), ("g", Some(2.0))]));
        effect.add(&gold, &[]);
        assert_eq!(effect, RerankEffect::default());
    }

    /// Regression: a server with ten knowledge bases loaded ten copies of one model.
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

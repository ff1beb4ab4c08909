//! BERT and XLM-RoBERTa encoders, such as the bge family, on the CPU: text embeddings and cross-encoders (rerankers).
//!
//! In: a Hugging Face directory (config.json, tokenizer.json, model.safetensors) of architecture `BertModel`, `XLMRobertaModel`,
//! `BertForSequenceClassification` or `XLMRobertaForSequenceClassification`. Out: text embeddings, or relevance
//! scores of passages for a query. This crate must not depend on indexes, services or training.

mod backbone;
mod cross_encoder;
mod embedding;

pub use cross_encoder::CrossEncoder;
pub use embedding::EmbeddingModel;

use std::path::Path;

/// Errors of loading and running a model.
#[derive(Debug, thiserror::Error)]
pub enum EncoderError {
    /// A file of the directory is missing, damaged or unsupported.
    #[error("{path}: {problem}")]
    File {
        /// Path of the file.
        path: String,
        /// Problem and remedy.
        problem: String,
    },
    /// Tokenization failed.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    /// The model produced NaN or Inf.
    #[error("the model produced NaN or Inf; its weights are damaged or overflow f32")]
    NotFinite,
    /// A computation failed.
    #[error("the model failed: {0}")]
    Compute(#[from] candle_core::Error),
}

impl EncoderError {
    pub(crate) fn file(path: &Path, problem: impl std::fmt::Display) -> Self {
        Self::File { path: path.display().to_string(), problem: problem.to_string() }
    }
}

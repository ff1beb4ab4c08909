//! Why a model cannot be used.

use std::path::Path;

/// Why a model cannot be used, in one sentence that names the place.
#[derive(Debug, thiserror::Error)]
pub enum EncoderError {
    /// A file of the directory is missing or not what it should be.
    #[error("{path}: {problem}")]
    File {
        /// Which.
        path: String,
        /// What is wrong, what to do.
        problem: String,
    },
    /// A text could not be cut into tokens.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    /// Weights that are damaged, or too large for f32.
    #[error("the model gives numbers that are none; its weights are damaged, or overflow")]
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

//! Errors of model directories, adapters and computations.

use std::path::{Path, PathBuf};

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A directory lacks a file.
    #[error("{directory}: no `{file}` there; a Hugging Face model directory needs {needs}")]
    MissingFile {
        /// The model directory.
        directory: PathBuf,
        /// Name of the missing file.
        file: String,
        /// What a complete directory holds.
        needs: &'static str,
    },
    /// The architecture is not supported.
    #[error("{path}: architecture `{found}` is not supported; expected one of {expected}")]
    UnsupportedArchitecture {
        /// The config.json.
        path: PathBuf,
        /// The architecture in it.
        found: String,
        /// Supported architectures.
        expected: &'static str,
    },
    /// A file is there and cannot be used.
    #[error("{path}: {message}")]
    BadFile {
        /// The damaged file.
        path: PathBuf,
        /// What is wrong with it, and the remedy.
        message: String,
    },
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// Text could not be converted to tokens, or back.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template could not be rendered.
    #[error("chat template: {0}")]
    Template(String),
    /// Settings of an adapter that do not fit the model.
    #[error("lora: {0}")]
    Lora(String),
    /// Generation cannot start or continue.
    #[error("generation: {0}")]
    Generation(String),
    /// A model cannot be sharded, or an operation does not support shards.
    #[error("tensor parallel: {0}")]
    Shard(String),
    /// Communication between ranks failed.
    #[error(transparent)]
    Ranks(#[from] crate::RanksError),
    /// A computation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl ModelError {
    pub(crate) fn bad_file(path: &Path, message: impl std::fmt::Display) -> Self {
        Self::BadFile { path: path.to_owned(), message: message.to_string() }
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}

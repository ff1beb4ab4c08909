//! Errors of model directories, adapters and computations.

use querl_core::fsx::io_problem;
use querl_core::model_config::{DOWNLOAD_AGAIN, ReadError};
use std::io;
use std::path::{Path, PathBuf};

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ModelError {
    #[error("{directory}: no `{file}` there; a Hugging Face model directory needs {needs}")]
    MissingFile { directory: PathBuf, file: String, needs: &'static str },
    #[error("{path}: architecture `{found}` is not supported; expected one of {expected}")]
    UnsupportedArchitecture { path: PathBuf, found: String, expected: &'static str },
    #[error("{path}: {message}")]
    BadFile { path: PathBuf, message: String },
    #[error("{}: {}", path.display(), io_problem(source))]
    Io { path: PathBuf, source: io::Error },
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    #[error("{0}")]
    Template(String),
    #[error("lora: {0}")]
    Lora(String),
    #[error("generation: {0}")]
    Generation(String),
    #[error(
        "a model with a sliding window in its attention; GPUs compute full attention alone: set `device = \"cpu\"`"
    )]
    SlidingWindow,
    #[error("tensor parallel: {0}")]
    Shard(String),
    #[error(transparent)]
    Ranks(#[from] crate::RanksError),
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl ModelError {
    pub(crate) fn bad_file(path: &Path, message: impl std::fmt::Display) -> Self {
        Self::BadFile { path: path.to_owned(), message: message.to_string() }
    }

    pub(crate) fn unread(path: &Path, error: ReadError) -> Self {
        match error {
            ReadError::Io(source) => Self::io(path)(source),
            ReadError::Invalid(message) => Self::bad_file(path, message),
        }
    }

    /// The error for a file that is truncated, empty or not of the format `expected`, such as `JSON`.
    pub(crate) fn unparsed(path: &Path, expected: &str, problem: impl std::fmt::Display) -> Self {
        Self::bad_file(path, format!("not {expected}: {problem}; {DOWNLOAD_AGAIN}"))
    }

    /// Maps an I/O error on the file at `path`: content that is not UTF-8 makes it a damaged file, other errors say nothing about the
    /// content.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| match source.kind() {
            io::ErrorKind::InvalidData => Self::bad_file(path, format!("{source}; {DOWNLOAD_AGAIN}")),
            _ => Self::Io { path: path.to_owned(), source },
        }
    }
}

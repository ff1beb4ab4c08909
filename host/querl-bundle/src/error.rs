//! Errors of manifests, bundles, keys and lock files.

use querl_core::fsx::io_problem;
use std::path::{Path, PathBuf};

/// Errors of manifests, bundles, keys and lock files.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum BundleError {
    /// A file could not be read or written.
    #[error("{}: {}", path.display(), io_problem(source))]
    Io { path: PathBuf, source: std::io::Error },
    /// A manifest or a lock file is invalid at one position.
    #[error("{origin}:{line}: {message}")]
    Text {
        origin: String,
        /// 1-based line; for a missing key, the line of its section.
        line: usize,
        message: String,
    },
    /// A file is not a regular file, or a plugin's folder cannot be packed.
    #[error("{}: {message}", path.display())]
    Folder { path: PathBuf, message: String },
    /// An archive is damaged, was tampered with, or was not made by `querl plugin pack`.
    #[error("{origin}: {part}: {message}")]
    Archive {
        origin: String,
        /// The damaged part: the name of an entry, `compressed stream`, `tar stream` or `seal`.
        part: String,
        message: String,
    },
    /// A key's text or file is invalid.
    #[error("{origin}: {message}")]
    Key {
        origin: String,
        /// Problem and remedy; never contains a private key.
        message: String,
    },
    /// No trusted key has signed the bundle.
    #[error("{origin}: {message}")]
    Untrusted { origin: String, message: String },
}

impl BundleError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn folder(path: &Path, message: impl Into<String>) -> Self {
        Self::Folder { path: path.to_owned(), message: message.into() }
    }
}

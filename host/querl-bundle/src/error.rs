//! Why a manifest, a bundle, a key or a lock file is not taken.

use std::path::{Path, PathBuf};

/// Why a manifest, a bundle, a key or a lock file is not taken.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A manifest or a lock file is wrong at one place.
    #[error("{origin}:{line}: {message}")]
    Text {
        /// Which file.
        origin: String,
        /// 1-based; where a key is missing, the section that lacks it.
        line: usize,
        /// Key, value and what was expected.
        message: String,
    },
    /// A file is not of the sort that is read, or a plugin's folder cannot be packed as it is.
    #[error("{}: {message}", path.display())]
    Folder {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, and the remedy.
        message: String,
    },
    /// An archive is damaged, was tampered with, or was not made by `querl plugin pack`.
    #[error("{origin}: {part}: {message}")]
    Archive {
        /// Which archive.
        origin: String,
        /// The entry, `compressed stream`, `tar stream` or `seal`.
        part: String,
        /// What was found.
        message: String,
    },
    /// A key's text or file.
    #[error("{origin}: {message}")]
    Key {
        /// Where the key was written.
        origin: String,
        /// What is wrong; never shows a private key.
        message: String,
    },
    /// Nobody who is trusted has signed the bundle.
    #[error("{origin}: {message}")]
    Untrusted {
        /// Which bundle.
        origin: String,
        /// Who has signed it, and who was expected.
        message: String,
    },
}

impl BundleError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn folder(path: &Path, message: impl Into<String>) -> Self {
        Self::Folder { path: path.to_owned(), message: message.into() }
    }
}

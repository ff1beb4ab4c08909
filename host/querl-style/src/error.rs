//! Errors that the user can mend.

/// A setting, a model or a file cannot be used; the message says which and why.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(String);

pub(crate) fn usage(error: impl std::fmt::Display) -> anyhow::Error {
    UsageError(error.to_string()).into()
}

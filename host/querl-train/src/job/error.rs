//! Why a job failed.

use crate::TrainError;
use querl_core::ports::EnvironmentError;
use querl_model::{ModelError, RanksError};
use serde::{Deserialize, Serialize};
use std::error::Error;

/// Kinds of failure; exit codes follow from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// Any other failure.
    Failed,
    /// Invalid settings or input, which the user can correct.
    Usage,
    /// A limit that the user set was reached.
    Limit,
    /// The stop flag was set; the state is saved.
    Interrupted,
    /// The device ran out of memory.
    OutOfMemory,
}

impl FailureKind {
    /// The kind of a trainer's error.
    pub fn of(error: &TrainError) -> Self {
        match error {
            TrainError::Interrupted { .. } => Self::Interrupted,
            TrainError::DropRate { .. } => Self::Limit,
            TrainError::Data(_) => Self::Usage,
            error if error.is_out_of_memory() => Self::OutOfMemory,
            TrainError::Model(error) => Self::of_model(error),
            _ => Self::Failed,
        }
    }

    /// The user can correct what a model's folder lacks or holds, but not a failed computation.
    pub fn of_model(error: &ModelError) -> Self {
        match error {
            ModelError::MissingFile { .. }
            | ModelError::UnsupportedArchitecture { .. }
            | ModelError::BadFile { .. }
            | ModelError::Lora(_)
            | ModelError::Shard(_) => Self::Usage,
            _ => Self::Failed,
        }
    }
}

/// An error as text, as it crosses the C interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
#[serde(deny_unknown_fields)]
pub struct Failure {
    /// Decides the exit code.
    pub kind: FailureKind,
    /// One sentence, causes included.
    pub message: String,
}

impl Failure {
    /// A failure of kind [`FailureKind::Failed`].
    pub fn failed(message: impl Into<String>) -> Self {
        Self { kind: FailureKind::Failed, message: message.into() }
    }

    pub(super) fn usage(message: impl Into<String>) -> Self {
        Self { kind: FailureKind::Usage, message: message.into() }
    }
}

/// Why a job failed.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The job itself.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The environment could not score.
    #[error(transparent)]
    Environment(EnvironmentError),
    /// The response callback failed.
    #[error(transparent)]
    Callback(#[from] CallbackError),
}

impl From<TrainError> for JobError {
    fn from(error: TrainError) -> Self {
        match error {
            TrainError::Environment(error) => Self::Environment(error),
            error => Failure { kind: FailureKind::of(&error), message: error_chain(&error) }.into(),
        }
    }
}

impl From<RanksError> for JobError {
    fn from(error: RanksError) -> Self {
        TrainError::from(error).into()
    }
}

impl From<ModelError> for JobError {
    fn from(error: ModelError) -> Self {
        TrainError::from(error).into()
    }
}

/// The response callback accepts no more responses; its message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CallbackError(pub String);

/// An error with its causes as one line; a cause that the line ends with already is not repeated.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut sentence = String::new();
    let mut next = Some(error);
    while let Some(cause) = next {
        let text = cause.to_string();
        if !sentence.ends_with(&text) {
            sentence = if sentence.is_empty() { text } else { format!("{sentence}: {text}") };
        }
        next = cause.source();
    }
    sentence
}

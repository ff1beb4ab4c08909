//! How a job ends other than well.

use querl_core::ports::EnvironmentError;
use querl_model::{ModelError, RanksError};
use querl_train::TrainError;
use serde::{Deserialize, Serialize};
use std::error::Error;

/// Ways to end other than well; the command line's exit codes follow from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// Something went wrong on the way.
    Failed,
    /// Wrong settings or input: the user can mend it.
    Usage,
    /// A limit that the user set was reached.
    Limit,
    /// Somebody said stop; what was done is kept.
    Interrupted,
    /// The device's memory did not suffice.
    OutOfMemory,
}

impl Ending {
    /// What a trainer's error stands for.
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

    /// What a model's folder lacks or holds is for the user to mend; a failed computation is not.
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

/// An error in words, as it crosses the border.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
#[serde(deny_unknown_fields)]
pub struct Failure {
    /// How the program ends by it.
    pub ending: Ending,
    /// One sentence, causes included.
    pub message: String,
}

impl Failure {
    /// Something went wrong on the way.
    pub fn failed(message: impl Into<String>) -> Self {
        Self { ending: Ending::Failed, message: message.into() }
    }
}

/// Why a job was not done.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The job itself.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// What the host said when it was asked for a score.
    #[error(transparent)]
    Environment(EnvironmentError),
    /// The host took no more answers.
    #[error(transparent)]
    Refused(#[from] Refused),
}

impl From<TrainError> for JobError {
    fn from(error: TrainError) -> Self {
        match error {
            TrainError::Environment(error) => Self::Environment(error),
            error => Failure { ending: Ending::of(&error), message: chain_of(&error) }.into(),
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

/// The host took no more answers; why, it knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// An error with its causes as one line; a cause that the line ends with already is not said twice.
pub fn chain_of(error: &(dyn Error + 'static)) -> String {
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

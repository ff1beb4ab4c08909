//! What can stop a training.

use querl_core::ports::EnvironmentError;
use querl_model::{ModelError, RanksError};
use std::path::PathBuf;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A computation.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    /// Ranks that train together do not go on.
    #[error(transparent)]
    Ranks(#[from] RanksError),
    /// Ranks that train together have come to different weights.
    #[error(
        "{stage} step {step}: the ranks have come to different weights; the newest checkpoint is from before, and this is a fault of the cards' sums or of querl, please report it"
    )]
    RanksDiffer {
        /// Which stage.
        stage: &'static str,
        /// Which step.
        step: u64,
    },
    /// The environment could not score a batch.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The data does not fit the settings.
    #[error("{0}")]
    Data(String),
    /// Too many episodes were dropped.
    #[error(
        "rl step {step}: {n_dropped} of {n_episodes} episodes were dropped, above rl.max_drop_rate {max_drop_rate}; most often: {reason}"
    )]
    DropRate {
        /// Which step.
        step: u64,
        /// Dropped.
        n_dropped: usize,
        /// Of so many.
        n_episodes: usize,
        /// The limit.
        max_drop_rate: f64,
        /// The commonest rejection.
        reason: String,
    },
    /// A loss or gradient is not finite.
    #[error("{stage} step {step}: {what} is not finite; lower the learning rate or look at the batch before")]
    NotFinite {
        /// Which stage.
        stage: &'static str,
        /// Which step.
        step: u64,
        /// What.
        what: &'static str,
    },
    /// Rollout and training do not compute the same log-probabilities: what would be learned is not what was done.
    #[error(
        "rl step {step}: log-probabilities of rollout and training differ by {difference:.1e} a token {measure}, expected at most {limit:.0e}; run with another model.dtype, and report it with the model's config.json"
    )]
    RolloutDiffers {
        /// Which step.
        step: u64,
        /// Over the sampled tokens.
        difference: f64,
        /// The limit.
        limit: f64,
        /// What of the differences it is: their mean or the largest, in words.
        measure: &'static str,
    },
    /// A thread of ours panicked.
    #[error("{what} stopped by itself: {message}; this is a fault of querl or of the environment, please report it")]
    Thread {
        /// What it did.
        what: String,
        /// What it said.
        message: String,
    },
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A checkpoint cannot be written.
    #[error(
        "{path}: cannot be written; earlier checkpoints are whole, and the same command goes on from the newest: {source}"
    )]
    Checkpoint {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The device's memory did not suffice.
    #[error("{stage} step {step}: the device has no memory left ({message}); {}", gone_on(*saved))]
    OutOfMemory {
        /// Which stage.
        stage: &'static str,
        /// Which step.
        step: u64,
        /// The step that a checkpoint now holds; `None` where the newest one from before is what there is.
        saved: Option<u64>,
        /// The device's words.
        message: String,
    },
    /// The user asked to stop; what was reached is in `last` and in a checkpoint.
    #[error("interrupted at {stage} step {step}; what was done is saved, and the same command goes on from there")]
    Interrupted {
        /// Which stage.
        stage: &'static str,
        /// Which step.
        step: u64,
    },
}

impl TrainError {
    /// Whether the device's memory did not suffice: for a tensor, a product's workspace, or the weights when they were loaded.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Tensor(error) | Self::Model(ModelError::Tensor(error)) => is_out_of_memory(error),
            // Of another rank, in its words.
            Self::Ranks(error) | Self::Model(ModelError::Ranks(error)) => is_out_of_memory(error),
            _ => false,
        }
    }
}

/// CUDA's errors reach candle as text: the driver's `CUDA_ERROR_OUT_OF_MEMORY`, cuBLAS's `CUBLAS_STATUS_ALLOC_FAILED`.
fn is_out_of_memory(error: &impl std::fmt::Display) -> bool {
    let text = error.to_string();
    ["ERROR_OUT_OF_MEMORY", "STATUS_ALLOC_FAILED"].iter().any(|words| text.contains(words))
}

fn gone_on(saved: Option<u64>) -> String {
    match saved {
        Some(step) => format!("what was done until step {step} is saved, and the same command goes on from there"),
        None => "the same command goes on from the newest checkpoint".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_ran_out_is_told_from_other_failures() {
        let of = |text: &str| TrainError::from(candle_core::Error::Msg(text.into())).is_out_of_memory();
        assert!(of("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")"));
        assert!(of("CublasError(CUBLAS_STATUS_ALLOC_FAILED)"));
        assert!(!of("DriverError(CUDA_ERROR_ILLEGAL_ADDRESS, \"an illegal memory access was encountered\")"));
        let message = candle_core::Error::Msg("CUDA_ERROR_OUT_OF_MEMORY".into());
        assert!(TrainError::from(ModelError::Tensor(message)).is_out_of_memory());
        let message = "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".into();
        assert!(TrainError::from(RanksError::Failed { rank: 1, message }).is_out_of_memory());
        assert!(!TrainError::Data("out of rows".into()).is_out_of_memory());
    }
}

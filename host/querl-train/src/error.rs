//! Errors of training.

use querl_core::ports::EnvironmentError;
use querl_model::{ModelError, RanksError};
use std::path::PathBuf;

/// Why a training stopped.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A computation.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    /// Another rank failed.
    #[error(transparent)]
    Ranks(#[from] RanksError),
    /// The weights of the ranks differ.
    #[error(
        "{stage} step {step}: the weights of the ranks differ; the newest checkpoint is from before that; internal error or faulty all-reduce of the GPUs, please report it"
    )]
    RanksDiffer {
        /// The stage, `sft`, `rl` or `rm`.
        stage: &'static str,
        /// The step.
        step: u64,
    },
    /// The environment could not score a batch.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// Data or settings are invalid.
    #[error("{0}")]
    Data(String),
    /// Too many episodes were dropped.
    #[error(
        "rl step {step}: {n_dropped} of {n_episodes} episodes were dropped, above rl.max_drop_rate {max_drop_rate}; most often: {reason}"
    )]
    DropRate {
        /// The step.
        step: u64,
        /// Episodes without a score.
        n_dropped: usize,
        /// Episodes of the batch.
        n_episodes: usize,
        /// The limit.
        max_drop_rate: f64,
        /// The commonest rejection.
        reason: String,
    },
    /// A loss or gradient is not finite.
    #[error("{stage} step {step}: {what} is not finite; lower the learning rate or look at the batch before")]
    NotFinite {
        /// The stage, `sft`, `rl` or `rm`.
        stage: &'static str,
        /// The step.
        step: u64,
        /// The quantity.
        what: &'static str,
    },
    /// Rollout and training compute different log-probabilities.
    #[error(
        "rl step {step}: log-probabilities of rollout and training differ by {difference:.1e} a token {measure}, expected at most {limit:.0e}; run with another model.dtype, and report it with the model's config.json"
    )]
    RolloutDiffers {
        /// The step.
        step: u64,
        /// Per token, in nats.
        difference: f64,
        /// The limit.
        limit: f64,
        /// `on average` or `at worst`.
        measure: &'static str,
    },
    /// A thread panicked.
    #[error("{what} panicked: {message}; internal error of querl or of the environment, please report it")]
    Thread {
        /// The thread's task.
        what: String,
        /// The panic message.
        message: String,
    },
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A checkpoint cannot be written.
    #[error(
        "{path}: cannot be written; earlier checkpoints are complete; run the same command again to resume: {source}"
    )]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The device ran out of memory.
    #[error("{stage} step {step}: out of device memory ({message}); {}", resume_hint(*saved))]
    OutOfMemory {
        /// The stage, `sft`, `rl` or `rm`.
        stage: &'static str,
        /// The step.
        step: u64,
        /// The step of the checkpoint that was written; `None` if none could be, and an older one remains.
        saved: Option<u64>,
        /// The device's message.
        message: String,
    },
    /// The stop flag was set; the state is saved in `last` and in a checkpoint.
    #[error("interrupted at {stage} step {step}; the state is saved; run the same command again to resume")]
    Interrupted {
        /// The stage, `sft`, `rl` or `rm`.
        stage: &'static str,
        /// The step.
        step: u64,
    },
}

impl TrainError {
    /// Whether the device ran out of memory: for a tensor, a workspace of a matrix product, or the weights while loading.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Tensor(error) | Self::Model(ModelError::Tensor(error)) => is_out_of_memory(error),
            // Of another rank, as text.
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

fn resume_hint(saved: Option<u64>) -> String {
    match saved {
        Some(step) => format!("step {step} is saved; run the same command again to resume"),
        None => "run the same command again to resume from the newest checkpoint".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_is_distinguished_from_other_failures() {
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

//! Errors of training.

use querl_core::fsx::io_problem;
use querl_core::ports::EnvironmentError;
use querl_model::{ModelError, RanksError};
use std::path::PathBuf;

/// Why a training stopped. `stage` is `sft`, `rl` or `rm`.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // documented by the messages
pub enum TrainError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    #[error(transparent)]
    Ranks(#[from] RanksError),
    #[error(
        "{stage} step {step}: the weights of the ranks differ; the newest checkpoint is from before that; internal error or faulty all-reduce of the GPUs, please report it"
    )]
    RanksDiffer { stage: &'static str, step: u64 },
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    #[error("{0}")]
    Data(String),
    /// The text says which episode log differs from what it was at the newest checkpoint, and how.
    #[error("{0}; no earlier checkpoint fits it; run the stage again with `--from rl`")]
    EpisodeLog(String),
    #[error(
        "rl step {step}: {n_dropped} of {n_episodes} episodes were dropped, above rl.max_drop_rate {max_drop_rate}; most often: {reason}{last}"
    )]
    DropRate {
        step: u64,
        n_dropped: usize,
        n_episodes: usize,
        max_drop_rate: f64,
        /// The most frequent rejection code.
        reason: String,
        /// The last rejection with this code, as a clause; empty if it has no detail.
        last: String,
    },
    #[error("{stage} step {step}: {what} is not finite; lower the learning rate or look at the batch before")]
    NotFinite { stage: &'static str, step: u64, what: &'static str },
    #[error(
        "rl step {step}: log-probabilities of rollout and training differ by {difference:.1e} a token {measure}, expected at most {limit:.0e}; run with another model.dtype, and report it with the model's config.json"
    )]
    RolloutDiffers {
        step: u64,
        /// Difference of the log-probabilities per token, in nats.
        difference: f64,
        limit: f64,
        measure: &'static str,
    },
    #[error(
        "rl step {step}: the KL of the rollout server's log-probabilities to those of the training pass is {kl:.3} a token, above rollout.max_mismatch_kl {max_mismatch_kl}; let the server report those of the sampling distribution (vLLM: --logprobs-mode processed_logprobs), and serve the model that is trained"
    )]
    Mismatch {
        step: u64,
        /// KL (k3 estimate), in nats per token.
        kl: f64,
        max_mismatch_kl: f64,
    },
    #[error("{what} panicked: {message}; internal error of querl or of the environment, please report it")]
    Thread { what: String, message: String },
    #[error("{}: {}", path.display(), io_problem(source))]
    Io { path: PathBuf, source: std::io::Error },
    #[error(
        "{}: cannot be written; earlier checkpoints are complete; run the same command again to resume: {}",
        path.display(),
        io_problem(source)
    )]
    Checkpoint { path: PathBuf, source: std::io::Error },
    #[error("{stage} step {step}: out of device memory ({message}); {}", resume_hint(*saved))]
    OutOfMemory {
        stage: &'static str,
        step: u64,
        /// Step of the checkpoint that was written; `None` if none could be written, and an older checkpoint remains.
        saved: Option<u64>,
        message: String,
    },
    #[error("interrupted at {stage} step {step}; the state is saved; run the same command again to resume")]
    Interrupted { stage: &'static str, step: u64 },
}

impl TrainError {
    /// Whether the device ran out of memory: for a tensor, a workspace of a matrix product, or the weights while loading.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Tensor(error) | Self::Model(ModelError::Tensor(error)) => is_out_of_memory(error),
            // Errors of other ranks arrive as text.
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

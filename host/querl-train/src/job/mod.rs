//! Jobs: fine-tuning, reinforcement learning and generation with models that are loaded from folders.
//!
//! A stage fills an [`SftJob`], [`RlJob`] or [`GenerateJob`] and hands it to [`run_sft`], [`run_rl`] or [`run_generate`] with
//! [`Callbacks`] and, for scores, [`Environments`]. On the CPU that is an ordinary call in the program.
//!
//! A GPU job runs in the library `libquerl_cuda`, since a program that links CUDA does not start on a machine without its driver:
//! [`Library`] has the same three functions, serialises the job, and answers the library's callbacks over the C interface of
//! [`interface`]. Only that path wraps callbacks and environments.

mod error;
pub mod interface;
mod library;
pub mod memory_plan;
mod run;

pub use error::{CallbackError, Failure, FailureKind, JobError, error_chain};
pub use library::{Library, LibraryError};
pub use run::{lora_settings, run_generate, run_rl, run_sft};

use crate::{Example, MetricSink, Metrics};
use querl_core::config::{ModelConfig, RlConfig, SftConfig};
use querl_core::ports::{Environment, Progress};
use querl_core::records::Message;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// What one rank of a job computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The CPU.
    Cpu,
    /// A GPU by its index in the driver's order.
    Cuda(usize),
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// What a job runs on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resources {
    /// One rank per device, at least one. Several ranks may share the CPU.
    pub devices: Vec<Device>,
    /// CPU threads; 0: all cores. Only the first job of a process sets it.
    pub threads: usize,
}

/// Supervised fine-tuning of `model`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SftJob {
    /// The base model.
    pub model: ModelConfig,
    /// Seeds new adapters, the order of the data and dropout.
    pub seed: u64,
    /// Hyperparameters.
    pub config: SftConfig,
    /// The training split.
    pub train: Vec<Example>,
    /// The validation split, which decides which checkpoint is best; may be empty.
    pub val: Vec<Example>,
    /// Digest of everything that the result depends on; `None`: no checkpoints to resume from are written.
    pub fingerprint: Option<String>,
    /// Where `best`, `last` and `state` are written.
    pub output_dir: PathBuf,
}

/// Reinforcement learning on the frozen base `model`, scored by [`Environments`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RlJob {
    /// The base model.
    pub model: ModelConfig,
    /// Seeds new adapters, the order of the data and the sampling.
    pub seed: u64,
    /// Hyperparameters.
    pub config: RlConfig,
    /// The shape of new adapters.
    pub lora: SftConfig,
    /// Start of the policy, and the reference; `None`: a new adapter, and the bare base as the reference.
    pub adapter: Option<PathBuf>,
    /// Prompt tokens of the training split, by row.
    pub train_prompts: Vec<Vec<u32>>,
    /// Prompt tokens of the validation split, by row.
    pub val_prompts: Vec<Vec<u32>>,
    /// As [`SftJob::fingerprint`].
    pub fingerprint: Option<String>,
    /// Where `best`, `last` and `state` are written.
    pub output_dir: PathBuf,
}

/// Greedy or beam-search responses of `model`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenerateJob {
    /// The base model.
    pub model: ModelConfig,
    /// `None`: the bare base.
    pub adapter: Option<PathBuf>,
    /// One conversation per response.
    pub prompts: Vec<Vec<Message>>,
    /// 1: greedy.
    pub n_beams: usize,
    /// Limits and stop strings, as in training.
    pub limits: RlConfig,
    /// Responses per call of the response callback.
    pub batch_size: usize,
}

/// One response and its latency.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GeneratedResponse {
    /// Decoded up to a stop string, without special tokens.
    pub text: String,
    /// Tokens generated, end of sequence included.
    pub n_tokens: u32,
    /// Reached the token limit.
    pub truncated: bool,
    /// Wall-clock time of the response, in milliseconds; `None` where other ranks used the same CPU meanwhile.
    pub latency_ms: Option<f64>,
}

/// What a job calls while it runs. Calls come from several threads.
#[derive(Clone, Copy)]
pub struct Callbacks<'a> {
    /// Where progress is shown.
    pub progress: &'a dyn Progress,
    /// Where metrics are recorded; [`NoMetrics`] for generation.
    pub metrics: &'a Mutex<dyn MetricSink + Send + 'a>,
    /// Set to stop at the next safe point; never cleared.
    pub stop: &'a AtomicBool,
}

/// What scores the responses of an [`RlJob`].
#[derive(Clone, Copy)]
pub struct Environments<'a> {
    /// Opened with the rows of the training split.
    pub train: &'a dyn Environment,
    /// Opened with the rows of the validation split.
    pub val: &'a dyn Environment,
}

/// Receives the next responses of a generation, in the order of the prompts.
pub type ResponseCallback<'a> = dyn FnMut(Vec<GeneratedResponse>) -> Result<(), CallbackError> + Send + 'a;

/// Discards metrics.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoMetrics;

impl MetricSink for NoMetrics {
    fn record(&mut self, _: &str, _: u64, _: &Metrics) -> io::Result<()> {
        Ok(())
    }

    fn mark(&mut self) -> io::Result<u64> {
        Ok(0)
    }

    fn rewind(&mut self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

//! Jobs: fine-tuning, reinforcement learning and generation with models that are loaded from folders.
//!
//! A stage fills an [`SftJob`], [`RlJob`] or [`GenerateJob`] and hands it to [`run_sft`], [`run_rl`] or [`run_generate`] with
//! [`Callbacks`] and, for scores, [`Environments`]. On the CPU that is an ordinary call in the program.
//!
//! A GPU job runs in the library `libquerl_cuda`, since a program that links CUDA does not start on a machine without its driver:
//! [`Library`] has the same three functions, serialises the job, and answers the library's callbacks over the C interface of
//! [`interface`]. Only that path wraps callbacks and environments.

pub mod interface;
mod library;
pub mod memory_plan;
mod run;

pub use library::{Library, LibraryError};
pub use run::{lora_settings, run_generate, run_rl, run_sft};

use crate::{Example, MetricSink, Metrics, TrainError};
use querl_core::config::{ModelConfig, RlConfig, SftConfig};
use querl_core::fsx::is_input_error;
use querl_core::ports::{Environment, EnvironmentError, LogMark, Progress, RolloutEngine};
use querl_core::records::{Message, Rejection};
use querl_model::{ModelError, RanksError};
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard};

/// Device of one rank of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The CPU.
    Cpu,
    /// A GPU, by its index in the order of the CUDA driver.
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

/// Devices and CPU threads of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resources {
    /// One rank per device, at least one. Several ranks may share the CPU.
    pub devices: Vec<Device>,
    /// Number of CPU threads, 0 for all cores; only the first job of a process sets it.
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
    /// Folder in which `best`, `last` and `state` are written.
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
    /// LoRA settings of new adapters (policy without `adapter`, critic).
    pub lora: SftConfig,
    /// Folder of the adapter that the policy starts from and that is the reference; `None`: the policy is a new adapter, and the reference
    /// is the base without adapter.
    pub adapter: Option<PathBuf>,
    /// Token ids of the prompts of the training split, one list per row.
    pub train_prompts: Vec<Vec<u32>>,
    /// Token ids of the prompts of the validation split, one list per row.
    pub val_prompts: Vec<Vec<u32>>,
    /// `Some`: [`Environments::rollouts`] generates the responses, and this is the maximum KL of its log-probabilities, as
    /// [`ServerRollouts::max_mismatch_kl`](crate::rl::ServerRollouts::max_mismatch_kl). `None`: the job generates the responses.
    pub max_mismatch_kl: Option<f64>,
    /// Digest of everything that the result depends on; `None`: no checkpoints to resume from are written.
    pub fingerprint: Option<String>,
    /// Step after which the job saves its state and stops, as if the stop flag were set; `None`: the job takes all steps.
    pub stop_after: Option<u64>,
    /// Folder in which `best`, `last` and `state` are written.
    pub output_dir: PathBuf,
}

/// Generation of responses with `model`: greedy, by beam search, or sampled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenerateJob {
    /// The base model.
    pub model: ModelConfig,
    /// Folder of the adapter; `None`: the base without adapter.
    pub adapter: Option<PathBuf>,
    /// The conversations to respond to.
    pub prompts: Vec<Vec<Message>>,
    /// Beam width of beam search; 1 is greedy decoding.
    pub n_beams: usize,
    /// Settings of sampling several responses per prompt; `None`: one response by greedy decoding or beam search.
    pub samples: Option<SampleSettings>,
    /// Token limit and stop strings, as in training; for sampling also temperature, `top_k` and `top_p`.
    pub limits: RlConfig,
    /// Prompts per call of the response callback.
    pub batch_size: usize,
}

impl GenerateJob {
    /// Number of responses per prompt.
    pub fn n_per_prompt(&self) -> usize {
        self.samples.map_or(1, |samples| samples.n_per_prompt)
    }
}

/// Sampling of several responses per prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SampleSettings {
    /// Responses per prompt, at least 1.
    pub n_per_prompt: usize,
    /// Seed of the random numbers; each prompt has its own stream.
    pub seed: u64,
}

/// One response and its latency.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GeneratedResponse {
    /// The decoded response up to a stop string, without special tokens.
    pub text: String,
    /// Number of generated tokens, including the end-of-sequence token.
    pub n_tokens: u32,
    /// Whether the response ended at the token limit.
    pub truncated: bool,
    /// Wall-clock time to generate all responses to the prompt, in milliseconds; `None` if other ranks used the same CPU at the same time.
    pub latency_ms: Option<f64>,
    /// Mean log-probability of the response's tokens in nats, at the temperature of [`GenerateJob::limits`]; `None` for no tokens.
    pub mean_logprob: Option<f64>,
}

/// Callbacks of a job: progress, metrics and the stop flag. Called from several threads.
#[derive(Clone, Copy)]
pub struct Callbacks<'a> {
    /// Where progress is shown.
    pub progress: &'a dyn Progress,
    /// Where metrics are recorded; [`NoMetrics`] for generation.
    pub metrics: &'a Mutex<dyn MetricSink + Send + 'a>,
    /// Stop flag: the job stops at the next safe point once it is set. It is never cleared.
    pub stop: &'a AtomicBool,
}

/// Environments that score the responses of an [`RlJob`], and the engine that generates them if the job does not.
#[derive(Clone, Copy)]
pub struct Environments<'a> {
    /// Environment of the training split, opened with its rows.
    pub train: &'a dyn Environment,
    /// Environment of the validation split, opened with its rows.
    pub val: &'a dyn Environment,
    /// Rollout engine of a job with [`RlJob::max_mismatch_kl`]; `None` for other jobs.
    pub rollouts: Option<&'a dyn RolloutEngine>,
}

/// Callback that receives the next batch of generated responses, in the order of the prompts; the samples of a prompt are adjacent.
pub type ResponseCallback<'a> = dyn FnMut(Vec<GeneratedResponse>) -> Result<(), CallbackError> + Send + 'a;

/// Discards metrics.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoMetrics;

impl MetricSink for NoMetrics {
    fn record(&mut self, _: &str, _: u64, _: &Metrics) -> io::Result<()> {
        Ok(())
    }

    fn mark(&mut self) -> io::Result<LogMark> {
        Ok(LogMark::default())
    }

    fn rewind(&mut self, _: LogMark) -> io::Result<Option<String>> {
        Ok(None)
    }
}

/// Kinds of failure, which determine the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// Any other failure.
    Failed,
    /// Invalid settings or input, which the user can correct.
    Usage,
    /// A limit that the user set was reached.
    Limit,
    /// The limit of episodes without a score was reached, and most of these lack the teacher's rewrite.
    MissingBaselines,
    /// The stop flag was set; the state is saved.
    Interrupted,
    /// The device ran out of memory.
    OutOfMemory,
}

impl FailureKind {
    /// The failure kind of a training error.
    pub fn of(error: &TrainError) -> Self {
        match error {
            TrainError::Interrupted { .. } => Self::Interrupted,
            TrainError::DropRate { reason, .. } if reason == Rejection::BASELINE_MISSING => Self::MissingBaselines,
            TrainError::DropRate { .. } | TrainError::Mismatch { .. } => Self::Limit,
            TrainError::Data(_) | TrainError::EpisodeLog(_) => Self::Usage,
            error if error.is_out_of_memory() => Self::OutOfMemory,
            TrainError::Model(error) => Self::of_model(error),
            _ => Self::Failed,
        }
    }

    /// The failure kind of a model error: [`FailureKind::Usage`] for the content of a model folder, which the user can correct.
    pub fn of_model(error: &ModelError) -> Self {
        match error {
            ModelError::MissingFile { .. }
            | ModelError::UnsupportedArchitecture { .. }
            | ModelError::BadFile { .. }
            | ModelError::Template(_)
            | ModelError::Lora(_)
            | ModelError::SlidingWindow
            | ModelError::Shard(_) => Self::Usage,
            ModelError::Io { source, .. } if is_input_error(source) => Self::Usage,
            _ => Self::Failed,
        }
    }
}

/// A job's error as kind and text, the form in which it crosses the C interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
#[serde(deny_unknown_fields)]
pub struct Failure {
    /// Kind of the failure, which determines the exit code.
    pub kind: FailureKind,
    /// Error message with its causes, on one line.
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

/// Error of the response callback, which ends the generation; the text is the callback's message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CallbackError(pub String);

/// Formats an error and its causes as one line; a cause that the line already ends with is not repeated.
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

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

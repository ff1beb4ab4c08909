//! What a job is, and what comes of it.

use crate::{Device, Measured, Measuring};
use querl_core::config::{ModelConfig, RlConfig, SftConfig};
use querl_core::records::Message;
use querl_train::Example;
use querl_train::rl::RlSummary;
use querl_train::sft::SftSummary;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// One training, or one model's answers to some prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Who does it: a rank on each, at least one. Several ranks of the processor share it.
    pub devices: Vec<Device>,
    /// Threads of the processor; 0 takes all cores. Only the first job of a process decides.
    pub threads: usize,
    /// The base, its storage, and how passes are cut.
    pub model: ModelConfig,
    /// Seeds new adapters, the order of the data and the sampling.
    pub seed: u64,
    /// What is done.
    pub work: Work,
}

/// What is done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Supervised fine-tuning.
    Sft(Fitting),
    /// Reinforcement learning; the host scores.
    Rl(Box<Reinforcing>),
    /// Answers, one after another.
    Generate(Generating),
    /// Figures of a random model.
    Measure(Box<Measuring>),
}

/// A fine-tuning: `model.path` is what is learned on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fitting {
    /// Hyperparameters.
    pub config: SftConfig,
    /// What is learned.
    pub train: Vec<Example>,
    /// What decides which checkpoint is best; may be empty.
    pub val: Vec<Example>,
    /// Stands for everything that the result depends on; `None` keeps no checkpoints to go on from.
    pub fingerprint: Option<String>,
    /// Where `best`, `last` and `state` are written.
    pub output_dir: PathBuf,
}

/// An optimisation against the host's scores: `model.path` is the frozen base.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reinforcing {
    /// Hyperparameters.
    pub config: RlConfig,
    /// The shape of new adapters.
    pub lora: SftConfig,
    /// The policy's first adapter, and the reference; `None` begins with a new one beside the bare base.
    pub adapter: Option<PathBuf>,
    /// Prompt tokens of the training split, by row.
    pub train_prompts: Vec<Vec<u32>>,
    /// Prompt tokens of the validation split, by row.
    pub val_prompts: Vec<Vec<u32>>,
    /// As [`Fitting::fingerprint`].
    pub fingerprint: Option<String>,
    /// Where `best`, `last` and `state` are written.
    pub output_dir: PathBuf,
}

/// A model's best answers: it draws nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Generating {
    /// The adapter; `None` is the bare base.
    pub adapter: Option<PathBuf>,
    /// One conversation per answer.
    pub prompts: Vec<Vec<Message>>,
    /// 1 is greedy.
    pub n_beams: usize,
    /// Limits and stop strings, as in training.
    pub limits: RlConfig,
    /// Answers that are handed to the host at once.
    pub n_at_once: usize,
}

/// One answer and the time it took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answered {
    /// As decoded, up to a stop string, special tokens left out.
    pub text: String,
    /// Tokens generated, end of sequence included.
    pub n_tokens: u32,
    /// True where the token limit cut it off.
    pub truncated: bool,
    /// Wall-clock time to write it, in milliseconds; `None` where others of the processor's ranks wrote at the same time, so that it
    /// is no time that a user would wait.
    pub latency_ms: Option<f64>,
}

/// What came of a job that was done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Of a fine-tuning.
    Sft(SftSummary),
    /// Of an optimisation.
    Rl(RlSummary),
    /// All answers were handed to the host.
    Generated,
    /// Of a measurement.
    Measured(Box<Measured>),
}

//! Models and trainers, wired into the stages that train and generate.

mod generator;
mod host;
mod measuring;
mod memory;
mod rl;
mod sft;

#[cfg(test)]
pub use generator::Each;
pub use generator::{Generation, Generator, answer, generator};
pub use measuring::{fit, measure};
pub use memory::of_config as memory_of_config;
pub use rl::{RlData, rl};
pub use sft::sft;

use crate::failure::Stop;
use crate::lengths::{self, Limit, RowLength};
use crate::run::Run;
use crate::stages::facts::Facts;
use querl_core::config::{Config, ModelConfig, TuningMethod};
use querl_core::records::{DatasetRow, Split};
use querl_device::{Device, Job, JobError, Work};
use querl_model::{DecoderConfig, ModelError, Shard, TextTokenizer};
use querl_train::{BEST, STATE};
use std::path::{Path, PathBuf};

/// Where a training stage keeps the checkpoint that later stages use.
pub fn best(stage_folder: &Path) -> PathBuf {
    stage_folder.join(BEST)
}

/// Where a training stage keeps what it goes on from when it was stopped.
pub fn state(stage_folder: &Path) -> PathBuf {
    stage_folder.join(STATE)
}

/// Everything about the model's folder that can be wrong, found before any stage runs.
///
/// # Errors
/// A file is missing or damaged, or the architecture is not supported.
pub fn preflight(config: &Config) -> anyhow::Result<()> {
    let path = &config.model.path;
    let tokenizer = TextTokenizer::load(path).map_err(|error| Stop::usage(error.to_string()))?;
    querl_model::check_directory(path).map_err(|error| Stop::usage(error.to_string()))?;
    let shapes = DecoderConfig::load(&path.join("config.json"))?;
    Shard::check(config.model.tensor_parallel, &shapes, config.model.dtype)
        .map_err(|error| Stop::usage(error.to_string()))?;
    let (n_tokens, vocab_size) = (tokenizer.vocab_size(), shapes.vocab_size);
    if n_tokens > vocab_size {
        let message = format!(
            "{}: the tokenizer has {n_tokens} tokens and config.json a vocab_size of {vocab_size}; they belong to different models",
            path.display()
        );
        return Err(Stop::usage(message).into());
    }
    Ok(())
}

/// Looks whether the prompts of a split leave a model room for its answers.
///
/// # Errors
/// One does not, or the model's folder cannot be read.
pub fn check_prompts(run: &Run, split: Split, rows: &[DatasetRow]) -> anyhow::Result<()> {
    let tokenizer = TextTokenizer::load(&run.config.model.path)?;
    let prompts = prompts(rows, &tokenizer)?;
    let n_positions = DecoderConfig::load(&run.config.model.path.join("config.json"))?.max_positions;
    let answer = run.config.rl.max_new_tokens;
    let lengths = prompts.iter().map(|prompt| RowLength { prompt: prompt.len(), answer });
    Ok(lengths::check(split, rows.iter().zip(lengths), &[Limit::Written(n_positions)])?)
}

/// Uses `threads` threads for models; 0 takes all cores.
pub fn set_threads(threads: usize) {
    querl_model::set_threads(threads);
}

/// The folders that make up a trained model.
struct Base {
    model: PathBuf,
    adapter: Option<PathBuf>,
}

impl Base {
    /// A checkpoint is an adapter, whose base is the configured model or what full fine-tuning made of it, or a whole model.
    fn of(run: &Run, checkpoint: &Path) -> Self {
        let model = match run.config.sft.method {
            TuningMethod::Lora => run.config.model.path.clone(),
            TuningMethod::Full => best(&run.dir.sft()),
        };
        let is_adapter = checkpoint.join("adapter_config.json").is_file();
        Self { model, adapter: is_adapter.then(|| checkpoint.to_owned()) }
    }
}

/// A job of this run on the base at `model`.
fn job(run: &Run, model: PathBuf, work: Work) -> Job {
    let config = &run.config;
    Job {
        devices: run.place.devices(),
        threads: config.threads,
        model: ModelConfig { path: model, ..config.model.clone() },
        seed: config.seed,
        work,
    }
}

/// Names the cards in what a stage found; that the processor did it goes without saying.
fn add_device(facts: &mut Facts, run: &Run) {
    if run.place.devices() != [Device::Cpu] {
        facts.add("device", run.place.name());
    }
}

fn prompts(rows: &[DatasetRow], tokenizer: &TextTokenizer) -> Result<Vec<Vec<u32>>, ModelError> {
    rows.iter().map(|row| tokenizer.encode_prompt(row.prompt())).collect()
}

/// A job's error with the exit code it stands for.
pub(crate) fn ending(error: JobError) -> anyhow::Error {
    match error {
        JobError::Environment(error) => error.into(),
        JobError::Failed(failure) => Stop::of(failure).into(),
        JobError::Refused(refused) => refused.into(),
    }
}

/// What a job of one kind never returns.
fn other_outcome() -> anyhow::Error {
    anyhow::anyhow!("the job ended as one of another kind; this is a fault of querl, please report it")
}

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

use crate::ledger::Facts;
use crate::lengths::{self, Limit, RowLength};
use crate::run::Run;
use querl_core::config::{ModelConfig, TuningMethod};
use querl_core::records::{DatasetRow, Split};
use querl_device::{Device, Job, Work};
use querl_model::{DecoderConfig, ModelError, TextTokenizer};
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

/// What a job of one kind never returns.
fn other_outcome() -> anyhow::Error {
    anyhow::anyhow!("the job ended as one of another kind; this is a fault of querl, please report it")
}

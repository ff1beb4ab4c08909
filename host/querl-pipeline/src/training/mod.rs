//! What the training and evaluation stages share: model checks, prompts, memory, generation with a trained model.

mod generator;
pub mod memory;

#[cfg(test)]
pub use generator::Each;
pub use generator::{Generation, Generator, generate, generator};
pub use memory::of_config as memory_of_config;

use crate::ledger::Facts;
use crate::lengths::{self, Limit, RowLength};
use crate::run::Run;
use querl_core::config::{Config, ModelConfig, TuningMethod};
use querl_core::records::{DatasetRow, Split};
use querl_model::{DecoderConfig, ModelError, TextTokenizer};
use querl_train::job::Device;
use querl_train::{BEST, STATE};
use std::path::{Path, PathBuf};

/// The checkpoint of a training stage that later stages use.
pub fn best(stage_folder: &Path) -> PathBuf {
    stage_folder.join(BEST)
}

/// Where a training stage keeps its checkpoints to resume from.
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

/// The folders of a trained model.
pub struct Base {
    /// The base model.
    pub model: PathBuf,
    /// The adapter, if it is not a full model.
    pub adapter: Option<PathBuf>,
}

impl Base {
    /// A checkpoint is an adapter, whose base is the configured model or what full fine-tuning made of it, or a whole model.
    pub fn of(run: &Run, checkpoint: &Path) -> Self {
        let model = match run.config.sft.method {
            TuningMethod::Lora => run.config.model.path.clone(),
            TuningMethod::Full => best(&run.dir.sft()),
        };
        let is_adapter = checkpoint.join("adapter_config.json").is_file();
        Self { model, adapter: is_adapter.then(|| checkpoint.to_owned()) }
    }

    /// The model section of a job on this base.
    pub fn model_config(&self, config: &Config) -> ModelConfig {
        ModelConfig { path: self.model.clone(), ..config.model.clone() }
    }
}

/// Adds the device to a stage's facts, unless it is one rank on the CPU.
pub fn add_device(facts: &mut Facts, run: &Run) {
    if run.executor.devices() != [Device::Cpu] {
        facts.add("device", run.executor.name());
    }
}

/// Prompt tokens by row.
///
/// # Errors
/// The chat template fails.
pub fn prompts(rows: &[DatasetRow], tokenizer: &TextTokenizer) -> Result<Vec<Vec<u32>>, ModelError> {
    rows.iter().map(|row| tokenizer.encode_prompt(row.prompt())).collect()
}

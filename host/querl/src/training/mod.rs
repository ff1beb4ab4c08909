//! Models and trainers, wired into the stages that train and generate.

mod generator;
mod rl;
mod sft;

pub use generator::{Generation, Generator, generator};
pub use rl::{RlData, rl};
pub use sft::sft;

use crate::failure::Stop;
use crate::lengths::{self, Limit, RowLength};
use crate::metrics_log::MetricsLog;
use crate::run::Run;
use querl_core::config::{Config, TuningMethod};
use querl_core::records::{DatasetRow, Split};
use querl_model::{DecoderConfig, LoraSettings, ModelError, Modules, TextTokenizer};
use querl_train::{BEST, MetricSink, Metrics, STATE, TrainError};
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
    let (n_tokens, vocab_size) = (tokenizer.vocab_size(), DecoderConfig::load(&path.join("config.json"))?.vocab_size);
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

/// The shape of new adapters: the policy's, and the critic's beside it.
fn lora(config: &Config) -> LoraSettings {
    let sft = &config.sft;
    LoraSettings {
        use_rslora: sft.use_rslora,
        use_dora: sft.use_dora,
        dropout: sft.lora_dropout,
        target_modules: Modules::from_names(&sft.lora_target_modules),
        ..LoraSettings::all_linear(sft.lora_rank, sft.lora_alpha)
    }
}

fn prompts(rows: &[DatasetRow], tokenizer: &TextTokenizer) -> Result<Vec<Vec<u32>>, ModelError> {
    rows.iter().map(|row| tokenizer.encode_prompt(row.prompt())).collect()
}

/// A trainer's error with the exit code it stands for.
pub(crate) fn ending(error: TrainError) -> anyhow::Error {
    let text = error.to_string();
    match error {
        TrainError::Interrupted { .. } => Stop::interrupted(text).into(),
        TrainError::DropRate { .. } => Stop::limit(text).into(),
        TrainError::Data(_) => Stop::usage(text).into(),
        TrainError::Environment(error) => error.into(),
        TrainError::Model(error) => error.into(),
        error => error.into(),
    }
}

/// Hands the trainers' metrics to `metrics.jsonl`.
pub(crate) struct Sink(pub(crate) MetricsLog);

impl MetricSink for Sink {
    fn record(&mut self, _stage: &str, step: u64, metrics: &Metrics) -> std::io::Result<()> {
        self.0.append(step, metrics)
    }

    fn mark(&mut self) -> std::io::Result<u64> {
        self.0.mark()
    }

    fn rewind(&mut self, mark: u64) -> std::io::Result<()> {
        self.0.rewind(mark)
    }
}

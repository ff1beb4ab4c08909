//! Models and trainers, wired into the stages that train and generate.

use crate::failure::Stop;
use crate::interrupt;
use crate::lengths::{self, Limit, RowLength};
use crate::metrics_log::MetricsLog;
use crate::run::Run;
use crate::stages::facts::Facts;
use querl_core::config::{Config, TuningMethod};
use querl_core::ports::{Environment, PolicyResponse, Progress};
use querl_core::records::{DatasetRow, Split};
use querl_model::{
    Decoder, DecoderConfig, Decoding, GenerationRequest, LoraAdapter, LoraSettings, ModelError, TextTokenizer, Weights,
    generate,
};
use querl_train::rl::{self, RlTask};
use querl_train::sft::{self, SftTask};
use querl_train::{BEST, Example, MetricSink, Metrics, Policy, TrainError};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// One answer of a model and the time it took.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The answer.
    pub response: PolicyResponse,
    /// Wall-clock time to write it, in milliseconds.
    pub latency_ms: f64,
}

/// A model that answers greedily.
pub trait Generator {
    /// One answer per row, in order.
    ///
    /// # Errors
    /// The model cannot compute.
    fn generate(&self, rows: &[DatasetRow]) -> anyhow::Result<Vec<Generation>>;
}

/// What reinforcement learning learns from and is chosen by.
pub struct RlData<'a> {
    /// Rows of the training split.
    pub train: &'a [DatasetRow],
    /// Scores answers to them.
    pub train_environment: &'a dyn Environment,
    /// Rows of the validation split.
    pub val: &'a [DatasetRow],
    /// Scores answers to them.
    pub val_environment: &'a dyn Environment,
}

/// Where a training stage keeps the checkpoint that later stages use.
pub fn best(stage_folder: &Path) -> PathBuf {
    stage_folder.join(BEST)
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

/// Looks whether the rows to learn from fit `sft.max_length` and the model.
fn check_examples(split: Split, rows: &[DatasetRow], examples: &[Example], limits: &[Limit]) -> Result<(), Stop> {
    let answered = rows.iter().filter(|row| row.target().is_some());
    let lengths = examples.iter().map(|row| RowLength { prompt: row.prompt.len(), answer: row.response.len() });
    lengths::check(split, answered.zip(lengths), limits)
}

/// Uses `threads` threads for models; 0 takes all cores.
pub fn set_threads(threads: usize) {
    querl_model::set_threads(threads);
}

/// Fine-tunes on the rows that have an answer.
///
/// # Errors
/// The model cannot be loaded or trained, or the user said stop.
pub fn sft(
    run: &Run,
    train: &[DatasetRow],
    val: &[DatasetRow],
    metrics: MetricsLog,
    progress: &dyn Progress,
) -> anyhow::Result<Facts> {
    let config = &run.config;
    let tokenizer = TextTokenizer::load(&config.model.path)?;
    let weights = match config.sft.method {
        TuningMethod::Lora => Weights::Frozen,
        TuningMethod::Full => Weights::Trained,
    };
    let decoder = Decoder::load(&config.model.path, weights)?;
    let adapter = match config.sft.method {
        TuningMethod::Lora => Some(LoraAdapter::new(&decoder, lora(config), config.seed)?),
        TuningMethod::Full => None,
    };
    let (train_rows, val_rows) = (train, val);
    let (train, val) = (examples(train_rows, &tokenizer)?, examples(val_rows, &tokenizer)?);
    let limits = [Limit::SftMaxLength(config.sft.max_length), Limit::Learned(decoder.config().max_positions)];
    check_examples(Split::Train, train_rows, &train, &limits)?;
    check_examples(Split::Val, val_rows, &val, &limits)?;
    let task = SftTask {
        policy: Policy { decoder: &decoder, adapter: adapter.as_ref() },
        base_path: &config.model.path,
        train: &train,
        val: &val,
        config: &config.sft,
        seed: config.seed,
        output_dir: &run.dir.sft(),
        progress,
        stop: interrupt::flag(),
    };
    let summary = sft::train(&task, &mut Sink(metrics)).map_err(ending)?;
    let mut facts = Facts::default();
    facts.add("rows", train.len()).add("steps", summary.n_steps).add("answer tokens", summary.n_tokens);
    facts.add("train loss", summary.train_loss).add("eval loss", summary.best_val_loss);
    facts.add("best step", summary.best_step);
    Ok(facts)
}

/// Optimises the fine-tuned policy against the environment.
///
/// # Errors
/// As [`sft`], and what the environment reports.
pub fn rl(run: &Run, data: &RlData<'_>, metrics: MetricsLog, progress: &dyn Progress) -> anyhow::Result<Facts> {
    let config = &run.config;
    check_prompts(run, Split::Train, data.train)?;
    check_prompts(run, Split::Val, data.val)?;
    let base = Base::of(run, &best(&run.dir.sft()));
    let tokenizer = TextTokenizer::load(&base.model)?;
    let decoder = Decoder::load(&base.model, Weights::Frozen)?;
    let load = |path: &PathBuf| LoraAdapter::load(path, decoder.config());
    let reference = base.adapter.as_ref().map(load).transpose()?;
    let policy = match &base.adapter {
        Some(path) => load(path)?,
        None => LoraAdapter::new(&decoder, lora(config), config.seed)?,
    };
    let (train_prompts, val_prompts) = (prompts(data.train, &tokenizer)?, prompts(data.val, &tokenizer)?);
    let task = RlTask {
        decoder: &decoder,
        base_path: &base.model,
        policy: &policy,
        reference: reference.as_ref(),
        tokenizer: &tokenizer,
        train: rl::RlData { prompts: &train_prompts, environment: data.train_environment },
        val: rl::RlData { prompts: &val_prompts, environment: data.val_environment },
        config: &config.rl,
        critic_lora: lora(config),
        seed: config.seed,
        output_dir: &run.dir.rl(),
        progress,
        stop: interrupt::flag(),
    };
    let summary = rl::train(&task, &mut Sink(metrics)).map_err(ending)?;
    let mut facts = Facts::default();
    facts.add("steps", summary.n_steps).add("episodes", summary.n_episodes);
    facts.add("dropped", summary.dropped.values().sum::<u64>()).add_parts(&summary.dropped);
    facts.add("val reward before", summary.first_val_reward).add("val reward best", summary.best_val_reward);
    facts.add("best step", summary.best_step);
    Ok(facts)
}

/// The model that a training stage left.
///
/// # Errors
/// It cannot be loaded.
pub fn generator(run: &Run, stage_folder: &Path) -> anyhow::Result<Box<dyn Generator>> {
    let checkpoint = best(stage_folder);
    let base = Base::of(run, &checkpoint);
    let decoder = Decoder::load(&base.model, Weights::Frozen)?;
    let adapter = base.adapter.map(|path| LoraAdapter::load(&path, decoder.config())).transpose()?;
    let tokenizer = TextTokenizer::load(&base.model)?;
    Ok(Box::new(Greedy { decoder, adapter, tokenizer, max_new_tokens: run.config.rl.max_new_tokens }))
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

fn lora(config: &Config) -> LoraSettings {
    LoraSettings::all_linear(config.sft.lora_rank, config.sft.lora_alpha)
}

fn prompts(rows: &[DatasetRow], tokenizer: &TextTokenizer) -> Result<Vec<Vec<u32>>, ModelError> {
    rows.iter().map(|row| tokenizer.encode_prompt(row.prompt())).collect()
}

/// Rows that have an answer, as tokens.
fn examples(rows: &[DatasetRow], tokenizer: &TextTokenizer) -> Result<Vec<Example>, ModelError> {
    let answered = rows.iter().filter_map(|row| Some((row.prompt(), row.target()?)));
    answered
        .map(|(prompt, target)| {
            Ok(Example { prompt: tokenizer.encode_prompt(prompt)?, response: tokenizer.encode_response(target)? })
        })
        .collect()
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
    fn record(&mut self, stage: &str, step: u64, metrics: &Metrics) -> std::io::Result<()> {
        self.0.append(stage, step, metrics)
    }
}

struct Greedy {
    decoder: Decoder,
    adapter: Option<LoraAdapter>,
    tokenizer: TextTokenizer,
    max_new_tokens: usize,
}

impl Generator for Greedy {
    /// One query at a time: the latency is what a single user would wait.
    fn generate(&self, rows: &[DatasetRow]) -> anyhow::Result<Vec<Generation>> {
        rows.iter().enumerate().map(|(index, row)| self.answer(index, row)).collect()
    }
}

impl Greedy {
    fn answer(&self, row_index: usize, row: &DatasetRow) -> anyhow::Result<Generation> {
        let started = Instant::now();
        let prompt = self.tokenizer.encode_prompt(row.prompt())?;
        let request = GenerationRequest { prompt: &prompt, seed: 0 };
        let stop_ids = self.tokenizer.stop_ids();
        let adapter = self.adapter.as_ref();
        let answers = generate(&self.decoder, adapter, &[request], Decoding::Greedy, self.max_new_tokens, stop_ids)?;
        let texts = answers.into_iter().map(|answer| Ok((self.tokenizer.decode(&answer.token_ids)?, answer)));
        let (text, answer) = texts.collect::<Result<Vec<_>, ModelError>>()?.swap_remove(0);
        let latency_ms = started.elapsed().as_secs_f64() * 1e3;
        let n_tokens = answer.token_ids.len() as u32;
        let response = PolicyResponse { row_index, sample_index: 0, text, n_tokens, truncated: answer.truncated };
        Ok(Generation { response, latency_ms })
    }
}

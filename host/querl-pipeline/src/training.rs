//! Helpers of the training and evaluation stages: checks of the model and of row lengths, prompts, and generation with a trained model.

pub(crate) mod memory;

use crate::failure::{Stop, ending};
use crate::interrupt;
use crate::ledger::{Facts, StageName};
use crate::run::Run;
use anyhow::Context;
use querl_core::config::{Config, ModelConfig, TuningMethod};
use querl_core::ports::{PolicyResponse, Progress, Prompts, Reporter};
use querl_core::records::{DatasetRow, Split};
use querl_core::run_dir::RunDir;
use querl_data::{QueryTable, first_policy_prompt};
use querl_model::{DecoderConfig, ModelError, Shard, TextTokenizer};
use querl_train::job::{
    CallbackError, Callbacks, Device, FailureKind, GenerateJob, GeneratedResponse, JobError, NoMetrics, SampleSettings,
};
use querl_train::{BEST, STATE};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once};

pub(crate) fn folder(dir: &RunDir, stage: StageName) -> PathBuf {
    if stage == StageName::Sft { dir.sft() } else { dir.rl() }
}

/// Folder of the best checkpoint of a training stage, which later stages use.
pub(crate) fn best(stage_folder: &Path) -> PathBuf {
    stage_folder.join(BEST)
}

/// Folder of the trainer state of a training stage, from which it resumes.
pub(crate) fn state(stage_folder: &Path) -> PathBuf {
    stage_folder.join(STATE)
}

/// Checks that the prompts and responses of a split fit into the model's maximum positions.
pub(crate) fn check_prompts(run: &Run, split: Split, rows: &[DatasetRow]) -> anyhow::Result<()> {
    let tokenizer = TextTokenizer::for_policy(&run.config.model)?;
    let prompts = prompts(rows, &tokenizer)?;
    let n_positions = DecoderConfig::load(&run.config.model.path.join("config.json"))?.max_positions;
    let answer = run.config.rl.max_new_tokens;
    let lengths = prompts.iter().map(|prompt| RowLength { prompt: prompt.len(), answer });
    Ok(check_lengths(split, rows.iter().zip(lengths), &[TokenLimit::Generated(n_positions)])?)
}

pub(crate) struct Base {
    pub model: PathBuf,
    pub adapter: Option<PathBuf>,
}

impl Base {
    /// The best checkpoint of a training stage: a full model, or an adapter on the configured model or on the model that full fine-tuning
    /// produced.
    ///
    /// # Errors
    /// The adapter is missing: without it the base alone would be taken for the trained model.
    pub(crate) fn of(config: &Config, dir: &RunDir, stage: StageName) -> Result<Self, Stop> {
        let (sft, is_full) = (best(&dir.sft()), config.sft.method == TuningMethod::Full);
        let model = if is_full { sft } else { config.model.path.clone() };
        if is_full && stage == StageName::Sft {
            return Ok(Self { model, adapter: None });
        }
        let adapter = best(&folder(dir, stage));
        let config = adapter.join("adapter_config.json");
        if !config.is_file() {
            let remedy = format!("put the file back, or run `querl {stage} CONFIG --from {stage}` to make it again");
            return Err(Stop::usage(format!("{}: is missing; {remedy}", config.display())));
        }
        Ok(Self { model, adapter: Some(adapter) })
    }

    /// The model configuration of a job on this base.
    pub(crate) fn model_config(&self, config: &Config) -> ModelConfig {
        ModelConfig { path: self.model.clone(), ..config.model.clone() }
    }
}

/// Adds the device to a stage's facts, unless the job runs as one rank on the CPU.
pub(crate) fn add_device(facts: &mut Facts, run: &Run) {
    if run.executor.devices() != [Device::Cpu] {
        facts.add("device", run.executor.name());
    }
}

pub(crate) fn prompts(rows: &[DatasetRow], tokenizer: &TextTokenizer) -> Result<Vec<Vec<u32>>, ModelError> {
    rows.iter().map(|row| tokenizer.encode_prompt(row.prompt())).collect()
}

/// A response of a model and its latency.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Generation {
    pub response: PolicyResponse,
    /// Wall-clock time of the generation in milliseconds; `None` if other ranks used the same CPU at the same time.
    pub latency_ms: Option<f64>,
}

pub(crate) type Each<'a> = dyn FnMut(Vec<Generation>) -> anyhow::Result<()> + Send + 'a;

/// A model that generates one response per dataset row.
pub(crate) trait Generator: Sync {
    /// Generates one response per row, in order; calls `each` with batches of `n_at_once`.
    fn generate(&self, rows: &[DatasetRow], n_at_once: usize, each: &mut Each<'_>) -> anyhow::Result<()>;
}

/// The trained model of a stage, as a generator that loads it once for all rows.
pub(crate) fn generator(run: &Run, stage: StageName) -> Result<LocalModel<'_>, Stop> {
    let base = Base::of(&run.config, &run.dir, stage)?;
    Ok(LocalModel { run, base, name: stage.as_str(), samples: None })
}

/// The configured base model without training, as a generator called `name`.
pub(crate) fn untrained<'a>(run: &'a Run, name: &'static str) -> LocalModel<'a> {
    let base = Base { model: run.config.model.path.clone(), adapter: None };
    LocalModel { run, base, name, samples: None }
}

/// Reports lines only; the caller reports progress.
struct Lines<'a>(&'a dyn Reporter);

impl Progress for Lines<'_> {
    fn update(&self, _: u64, _: u64, _: &str) {}

    fn line(&self, text: &str) {
        self.0.message(text);
    }
}

/// A model that generates in this process, with or without an adapter.
pub(crate) struct LocalModel<'a> {
    run: &'a Run,
    base: Base,
    name: &'static str,
    samples: Option<SampleSettings>,
}

impl LocalModel<'_> {
    /// The same model with `n_per_prompt` samples for each row. [`Generator::generate`] takes the sample with the highest mean
    /// log-probability per token: a rule that a server can follow, since it needs neither the teacher nor retrieval nor a reward.
    pub(crate) fn sampled(self, name: &'static str, n_per_prompt: usize) -> Self {
        let samples = SampleSettings { n_per_prompt, seed: self.run.config.seed };
        Self { name, samples: Some(samples), ..self }
    }

    /// Generates responses to all rows, in order; calls `each` with the responses of the next `n_at_once` rows, one list per row.
    pub(crate) fn respond(
        &self,
        rows: &[DatasetRow],
        n_at_once: usize,
        each: &mut (dyn FnMut(Vec<Vec<GeneratedResponse>>) -> anyhow::Result<()> + Send),
    ) -> anyhow::Result<()> {
        let config = &self.run.config;
        let job = GenerateJob {
            model: self.base.model_config(config),
            adapter: self.base.adapter.clone(),
            prompts: rows.iter().map(|row| row.prompt().to_vec()).collect(),
            n_beams: config.eval.n_beams,
            samples: self.samples,
            limits: config.rl.clone(),
            batch_size: n_at_once,
        };
        let n_per_prompt = job.n_per_prompt();
        let mut take = |responses: Vec<GeneratedResponse>| {
            each(responses.chunks(n_per_prompt.max(1)).map(<[GeneratedResponse]>::to_vec).collect())
        };
        generate(self.run, &format!("system {}", self.name), &job, &mut take)
    }
}

impl Generator for LocalModel<'_> {
    fn generate(&self, rows: &[DatasetRow], n_at_once: usize, each: &mut Each<'_>) -> anyhow::Result<()> {
        let mut n_generated = 0;
        self.respond(rows, n_at_once, &mut |responses| {
            let chosen = responses.into_iter().filter_map(likeliest).enumerate();
            let generations: Vec<Generation> =
                chosen.map(|(index, one)| generation(n_generated + index, one)).collect();
            n_generated += generations.len();
            each(generations)
        })
    }
}

/// The response with the highest mean log-probability per token; on ties the first.
fn likeliest(responses: Vec<GeneratedResponse>) -> Option<GeneratedResponse> {
    responses.into_iter().reduce(|best, other| if other.mean_logprob > best.mean_logprob { other } else { best })
}

/// Runs a generation job and passes its responses to `take` in batches, as they are generated. `by` names the model in messages.
pub(crate) fn generate(
    run: &Run,
    by: &str,
    job: &GenerateJob,
    take: &mut (dyn FnMut(Vec<GeneratedResponse>) -> anyhow::Result<()> + Send),
) -> anyhow::Result<()> {
    let (metrics, mut taking) = (Mutex::new(NoMetrics), None);
    let lines = Lines(run.reporter.as_ref());
    let callbacks = Callbacks { progress: &lines, metrics: &metrics, stop: interrupt::flag() };
    let mut on_responses = |responses| {
        take(responses).map_err(|error| {
            let message = error.to_string();
            taking.get_or_insert(error);
            CallbackError(message)
        })
    };
    let result = run.executor.run_generate(job, run.config.threads, &mut on_responses, &callbacks);
    match result {
        Ok(()) => Ok(()),
        Err(JobError::Callback(error)) => Err(taking.unwrap_or_else(|| error.into())),
        Err(error) => {
            let is_stop = matches!(&error, JobError::Failed(failure) if failure.kind == FailureKind::Interrupted);
            let error = Err(ending(error));
            if is_stop { error } else { error.with_context(|| by.to_owned()) }
        }
    }
}

fn generation(row_index: usize, response: GeneratedResponse) -> Generation {
    let GeneratedResponse { text, n_tokens, truncated, latency_ms, mean_logprob: _ } = response;
    Generation { response: PolicyResponse { row_index, sample_index: 0, text, n_tokens, truncated }, latency_ms }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenLimit {
    SftMaxLength(usize),
    /// Positions of the model; the response may have `rl.max_new_tokens`.
    Generated(usize),
    Learned(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowLength {
    pub prompt: usize,
    pub answer: usize,
}

impl TokenLimit {
    fn n_tokens(self) -> usize {
        match self {
            Self::SftMaxLength(n) | Self::Generated(n) | Self::Learned(n) => n,
        }
    }

    fn advice(self) -> String {
        match self {
            Self::SftMaxLength(n) => format!("sft.max_length is {n}: shorten the row or raise the limit"),
            Self::Generated(n) => format!("the model has {n} positions: shorten the row or lower rl.max_new_tokens"),
            Self::Learned(n) => format!("the model has {n} positions: shorten the row"),
        }
    }
}

pub(crate) fn check_lengths<'a>(
    split: Split,
    rows: impl IntoIterator<Item = (&'a DatasetRow, RowLength)>,
    limits: &[TokenLimit],
) -> Result<(), Stop> {
    for (row, length) in rows {
        let n_tokens = length.prompt + length.answer;
        if let Some(limit) = limits.iter().find(|limit| n_tokens > limit.n_tokens()) {
            let (row, RowLength { prompt, answer }) = (row.metadata.query.row, length);
            return Err(Stop::usage(format!(
                "row {row} of the query table ({} split) makes {n_tokens} tokens, {prompt} of prompt and {answer} of response; {}",
                split.name(),
                limit.advice()
            )));
        }
    }
    Ok(())
}

/// Checks the folder of the model before any stage up to `last` runs. For data stages, which only need the model's size for defaults, only
/// `config.json` is checked. A model on a hub that is not downloaded yet has no folder and is not checked.
///
/// # Errors
/// A file is missing or damaged, or the settings do not fit the model.
pub fn preflight(config: &Config, last: StageName) -> anyhow::Result<()> {
    match last {
        _ if hub_name(config).is_some() => Ok(()),
        StageName::Sft | StageName::Rl | StageName::Eval => check_model(config),
        _ => Ok(querl_model::check_config_file(&config.model.path).map_err(Stop::of_model)?),
    }
}

/// The hub name of the configured model if it is not downloaded yet; `None` if the model is a local folder.
pub fn hub_name(config: &Config) -> Option<&Path> {
    Some(config.model.path.as_path()).filter(|path| !path.is_absolute())
}

/// Renders the first prompt of the training: a chat template that refuses the form of the prompts would stop it only after the data stages.
/// A model on a hub that is not downloaded yet is not checked.
///
/// # Errors
/// The template refuses the prompt, or the rows, the prompt plugin or the tokenizer cannot be used.
pub fn check_first_prompt(config: &Config, table: &QueryTable, prompts: &dyn Prompts) -> anyhow::Result<()> {
    if hub_name(config).is_some() {
        return Ok(());
    }
    let Some(messages) = first_policy_prompt(table, &config.data, prompts)? else { return Ok(()) };
    let tokenizer = TextTokenizer::for_policy(&config.model).map_err(Stop::of_model)?;
    let Err(error) = tokenizer.render_prompt(&messages) else { return Ok(()) };
    let (system, others): (Vec<_>, Vec<_>) = messages.into_iter().partition(|message| message.role == "system");
    if system.is_empty() || tokenizer.render_prompt(&others).is_err() {
        return Err(Stop::of_model(error).into());
    }
    let (sender, remedy) = match config.data.dataset.is_set() {
        true => ("a prompt of data.dataset has", "prompts without one"),
        false => ("plugins.prompt sends", "a prompt plugin that sends none"),
    };
    let message =
        format!("{error}; {sender} a system message, which this template refuses: use {remedy}, or another model");
    Err(Stop::usage(message).into())
}

/// Checks the folder of a model: configuration, tokenizer, headers of the weights. Warns once about prompts without today's date.
///
/// # Errors
/// As [`preflight`].
pub(crate) fn check_model(config: &Config) -> anyhow::Result<()> {
    let path = &config.model.path;
    let tokenizer = TextTokenizer::for_policy(&config.model).map_err(Stop::of_model)?;
    if let Some(note) = tokenizer.date_note() {
        // A sweep checks the model again for each trial.
        static WARNED: Once = Once::new();
        WARNED.call_once(|| tracing::warn!("{}: {note}", path.display()));
    }
    querl_model::check_directory(path).map_err(Stop::of_model)?;
    let shapes = DecoderConfig::load(&path.join("config.json"))?;
    Shard::check(config.model.tensor_parallel, &shapes, config.model.dtype).map_err(Stop::usage)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::testing::dataset_row;

    #[test]
    fn the_likeliest_sample_is_chosen_and_the_first_of_equal_ones() {
        let response = |text: &str, mean_logprob| GeneratedResponse {
            text: text.into(),
            n_tokens: 3,
            truncated: false,
            latency_ms: None,
            mean_logprob,
        };
        let chosen = likeliest(vec![
            response("empty", None),
            response("a", Some(-0.7)),
            response("b", Some(-0.2)),
            response("c", Some(-0.2)),
        ]);
        assert_eq!(chosen.unwrap().text, "b");
        assert_eq!(likeliest(Vec::new()), None);
    }

    #[test]
    fn row_that_does_not_fit_is_named_as_the_spreadsheet_shows_it() {
        let row = dataset_row("a");
        let rows = || [(&row, RowLength { prompt: 90, answer: 11 })];
        check_lengths(Split::Train, rows(), &[TokenLimit::SftMaxLength(101), TokenLimit::Learned(101)]).unwrap();
        let refusal = |limit| check_lengths(Split::Train, rows(), &[limit]).unwrap_err().to_string();
        let place = "row 2 of the query table (train split) makes 101 tokens, 90 of prompt and 11 of response; ";
        let advice = "sft.max_length is 100: shorten the row or raise the limit";
        assert_eq!(refusal(TokenLimit::SftMaxLength(100)), format!("{place}{advice}"));
        let advice = "the model has 64 positions: shorten the row or lower rl.max_new_tokens";
        assert_eq!(refusal(TokenLimit::Generated(64)), format!("{place}{advice}"));
    }
}

//! `querl plan`: whether a training on these data can succeed, before it costs anything. Facts with figures, each with one sentence of what to do.
//!
//! In: a configuration, and the run directory where its data stages are finished. Out: a [`Plan`]; nothing of the run is written but the spend of
//! external calls. Order of cost: texts and tokens, a forward pass of the base model, lookups, a trial rollout. docs/training.md has the facts.

mod advice;
mod comparison;
mod data;
mod headroom;
mod inputs;
mod lookups;
mod loss;
mod rollout;
pub mod scale;
mod tokens;

pub use advice::{Advice, Level};
pub use comparison::{ComparisonFacts, DeviationSource};
pub use data::{DataFacts, Script, TextFacts};
pub use headroom::{RankHistogram, RetrievalHeadroom, SideFigures, SplitHeadroom, TeacherHeadroom};
pub use inputs::script_warning;
pub use loss::{LossFacts, TextLoss};
pub use rollout::RolloutFacts;
pub use tokens::{Coverage, TokenizerFacts, UnknownChars};

use crate::failure::Stop;
use crate::hub_name;
use crate::ledger::{Ledger, StageName, listing};
use crate::report::scores_count_words;
use crate::run::{Run, async_runtime, outside_for_scoring};
use crate::stages::changed_since_data;
use inputs::PlanInputs;
use lookups::LookedUp;
use loss::{base_loss, spread};
use querl_core::config::{Config, RetrievalKind};
use querl_core::ports::Reporter;
use querl_core::run_dir::RunDir;
use querl_data::{ServiceContext, UnknownGoldIds, check_knowledge_base};
use querl_model::{DecoderConfig, TextTokenizer};
use scale::{Cluster, ScalePlan, WorkloadSize};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use tokens::coverage;

/// Maximum number of texts of one kind whose tokens are counted.
const N_TOKENIZED: usize = 256;

/// Expensive parts of a plan to leave out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PlanOptions {
    /// Skip the forward pass of the base model; if the model's folder does not exist yet, also the tokenizer and the trial rollout.
    pub skip_model: bool,
    /// Skip the trial rollout, so that no plugin is opened.
    pub skip_rollout: bool,
}

/// Result of `querl plan`: all facts, and the advice derived from them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// Size and language of the data.
    pub data: DataFacts,
    /// Coverage of the tokenizer; `None` if the model does not exist yet.
    pub tokenizer: Option<TokenizerFacts>,
    /// Loss of the base model; `None` if it was skipped.
    pub base_model: Option<LossFacts>,
    /// Headroom of the teacher; `None` before the data stages or without retrieval.
    pub teacher: Option<TeacherHeadroom>,
    /// Headroom of retrieval; `None` without known gold passages.
    pub retrieval: Option<RetrievalHeadroom>,
    /// Result of the trial rollout; `None` if it was skipped, and before the data stages.
    pub rollout: Option<RolloutFacts>,
    /// Expected precision of the final comparison on the test split.
    pub test: ComparisonFacts,
    /// Gold passage ids that the knowledge base lacks; `None` if it has all, or if a service has the passages.
    pub unknown_gold_ids: Option<UnknownGoldIds>,
    /// Names of the settings, files and plugins that have changed since the data stages ran.
    pub changed_since_data: Vec<String>,
    /// Advice on each fact.
    pub advice: Vec<Advice>,
}

/// Computes the plan of a training.
///
/// # Errors
/// The table, a file of the run, the model, retrieval or a plugin cannot be used.
pub fn plan(
    config: &Config,
    config_path: &Path,
    options: PlanOptions,
    reporter: Arc<dyn Reporter>,
) -> anyhow::Result<Plan> {
    let dir = RunDir::new(&config.output_dir);
    let inputs = PlanInputs::read(config, &dir)?;
    let unknown_gold_ids = match config.retrieval.kind {
        RetrievalKind::Embedded => check_knowledge_base(config, &inputs.queries)?,
        RetrievalKind::Http | RetrievalKind::None => None,
    };
    let has_dataset = inputs.splits.is_some();
    // The folder of an unfinished pretraining has no config.json yet.
    let has_model = !options.skip_model || config.model.path.join("config.json").is_file();
    let opens_plugins = has_dataset && has_model && !options.skip_rollout;
    // Opened first: an unbuilt plugin is reported before anything is computed.
    let run = opens_plugins.then(|| Run::open_for_scoring(config.clone(), config_path, reporter)).transpose()?;
    let data = inputs.facts(config);
    let tokenizer = has_model.then(|| tokenizer_facts(config, &inputs)).transpose()?;
    let base_model = match options.skip_model {
        true => None,
        false => {
            querl_model::set_threads(config.threads);
            querl_model::check_weights(&config.model.path).map_err(Stop::of_model)?;
            let passages: Vec<&str> = inputs.passages.iter().map(String::as_str).collect();
            Some(base_loss(config, inputs.train(), &passages)?)
        }
    };
    let changed_since_data = changed(config, &dir, run.as_ref(), has_dataset);
    let looked_up = look_up(config, &inputs, run.as_ref())?;
    let has_win_rate = !scores_count_words(&config.retrieval);
    let rows = looked_up.as_ref().map(|found| found.rows.as_slice()).unwrap_or_default();
    let teacher = looked_up.as_ref().map(|found| {
        let mut teacher = TeacherHeadroom::of(&found.rows, found.n_failed, has_win_rate);
        teacher.evaluates_history = config.eval.systems.iter().any(|system| system == "with_history");
        teacher
    });
    let (retrieval, test) = (RetrievalHeadroom::of(rows), ComparisonFacts::of(inputs.n_test_groups, rows));
    let rollout = run.as_ref().filter(|_| !inputs.train().is_empty());
    let rollout = rollout.map(|run| rollout::trial_rollout(run, inputs.train())).transpose();
    // Also after a failure, so that paid calls are recorded.
    let saved = run.as_ref().map_or(Ok(()), |run| run.outside.spend_tracker().save());
    let (rollout, advice) = (rollout?, Vec::new());
    saved?;
    let plan = Plan {
        data,
        tokenizer,
        base_model,
        teacher,
        retrieval,
        rollout,
        test,
        unknown_gold_ids,
        changed_since_data,
        advice,
    };
    Ok(Plan { advice: plan.in_words(has_dataset, hub_name(config)), ..plan })
}

/// Runs retrieval for the plan, with the limits, cache and budget of the run.
fn look_up(config: &Config, inputs: &PlanInputs, run: Option<&Run>) -> anyhow::Result<Option<LookedUp>> {
    if inputs.splits.is_none() {
        return Ok(None);
    }
    if let Some(run) = run {
        return look_up_in(config, inputs, &run.outside, &run.runtime);
    }
    look_up_in(config, inputs, &outside_for_scoring(config)?, &async_runtime()?)
}

/// Runs retrieval; paid calls are recorded, also after a failure.
fn look_up_in(
    config: &Config,
    inputs: &PlanInputs,
    outside: &ServiceContext,
    runtime: &tokio::runtime::Runtime,
) -> anyhow::Result<Option<LookedUp>> {
    let looked_up = lookups::look_up(config, inputs, outside, runtime);
    let saved = outside.spend_tracker().save();
    let looked_up = looked_up?;
    saved?;
    Ok(looked_up)
}

/// Settings and files that have changed since the data stages ran. Missing files are reported by the stages.
fn changed(config: &Config, dir: &RunDir, run: Option<&Run>, has_dataset: bool) -> Vec<String> {
    if !has_dataset {
        return Vec::new();
    }
    let plugins = run.map(|run| &run.plugins);
    let found = Ledger::open(&dir.stages()).and_then(|ledger| changed_since_data(config, plugins, &ledger));
    found.unwrap_or_else(|error| {
        tracing::debug!("the settings of the data stages are not compared: {error:#}");
        Vec::new()
    })
}

fn tokenizer_facts(config: &Config, inputs: &PlanInputs) -> anyhow::Result<TokenizerFacts> {
    let tokenizer = TextTokenizer::load(&config.model.path).map_err(Stop::of_model)?;
    let queries = spread(&inputs.queries, N_TOKENIZED, |_| true);
    let queries = queries.iter().map(|query| query.original_query.as_str());
    let passages = spread(&inputs.passages, N_TOKENIZED, |_| true).into_iter().map(String::as_str);
    let (queries, unknown_query_chars) = coverage(&tokenizer, queries)?;
    let passages = (!inputs.passages.is_empty()).then(|| coverage(&tokenizer, passages)).transpose()?;
    Ok(TokenizerFacts {
        vocab_size: tokenizer.vocab_size(),
        unknown_query_chars,
        queries,
        passages: passages.map(|(passages, _)| passages),
    })
}

impl Plan {
    /// `hub_name`: of a model that is not downloaded.
    fn in_words(&self, has_dataset: bool, hub_name: Option<&Path>) -> Vec<Advice> {
        let no_model = || {
            let action =
                "make it with `querl model corpus` and `querl model pretrain`, or put one there, then plan again";
            match hub_name {
                None => Advice::new("tokenizer", Level::Unknown, "there is no model at model.path yet", action),
                // The path of a folder that does not exist yet may look like a model name.
                Some(_) => {
                    let finding = "there is no model at model.path, and none of this name is downloaded";
                    let action = format!("leave out --no_model to download it, or {action}");
                    Advice::new("tokenizer", Level::Unknown, finding, action)
                }
            }
        };
        let tokenizer = self.tokenizer.as_ref().map_or_else(no_model, TokenizerFacts::advice);
        let mut advice = vec![self.data.advice(), tokenizer];
        let base_model = self.base_model.as_ref().map(LossFacts::advice);
        let rollout = self.rollout.as_ref().map(|rollout| rollout.advice_after(base_model.as_ref()));
        advice.extend(base_model);
        advice.extend(self.teacher.as_ref().map(TeacherHeadroom::advice));
        advice.extend(self.retrieval.as_ref().map(RetrievalHeadroom::advice));
        advice.extend(rollout);
        advice.push(self.test.advice());
        let gold_ids = |found: &UnknownGoldIds| {
            let level = if found.in_most_rows { Level::Bad } else { Level::Weak };
            Advice::new("gold ids", level, &found.finding, &found.action)
        };
        advice.extend(self.unknown_gold_ids.as_ref().map(gold_ids));
        if !self.changed_since_data.is_empty() {
            let finding = format!("{} changed since the data stages ran", listing(&self.changed_since_data));
            let action = "the figures are of the earlier data: run `querl run CONFIG --to convert`, then plan again";
            advice.push(Advice::new("stages", Level::Weak, finding, action));
        }
        if !has_dataset {
            let finding = "teacher, retrieval and rewards are not known before the data stages";
            advice.push(Advice::new(
                "stages",
                Level::Unknown,
                finding,
                "run `querl run CONFIG --to convert`, then plan again",
            ));
        }
        advice
    }

    /// The plan as text for a terminal.
    pub fn to_text(&self) -> String {
        let lines: String = self.advice.iter().map(|advice| advice.line() + "\n").collect();
        lines
            + "(ok: nothing to do; ?: not known; !: a gain is less likely, or harder to show; !!: a gain is unlikely)\n"
    }
}

/// Advice from the facts that cost nothing (data, tokenizer, test split), for the start of a run; runs no model and makes no external call.
///
/// # Errors
/// As [`plan`].
pub fn summary(config: &Config) -> anyhow::Result<Vec<Advice>> {
    let inputs = PlanInputs::read(config, &RunDir::new(&config.output_dir))?;
    let mut advice = vec![inputs.facts(config).advice()];
    // The data stages need no model: it may be trained on their output later.
    advice.extend(tokenizer_facts(config, &inputs).ok().map(|facts| facts.advice()));
    advice.push(ComparisonFacts::of(inputs.n_test_groups, &[]).advice());
    Ok(advice)
}

/// Logs what the [`summary`] finds, unless a stage of the run is finished: as a warning what makes a gain less likely. Errors are ignored here,
/// since the stages report them. `path`: the configuration file, for the command that says what to do.
pub fn log_summary(config: &Config, path: &Path) {
    let has_finished_stage = |ledger: Ledger| StageName::ALL.into_iter().any(|stage| ledger.finished(stage).is_some());
    if Ledger::open(&RunDir::new(&config.output_dir).stages()).is_ok_and(has_finished_stage) {
        return;
    }
    let advice = match summary(config) {
        Ok(advice) => advice,
        Err(error) => {
            tracing::debug!("no summary of the plan: {error:#}");
            return;
        }
    };
    for Advice { topic, level, finding, .. } in &advice {
        match level {
            Level::Ok => {}
            Level::Unknown => tracing::info!("plan: {topic}: {finding}"),
            Level::Weak => tracing::warn!("plan: {topic} (weak): {finding}"),
            Level::Bad => tracing::warn!("plan: {topic} (bad): {finding}"),
        }
    }
    if advice.iter().any(|one| one.level >= Level::Weak) {
        tracing::info!("plan: `querl plan {}` says what to do", path.display());
    }
}

/// Predicts the training of a configuration on a cluster of GPUs. `shapes`: shapes of a model to use instead of the configured one.
///
/// # Errors
/// The table, a file of the run, the tokenizer or the model's `config.json` cannot be read.
pub fn plan_on(config: &Config, cluster: Cluster, shapes: Option<DecoderConfig>) -> anyhow::Result<ScalePlan> {
    let inputs = PlanInputs::read(config, &RunDir::new(&config.output_dir))?;
    let tokenizer = TextTokenizer::for_policy(&config.model).map_err(Stop::usage)?;
    let size = workload_size(config, &inputs, &tokenizer)?;
    let shapes = match shapes {
        Some(shapes) => shapes,
        None => DecoderConfig::load(&config.model.path.join("config.json")).map_err(Stop::usage)?,
    };
    Ok(ScalePlan::new(config, &shapes, size, cluster))
}

/// Sizes of prompts and responses of the dataset. If there is only a table, prompts have the query's tokens and an assumed number of tokens
/// for the instructions of a typical prompt plugin, and responses are as long as the query.
fn workload_size(config: &Config, inputs: &PlanInputs, tokenizer: &TextTokenizer) -> anyhow::Result<WorkloadSize> {
    const INSTRUCTION_TOKENS: f64 = 150.0;
    let (mut prompts, mut responses, mut queries) = (Vec::new(), Vec::new(), Vec::new());
    for row in spread(inputs.train(), N_TOKENIZED, |_| true) {
        prompts.push(tokenizer.encode_prompt(row.prompt())?.len() as f64);
        if let Some(target) = row.target() {
            responses.push(tokenizer.encode_response(target)?.len() as f64);
        }
    }
    for query in spread(&inputs.queries, N_TOKENIZED, |_| true) {
        queries.push(tokenizer.encode(&query.original_query)?.len() as f64);
    }
    let of_query = advice::mean(queries).unwrap_or(0.0);
    let (prompt, response) = (advice::mean(prompts), advice::mean(responses));
    Ok(WorkloadSize {
        prompt_tokens: prompt.unwrap_or(INSTRUCTION_TOKENS + of_query),
        response_tokens: response.unwrap_or(of_query).clamp(1.0, config.rl.max_new_tokens.max(1) as f64),
        n_steps: config.rl.n_steps(inputs.n_rows[0]),
        is_measured: inputs.splits.is_some(),
    })
}

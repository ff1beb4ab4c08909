//! `--dry-run`: the external calls of a run before they are made: rows, calls, cached responses, ranges of cost and time.
//!
//! The number of response tokens and the latency of a service are unknown in advance. The low cost assumes 0.7 of the estimated prompt
//! tokens and a tenth of `max_tokens` for responses; the high cost assumes 1.5 of the prompt tokens and all of `max_tokens`. Calls of `rl`
//! are between one per query (all samples are equal) and one per episode (all samples differ). A rerank call is assumed to have one passage
//! of 20 tokens to all candidates of 500 tokens each. A reward that calls the judge through a host function is assumed to call it once
//! per episode, with a prompt of the length of the judge's own. Training time is not included.
//!
//! Nothing is built, fetched or written, and no key is read. While a plugin has to be built or fetched, every stage counts as not begun
//! and prices are unknown.

use crate::environment;
use crate::ledger::StageName;
use crate::pins::{OnPluginChange, Pins};
use crate::plugins::unprepared;
use crate::run::{Run, outside_to_look};
use crate::stages::{MAX_LOOKUPS_OF_EXPANSIONS, PlannedWork, Window, knowledge_base_of_expansions, plan};
use querl_core::config::{
    Config, EndpointConfig, JudgeForm, JudgeKind, RetrievalKind, RewriteForm, ServicePrice, TeacherKind,
};
use querl_core::fsx::{ReadError, open_jsonl};
use querl_core::ports::{EpisodeInputs, InputUse, PromptInput, PromptTask, Prompts, Teacher};
use querl_core::records::{Context as OfQuery, Message, QueryRow, RewriteRecord, ValidatedRecord};
use querl_core::run_dir::RunDir;
use querl_data::{
    BatchTeacher, BatchedPrompts, Journal, QueryTable, Rows, ServiceContext, check_knowledge_base, check_recording,
    open_queries, open_teacher, prompt_tokens,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Maximum number of rows whose prompts are built; their mean is used for the others.
const MOST_PROMPTS: u32 = 2000;
/// Assumed seconds of one call to a chat model and to a retrieval service, without a measurement.
const CHAT_S: Range = Range { low: 0.5, high: 10.0 };
const RETRIEVAL_S: Range = Range { low: 0.05, high: 2.0 };
const PASSAGE_TOKENS: Range = Range { low: 20.0, high: 500.0 };

/// Range of an estimated figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Range {
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

impl Range {
    fn exactly(value: f64) -> Self {
        Self { low: value, high: value }
    }
}

/// The calls of one stage to one service.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    /// Name of the stage.
    pub stage: &'static str,
    /// Name of the service, such as `teacher gpt-5`.
    pub provider: String,
    /// Number of calls.
    pub calls: Range,
    /// Number of calls with a cached response; `None` if the requests are not known yet.
    pub cached: Option<u64>,
    /// Number of calls in submitted batches, which are not paid again; `None` if the batch API is not used.
    pub in_batches: Option<u64>,
    /// Cost of the calls, in the currency of the configured prices; `None` without prices.
    pub cost: Option<Range>,
    /// Wall-clock time of the calls, in seconds.
    pub seconds: Range,
}

/// Estimated external calls of a run, with their cost and time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// Number of usable rows of the query table.
    pub rows: usize,
    /// Calls of each stage to each service, in the order of the stages.
    pub steps: Vec<Step>,
    /// Plugins that the run must build or fetch first.
    pub unprepared_plugins: Vec<PathBuf>,
    /// The configured budget.
    pub budget: Option<f64>,
    /// Warnings about the data.
    pub warnings: Vec<String>,
}

/// The stages that call external services.
const ASKING: [StageName; 5] =
    [StageName::Rewrite, StageName::Validate, StageName::Convert, StageName::Rl, StageName::Eval];

/// Estimates the stages of `window`; makes no external call and writes nothing. Pins are compared as by the run. The model is not opened.
///
/// # Errors
/// The table, a recorded teacher, the knowledge base or a plugin cannot be used, or a plugin or a lock file is not what the run requires.
pub fn estimate(
    config: &Config,
    config_path: &Path,
    window: Window,
    on_change: OnPluginChange,
) -> anyhow::Result<Estimate> {
    let table = open_queries(&config.data)?;
    let not_recorded = match window.first {
        StageName::Rewrite => check_recording(config, &table)?,
        _ => None,
    };
    let unknown = match window.first <= StageName::Validate {
        true => check_knowledge_base(config, &table)?,
        false => None,
    };
    let warnings = unknown.iter().map(ToString::to_string).chain(not_recorded).collect();
    let dir = RunDir::new(&config.output_dir);
    let unprepared_plugins = unprepared(&config.plugins, &Pins { dir: &dir, config: config_path, on_change })?;
    let outside = outside_to_look(config)?;
    let run = match unprepared_plugins.is_empty() {
        true => Some(Run::open_to_look(config.clone(), outside.clone())?),
        false => None,
    };
    let planned = match &run {
        Some(run) => plan(run, window, &ASKING)?,
        None => window
            .stages()
            .filter(|stage| ASKING.contains(stage))
            .map(|stage| (stage, PlannedWork::StartsOver))
            .collect(),
    };
    let prompts = run.as_ref().map(|run| run.plugins.prompts.as_ref());
    let n_rows = table.findings().n_usable;
    let rewards = run.as_ref().map(|run| &run.plugins.rewards);
    let reads = rewards.map_or(EpisodeInputs::CONTRACT_0_1, |rewards| environment::inputs(rewards));
    let of_baseline = rewards.map(|rewards| environment::inputs_of_baseline(rewards));
    let reads_of_baseline = of_baseline.unwrap_or(EpisodeInputs::CONTRACT_0_1.of_baseline());
    let n_rewards_ask_judge = run.as_ref().map_or(0, |run| run.plugins.n_rewards_ask_judge) as f64;
    let n_queries = n_rows as f64;
    let estimator = Estimator {
        config,
        dir: &dir,
        outside: &outside,
        prompts,
        reads,
        reads_of_baseline,
        n_rewards_ask_judge,
        table: &table,
        n_rows: n_queries,
    };
    let steps = estimator.steps(planned)?;
    Ok(Estimate { rows: n_rows, steps, unprepared_plugins, budget: config.budget, warnings })
}

#[derive(Debug, Clone, Copy)]
struct Answers {
    n: Range,
    /// Maximum number of samples for pass@k, for which retrieval is called but no reward.
    n_samples: f64,
    judged: f64,
    n_queries: f64,
}

/// Rows without a response of an earlier run.
#[derive(Default)]
struct PromptCounts {
    n_rows: f64,
    n_known: f64,
    n_noted: f64,
    n_tokens: f64,
}

struct Estimator<'a> {
    config: &'a Config,
    dir: &'a RunDir,
    outside: &'a ServiceContext,
    /// `None` if the plugin has to be built or fetched.
    prompts: Option<&'a dyn Prompts>,
    /// Inputs that the rewards read; all inputs if a reward has to be built or fetched.
    reads: EpisodeInputs,
    /// The same of the teacher's rewrite.
    reads_of_baseline: EpisodeInputs,
    n_rewards_ask_judge: f64,
    table: &'a QueryTable,
    n_rows: f64,
}

impl Estimator<'_> {
    fn steps(&self, planned: Vec<(StageName, PlannedWork)>) -> anyhow::Result<Vec<Step>> {
        let (config, mut steps, mut rewrites) = (self.config, Vec::new(), PlannedWork::Resumes);
        for (stage, ahead) in planned {
            match stage {
                StageName::Rewrite if config.called_teacher() == Some(TeacherKind::Openai) => {
                    rewrites = ahead;
                    steps.push(self.rewrite(ahead)?);
                }
                StageName::Validate => {
                    // Rewrites of another teacher have no hits yet.
                    let ahead = if rewrites == PlannedWork::StartsOver { rewrites } else { ahead };
                    steps.extend(self.validate(ahead)?);
                }
                // One to four retrieval calls per row (`stages/edit_targets.rs`), and some per row of train for expansions.
                StageName::Convert if config.data.rewrite_form == RewriteForm::Edit => {
                    let n_of_expansions = knowledge_base_of_expansions(config)
                        .map_or(0.0, |_| MAX_LOOKUPS_OF_EXPANSIONS as f64 * config.data.split[0]);
                    let n = Range { low: self.n_rows, high: (4.0 + n_of_expansions) * self.n_rows };
                    steps.extend(self.retrieval_steps(stage, n)?);
                }
                StageName::Rl => steps.extend(self.scoring(stage, self.of_rl())?),
                StageName::Eval => steps.extend(self.scoring(stage, self.of_eval()?)?),
                _ => {}
            }
        }
        Ok(steps)
    }

    fn rewrite(&self, ahead: PlannedWork) -> anyhow::Result<Step> {
        let teacher =
            open_teacher(&self.config.teacher, &self.config.fallback_teacher, &self.config.data, self.outside)?;
        let (mut done, mut measured_s, mut n_measured) = (HashSet::new(), 0.0, 0.0);
        for_each_left_by(&self.dir.rewrites(), |record: RewriteRecord| {
            let Ok(completion) = record.rewrite else { return };
            if done.insert(record.query.id)
                && let Some(latency_ms) = completion.latency_ms
            {
                (measured_s, n_measured) = (measured_s + latency_ms / 1000.0, n_measured + 1.0);
            }
        });
        if ahead == PlannedWork::StartsOver {
            done.clear();
        }
        let asked = self.count_prompts(&done, teacher.as_ref(), &self.noted()?)?;
        let n_tokens = self.prompts.map(|_| asked.n_tokens);
        let call_s = if n_measured > 0.0 { Range::exactly(measured_s / n_measured) } else { CHAT_S };
        let (endpoint, calls) = (self.config.teacher.endpoint(), asked.n_rows - asked.n_known - asked.n_noted);
        let (calls, cached) = (Range::exactly(calls), self.prompts.map(|_| asked.n_known as u64));
        let step = chat_step(StageName::Rewrite, "teacher", &endpoint, calls, n_tokens, call_s, cached);
        let step = Step { in_batches: Some(asked.n_noted as u64).filter(|n| *n > 0), ..step };
        Ok(if self.config.teacher.batch { in_batches(step, self.config.teacher.batch_price_factor) } else { step })
    }

    /// Reasons for which the run would wait or refuse to start.
    fn noted(&self) -> anyhow::Result<BatchedPrompts> {
        let state = self.dir.batches();
        if !state.exists() {
            return Ok(BatchedPrompts::default());
        }
        Ok(BatchTeacher::open(&self.config.teacher, self.outside)?.batched_prompts(&state)?)
    }

    /// Calls and tokens of the rows without a response of an earlier run.
    fn count_prompts(
        &self,
        done: &HashSet<String>,
        teacher: &dyn Teacher,
        noted: &BatchedPrompts,
    ) -> anyhow::Result<PromptCounts> {
        let (mut asked, mut n_looked_at) = (PromptCounts::default(), 0);
        for row in self.table.read()? {
            let row = row?;
            if done.contains(&row.id) {
                continue;
            }
            asked.n_rows += 1.0;
            if let Some(prompts) = self.prompts.filter(|_| n_looked_at < MOST_PROMPTS) {
                n_looked_at += 1;
                let context = of_query(&row);
                let input = PromptInput { query: &row.original_query, context: &context, rewrite: None };
                let messages = prompts.messages(PromptTask::TeacherRewrite, &input)?;
                if teacher.knows(&messages) {
                    asked.n_known += 1.0;
                } else if noted.contains(&messages) {
                    asked.n_noted += 1.0;
                } else {
                    asked.n_tokens += prompt_tokens(&messages) as f64;
                }
            }
        }
        let scale = asked.n_rows / f64::from(n_looked_at.max(1));
        let scaled = |n: f64| (n * scale).round();
        let (n_known, n_noted) = (scaled(asked.n_known), scaled(asked.n_noted));
        let n_noted = n_noted.min(asked.n_rows - n_known);
        Ok(PromptCounts { n_known, n_noted, n_tokens: asked.n_tokens * scale, ..asked })
    }

    fn validate(&self, ahead: PlannedWork) -> anyhow::Result<Vec<Step>> {
        let mut n_done = 0.0;
        if ahead == PlannedWork::StartsOver {
            return self.retrieval_steps(StageName::Validate, Range::exactly(self.n_rows));
        }
        for_each_left_by(&self.dir.validated(), |record: ValidatedRecord| {
            n_done += if matches!(record.retrieval, Some(Ok(_))) { 1.0 } else { 0.0 };
        });
        self.retrieval_steps(StageName::Validate, Range::exactly((self.n_rows - n_done).max(0.0)))
    }

    fn of_rl(&self) -> Answers {
        let (rl, split) = (&self.config.rl, self.config.data.split);
        let (n_train, n_val) = (self.n_rows * split[0], self.n_rows * split[1]);
        let n_steps = rl.n_steps(n_train.round() as usize);
        let n_episodes = n_steps as f64 * (rl.batch_size * rl.n_samples) as f64;
        let n_evaluations = (n_steps / rl.eval_steps.max(1)) as f64 + 1.0;
        let n_rounds = if rl.dynamic_sampling { 1 + rl.max_resampled_batches } else { 1 };
        let (low, high) = (n_episodes.min(n_train) + n_val, n_episodes * n_rounds as f64 + n_val * n_evaluations);
        Answers {
            n: Range { low, high },
            n_samples: 0.0,
            judged: self.config.judge.sample_rate,
            n_queries: n_episodes.min(n_train) + n_val,
        }
    }

    fn of_eval(&self) -> anyhow::Result<Answers> {
        let n_test = self.n_rows * self.config.data.split[2];
        let mut systems = self.config.eval.evaluated_systems();
        // The evaluation skips the system if no query has a history.
        if systems.contains(&"with_history") && !self.has_history()? {
            systems.retain(|system| *system != "with_history");
        }
        // Whether there are terms is known after convert.
        let n_unknown = systems.iter().filter(|system| **system == "expanded").count() as f64;
        let n_systems = systems.iter().filter(|system| **system != "teacher").count() as f64;
        let n_sampled = systems.iter().filter(|system| matches!(**system, "sft" | "rl")).count() as f64;
        Ok(Answers {
            n: Range { low: n_test.min(n_test * (n_systems - n_unknown)), high: n_test * n_systems },
            n_samples: n_test * n_sampled * self.config.eval.pass_at_k as f64,
            judged: 1.0,
            n_queries: n_test,
        })
    }

    /// True if a query of the table has a history; which queries are in test is not known yet.
    fn has_history(&self) -> anyhow::Result<bool> {
        for row in self.table.read()? {
            if !row?.history_summary.trim().is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn scoring(&self, stage: StageName, answers: Answers) -> anyhow::Result<Vec<Step>> {
        // Rollouts compute only what the rewards read; the evaluation computes everything.
        let is_read = |used: InputUse| stage == StageName::Eval || used != InputUse::Unused;
        let mut steps = Vec::new();
        if is_read(self.reads.retrieval) {
            let n = Range { high: answers.n.high + answers.n_samples, ..answers.n };
            steps.extend(self.retrieval_steps(stage, n)?);
        }
        if self.config.judge.kind == JudgeKind::Openai && is_read(self.reads.judgement) {
            // A comparison of both sides is one call.
            let scores_teacher =
                self.config.judge.form == JudgeForm::Score && is_read(self.reads_of_baseline.judgement);
            let of_teacher = if scores_teacher { answers.n_queries } else { 0.0 };
            let calls = |n: f64| (answers.judged * (n + of_teacher)).ceil();
            steps.push(self.judge_step(stage, "judge", answers.n, calls)?);
        }
        if self.config.judge.kind == JudgeKind::Openai && self.n_rewards_ask_judge > 0.0 {
            let calls = |n: f64| self.n_rewards_ask_judge * n.ceil();
            steps.push(self.judge_step(stage, "judge of plugins", answers.n, calls)?);
        }
        Ok(steps)
    }

    /// Judge calls for a number of answers in the range `n`.
    fn judge_step(
        &self,
        stage: StageName,
        section: &str,
        n: Range,
        calls: impl Fn(f64) -> f64,
    ) -> anyhow::Result<Step> {
        let calls = Range { low: calls(n.low), high: calls(n.high) };
        let n_tokens = self.tokens_of_a_judgement()?.map(|n_tokens| calls.high * n_tokens);
        Ok(chat_step(stage, section, &self.config.judge.endpoint(), calls, n_tokens, CHAT_S, None))
    }

    /// Prompt tokens of a judge call, with the query in place of the rewrite; `None` without the prompts.
    fn tokens_of_a_judgement(&self) -> anyhow::Result<Option<f64>> {
        let Some(prompts) = self.prompts else { return Ok(None) };
        let (mut n_tokens, mut n_looked_at) = (0, 0);
        for row in self.table.read()?.take(50) {
            let row = row?;
            n_looked_at += 1;
            let context = of_query(&row);
            let input =
                PromptInput { query: &row.original_query, context: &context, rewrite: Some(&row.original_query) };
            n_tokens += prompt_tokens(&prompts.messages(PromptTask::Judge, &input)?);
        }
        Ok(Some(n_tokens as f64 / f64::from(n_looked_at.max(1))))
    }

    /// The services that `n` retrievals call.
    fn retrieval_steps(&self, stage: StageName, n: Range) -> anyhow::Result<Vec<Step>> {
        let retrieval = &self.config.retrieval;
        let (embedding, rerank) = (&retrieval.embedding, &retrieval.rerank);
        let mut steps = Vec::new();
        let limits = (retrieval.max_concurrent, retrieval.requests_per_minute);
        if retrieval.kind == RetrievalKind::Http {
            let free = Range::exactly(0.0);
            steps.push(service_step(stage, "retrieval", n, free, Some(retrieval.price()), limits));
        }
        let n_tokens = if retrieval.calls_embedding_service() || retrieval.calls_rerank_service() {
            self.tokens_of_a_query()?
        } else {
            0.0
        };
        if retrieval.calls_embedding_service() {
            let (limits, tokens) = ((embedding.max_concurrent, embedding.requests_per_minute), around(n_tokens));
            steps.push(service_step(stage, "retrieval.embedding", n, tokens, embedding.price(), limits));
        }
        if retrieval.calls_rerank_service() {
            let n_candidates = rerank.n_candidates.max(retrieval.top_k);
            // A retrieval may return one passage or all candidates.
            let calls = Range { low: n.low, high: n.high * n_candidates.div_ceil(rerank.batch_size.max(1)) as f64 };
            let n_passages = n_candidates.min(rerank.batch_size) as f64;
            let tokens = Range {
                low: around(n_tokens).low + PASSAGE_TOKENS.low,
                high: n_passages * (around(n_tokens).high + PASSAGE_TOKENS.high),
            };
            let limits = (rerank.max_concurrent, rerank.requests_per_minute);
            steps.push(service_step(stage, "retrieval.rerank", calls, tokens, rerank.price(), limits));
        }
        Ok(steps)
    }

    /// Mean tokens of a query with its history.
    fn tokens_of_a_query(&self) -> anyhow::Result<f64> {
        let (mut n_tokens, mut n_looked_at) = (0, 0);
        for row in self.table.read()?.take(50) {
            let QueryRow { original_query, history_summary, .. } = row?;
            let content = format!("{original_query} {history_summary}");
            n_tokens += prompt_tokens(&[Message { role: String::new(), content }]);
            n_looked_at += 1;
        }
        Ok(n_tokens as f64 / f64::from(n_looked_at.max(1)))
    }
}

/// `n_tokens`: prompt tokens of all `calls.high` calls; without it the cost is unknown.
fn chat_step(
    stage: StageName,
    section: &str,
    endpoint: &EndpointConfig,
    calls: Range,
    n_tokens: Option<f64>,
    call_s: Range,
    cached: Option<u64>,
) -> Step {
    let each = n_tokens.map(|n_tokens| n_tokens / calls.high.max(1.0));
    let max_tokens = f64::from(endpoint.max_tokens);
    let price = |n_calls: f64, prompt: f64, answer: f64| {
        let of_prompt = each? * prompt * endpoint.price_prompt_per_million?;
        Some(n_calls * (of_prompt + max_tokens * answer * endpoint.price_completion_per_million?) / 1e6)
    };
    let cost = price(calls.low, 0.7, 0.1).zip(price(calls.high, 1.5, 1.0)).map(|(low, high)| Range { low, high });
    let of = |n_calls: f64, call_s: f64| {
        let by_calls = time(n_calls, call_s, endpoint.max_concurrent, endpoint.requests_per_minute);
        let per_minute = endpoint.tokens_per_minute.map_or(f64::INFINITY, f64::from);
        by_calls.max(n_calls * (each.unwrap_or_default() + max_tokens) / per_minute * 60.0)
    };
    let seconds = Range { low: of(calls.low, call_s.low), high: of(calls.high, call_s.high) };
    let provider = format!("{section} {}", endpoint.model.as_deref().unwrap_or_default());
    Step { stage: stage.as_str(), provider, calls, cached, in_batches: None, cost, seconds }
}

/// The range that is assumed for the tokens of a text whose estimate is `n_tokens`.
fn around(n_tokens: f64) -> Range {
    Range { low: 0.7 * n_tokens, high: 1.5 * n_tokens }
}

/// Calls to an embedding, reranking or retrieval service, each with `tokens` tokens. `limits`: concurrent calls, and attempts per minute.
fn service_step(
    stage: StageName,
    provider: &str,
    calls: Range,
    tokens: Range,
    price: Option<ServicePrice>,
    (max_concurrent, per_minute): (usize, Option<u32>),
) -> Step {
    let of = |calls: f64, call_s: f64| time(calls, call_s, max_concurrent, per_minute);
    let seconds = Range { low: of(calls.low, RETRIEVAL_S.low), high: of(calls.high, RETRIEVAL_S.high) };
    let cost = price.map(|price| Range {
        low: price.cost(calls.low, calls.low * tokens.low),
        high: price.cost(calls.high, calls.high * tokens.high),
    });
    let provider = provider.to_owned();
    Step { stage: stage.as_str(), provider, calls, cached: None, in_batches: None, cost, seconds }
}

fn time(n_calls: f64, call_s: f64, max_concurrent: usize, per_minute: Option<u32>) -> f64 {
    let by_quota = per_minute.map_or(0.0, |per_minute| n_calls / f64::from(per_minute) * 60.0);
    (n_calls * call_s / max_concurrent as f64).max(by_quota)
}

fn of_query(row: &QueryRow) -> OfQuery {
    OfQuery { user_profile: row.user_profile.clone(), history_summary: row.history_summary.clone() }
}

/// Calls `each` with every readable record of an output and of its journal.
fn for_each_left_by<T: DeserializeOwned>(output: &Path, mut each: impl FnMut(T)) {
    for path in [output.to_owned(), Journal::path_for(output)] {
        let Ok(lines) = open_jsonl::<T>(&path) else { continue };
        let readable = lines.take_while(|line| !matches!(line, Err(ReadError::Io { .. })));
        readable.flatten().for_each(|line| each(line.value));
    }
}

/// Batches have a lower price and take up to a day.
fn in_batches(step: Step, price_factor: f64) -> Step {
    let cost = step.cost.map(|cost| Range { low: cost.low * price_factor, high: cost.high * price_factor });
    let seconds = if step.calls.high > 0.0 || step.in_batches.is_some() {
        Range { low: 0.0, high: 86_400.0 }
    } else {
        step.seconds
    };
    Step { cost, seconds, ..step }
}

impl Estimate {
    /// The estimate as text for a terminal.
    pub fn to_text(&self) -> String {
        let mut lines = vec![format!("{} rows; no call was made", self.rows)];
        for step in &self.steps {
            let cached = step.cached.map(|n| format!(", {n} from the cache")).unwrap_or_default();
            let in_batches = step.in_batches.map(|n| format!(", {n} in a batch under way")).unwrap_or_default();
            let cost = step.cost.map_or("price unknown".into(), |cost| format!("price {}", shown(cost, 4)));
            let (calls, seconds) = (shown(step.calls, 0), shown(step.seconds, 0));
            lines.push(format!(
                "  {:<8} {}: {calls} calls{cached}{in_batches}, {cost}, {seconds} s",
                step.stage, step.provider
            ));
        }
        if self.steps.is_empty() {
            lines.push("  no external service is called".into());
        }
        if !self.unprepared_plugins.is_empty() {
            let names: Vec<_> = self.unprepared_plugins.iter().map(|path| path.display().to_string()).collect();
            let names = names.join(", ");
            lines.push(format!("  built or fetched first, prices unknown until then (`querl plugin build`): {names}"));
        }
        let known: Vec<Range> = self.steps.iter().filter_map(|step| step.cost).collect();
        if !self.steps.is_empty() && known.len() == self.steps.len() {
            let sum = |of: fn(&Range) -> f64| known.iter().map(of).sum::<f64>();
            let total = Range { low: sum(|range| range.low), high: sum(|range| range.high) };
            let budget = self.budget.map(|budget| format!(", budget {budget}")).unwrap_or_default();
            lines.push(format!("  in all: price {}{budget}", shown(total, 4)));
        }
        lines.extend(self.warnings.iter().map(|warning| format!("warning: {warning}")));
        lines.join("\n")
    }
}

fn shown(range: Range, digits: usize) -> String {
    let (low, high) = (format!("{:.digits$}", range.low), format!("{:.digits$}", range.high));
    if low == high { low } else { format!("{low} to {high}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_and_concurrency_bound_the_time() {
        assert_eq!(time(1000.0, 0.2, 10, None), 20.0);
        assert_eq!(time(1000.0, 0.2, 10, Some(600)), 100.0);
    }

    #[test]
    fn ranges_without_width_are_numbers() {
        assert_eq!(shown(Range::exactly(40.0), 0), "40");
        assert_eq!(shown(Range { low: 0.01, high: 0.5 }, 4), "0.0100 to 0.5000");
    }
}

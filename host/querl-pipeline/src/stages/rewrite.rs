//! Stage 1: the teacher rewrites each query. A teacher is a service, a recording, or a model in this process; a dataset from another
//! framework already has the rewrites.

use super::stage::{Done, QUERY_TABLE, Stage, make_tables, remove};
use super::{funnel, leaks, stage};
use crate::failure::Stop;
use crate::ledger::{Facts, Inputs, Ledger, StageName};
use crate::run::Run;
use crate::{interrupt, training};
use anyhow::Context;
use querl_core::config::{DataConfig, ModelConfig, RlConfig, TeacherConfig, TeacherKind};
use querl_core::ports::Progress;
use querl_core::records::{CallFailure, Completion, FailureKind, Message, RewriteRecord};
use querl_core::run_dir::RunDir;
use querl_data::{
    BatchTeacher, Findings, Journal, LocalRewriteCollector, LocalRewriteStage, NewPrompts, QueryTable, StageResults,
    dataset_rewrites, open_fallback, open_queries, open_teacher, refuse_open_batches, rewrite, rewrite_in_batch,
    table_path, teacher_prompts,
};
use querl_model::{DecoderConfig, TextTokenizer};
use querl_train::job::{GenerateJob, GeneratedResponse};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub(crate) struct Rewrite;

impl Stage for Rewrite {
    fn name(&self) -> StageName {
        StageName::Rewrite
    }

    fn inputs(&self, run: &Run, _: &Ledger) -> anyhow::Result<Inputs> {
        let mut inputs = Inputs::default();
        let except = [
            "input",
            "dataset",
            "split",
            "split_seed",
            "rewrite_form",
            "expansion_terms",
            "leak_similarity",
            "on_leak",
        ];
        inputs.section("data", &run.config.data, &except)?;
        stage::add_queries(&mut inputs, &run.config.data)?;
        if run.config.called_teacher().is_some() {
            stage::add_teacher(&mut inputs, &run.config)?;
        }
        run.plugins.add_inputs(&mut inputs, "prompt");
        Ok(inputs)
    }

    /// Rewrites are found by query, so they stay valid when other rows change; and when the fallback teacher changes, since each record
    /// names its teacher.
    fn keeps_rows(&self, name: &str) -> bool {
        name == QUERY_TABLE || name.starts_with("data.") || name.starts_with("fallback_teacher.")
    }

    fn check(&self, run: &Run) -> anyhow::Result<()> {
        open_queries(&run.config.data)?;
        match run.config.called_teacher() {
            None => {}
            Some(TeacherKind::Local) => {
                check_local_teacher(run)?;
                open_fallback(&run.config.fallback_teacher, &run.outside)?;
            }
            Some(TeacherKind::Recorded | TeacherKind::Openai) => {
                open_teacher(&run.config.teacher, &run.config.fallback_teacher, &run.config.data, &run.outside)?;
            }
        }
        // Checked before anything is removed: a submitted batch must be paid even if its responses are never read.
        match run.config.called_teacher() {
            Some(TeacherKind::Openai) => batches(run).map(drop)?,
            Some(TeacherKind::Recorded | TeacherKind::Local) | None => refuse_open_batches(&run.dir.batches())?,
        }
        Ok(())
    }

    fn permit(&self, run: &Run, last: StageName, progress: &dyn Progress) -> anyhow::Result<Facts> {
        leaks::before_rewriting(run, last, progress)?;
        if run.config.called_teacher() == Some(TeacherKind::Local) {
            check_local_prompts(run)?;
        }
        Ok(Facts::default())
    }

    fn warning(&self, run: &Run, facts: &Facts) -> Option<String> {
        funnel::not_recorded(&run.config, facts)
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![dir.rewrites()]
    }

    fn tables(&self, run: &Run) -> Vec<PathBuf> {
        run.config.data.export.iter().map(|format| table_path(&run.dir.rewrites(), *format)).collect()
    }

    /// Recorded batches are kept, because their responses belong to prompts, not to rows, and are in flight.
    fn owned(&self, dir: &RunDir) -> Vec<PathBuf> {
        stage::journaled(dir.rewrites())
    }

    fn is_resumable(&self, dir: &RunDir) -> bool {
        stage::has_content(&Journal::path_for(&dir.rewrites()))
    }

    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done> {
        let table = open_queries(&run.config.data)?.with_merged_cells()?;
        table.findings().notes().iter().for_each(|note| progress.line(note));
        let (output, formats, data) = (run.dir.rewrites(), &run.config.data.export, &run.config.data);
        let mut tally = Tally { cost: Some(0.0), ..Tally::default() };
        let mut add = |record: &RewriteRecord| {
            tally.add(record);
            Ok(())
        };
        let (teacher, hint) = if data.dataset.is_set() {
            dataset_rewrites(&table, data, run.plugins.prompts.as_ref(), &output, &mut add)?;
            (dataset_name(data), None)
        } else {
            let (asked, teacher, hint) = ask(run, &table, Journal::open(&output)?, progress)?;
            asked.write(add)?;
            (teacher, hint)
        };
        remove(&run.dir.batches())?;
        make_tables::<RewriteRecord>(&output, formats)?;
        let done = tally.done(table.findings(), &teacher, hint);
        // A completion that cannot be parsed would not change in the next run.
        Ok(if data.dataset.is_set() { Done { n_failed: 0, ..done } } else { done })
    }
}

/// Name in reports: the first file.
fn dataset_name(data: &DataConfig) -> String {
    let files = data.query_files();
    let name = files.first().and_then(|path| path.file_name()).unwrap_or_default();
    format!("{} (dataset)", name.to_string_lossy())
}

/// The rewrites, name and hint of the teacher.
fn ask<'a>(
    run: &'a Run,
    table: &'a QueryTable,
    journal: Journal<RewriteRecord>,
    progress: &'a dyn Progress,
) -> anyhow::Result<(StageResults<'a, RewriteRecord>, String, Option<String>)> {
    let (config, prompts) = (&run.config.teacher, run.plugins.prompts.as_ref());
    if config.kind == TeacherKind::Local {
        return Ok((rewrite_locally(run, table, journal, progress)?, local_teacher_name(config), None));
    }
    let outside = run.outside.clone().until(interrupt::flag());
    let teacher = open_teacher(config, &run.config.fallback_teacher, &run.config.data, &outside)?;
    let teacher = teacher.as_ref();
    let asked = match batches(run)? {
        Some((batch, new)) => {
            if new == NewPrompts::Skip {
                progress.line(
                    "batches submitted while teacher.batch was on are waited for; other rows are sent one by one",
                );
            }
            let (state, how) = (run.dir.batches(), (new, config.max_concurrent));
            let asking = rewrite_in_batch(table, (teacher, &batch), prompts, journal, how, &state, progress);
            interrupt::finish(&run.runtime, asking)?
        }
        None => {
            let asking = rewrite(table, teacher, prompts, journal, config.max_concurrent, progress);
            interrupt::finish(&run.runtime, asking)?
        }
    };
    Ok((asked, teacher.name().to_owned(), teacher.hint()))
}

/// The batch client, to submit batches, or to read those submitted while `teacher.batch` was on.
fn batches(run: &Run) -> anyhow::Result<Option<(BatchTeacher, NewPrompts)>> {
    let (config, state) = (&run.config.teacher, run.dir.batches());
    if config.kind != TeacherKind::Openai || !(config.batch || state.exists()) {
        return Ok(None);
    }
    let batch = BatchTeacher::open(config, &run.outside)?;
    Ok(match (config.batch, batch.has_batches(&state)?) {
        (true, _) => Some((batch, NewPrompts::Submit)),
        (false, true) => Some((batch, NewPrompts::Skip)),
        (false, false) => None,
    })
}

/// Totals over the records of the stage.
#[derive(Default)]
struct Tally {
    n_rewritten: u64,
    n_by_the_fallback: u64,
    failures: BTreeMap<String, u64>,
    n_not_recorded: u64,
    /// Cost of all rewrites, including cached ones of earlier runs; `None` if a price is unknown.
    cost: Option<f64>,
}

impl Tally {
    fn add(&mut self, record: &RewriteRecord) {
        match &record.rewrite {
            Ok(done) => {
                self.n_rewritten += 1;
                self.n_by_the_fallback += u64::from(done.source.is_some());
                self.cost = self.cost.zip(done.cost).map(|(sum, cost)| sum + cost);
            }
            Err(failure) => {
                self.n_not_recorded += u64::from(failure.kind == FailureKind::NotRecorded);
                *self.failures.entry(failure.kind.to_string()).or_default() += 1;
            }
        }
    }

    fn done(self, findings: &Findings, teacher: &str, hint: Option<String>) -> Done {
        let skipped = [("empty", findings.empty.n), ("repeated", findings.repeated.n)];
        let skipped = skipped.into_iter().filter(|(_, n)| *n > 0).map(|(name, n)| (name.to_owned(), n as u64));
        let n_failed: u64 = self.failures.values().sum();
        let mut facts = Facts::default();
        facts.add("teacher", teacher);
        facts.add("rows read", findings.n_rows).add_parts(&skipped.collect());
        facts.add("rewritten", self.n_rewritten);
        if self.n_by_the_fallback > 0 {
            facts.add_part("by the fallback", self.n_by_the_fallback);
        }
        facts.add("teacher failed", n_failed).add_parts(&self.failures);
        if let Some(hint) = hint.filter(|_| self.n_not_recorded > 0) {
            facts.add(funnel::HINT, hint);
        }
        facts.add("price", self.cost);
        // Queries missing in a recording are not retried; a change of the file runs the stage again.
        Done { facts, n_failed: n_failed - self.n_not_recorded }
    }
}

/// Rows per generation job: the model is loaded once per job, and the prompts of a job are in memory.
const N_ROWS_A_PORTION: usize = 4096;
const N_ROWS_AT_ONCE: usize = 16;

/// Name in reports: the folder.
fn local_teacher_name(config: &TeacherConfig) -> String {
    let path = config.adapter_path.as_ref().or(config.model_path.as_ref());
    let name = path.and_then(|path| path.file_name()).unwrap_or_default();
    format!("{} (local)", name.to_string_lossy())
}

fn check_local_teacher(run: &Run) -> anyhow::Result<()> {
    let path = model_folder(run)?;
    TextTokenizer::load(path).map_err(Stop::of_model)?;
    querl_model::check_weights(path).map_err(Stop::of_model)?;
    Ok(run.executor.check_answers_of("teacher.model_path", path)?)
}

/// Encodes the prompt of every row: a chat template may refuse some of them.
fn check_local_prompts(run: &Run) -> anyhow::Result<()> {
    let (table, window) = (open_queries(&run.config.data)?, ContextWindow::of(run)?);
    for messages in teacher_prompts(&table, run.plugins.prompts.as_ref())? {
        window.tokens_of(&messages?)?.ok();
    }
    Ok(())
}

fn model_folder(run: &Run) -> anyhow::Result<&Path> {
    let missing = || Stop::usage("teacher.model_path is not set; a teacher of kind `local` needs a model");
    Ok(run.config.teacher.model_path.as_deref().ok_or_else(missing)?)
}

fn rewrite_locally<'a>(
    run: &'a Run,
    table: &'a QueryTable,
    journal: Journal<RewriteRecord>,
    progress: &'a dyn Progress,
) -> anyhow::Result<StageResults<'a, RewriteRecord>> {
    let config = &run.config.teacher;
    let mut rewriting = LocalRewriteStage::begin(table, run.plugins.prompts.as_ref(), journal, progress)?;
    let window = ContextWindow::of(run)?;
    loop {
        let (portion, answers) = rewriting.portion(N_ROWS_A_PORTION)?;
        if portion.is_empty() {
            break;
        }
        generate_portion(run, &window, portion, answers)?;
    }
    let fallback = open_fallback(&run.config.fallback_teacher, &run.outside)?;
    let ending = rewriting.finish(local_teacher_name(config), fallback, run.config.fallback_teacher.max_concurrent);
    interrupt::finish(&run.runtime, ending)
}

fn generate_portion(
    run: &Run,
    window: &ContextWindow,
    portion: Vec<Vec<Message>>,
    taken: &mut LocalRewriteCollector<'_>,
) -> anyhow::Result<()> {
    let config = &run.config.teacher;
    // (index in the portion, tokens of the prompt)
    let (mut places, mut prompts) = (Vec::new(), Vec::new());
    for (place, messages) in portion.into_iter().enumerate() {
        match window.tokens_of(&messages)? {
            Ok(n_tokens) => {
                places.push((place, n_tokens));
                prompts.push(messages);
            }
            Err(failure) => taken.take(place, Err(failure))?,
        }
    }
    if prompts.is_empty() {
        return Ok(());
    }
    let max_new_tokens = config.max_tokens as usize;
    let limits = RlConfig { max_new_tokens, min_new_tokens: 0, ..run.config.rl.clone() };
    let path = model_folder(run)?.to_owned();
    let model = ModelConfig { path, enable_thinking: None, ..run.config.model.clone() };
    let adapter = config.adapter_path.clone();
    let job = GenerateJob { model, adapter, prompts, n_beams: 1, samples: None, limits, batch_size: N_ROWS_AT_ONCE };
    let mut places = places.into_iter();
    let mut take = |responses: Vec<GeneratedResponse>| -> anyhow::Result<()> {
        for response in responses {
            let (place, n_tokens) = places.next().context("more answers than prompts")?;
            taken.take(place, completion(response, n_tokens))?;
        }
        Ok(())
    };
    training::generate(run, "teacher", &job, &mut take)
}

/// The rewrite of a response; a truncated one is a failure.
fn completion(response: GeneratedResponse, n_prompt_tokens: usize) -> Result<Completion, CallFailure> {
    if response.truncated {
        let message = "the response was cut off; raise teacher.max_tokens".into();
        return Err(CallFailure { kind: FailureKind::InvalidResponse, message });
    }
    Ok(Completion {
        text: response.text,
        prompt_tokens: Some(n_prompt_tokens as u64),
        completion_tokens: Some(u64::from(response.n_tokens)),
        cost: Some(0.0),
        latency_ms: response.latency_ms,
        source: None,
    })
}

/// Maximum numbers of tokens of the model.
struct ContextWindow {
    tokenizer: TextTokenizer,
    n_positions: usize,
    max_tokens: usize,
}

impl ContextWindow {
    fn of(run: &Run) -> anyhow::Result<Self> {
        let path = model_folder(run)?;
        let n_positions = DecoderConfig::load(&path.join("config.json"))?.max_positions;
        let max_tokens = run.config.teacher.max_tokens as usize;
        Ok(Self { tokenizer: TextTokenizer::load(path)?, n_positions, max_tokens })
    }

    /// Token ids of a prompt; a failure if no positions are left for the response.
    fn tokens_of(&self, messages: &[Message]) -> anyhow::Result<Result<usize, CallFailure>> {
        let n_tokens = self.tokenizer.encode_prompt(messages)?.len();
        if n_tokens + self.max_tokens <= self.n_positions {
            return Ok(Ok(n_tokens));
        }
        let message = format!(
            "the prompt has {n_tokens} tokens; with teacher.max_tokens = {} they exceed the model's {} positions",
            self.max_tokens, self.n_positions
        );
        Ok(Err(CallFailure { kind: FailureKind::Rejected, message }))
    }
}

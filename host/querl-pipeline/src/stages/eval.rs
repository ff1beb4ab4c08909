//! Stage 6: evaluates every system on the test split. [`crate::report`] computes the figures from its records.

use super::stage::{self, Done, Stage};
use crate::environment::{Baselines, RowColumns, Scorer};
use crate::evaluation::{Evaluated, Evaluation, ResponseReading, System, evaluate_system, n_failed};
use crate::failure::Stop;
use crate::ledger::{Facts, Inputs, Ledger, StageName, rows_of, teacher_name};
use crate::report::Names;
use crate::run::Run;
use crate::training::{self, Base, LocalModel};
use crate::{pass_at_k, second_retrieval, untrained};
use anyhow::Context;
use querl_core::config::{Config, RetrievalKind, RlConfig, SecondRetrieval};
use querl_core::fsx::write_jsonl;
use querl_core::ports::{Progress, StyleModel};
use querl_core::records::{DatasetRow, EvalRecord, QueryRow, Split, SystemAnswer};
use querl_core::run_dir::RunDir;
use querl_style::turns_of;
use std::path::PathBuf;

pub(crate) struct Eval;

impl Stage for Eval {
    fn name(&self) -> StageName {
        StageName::Eval
    }

    fn inputs(&self, run: &Run, ledger: &Ledger) -> anyhow::Result<Inputs> {
        let mut inputs = Inputs::default();
        // The other keys of the section affect only metrics, which are always computed again.
        inputs.text("eval.systems", run.config.eval.evaluated_systems().join(" "));
        add_comparisons(&mut inputs, run, ledger)?;
        add_decoding(&mut inputs, &run.config)?;
        stage::add_scoring(&mut inputs, run)?;
        stage::add_audit(&mut inputs, run)?;
        inputs.made_by(ledger, StageName::Validate, &run.dir.validated())?;
        inputs.made_by(ledger, StageName::Convert, &run.dir.split(Split::Test))?;
        for stage in trained(&run.config) {
            inputs.made_by(ledger, stage, &training::best(&training::folder(&run.dir, stage)))?;
        }
        Ok(inputs)
    }

    fn check(&self, run: &Run) -> anyhow::Result<()> {
        run.plugins.check_style()?;
        second_retrieval::check(&run.config)?;
        run.services().map(drop)
    }

    fn permit(&self, run: &Run, _: StageName, _: &dyn Progress) -> anyhow::Result<Facts> {
        for stage in trained(&run.config) {
            Base::of(&run.config, &run.dir, stage)?;
        }
        let systems = run.config.eval.evaluated_systems();
        if systems.iter().all(|system| matches!(*system, "raw" | "with_history" | "expanded" | "teacher")) {
            return Ok(Facts::default());
        }
        let rows: Vec<DatasetRow> = rows_of(&run.dir.split(Split::Test))?;
        if !trained(&run.config).is_empty() {
            training::check_prompts(run, Split::Test, &rows)?;
        }
        for system in systems {
            if let Some(rows) = own_rows(run, system, &rows)? {
                let checked = training::check_prompts(run, Split::Test, &rows);
                checked.with_context(|| format!("eval.systems, {system}"))?;
            }
        }
        Ok(Facts::default())
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![dir.eval_records()]
    }

    fn owned(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![dir.eval_records(), dir.eval(), dir.report()]
    }

    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done> {
        let services = run.services()?;
        let names = Names {
            teacher: teacher_name(&run.dir)?,
            judge: services.judge.as_ref().map(|judge| judge.name().to_owned()),
            retrieval: run.retriever()?.name().to_owned(),
        };
        let (Evaluated { records, unscored }, n_failed_samples) =
            evaluate(run, Scorer::new(services, run.runtime.handle().clone()), progress)?;
        write_jsonl(&run.dir.eval_records(), &records).context("eval/records.jsonl cannot be written")?;
        let mut facts = Facts::default();
        facts.add("answers", records.len());
        facts.add("answers without a reward", unscored.values().sum::<u64>()).add_parts(&unscored);
        facts.add("teacher", names.teacher);
        facts.add("judge", names.judge).add("retrieval", names.retrieval);
        if n_failed_samples > 0 {
            facts.add("samples whose retrieval failed", n_failed_samples);
        }
        Ok(Done { facts, n_failed: n_failed(&records) + n_failed_samples })
    }
}

/// Adds the decoding settings of trained models to the inputs.
pub(crate) fn add_decoding(inputs: &mut Inputs, config: &Config) -> anyhow::Result<()> {
    let RlConfig { max_new_tokens, min_new_tokens, repetition_penalty, no_repeat_ngram_size, stop_strings, .. } =
        &config.rl;
    inputs.text("eval.n_beams", config.eval.n_beams);
    inputs.text("rl.max_new_tokens", max_new_tokens).text("rl.min_new_tokens", min_new_tokens);
    inputs.text("rl.repetition_penalty", repetition_penalty).text("rl.no_repeat_ngram_size", no_repeat_ngram_size);
    inputs.text("rl.stop_strings", format!("{stop_strings:?}"));
    inputs.text("model.dtype", config.model.dtype.name());
    stage::add_thinking(inputs, config);
    inputs.model("model", &config.model.path).map(drop)
}

/// Adds the inputs of untrained systems, samples and the second retriever. The retriever's passages are an input in any case.
fn add_comparisons(inputs: &mut Inputs, run: &Run, ledger: &Ledger) -> anyhow::Result<()> {
    let (eval, rl) = (&run.config.eval, &run.config.rl);
    if eval.evaluated_systems().contains(&"prompted") {
        inputs.text("eval.prompted_with", format!("{:?}", eval.prompted_with)).text("eval.few_shot", eval.few_shot);
        if eval.few_shot > 0 {
            inputs.made_by(ledger, StageName::Convert, &run.dir.split(Split::Train))?;
        }
    }
    if eval.best_of_n > 1 || eval.pass_at_k > 0 {
        inputs.text("eval.best_of_n", eval.best_of_n).text("eval.pass_at_k", eval.pass_at_k);
        inputs.text("rl.temperature", rl.temperature).text("rl.top_k", rl.top_k).text("rl.top_p", rl.top_p);
        inputs.text("seed", run.config.seed);
    }
    let second = run.config.second_retrieval();
    if second != SecondRetrieval::None {
        // `auto` has a limit on the number of passages, a named retriever has none.
        let auto = if run.config.eval.second_retrieval == SecondRetrieval::Auto { "auto " } else { "" };
        inputs.text("eval.second_retrieval", format!("{auto}{second:?}").to_lowercase());
    }
    match run.config.second_embedding_path().filter(|_| second == SecondRetrieval::Semantic) {
        Some(path) => inputs.model("second embedding model", path).map(drop),
        None => Ok(()),
    }
}

/// Rows with the prompts of a system that does not use the policy's prompts.
fn own_rows(run: &Run, system: &str, rows: &[DatasetRow]) -> anyhow::Result<Option<Vec<DatasetRow>>> {
    match system {
        "prompted" => Ok(Some(untrained::prompted_rows(run, rows)?)),
        "hyde" => Ok(Some(untrained::hyde_rows(rows))),
        _ => Ok(None),
    }
}

/// The model of a system, its name and how its responses are read; `None` for systems whose rewrites are known.
fn model_of<'a>(run: &'a Run, system: &str) -> Result<Option<(LocalModel<'a>, &'static str, ResponseReading)>, Stop> {
    let parsed = |model, name| Some((model, name, ResponseReading::Parsed));
    Ok(match system {
        "prompted" => parsed(training::untrained(run, "prompted"), "prompted"),
        "hyde" => Some((training::untrained(run, "hyde"), "hyde", ResponseReading::Verbatim)),
        "best_of_n" => {
            let model = training::generator(run, StageName::Sft)?;
            parsed(model.sampled("best_of_n", run.config.eval.best_of_n), "best_of_n")
        }
        "sft" => parsed(training::generator(run, StageName::Sft)?, "sft"),
        "rl" => parsed(training::generator(run, StageName::Rl)?, "rl"),
        _ => None,
    })
}

/// Evaluates all systems. Also returns the number of samples for pass@k whose retrieval failed.
fn evaluate(run: &Run, scorer: Scorer, progress: &dyn Progress) -> anyhow::Result<(Evaluated, u64)> {
    let rows: Vec<DatasetRow> = rows_of(&run.dir.split(Split::Test))?;
    let baselines = Baselines::new(rows_of(&run.dir.validated())?, run.config.retrieval.kind);
    let columns = RowColumns::read(scorer.rewards(), &run.config.data, &rows)?;
    let (mut all, mut n_failed_samples) = (Evaluated::default(), 0);
    let has_history = rows.iter().any(|row| !row.metadata.query.history_summary.trim().is_empty());
    let has_expansions = rows.iter().any(|row| row.metadata.query.expansion.is_some());
    for name in run.config.eval.evaluated_systems() {
        if name == "with_history" && !has_history {
            progress.line("with_history is not evaluated: no query of test has a history summary");
            continue;
        }
        if name == "expanded" && !has_expansions {
            progress.line("expanded is not evaluated: this run has no learned expansions");
            continue;
        }
        let own_rows = own_rows(run, name, &rows)?;
        let rows = own_rows.as_deref().unwrap_or(&rows);
        let evaluation = Evaluation { rows, columns: &columns, baselines: &baselines, scorer: &scorer };
        let model = model_of(run, name)?;
        let system = match (&model, name) {
            (Some((generator, name, reading)), _) => System::Model { name, generator, reading: *reading },
            (None, "teacher") => System::Teacher,
            (None, "with_history") => System::WithHistory,
            (None, "expanded") => System::Expanded,
            (None, _) => System::Raw,
        };
        let mut evaluated = evaluate_system(&system, &evaluation, progress)?;
        n_failed_samples += add_samples(run, name, &evaluation, &mut evaluated.records, progress)?;
        all.records.extend(evaluated.records);
        evaluated.unscored.into_iter().for_each(|(code, n)| *all.unscored.entry(code).or_default() += n);
    }
    second_retrieval::add(run, &mut all.records, progress)?;
    audit(run, &mut all.records, progress);
    Ok((all, n_failed_samples))
}

/// Samples for pass@k of a trained system, if they are configured and retrieval can find gold passages. Returns the number of
/// those whose retrieval failed.
fn add_samples(
    run: &Run,
    system: &str,
    evaluation: &Evaluation<'_>,
    records: &mut [EvalRecord],
    progress: &dyn Progress,
) -> anyhow::Result<u64> {
    let n_samples = run.config.eval.pass_at_k;
    let stage = [StageName::Sft, StageName::Rl].into_iter().find(|stage| stage.as_str() == system);
    let Some(stage) = stage.filter(|_| n_samples > 0 && run.config.retrieval.kind != RetrievalKind::None) else {
        return Ok(0);
    };
    let model = training::generator(run, stage)?.sampled(stage.as_str(), n_samples);
    pass_at_k::add(&model, evaluation.rows, records, evaluation.scorer, progress)
}

/// Classifies every response with the second style model, if there is one. A failed classification leaves the field empty.
fn audit(run: &Run, records: &mut [EvalRecord], progress: &dyn Progress) {
    let Some(model) = &run.plugins.audit else { return };
    let has_text = |answer: &&mut SystemAnswer| !answer.candidate.rewrite.trim().is_empty();
    let answered = records.iter_mut().filter_map(|record| Some((&record.query, record.outcome.as_mut().ok()?)));
    let mut answered: Vec<_> = answered.filter(|(_, answer)| has_text(answer)).collect();
    let turns =
        |(query, answer): &(&QueryRow, &mut SystemAnswer)| turns_of(&query.original_query, &answer.candidate.rewrite);
    let said = model.classify_all(&answered.iter().map(turns).collect::<Vec<_>>());
    let mut n_failed = 0;
    for ((_, answer), said) in answered.iter_mut().zip(said) {
        n_failed += u64::from(said.is_err());
        answer.audit_style = said.ok();
    }
    if n_failed > 0 {
        let what = "which are left out of its metrics";
        progress.line(&format!("plugins.style_model.audit: {n_failed} responses could not be classified, {what}"));
    }
}

/// The training stages whose models are to be evaluated.
fn trained(config: &Config) -> Vec<StageName> {
    let systems = config.eval.evaluated_systems();
    let is_evaluated = |stage: &StageName| {
        let takes_samples = *stage == StageName::Sft && systems.contains(&"best_of_n");
        takes_samples || systems.contains(&stage.as_str())
    };
    [StageName::Sft, StageName::Rl].into_iter().filter(is_evaluated).collect()
}

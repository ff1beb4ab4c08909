//! Stage 6: evaluates every system on the test split. [`crate::report`] computes the figures from its records.

use super::stage::{self, Done, Stage};
use crate::environment::{Baselines, RowColumns, Scorer};
use crate::evaluation::{Evaluated, Evaluation, System, evaluate_system, n_failed};
use crate::ledger::{Facts, Inputs, Ledger, StageName, rows_of, teacher_name};
use crate::report::Names;
use crate::run::Run;
use crate::training::{self, Base};
use anyhow::Context;
use querl_core::config::{Config, RlConfig};
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
        // The other keys of the section concern the metrics, which are computed again each time.
        inputs.text("eval.systems", run.config.eval.systems.join(" "));
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
        run.services().map(drop)
    }

    fn permit(&self, run: &Run, _: StageName, _: &dyn Progress) -> anyhow::Result<Facts> {
        for stage in trained(&run.config) {
            Base::of(&run.config, &run.dir, stage)?;
        }
        if !trained(&run.config).is_empty() {
            let rows: Vec<DatasetRow> = rows_of(&run.dir.split(Split::Test))?;
            training::check_prompts(run, Split::Test, &rows)?;
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
        let Evaluated { records, unscored } =
            evaluate(run, Scorer::new(services, run.runtime.handle().clone()), progress)?;
        write_jsonl(&run.dir.eval_records(), &records).context("eval/records.jsonl cannot be written")?;
        let mut facts = Facts::default();
        facts.add("answers", records.len());
        facts.add("answers without a reward", unscored.values().sum::<u64>()).add_parts(&unscored);
        facts.add("teacher", names.teacher);
        facts.add("judge", names.judge).add("retrieval", names.retrieval);
        Ok(Done { facts, n_failed: n_failed(&records) })
    }
}

/// What trained models decode with, other than their checkpoints and prompts.
pub(crate) fn add_decoding(inputs: &mut Inputs, config: &Config) -> anyhow::Result<()> {
    let RlConfig { max_new_tokens, min_new_tokens, repetition_penalty, no_repeat_ngram_size, stop_strings, .. } =
        &config.rl;
    inputs.text("eval.n_beams", config.eval.n_beams);
    inputs.text("rl.max_new_tokens", max_new_tokens).text("rl.min_new_tokens", min_new_tokens);
    inputs.text("rl.repetition_penalty", repetition_penalty).text("rl.no_repeat_ngram_size", no_repeat_ngram_size);
    inputs.text("rl.stop_strings", format!("{stop_strings:?}"));
    inputs.text("model.dtype", config.model.dtype.name());
    inputs.model("model", &config.model.path).map(drop)
}

fn evaluate(run: &Run, scorer: Scorer, progress: &dyn Progress) -> anyhow::Result<Evaluated> {
    let rows: Vec<DatasetRow> = rows_of(&run.dir.split(Split::Test))?;
    let baselines = Baselines::new(rows_of(&run.dir.validated())?, run.config.retrieval.kind);
    let columns = RowColumns::read(scorer.rewards(), &run.config.data, &rows)?;
    let evaluation = Evaluation { rows: &rows, columns: &columns, baselines: &baselines, scorer: &scorer };
    let mut all = Evaluated::default();
    for name in &run.config.eval.systems {
        let stage = trained(&run.config).into_iter().find(|stage| stage.as_str() == name);
        let generator = stage.map(|stage| training::generator(run, stage)).transpose()?;
        let system = match (&generator, stage, name.as_str()) {
            (Some(generator), Some(stage), _) => System::Model { name: stage.as_str(), generator: generator.as_ref() },
            (_, _, "teacher") => System::Teacher,
            _ => System::Raw,
        };
        let evaluated = evaluate_system(&system, &evaluation, progress)?;
        all.records.extend(evaluated.records);
        evaluated.unscored.into_iter().for_each(|(code, n)| *all.unscored.entry(code).or_default() += n);
    }
    audit(run, &mut all.records, progress);
    Ok(all)
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
    let wanted = |stage: &StageName| config.eval.systems.iter().any(|system| system == stage.as_str());
    [StageName::Sft, StageName::Rl].into_iter().filter(wanted).collect()
}

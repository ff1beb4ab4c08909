//! Stage 1: the teacher rewrites each query.

use super::stage::{Done, Stage, make_tables, remove, remove_tables};
use super::{dependencies, leaks, local_teacher};
use crate::interrupt;
use crate::ledger::{Facts, Inputs, Ledger, StageName};
use crate::run::Run;
use querl_core::config::TeacherKind;
use querl_core::ports::Progress;
use querl_core::records::{FailureKind, QueryRow, RewriteRecord};
use querl_core::run_dir::RunDir;
use querl_data::{
    BatchTeacher, Findings, Journal, NewPrompts, QueryTable, StageResults, open_fallback, open_queries, open_teacher,
    refuse_open_batches, rewrite, rewrite_in_batch, table_path,
};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// As the ledger calls the input.
const QUERY_TABLE: &str = "query table";

/// The stage.
pub struct Rewrite;

impl Stage for Rewrite {
    fn name(&self) -> StageName {
        StageName::Rewrite
    }

    fn inputs(&self, run: &Run, _: &Ledger) -> anyhow::Result<Inputs> {
        let mut inputs = Inputs::default();
        inputs.section("data", &run.config.data, &["input", "split", "split_seed", "leak_similarity", "on_leak"])?;
        inputs.file(QUERY_TABLE, &run.config.data.input)?;
        dependencies::add_teacher(&mut inputs, run)?;
        run.plugins.add_prompts(&mut inputs);
        Ok(inputs)
    }

    /// A rewrite is found again by its query: other rows leave it good. So does another one to ask where the teacher fails: who
    /// wrote a row stands in it.
    fn keeps_rows(&self, name: &str) -> bool {
        name == QUERY_TABLE || name.starts_with("data.") || name.starts_with("fallback_teacher.")
    }

    fn check(&self, run: &Run) -> anyhow::Result<()> {
        open_queries(&run.config.data)?;
        if run.config.teacher.kind == TeacherKind::Local {
            local_teacher::check(run)?;
            open_fallback(&run.config.fallback_teacher, &run.outside)?;
        } else {
            open_teacher(&run.config.teacher, &run.config.fallback_teacher, &run.outside)?;
        }
        // Before anything is removed: a batch that is being worked on is paid, whether somebody reads it or not.
        match run.config.teacher.kind {
            TeacherKind::Openai => batches(run).map(drop)?,
            TeacherKind::Recorded | TeacherKind::Local => refuse_open_batches(&run.dir.batches())?,
        }
        Ok(())
    }

    fn permit(&self, run: &Run, last: StageName, progress: &dyn Progress) -> anyhow::Result<Facts> {
        leaks::before_rewriting(run, last, progress)?;
        Ok(Facts::default())
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![dir.rewrites()]
    }

    fn tables(&self, run: &Run) -> Vec<PathBuf> {
        run.config.data.export.iter().map(|format| table_path(&run.dir.rewrites(), *format)).collect()
    }

    /// Batches that are noted stay: their answers belong to prompts, whichever rows have them, and are on their way.
    fn clean(&self, dir: &RunDir) -> std::io::Result<()> {
        remove(&Journal::path_for(&dir.rewrites()))?;
        remove_tables(&dir.rewrites(), &[])?;
        remove(&dir.rewrites())
    }

    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done> {
        let table = open_queries(&run.config.data)?;
        table.findings().notes().iter().for_each(|note| progress.line(note));
        let (output, formats) = (run.dir.rewrites(), &run.config.data.export);
        let (asked, teacher) = ask(run, &table, Journal::open(&output)?, progress)?;
        let mut tally = Tally { cost: Some(0.0), ..Tally::default() };
        asked.write(|record| {
            tally.add(record);
            Ok(())
        })?;
        remove(&run.dir.batches())?;
        make_tables::<RewriteRecord>(&output, formats)?;
        Ok(tally.done(table.findings(), &teacher))
    }
}

/// All rows asked, and who was.
fn ask<'a>(
    run: &'a Run,
    table: &'a QueryTable,
    journal: Journal<RewriteRecord>,
    progress: &'a dyn Progress,
) -> anyhow::Result<(StageResults<'a, QueryRow, RewriteRecord>, String)> {
    let (config, prompts) = (&run.config.teacher, run.plugins.prompts.as_ref());
    if config.kind == TeacherKind::Local {
        return Ok((local_teacher::rewrite(run, table, journal, progress)?, local_teacher::name(config)));
    }
    let outside = run.outside.clone().until(interrupt::flag());
    let teacher = open_teacher(config, &run.config.fallback_teacher, &outside)?;
    let teacher = teacher.as_ref();
    let asked = match batches(run)? {
        Some((batch, new)) => {
            if new == NewPrompts::Skip {
                progress.line(
                    "batches handed over while teacher.batch was on are waited for; other rows are asked one by one",
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
    Ok((asked, teacher.name().to_owned()))
}

/// Batches to hand over, or to read because they were handed over while `teacher.batch` was on.
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

/// What the records of the stage come to.
#[derive(Default)]
struct Tally {
    n_rewritten: u64,
    n_by_the_fallback: u64,
    failures: BTreeMap<String, u64>,
    n_not_recorded: u64,
    /// What they cost whenever they were made, earlier runs' from the cache included; `None` once a price is unknown.
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

    fn done(self, findings: &Findings, teacher: &str) -> Done {
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
        facts.add("price", self.cost);
        // A recording that lacks a query will lack it tomorrow; when it changes, the stage runs anew.
        Done { facts, n_failed: n_failed - self.n_not_recorded }
    }
}

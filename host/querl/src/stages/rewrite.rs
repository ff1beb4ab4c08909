//! Stage 1: the teacher rewrites each query.

use super::ledger::Ledger;
use super::{Done, Facts, Inputs, Stage, StageName, remove, remove_tables, world};
use crate::interrupt;
use crate::run::Run;
use anyhow::Context;
use querl_core::ports::Progress;
use querl_core::records::{FailureKind, RewriteRecord};
use querl_core::run_dir::RunDir;
use querl_data::{Findings, Journal, RewriteTables, open_queries, open_teacher, rewrite, table_path};
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
        world::add_teacher(&mut inputs, run)?;
        run.plugins.add_prompts(&mut inputs);
        Ok(inputs)
    }

    /// A rewrite is found again by its query: other rows leave it good.
    fn keeps_rows(&self, name: &str) -> bool {
        name == QUERY_TABLE || name.starts_with("data.")
    }

    fn check(&self, run: &Run) -> anyhow::Result<()> {
        open_queries(&run.config.data)?;
        open_teacher(&run.config.teacher)?;
        Ok(())
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![dir.rewrites()]
    }

    fn tables(&self, run: &Run) -> Vec<PathBuf> {
        run.config.data.export.iter().map(|format| table_path(&run.dir.rewrites(), *format)).collect()
    }

    fn clean(&self, dir: &RunDir) -> std::io::Result<()> {
        remove(&Journal::path_beside(&dir.rewrites()))?;
        remove_tables(&dir.rewrites(), &[])?;
        remove(&dir.rewrites())
    }

    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done> {
        let table = open_queries(&run.config.data)?;
        table.findings().notes().iter().for_each(|note| progress.line(note));
        let (output, formats) = (run.dir.rewrites(), &run.config.data.export);
        let teacher = open_teacher(&run.config.teacher)?;
        let n_calls = run.config.teacher.max_concurrent;
        let prompts = run.plugins.prompts.as_ref();
        let asking = rewrite(&table, teacher.as_ref(), prompts, Journal::open(&output)?, n_calls, progress);
        let asked = interrupt::block_on(&run.runtime, asking)??;
        let mut tally = Tally { cost: Some(0.0), ..Tally::default() };
        let mut tables = RewriteTables::create(&output, formats)?;
        asked.write(|record| {
            tally.add(record);
            tables.add(record)
        })?;
        tables.finish()?;
        remove_tables(&output, formats).context("tables of other formats cannot be removed")?;
        Ok(tally.done(table.findings(), teacher.name()))
    }
}

/// What the records of the stage come to.
#[derive(Default)]
struct Tally {
    n_rewritten: u64,
    /// By kind.
    failures: BTreeMap<String, u64>,
    n_not_recorded: u64,
    /// `None` once a call's price is unknown.
    cost: Option<f64>,
}

impl Tally {
    fn add(&mut self, record: &RewriteRecord) {
        match &record.rewrite {
            Ok(done) => {
                self.n_rewritten += 1;
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
        facts.add("teacher failed", n_failed).add_parts(&self.failures);
        facts.add("cost", self.cost);
        // A recording that lacks a query will lack it tomorrow; when it changes, the stage runs anew.
        Done { facts, n_failed: n_failed - self.n_not_recorded }
    }
}

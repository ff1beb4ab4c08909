//! Stage 1: the teacher rewrites each query.

use super::ledger::Ledger;
use super::{Done, Facts, Inputs, Stage, StageName, remove, world};
use crate::interrupt;
use crate::run::Run;
use querl_core::ports::Progress;
use querl_core::records::{FailureKind, RewriteRecord};
use querl_core::run_dir::RunDir;
use querl_data::{Journal, QueryTable, open_teacher, read_table, rewrite, write_rewrites_xlsx};
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
        inputs.section("data", &run.config.data, &["input", "split", "split_seed"])?;
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
        read_table(&run.config.data)?;
        open_teacher(&run.config.teacher)?;
        Ok(())
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![dir.rewrites(), dir.rewrites_xlsx()]
    }

    fn clean(&self, dir: &RunDir) -> std::io::Result<()> {
        remove(&Journal::path_beside(&dir.rewrites()))?;
        self.outputs(dir).iter().try_for_each(|path| remove(path))
    }

    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done> {
        let table = read_table(&run.config.data)?;
        if let Some(note) = table.skipped_note() {
            progress.line(&note);
        }
        let teacher = open_teacher(&run.config.teacher)?;
        let (mut journal, previous) = Journal::open(&run.dir.rewrites())?;
        let n_calls = run.config.teacher.max_concurrent;
        let prompts = run.plugins.prompts.as_ref();
        let calls = rewrite(&table.rows, teacher.as_ref(), prompts, previous, &mut journal, n_calls, progress);
        let records = interrupt::block_on(&run.runtime, calls)??;
        write_rewrites_xlsx(&run.dir.rewrites_xlsx(), &records)?;
        journal.finish(&records)?;
        Ok(done(&table, &records, teacher.name()))
    }
}

fn done(table: &QueryTable, records: &[RewriteRecord], teacher: &str) -> Done {
    let failures = || records.iter().filter_map(|record| record.rewrite.as_ref().err());
    let mut by_kind: BTreeMap<String, u64> = BTreeMap::new();
    for failure in failures() {
        *by_kind.entry(failure.kind.to_string()).or_default() += 1;
    }
    let skipped = [("empty", &table.empty_rows), ("repeated", &table.repeated_rows)];
    let skipped = skipped.into_iter().filter(|(_, rows)| !rows.is_empty());
    let skipped: BTreeMap<String, u64> = skipped.map(|(name, rows)| (name.into(), rows.len() as u64)).collect();
    let mut facts = Facts::default();
    facts.add("teacher", teacher);
    facts.add("rows read", records.len() as u64 + skipped.values().sum::<u64>()).add_parts(&skipped);
    facts.add("rewritten", records.len() - failures().count());
    facts.add("teacher failed", failures().count()).add_parts(&by_kind);
    let cost: Option<f64> =
        records.iter().filter_map(|record| record.rewrite.as_ref().ok()).map(|done| done.cost).sum();
    facts.add("cost", cost);
    // A recording that lacks a query will lack it tomorrow; when it changes, the stage runs anew.
    let n_failed = failures().filter(|failure| failure.kind != FailureKind::NotRecorded).count() as u64;
    Done { facts, n_failed }
}

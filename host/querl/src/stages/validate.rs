//! Stage 2: what does retrieval find with each rewrite?

use super::ledger::Ledger;
use super::{Done, Facts, Inputs, Stage, StageName, mean, remove, rows_of, world};
use crate::interrupt;
use crate::run::Run;
use querl_core::ports::Progress;
use querl_core::records::{RewriteRecord, ValidatedRecord};
use querl_core::run_dir::RunDir;
use querl_data::{Journal, validate, write_validated_xlsx};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The stage.
pub struct Validate;

impl Stage for Validate {
    fn name(&self) -> StageName {
        StageName::Validate
    }

    fn inputs(&self, run: &Run, ledger: &Ledger) -> anyhow::Result<Inputs> {
        let mut inputs = Inputs::default();
        world::add_retrieval(&mut inputs, run)?;
        inputs.made_by(ledger, StageName::Rewrite, &run.dir.rewrites())?;
        Ok(inputs)
    }

    /// Hits are found again by query and rewrite: other rewrites leave them good.
    fn keeps_rows(&self, name: &str) -> bool {
        name == "rewrites.jsonl of rewrite"
    }

    fn check(&self, run: &Run) -> anyhow::Result<()> {
        run.retriever().map(drop)
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![dir.validated(), dir.validated_xlsx()]
    }

    fn clean(&self, dir: &RunDir) -> std::io::Result<()> {
        remove(&Journal::path_beside(&dir.validated()))?;
        self.outputs(dir).iter().try_for_each(|path| remove(path))
    }

    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done> {
        let rewrites: Vec<RewriteRecord> = rows_of(&run.dir.rewrites())?;
        let retriever = run.retriever()?;
        let (mut journal, previous) = Journal::open(&run.dir.validated())?;
        let n_calls = run.config.retrieval.max_concurrent;
        let calls = validate(&rewrites, retriever.as_ref(), previous, &mut journal, n_calls, progress);
        let records = interrupt::block_on(&run.runtime, calls)??;
        write_validated_xlsx(&run.dir.validated_xlsx(), &records)?;
        journal.finish(&records)?;
        Ok(done(&records, retriever.name()))
    }
}

fn done(records: &[ValidatedRecord], retriever: &str) -> Done {
    let asked: Vec<_> = records.iter().filter_map(|record| record.retrieval.as_ref()).collect();
    let mut by_kind: BTreeMap<String, u64> = BTreeMap::new();
    for failure in asked.iter().filter_map(|retrieval| retrieval.as_ref().err()) {
        *by_kind.entry(failure.kind.to_string()).or_default() += 1;
    }
    let n_failed = by_kind.values().sum();
    let n_empty = asked.iter().filter(|retrieval| retrieval.as_ref().is_ok_and(Vec::is_empty)).count();
    let mut facts = Facts::default();
    facts.add("retrieval", retriever);
    facts.add("looked up", asked.len());
    facts.add("found passages", (asked.len() - n_empty) as u64 - n_failed).add("found nothing", n_empty);
    facts.add("retrieval failed", n_failed).add_parts(&by_kind);
    facts.add("mean top1", mean(records.iter().filter_map(ValidatedRecord::top1_score)));
    Done { facts, n_failed }
}

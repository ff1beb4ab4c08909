//! Stage 2: retrieves the hits of each rewrite.

use super::stage::{self, Done, Mean, Stage, make_tables};
use crate::interrupt;
use crate::ledger::{Facts, Inputs, Ledger, StageName};
use crate::retrieval::RerankEffect;
use crate::run::Run;
use querl_core::config::RetrievalKind;
use querl_core::ports::Progress;
use querl_core::records::{RewriteRecord, ValidatedRecord};
use querl_core::run_dir::RunDir;
use querl_data::{Journal, RecordFile, table_path, validate};
use std::collections::BTreeMap;
use std::path::PathBuf;

const EXPORT: &str = "data.export";

pub(crate) struct Validate;

impl Stage for Validate {
    fn name(&self) -> StageName {
        StageName::Validate
    }

    fn inputs(&self, run: &Run, ledger: &Ledger) -> anyhow::Result<Inputs> {
        let mut inputs = Inputs::default();
        stage::add_retrieval(&mut inputs, &run.config)?;
        inputs.made_by(ledger, StageName::Rewrite, &run.dir.rewrites())?;
        inputs.text(EXPORT, format!("{:?}", run.config.data.export));
        Ok(inputs)
    }

    /// Hits are found by query and rewrite, so they stay valid when other rewrites change.
    fn keeps_rows(&self, name: &str) -> bool {
        name == "rewrites.jsonl of rewrite" || name == EXPORT
    }

    fn check(&self, run: &Run) -> anyhow::Result<()> {
        run.retriever().map(drop)
    }

    fn outputs(&self, dir: &RunDir) -> Vec<PathBuf> {
        vec![dir.validated()]
    }

    fn tables(&self, run: &Run) -> Vec<PathBuf> {
        run.config.data.export.iter().map(|format| table_path(&run.dir.validated(), *format)).collect()
    }

    fn owned(&self, dir: &RunDir) -> Vec<PathBuf> {
        stage::journaled(dir.validated())
    }

    fn is_resumable(&self, dir: &RunDir) -> bool {
        stage::has_content(&Journal::path_for(&dir.validated()))
    }

    fn execute(&self, run: &Run, progress: &dyn Progress) -> anyhow::Result<Done> {
        let rewrites = RecordFile::<RewriteRecord>::new(&run.dir.rewrites());
        let (output, formats) = (run.dir.validated(), &run.config.data.export);
        let retriever = run.retriever_until(interrupt::flag())?;
        let n_calls = run.config.retrieval.max_concurrent;
        let looking_up = validate(&rewrites, retriever.as_ref(), Journal::open(&output)?, n_calls, progress);
        let asked = interrupt::finish(&run.runtime, looking_up)?;
        let mut tally = Tally::default();
        asked.write(|record| {
            tally.add(record);
            Ok(())
        })?;
        make_tables::<ValidatedRecord>(&output, formats)?;
        match run.config.retrieval.kind {
            RetrievalKind::None => Ok(tally.not_made(retriever.name())),
            _ => {
                if let Some(warning) = tally.reranking.warning() {
                    progress.line(&format!("warning: {warning}"));
                }
                Ok(tally.done(retriever.name()))
            }
        }
    }
}

/// Totals over the records of the stage.
#[derive(Default)]
struct Tally {
    n_found: u64,
    n_empty: u64,
    failures: BTreeMap<String, u64>,
    top1: Mean,
    reranking: RerankEffect,
}

impl Tally {
    fn add(&mut self, record: &ValidatedRecord) {
        match &record.retrieval {
            None => {}
            Some(Ok(hits)) if hits.is_empty() => self.n_empty += 1,
            Some(Ok(hits)) => {
                self.n_found += 1;
                self.reranking.add(&record.rewritten.query.gold_ids, hits);
            }
            Some(Err(failure)) => *self.failures.entry(failure.kind.to_string()).or_default() += 1,
        }
        record.top1_score().into_iter().for_each(|score| self.top1.add(score));
    }

    /// The result in a run without retrieval.
    fn not_made(self, retriever: &str) -> Done {
        let mut facts = Facts::default();
        facts.add("retrieval", retriever).add("not looked up", self.n_found + self.n_empty);
        Done { facts, n_failed: 0 }
    }

    fn done(self, retriever: &str) -> Done {
        let n_failed = self.failures.values().sum();
        let mut facts = Facts::default();
        facts.add("retrieval", retriever);
        facts.add("looked up", self.n_found + self.n_empty + n_failed);
        facts.add("found passages", self.n_found).add("found nothing", self.n_empty);
        facts.add("retrieval failed", n_failed).add_parts(&self.failures);
        facts.add("mean score of the first hit", self.top1.value());
        Done { facts, n_failed }
    }
}

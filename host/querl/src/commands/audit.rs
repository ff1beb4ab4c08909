//! `querl audit`: reports signs of reward hacking in a run, by comparing the reward over training with independent measures.

use crate::args::Format;
use crate::terminal;
use anyhow::Context;
use clap::Args;
use querl_core::config::load_resolved;
use querl_core::dir_lock::DirLock;
use querl_core::episodes::{self, RecordedEpisode};
use querl_core::fsx::write_atomic;
use querl_core::run_dir::RunDir;
use querl_data::{Passage, read_passages};
use querl_eval::{AuditOptions, AuditPassage, AuditSources, audit, audit_html, audit_text};
use querl_pipeline::failure::{Stop, run_in};
use querl_pipeline::ledger::{Ledger, StageName};
use querl_pipeline::run_logs;
use querl_train::job::{Failure, FailureKind};
use std::path::PathBuf;

/// Number of bootstrap resamples.
const N_RESAMPLES: usize = 1000;

/// Seed of the bootstrap: a constant, so that the same episodes give the same text.
const SEED: u64 = 42;

#[derive(Debug, Args)]
pub struct AuditArgs {
    /// The run folder
    #[arg(value_name = "RUN_DIR")]
    run: PathBuf,
    #[command(flatten)]
    format: Format,
    /// Write the audit as a page for a browser too
    #[arg(long, value_name = "FILE.html")]
    page: Option<PathBuf>,
    /// Suspicious episodes shown one by one
    #[arg(long, value_name = "N", default_value_t = 20)]
    show: usize,
    /// End with exit code 3 where there are signs of reward hacking, or where they cannot be looked for
    #[arg(long)]
    check: bool,
}

/// Reads the episodes, the metrics and the knowledge base of a run, and prints the audit.
pub fn run(args: &AuditArgs) -> anyhow::Result<()> {
    let dir = RunDir::new(&args.run);
    let unfinished = unfinished(&dir);
    let recorded = read_episodes(&dir)?;
    let (passages, mut notes) = knowledge_base(&dir);
    notes.splice(0..0, unfinished);
    notes.extend(run_logs::notes(&dir).unwrap_or_else(|error| vec![run_logs::not_compared(&error)]));
    let metrics = run_logs::metrics(&dir)?;
    let sources = AuditSources { passages: passages.as_deref(), metrics: &metrics };
    let options = AuditOptions { n_shown: args.show, seed: SEED, n_resamples: N_RESAMPLES };
    let audited = audit(&recorded, sources, notes, options);
    if let Some(path) = &args.page {
        write_atomic(path, audit_html(&audited)?.as_bytes()).with_context(|| path.display().to_string())?;
    }
    args.format.print(&audited, || audit_text(&audited))?;
    if let Some(path) = &args.page {
        terminal::print(&format!("page: {}", path.display()));
    }
    let problem = if audited.n_signs() > 0 { Some(audited.verdict()) } else { audited.not_audited() };
    if let Some(problem) = problem.filter(|_| args.check) {
        let message = format!("{}: {problem}", args.run.display());
        return Err(Stop::of(Failure { kind: FailureKind::Limit, message }).into());
    }
    Ok(())
}

fn read_episodes(dir: &RunDir) -> Result<Vec<RecordedEpisode>, Stop> {
    let file = dir.episodes();
    if !file.exists() {
        run_in(dir.root())?;
        return Err(Stop::usage(format!("{}: there is no such file; the stage `rl` writes it", file.display())));
    }
    let recorded = episodes::read(&file).map_err(Stop::usage)?;
    if recorded.is_empty() {
        return Err(Stop::usage(format!("{}: holds no episode; run the stage `rl` again", file.display())));
    }
    Ok(recorded)
}

/// A note if `rl` has not finished, because it is running or was stopped.
fn unfinished(dir: &RunDir) -> Option<String> {
    let ledger = Ledger::open(&dir.stages()).ok();
    let entry = ledger.as_ref().and_then(|ledger| ledger.entry(StageName::Rl));
    if entry.is_some_and(|entry| entry.finished) {
        return None;
    }
    match DirLock::holder(dir.root()) {
        Some(process) => Some(format!(
            "the run is still going (process {process}): the episodes up to now are audited, and later ones may change the verdict"
        )),
        None => entry.map(|_| {
            "the stage `rl` was stopped before its end: the episodes up to there are audited; `querl rl` resumes it"
                .into()
        }),
    }
}

/// The passages of the configured knowledge base; or `None` and a note that says why, because the rest of the audit does not need them.
fn knowledge_base(dir: &RunDir) -> (Option<Vec<AuditPassage>>, Vec<String>) {
    let skipped = |why: String| (None, vec![format!("no second retriever: {why}")]);
    let config = match load_resolved(&dir.config()) {
        Ok(config) => config,
        Err(error) => return skipped(error.to_string()),
    };
    let Some(path) = &config.retrieval.knowledge_base else {
        return skipped("the run has no `retrieval.knowledge_base`".into());
    };
    match read_passages(path) {
        Ok(passages) => (Some(passages.into_iter().map(audit_passage).collect()), Vec::new()),
        Err(error) => skipped(error.to_string()),
    }
}

fn audit_passage(passage: Passage) -> AuditPassage {
    let Passage { id, title, text } = passage;
    AuditPassage { id, text: format!("{title}\n{text}") }
}

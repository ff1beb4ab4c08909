//! `querl report DIR...`: the figures and the page again, from what the run folder holds; of several runs, the figures pooled.

use crate::args::Format;
use anyhow::Context;
use clap::Args;
use querl_core::config::load_resolved;
use querl_core::dir_lock::DirLock;
use querl_core::run_dir::RunDir;
use querl_pipeline::report::{self, Reported};
use std::io::Write;
use std::path::PathBuf;

/// Options of `querl report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The run folder; several (other seeds of one experiment) are pooled query by query
    #[arg(value_name = "DIR", required = true)]
    dirs: Vec<PathBuf>,
    #[command(flatten)]
    format: Format,
}

/// Writes `eval.json` and `report.html` of each folder again and prints the table, pooled where there are several.
pub fn run(args: &ReportArgs) -> anyhow::Result<()> {
    let runs: Vec<RunDir> = args.dirs.iter().map(RunDir::new).collect();
    let written = runs.iter().map(write).collect::<anyhow::Result<Vec<_>>>()?;
    if let [reported] = written.as_slice() {
        return print(reported, args.format).context("stdout");
    }
    let pooled = report::pooled(&runs)?;
    let mut stdout = std::io::stdout().lock();
    if args.format.json {
        serde_json::to_writer_pretty(&mut stdout, &pooled.evaluation)?;
        return writeln!(stdout).context("stdout");
    }
    stdout.write_all(pooled.table.as_bytes()).context("stdout")
}

fn write(dir: &RunDir) -> anyhow::Result<Reported> {
    let config = load_resolved(&dir.config())?;
    let _lock = DirLock::take(dir.root())?;
    report::write(&config, dir, &report::names(dir)?)
}

pub fn print(reported: &Reported, format: Format) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    if format.json {
        serde_json::to_writer_pretty(&mut stdout, &reported.evaluation)?;
        return writeln!(stdout);
    }
    stdout.write_all(reported.table.as_bytes())
}

//! `querl report DIR`: the figures and the page again, from what the run folder holds.

use crate::cli::Format;
use crate::report::{self, Reported};
use crate::run::lock;
use crate::stages;
use anyhow::Context;
use clap::Args;
use querl_core::config::load_resolved;
use querl_core::run_dir::RunDir;
use std::io::Write;
use std::path::PathBuf;

/// Options of `querl report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The run folder
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    format: Format,
}

/// Writes `eval.json` and `report.html` again and prints the table.
///
/// # Errors
/// The folder holds no evaluated run.
pub fn run(args: &ReportArgs) -> anyhow::Result<()> {
    let dir = RunDir::new(&args.dir);
    let config = load_resolved(&dir.config())?;
    let _lock = lock::take(&dir)?;
    let reported = report::write(&config, &dir, &stages::eval::names(&dir)?)?;
    print(&reported, args.format).context("stdout")
}

/// The figures on stdout.
///
/// # Errors
/// stdout is closed.
pub fn print(reported: &Reported, format: Format) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    if format.json {
        serde_json::to_writer_pretty(&mut stdout, &reported.evaluation)?;
        return writeln!(stdout);
    }
    stdout.write_all(reported.table.as_bytes())
}

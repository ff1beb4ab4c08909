//! `querl plugin test`: the conformance suite.

use super::settings;
use crate::args::Format;
use anyhow::Context;
use clap::Args;
use querl_conformance::{Outcome, Report, SuiteOptions};
use querl_core::fsx::write_atomic;
use querl_pipeline::failure::Stop;
use querl_pipeline::plugins::host;
use std::io::Write;
use std::path::PathBuf;

/// Options of `querl plugin test`.
#[derive(Debug, Args)]
pub struct TestArgs {
    /// A bundle, a component or a source folder
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// A setting to test it with: TOML value; a bare word is a text
    #[arg(long, value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// How often a call is repeated to see whether it gives the same
    #[arg(long, value_name = "N", default_value_t = SuiteOptions::default().n_repeats as u64,
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    repeats: u64,
    /// Write the report as JUnit XML too
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

/// Runs every check and the golden cases, and prints the report.
pub fn run(args: &TestArgs) -> anyhow::Result<()> {
    let options = SuiteOptions {
        n_repeats: args.repeats as usize,
        settings: settings::parse(&args.settings, "--settings")?,
        compiler: host::compiler()?,
        ..SuiteOptions::default()
    };
    let report = querl_conformance::run(&args.path, &options)?;
    if let Some(path) = &args.junit {
        write_atomic(path, report.junit().as_bytes())
            .map_err(|error| Stop::usage(format!("{}: cannot be written: {error}", path.display())))?;
    }
    let mut stdout = std::io::stdout().lock();
    match args.format.json {
        true => writeln!(stdout, "{:#}", report.json()),
        false => stdout.write_all(report.text().as_bytes()),
    }
    .context("stdout")?;
    conforms(&report)
}

/// Refuses a plugin that broke a rule.
pub fn conforms(report: &Report) -> anyhow::Result<()> {
    let failed = report.checks.iter().filter(|check| matches!(check.outcome, Outcome::Failed(_)));
    let names: Vec<_> = failed.map(|check| format!("`{}`", check.name)).collect();
    if names.is_empty() {
        return Ok(());
    }
    let (plugin, n_failed, n_checks) = (&report.plugin, names.len(), report.checks.len());
    let title = format!("{plugin} {}", report.version);
    anyhow::bail!("plugin {}: {n_failed} of {n_checks} checks failed: {}", title.trim_end(), names.join(", "))
}

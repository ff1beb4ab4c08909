//! `querl sweep`: hyperparameter search on the validation split.

use crate::args::{Format, ThreadsArg};
use crate::model_hub;
use crate::terminal::{self, Terminal};
use clap::Args;
use querl_core::config::Overrides;
use querl_core::ports::Reporter;
use querl_pipeline::sweep::{GridKey, SweepOptions, TrialLength, sweep};
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Debug, Args)]
pub struct SweepArgs {
    /// The configuration file
    #[arg(value_name = "CONFIG")]
    config: PathBuf,
    /// A key and the values to try; of several keys all combinations are tried
    #[arg(long, value_name = "KEY=V1,V2", required = true)]
    grid: Vec<String>,
    /// Try this many combinations of the grid, drawn at random
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    random: Option<u32>,
    /// Seeds that each combination is trained with
    #[arg(long, value_name = "S1,S2", value_delimiter = ',', required = true)]
    seeds: Vec<u64>,
    /// The metric by which combinations are ranked, of the evaluations on the validation split; higher is better
    #[arg(long, value_name = "METRIC", default_value = "val/reward")]
    metric: String,
    /// Successive halving: the worse half of the combinations stops early, and again at twice the steps
    #[arg(long)]
    halving: bool,
    /// Replace a key of the configuration in every trial, such as rl.max_steps=5: a TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The folder of the sweep: sweep.json, and a run directory for each trial
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    format: Format,
}

/// Runs `querl sweep`: starts or resumes a sweep and prints the ranking.
pub fn run(args: &SweepArgs) -> anyhow::Result<()> {
    let options = SweepOptions {
        grid: args.grid.iter().map(|text| GridKey::parse(text)).collect::<Result<_, _>>()?,
        n_random: args.random.map(|n| n as usize),
        seeds: args.seeds.clone(),
        metric: args.metric.clone(),
        length: if args.halving { TrialLength::Halving } else { TrialLength::Full },
        out: args.out.clone(),
    };
    let base = Overrides {
        set: args.set.clone(),
        threads: args.threads.threads,
        model_hub: Some(model_hub::find),
        ..Overrides::default()
    };
    let reporter: Arc<dyn Reporter> = Arc::new(Terminal);
    let report = sweep(&args.config, &base, &options, &reporter)?;
    args.format.print(&report, || report.to_text())?;
    terminal::print(&format!("everything is in {}", args.out.display()));
    Ok(())
}

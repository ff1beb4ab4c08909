//! `querl style eval`: a classifier measured on labelled dialogues.

use super::classifier::{ModelArgs, print};
use crate::terminal::Terminal;
use clap::Args;
use querl_style::EvalOptions;
use std::path::PathBuf;

/// What `querl style eval` takes.
#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Labelled dialogues (.json, .jsonl, .xlsx, .csv), none of which the model has learned from
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    /// Where to write eval.json and report.html
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Seeds the resamples
    #[arg(long, value_name = "N", default_value_t = 42)]
    seed: u64,
}

/// Prints the figures and writes them.
pub fn run(args: &EvalArgs) -> anyhow::Result<()> {
    let options = EvalOptions { file: args.file.clone(), output_dir: args.out.clone(), seed: args.seed };
    print(&querl_style::evaluate(&args.model.options(), &options, &Terminal)?)
}

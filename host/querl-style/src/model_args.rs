//! Command-line arguments that name a classifier.

use clap::Args;
use querl_pipeline::style_model::StyleModelSource;
use std::path::PathBuf;

/// Which classifier, and how it is queried.
#[derive(Debug, Clone, Args)]
pub(crate) struct ModelArgs {
    /// A classifier's folder, of `querl style train` or of transformers; or a PEFT adapter's
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// The base model of an adapter
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Most tokens of a text; of longer ones question and answer are truncated
    #[arg(long = "max_length", visible_alias = "max-length", value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    max_length: u32,
    /// Return calibrated probabilities, by the temperature that was fitted in training
    #[arg(long)]
    calibrated: bool,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    threads: usize,
}

impl From<&ModelArgs> for StyleModelSource {
    fn from(args: &ModelArgs) -> Self {
        let ModelArgs { model, base, max_length, calibrated, threads } = args.clone();
        Self { model, base, max_length, calibrated, threads }
    }
}

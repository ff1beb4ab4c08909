//! Which classifier a command uses, and what its training calls.

use anyhow::Context;
use clap::Args;
use querl_core::ports::Reporter;
use querl_pipeline::interrupt;
use querl_pipeline::metrics_log::MetricsLog;
use querl_style::{Callbacks, ClassifierOptions};
use querl_train::MetricSink;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Which classifier, and how it is asked.
#[derive(Debug, Clone, Args)]
pub(super) struct ModelArgs {
    /// A classifier's folder, of `querl style train` or of transformers; or a PEFT adapter's
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// The model that an adapter was trained on
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Most tokens of a text; of longer ones question and answer are shortened
    #[arg(long = "max_length", visible_alias = "max-length", value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    max_length: u32,
    /// Calibrate probabilities by the temperature that was fitted in training
    #[arg(long)]
    calibrated: bool,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub(super) threads: usize,
}

impl ModelArgs {
    pub(super) fn options(&self) -> ClassifierOptions {
        let Self { model, base, max_length, calibrated, threads } = self.clone();
        ClassifierOptions { model, base, max_length, calibrated, threads }
    }
}

pub(super) fn callbacks(reporter: &dyn Reporter) -> Callbacks<'_> {
    Callbacks { reporter, stop: interrupt::flag(), open_metrics: &open_metrics }
}

fn open_metrics(path: &Path) -> anyhow::Result<Box<dyn MetricSink>> {
    Ok(Box::new(MetricsLog::open(path, "rm")?))
}

pub(super) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush().context("stdout")
}

/// An input or a setting that cannot be used: exit code 2.
pub(super) fn usage(error: impl std::fmt::Display) -> anyhow::Error {
    crate::args::usage(error).into()
}

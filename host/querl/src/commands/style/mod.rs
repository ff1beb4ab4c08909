//! `querl style`: the style reward model, trained, evaluated, used and served. `querl rm` is an alias.

mod distill;
mod eval;
mod predict;
mod serve;
mod train;

pub(crate) use serve::{ServeOptions, run as serve};

use super::serve::report_new_form;
use anyhow::Context;
use clap::{Args, Subcommand};
use querl_core::ports::Reporter;
use querl_pipeline::failure::Stop;
use querl_pipeline::interrupt;
use querl_pipeline::metrics_log::MetricsLog;
use querl_style::{Callbacks, ClassifierOptions};
use querl_train::MetricSink;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The commands under `querl style`.
#[derive(Debug, Subcommand)]
pub enum StyleCommand {
    /// Train a classifier on labelled dialogues and measure it on held-out ones
    Train(Box<train::TrainArgs>),
    /// Measure a classifier on labelled dialogues
    Eval(eval::EvalArgs),
    /// Classify a text, the dialogues of a file, or lines of stdin
    Predict(predict::PredictArgs),
    /// Train a small classifier on the predictions of a large one for unlabelled dialogues
    Distill(Box<distill::DistillArgs>),
    /// Serve a classifier over HTTP, as `querl serve style` does
    Serve(serve::ServeArgs),
}

/// Runs one of them.
///
/// # Errors
/// As each says.
pub fn run(command: &StyleCommand) -> anyhow::Result<()> {
    match command {
        StyleCommand::Train(args) => train::run(args),
        StyleCommand::Eval(args) => eval::run(args),
        StyleCommand::Predict(args) => predict::run(args),
        StyleCommand::Distill(args) => distill::run(args),
        StyleCommand::Serve(args) => {
            report_new_form("querl style serve", "querl serve style");
            serve::run(&args.model.options(), &args.options)
        }
    }
}

/// Which classifier, and how it is asked.
#[derive(Debug, Clone, Args)]
pub(crate) struct ModelArgs {
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
    threads: usize,
}

impl ModelArgs {
    fn options(&self) -> ClassifierOptions {
        let Self { model, base, max_length, calibrated, threads } = self.clone();
        ClassifierOptions { model, base, max_length, calibrated, threads }
    }
}

fn callbacks(reporter: &dyn Reporter) -> Callbacks<'_> {
    Callbacks { reporter, stop: interrupt::flag(), open_metrics: &open_metrics }
}

fn open_metrics(path: &Path) -> anyhow::Result<Box<dyn MetricSink>> {
    Ok(Box::new(MetricsLog::open(path, "rm")?))
}

fn usage(error: impl std::fmt::Display) -> anyhow::Error {
    Stop::usage(error.to_string()).into()
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush().context("stdout")
}

//! The style reward model: a sequence classifier of dialogues that is trained, evaluated, distilled and served.
//!
//! In: labelled dialogues, settings, a base model. Out: a classifier directory, its evaluation, predictions, an HTTP service. This crate
//! must not depend on plugins or on the command line.

mod corpus;
mod distill;
mod eval;
mod fitting;
mod folds;
mod lines;
mod measured;
mod model_args;
mod names;
mod predict;
mod results;
mod serve;
mod settings;
mod teacher;
mod train;

pub use serve::{ServeOptions, run as serve};

use clap::Subcommand;
use querl_pipeline::style_model::StyleModelSource;

/// The commands under `querl style`.
#[derive(Debug, Subcommand)]
pub enum StyleCommand {
    /// Train a classifier on labelled dialogues and measure it on held-out ones
    Train(Box<train::TrainArgs>),
    /// Measure a classifier on labelled dialogues
    Eval(eval::EvalArgs),
    /// Say the style of a text, of a file's dialogues, or of those on stdin
    Predict(predict::PredictArgs),
    /// Train a small classifier on what a large one says of dialogues without labels
    Distill(Box<distill::DistillArgs>),
    /// Offer a classifier over HTTP: /predict, /classify, /health, /ready, /metrics, /openapi.json
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
        StyleCommand::Serve(args) => serve(&StyleModelSource::from(&args.model), &args.options),
    }
}

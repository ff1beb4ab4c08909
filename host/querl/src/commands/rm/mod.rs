//! `querl rm`: a classifier of the style of answers, trained, measured and asked.

mod corpus;
mod distill;
mod eval;
mod fitting;
mod folds;
mod lines;
mod measured;
mod model;
mod names;
mod predict;
mod results;
mod serve;
mod settings;
mod teacher;
mod train;

pub(crate) use model::{ModelArgs, OpenModel};
pub(crate) use serve::{ServeOptions, run as serve};

use clap::Subcommand;

/// The commands under `querl rm`.
#[derive(Debug, Subcommand)]
pub enum RmCommand {
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
pub fn run(command: &RmCommand) -> anyhow::Result<()> {
    match command {
        RmCommand::Train(args) => train::run(args),
        RmCommand::Eval(args) => eval::run(args),
        RmCommand::Predict(args) => predict::run(args),
        RmCommand::Distill(args) => distill::run(args),
        RmCommand::Serve(args) => serve::run(&args.model, &args.options),
    }
}

/// Most tokens of one pass: the classifiers that are trained here are small.
pub(crate) const TOKENS_PER_PASS: usize = 4096;

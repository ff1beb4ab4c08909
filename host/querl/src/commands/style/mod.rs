//! `querl style`: the style reward model, trained, evaluated, used and served. `querl rm` is an alias.

mod classifier;
mod distill;
mod eval;
mod predict;
mod serve;
mod train;

pub(crate) use serve::{ServeOptions, run as serve};

use crate::terminal::report_new_form;
use clap::Subcommand;

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

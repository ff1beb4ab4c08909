//! `querl style distill`: a small classifier that learns from a large one.

use super::classifier::{callbacks, print};
use crate::terminal::{self, Terminal};
use clap::Args;
use querl_style::DistillOptions;
use serde::Serialize;
use std::path::PathBuf;

/// What `querl style distill` takes.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct DistillArgs {
    /// A trained classifier
    #[arg(long, value_name = "DIR")]
    teacher: PathBuf,
    /// The model that a teacher's adapter was trained on
    #[arg(long, visible_alias = "teacher-base", value_name = "DIR")]
    teacher_base: Option<PathBuf>,
    /// Folder of the model to train: a language model, or a classifier, whose head is made anew
    #[arg(long, value_name = "DIR")]
    student: PathBuf,
    /// Dialogues that the teacher labels (.json, .jsonl, .xlsx, .csv); labels in it are passed over
    #[arg(long, value_name = "FILE")]
    unlabelled: PathBuf,
    /// Labelled dialogues; a part of them is held out and only measured on
    #[arg(long, visible_alias = "train-file", value_name = "FILE")]
    train_file: Option<PathBuf>,
    /// Labelled dialogues to measure on, in place of a part of train_file
    #[arg(long, visible_alias = "eval-file", value_name = "FILE")]
    eval_file: Option<PathBuf>,
    /// Where the student is written
    #[arg(long, visible_alias = "output-dir", value_name = "DIR")]
    output_dir: PathBuf,
    /// By which both models' logits are divided: above 1 the teacher's lesser guesses count too
    #[arg(long, value_name = "T", default_value_t = 2.0)]
    temperature: f64,
    /// What a label counts where there is one; the teacher counts the rest
    #[arg(long, visible_alias = "hard-weight", value_name = "SHARE", default_value_t = 0.5)]
    hard_weight: f64,
    #[command(flatten)]
    settings: StudentFlags,
}

/// Settings of the student's training, named as in `querl style train`.
#[derive(Debug, Args, Serialize)]
#[command(rename_all = "snake_case")]
struct StudentFlags {
    /// Most tokens of a text [default: 512]
    #[arg(long, visible_alias = "max-length", value_name = "N")]
    max_length: Option<u32>,
    /// Passes over what is learned [default: 3]
    #[arg(long, visible_alias = "num-train-epochs", value_name = "N")]
    num_train_epochs: Option<u32>,
    /// Peak learning rate; it falls to 0 along a line [default: 2e-5]
    #[arg(long, visible_alias = "learning-rate", value_name = "RATE")]
    learning_rate: Option<f64>,
    /// Dialogues of an optimizer step [default: 4]
    #[arg(long, visible_alias = "per-device-train-batch-size", value_name = "N")]
    per_device_train_batch_size: Option<u32>,
    /// Share of train_file that is held out [default: 0.2, with eval_file 0]
    #[arg(long, visible_alias = "eval-share", value_name = "SHARE")]
    eval_share: Option<f64>,
    /// Share of what is learned from that chooses the best checkpoint instead [default: 0.1]
    #[arg(long, visible_alias = "dev-share", value_name = "SHARE")]
    dev_share: Option<f64>,
    /// Train an adapter of this rank and the head, not every weight
    #[arg(long, visible_alias = "lora-rank", value_name = "N")]
    lora_rank: Option<u32>,
    /// Seeds head, order and splits [default: 42]
    #[arg(long, value_name = "N")]
    seed: Option<u32>,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
}

/// Trains the student, prints the comparison with its teacher.
pub fn run(args: &DistillArgs) -> anyhow::Result<()> {
    let options = DistillOptions {
        teacher: args.teacher.clone(),
        teacher_base: args.teacher_base.clone(),
        student: args.student.clone(),
        unlabelled: args.unlabelled.clone(),
        train_file: args.train_file.clone(),
        eval_file: args.eval_file.clone(),
        output_dir: args.output_dir.clone(),
        temperature: args.temperature,
        hard_weight: args.hard_weight,
        settings: toml::Table::try_from(&args.settings)?,
    };
    print(&querl_style::distill(&options, &callbacks(&Terminal))?)?;
    terminal::say(&format!("written to {}", args.output_dir.display()));
    Ok(())
}

//! `querl style train`: a classifier from labelled dialogues, and its figures on held-out ones.

use super::classifier::{callbacks, print};
use crate::terminal::{self, Terminal};
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};
use querl_serve::StylePrediction;
use querl_style::TrainConfig;
use serde::Serialize;
use std::path::PathBuf;

/// Options of `querl style train`: the names and defaults of the training script that people know.
#[derive(Debug, Args)]
pub struct TrainArgs {
    /// A TOML file with the same keys; a flag goes before it
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: TrainFlags,
}

/// The keys of the training script that people know, as flags.
#[derive(Debug, Args, Serialize)]
#[command(rename_all = "snake_case")]
pub struct TrainFlags {
    /// Folder of a Qwen2 or Qwen3 model: a language model, or a classifier, whose head is made anew
    #[arg(long, visible_alias = "model-name-or-path", value_name = "DIR")]
    model_name_or_path: Option<PathBuf>,
    /// Labelled dialogues (.json, .jsonl, .xlsx, .csv): input, label, label_english, metadata [default: rm_data/output_data/training_data.json]
    #[arg(long, visible_alias = "train-file", value_name = "FILE")]
    train_file: Option<PathBuf>,
    /// Where the classifier is written [default: rm_train/output/Qwen2.5-0.5B-Reward]
    #[arg(long, visible_alias = "output-dir", value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// The classes in the order of their ids, NAME or NAME=ENGLISH; any other label is refused [default: those of the file]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    labels: Option<Vec<String>>,
    /// Most tokens of a text; of longer ones question and answer are shortened [default: 512]
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
    /// Texts of max_length that a pass has room for when nothing is learned; no result depends on it [default: 8]
    #[arg(long, visible_alias = "per-device-eval-batch-size", value_name = "N")]
    per_device_eval_batch_size: Option<u32>,
    /// Decoupled weight decay of matrices [default: 0.01]
    #[arg(long, visible_alias = "weight-decay", value_name = "SHARE")]
    weight_decay: Option<f64>,
    /// Seeds head, order, splits, copies and resamples [default: 42]
    #[arg(long, value_name = "N")]
    seed: Option<u32>,
    /// Ask the trained classifier about three dialogues
    #[arg(long, visible_alias = "demo-inference", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    demo_inference: Option<bool>,
    /// Share of the steps with a rising learning rate [default: 0]
    #[arg(long, visible_alias = "warmup-ratio", value_name = "SHARE")]
    warmup_ratio: Option<f64>,
    /// What a dialogue of each class counts: all alike, or N / (K n_c), so that rare classes count as much as common ones [default: none]
    #[arg(long, visible_alias = "class-weights", value_parser = class_weights())]
    class_weights: Option<String>,
    /// Share of the target that is spread over all classes [default: 0]
    #[arg(long, visible_alias = "label-smoothing", value_name = "SHARE")]
    label_smoothing: Option<f64>,
    /// Changed copies of each dialogue that is learned from; never of one that chooses or measures [default: 0]
    #[arg(long, visible_alias = "augment-copies", value_name = "N")]
    augment_copies: Option<u32>,
    /// Epochs without a better loss on dev after which training stops; 0 for never [default: 0]
    #[arg(long, visible_alias = "early-stopping-patience", value_name = "N")]
    early_stopping_patience: Option<u32>,
    /// Train an adapter of this rank and the head, not every weight
    #[arg(long, visible_alias = "lora-rank", value_name = "N")]
    lora_rank: Option<u32>,
    /// Adapter scale is lora_alpha / lora_rank [default: twice the rank]
    #[arg(long, visible_alias = "lora-alpha", value_name = "N")]
    lora_alpha: Option<f64>,
    /// Share of an adapter's inputs set to zero in training [default: 0]
    #[arg(long, visible_alias = "lora-dropout", value_name = "SHARE")]
    lora_dropout: Option<f64>,
    /// Share of the dialogues that is held out and only measured on [default: 0.2, with num_folds 0]
    #[arg(long, visible_alias = "eval-share", value_name = "SHARE")]
    eval_share: Option<f64>,
    /// Share of the others that chooses the best checkpoint and the temperature [default: 0.1, with fewer than 100 of them and without early stopping 0]
    #[arg(long, visible_alias = "dev-share", value_name = "SHARE")]
    dev_share: Option<f64>,
    /// Measure by cross-validation besides: train on all but one of so many parts, each held out once
    #[arg(long, visible_alias = "num-folds", value_name = "N")]
    num_folds: Option<u32>,
    /// Rounds of the cross-validation, each with parts of its own [default: 1]
    #[arg(long, visible_alias = "num-repeats", value_name = "N")]
    num_repeats: Option<u32>,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
}

fn class_weights() -> PossibleValuesParser {
    PossibleValuesParser::new([
        PossibleValue::new("none").help("All alike"),
        PossibleValue::new("balanced").help("Classes alike"),
    ])
}

pub fn run(args: &TrainArgs) -> anyhow::Result<()> {
    let config = TrainConfig::new(toml::Table::try_from(&args.flags)?, args.config.as_deref())?;
    let trained = querl_style::train(&config, &callbacks(&Terminal))?;
    print(trained.figures.as_deref().unwrap_or_default())?;
    for (text, probabilities) in &trained.demo {
        println!("{text}\n{}", StylePrediction::new(&trained.classes, probabilities).text());
    }
    terminal::say(&format!("written to {}", config.output_dir().display()));
    Ok(())
}

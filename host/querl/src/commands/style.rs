//! `querl style`: trains, evaluates, distils and uses the style reward model. `querl rm` is an alias.

use super::serve;
use crate::model_hub;
use crate::terminal::{self, Terminal, report_new_form};
use anyhow::Context;
use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Args, Subcommand};
use querl_core::config::parse_model_name;
use querl_core::ports::Reporter;
use querl_data::read_dialogues;
use querl_pipeline::interrupt;
use querl_pipeline::metrics_log::MetricsLog;
use querl_serve::StylePrediction;
use querl_style::{Callbacks, ClassifierOptions, DistillOptions, EvalOptions, StyleClassifier, TrainConfig, texts_of};
use querl_train::MetricSink;
use serde::Serialize;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, Subcommand)]
pub enum StyleCommand {
    /// Train a classifier on labelled dialogues and measure it on held-out ones
    Train(Box<TrainArgs>),
    /// Measure a classifier on labelled dialogues
    Eval(EvalArgs),
    /// Classify a text, the dialogues of a file, or lines of stdin
    Predict(PredictArgs),
    /// Train a small classifier on the predictions of a large one for unlabelled dialogues
    Distill(Box<DistillArgs>),
    /// Serve a classifier over HTTP, as `querl serve style` does
    Serve(ServeArgs),
}

pub fn run(command: &StyleCommand) -> anyhow::Result<()> {
    match command {
        StyleCommand::Train(args) => run_train(args),
        StyleCommand::Eval(args) => run_eval(args),
        StyleCommand::Predict(args) => run_predict(args),
        StyleCommand::Distill(args) => run_distill(args),
        StyleCommand::Serve(args) => {
            report_new_form("querl style serve", "querl serve style");
            serve::style(&args.model.options()?, &args.server)
        }
    }
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    server: serve::StyleServerArgs,
}

#[derive(Debug, Clone, Args)]
struct ModelArgs {
    /// A classifier's folder, of `querl style train` or of transformers; or a PEFT adapter's; or its name on the hub
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// The model that an adapter was trained on
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Maximum tokens of a text; question and answer of longer ones are truncated
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
    fn options(&self) -> anyhow::Result<ClassifierOptions> {
        let &Self { max_length, calibrated, threads, .. } = self;
        let (model, base) = (model_hub::folder(&self.model)?, model_hub::optional_folder(self.base.as_deref())?);
        Ok(ClassifierOptions { model, base, max_length, calibrated, threads })
    }
}

fn callbacks(reporter: &dyn Reporter) -> Callbacks<'_> {
    Callbacks {
        reporter,
        stop: interrupt::flag(),
        open_metrics: &open_metrics,
        uninterrupted: &interrupt::uninterrupted,
    }
}

fn open_metrics(path: &Path) -> anyhow::Result<Box<dyn MetricSink>> {
    Ok(Box::new(MetricsLog::open(path, "rm")?))
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush().context("stdout")
}

/// An error about an input or setting that cannot be used; the exit code is 2.
fn usage(error: impl std::fmt::Display) -> anyhow::Error {
    crate::args::usage(error).into()
}

#[derive(Debug, Args)]
pub struct TrainArgs {
    /// A TOML file with the same keys; flags override it
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: TrainFlags,
}

/// Options of the training. Options that transformers' `TrainingArguments` also has keep its names.
#[derive(Debug, Args, Serialize)]
#[command(rename_all = "snake_case")]
pub struct TrainFlags {
    /// Folder of a Qwen2 or Qwen3 model: a language model, or a classifier, whose head is initialised again; or a model's name on the hub
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
    /// Maximum tokens of a text; question and answer of longer ones are truncated [default: 512]
    #[arg(long, visible_alias = "max-length", value_name = "N")]
    max_length: Option<u32>,
    /// Passes over what is learned [default: 3]
    #[arg(long, visible_alias = "num-train-epochs", value_name = "N")]
    num_train_epochs: Option<u32>,
    /// Peak learning rate; it falls to 0 along a line [default: 2e-5]
    #[arg(long, visible_alias = "learning-rate", value_name = "RATE")]
    learning_rate: Option<f64>,
    /// Dialogues per optimizer step [default: 4]
    #[arg(long, visible_alias = "per-device-train-batch-size", value_name = "N")]
    per_device_train_batch_size: Option<u32>,
    /// Texts of max_length per forward pass in evaluations; results do not depend on it [default: 8]
    #[arg(long, visible_alias = "per-device-eval-batch-size", value_name = "N")]
    per_device_eval_batch_size: Option<u32>,
    /// Decoupled weight decay of matrices [default: 0.01]
    #[arg(long, visible_alias = "weight-decay", value_name = "SHARE")]
    weight_decay: Option<f64>,
    /// Seed of classification head, data order, splits, augmented copies and resamples [default: 42]
    #[arg(long, value_name = "N")]
    seed: Option<u32>,
    /// Classify three example dialogues after the training
    #[arg(long, visible_alias = "demo-inference", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    demo_inference: Option<bool>,
    /// Share of the steps in which the learning rate warms up [default: 0]
    #[arg(long, visible_alias = "warmup-ratio", value_name = "SHARE")]
    warmup_ratio: Option<f64>,
    /// Weights of the classes in the loss: none, or balanced, N / (K n_c), so that rare classes have as much weight as common ones
    /// [default: none]
    #[arg(long, visible_alias = "class-weights", value_parser = class_weights())]
    class_weights: Option<String>,
    /// Label smoothing: share of the target probability that is distributed over all classes [default: 0]
    #[arg(long, visible_alias = "label-smoothing", value_name = "SHARE")]
    label_smoothing: Option<f64>,
    /// Augmented copies of each dialogue of the training split; dev and held-out dialogues have none [default: 0]
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
    /// Share of the dialogues that is held out for evaluation [default: 0.2, with num_folds 0]
    #[arg(long, visible_alias = "eval-share", value_name = "SHARE")]
    eval_share: Option<f64>,
    /// Dev split: share of the other dialogues, on which the best checkpoint is selected and the temperature fitted [default: 0.1; 0 with
    /// fewer than 100 of them and without early stopping]
    #[arg(long, visible_alias = "dev-share", value_name = "SHARE")]
    dev_share: Option<f64>,
    /// Also evaluate by cross-validation with this number of folds
    #[arg(long, visible_alias = "num-folds", value_name = "N")]
    num_folds: Option<u32>,
    /// Rounds of the cross-validation, each with different folds [default: 1]
    #[arg(long, visible_alias = "num-repeats", value_name = "N")]
    num_repeats: Option<u32>,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
}

fn class_weights() -> PossibleValuesParser {
    PossibleValuesParser::new([
        PossibleValue::new("none").help("Every dialogue has the same weight"),
        PossibleValue::new("balanced").help("Every class has the same weight"),
    ])
}

fn run_train(args: &TrainArgs) -> anyhow::Result<()> {
    let mut config = TrainConfig::new(toml::Table::try_from(&args.flags)?, args.config.as_deref())?;
    // Paths in a file are relative to its folder, but a model's name on the hub is not: remove the folder that was added.
    let base = args.config.as_deref().and_then(Path::parent).unwrap_or(Path::new(""));
    if let Ok(name) = config.model_name_or_path.strip_prefix(base)
        && !config.model_name_or_path.parent().is_some_and(Path::exists)
        && let Some(name) = name.to_str().filter(|name| parse_model_name(name).is_some())
    {
        config.model_name_or_path = model_hub::download(name)?;
    }
    let trained = querl_style::train(&config, &callbacks(&Terminal))?;
    print(trained.figures.as_deref().unwrap_or_default())?;
    for (text, probabilities) in &trained.demo {
        writeln!(std::io::stdout(), "{text}\n{}", StylePrediction::new(&trained.classes, probabilities).text())?;
    }
    terminal::print(&format!("written to {}", config.output_dir().display()));
    Ok(())
}

#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Labelled dialogues (.json, .jsonl, .xlsx, .csv) that the model was not trained on
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    /// Where to write eval.json and report.html
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Seed of the bootstrap resamples
    #[arg(long, value_name = "N", default_value_t = 42)]
    seed: u64,
}

fn run_eval(args: &EvalArgs) -> anyhow::Result<()> {
    let options = EvalOptions { file: args.file.clone(), output_dir: args.out.clone(), seed: args.seed };
    print(&querl_style::evaluate(&args.model.options()?, &options, &Terminal)?)
}

/// Arguments of `querl style distill`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct DistillArgs {
    /// A trained classifier
    #[arg(long, value_name = "DIR")]
    teacher: PathBuf,
    /// The model that a teacher's adapter was trained on
    #[arg(long, visible_alias = "teacher-base", value_name = "DIR")]
    teacher_base: Option<PathBuf>,
    /// Folder of the model to train: a language model, or a classifier, whose head is initialised again
    #[arg(long, value_name = "DIR")]
    student: PathBuf,
    /// Dialogues that the teacher labels (.json, .jsonl, .xlsx, .csv); labels in it are ignored
    #[arg(long, value_name = "FILE")]
    unlabelled: PathBuf,
    /// Labelled dialogues; a part of them is held out for evaluation
    #[arg(long, visible_alias = "train-file", value_name = "FILE")]
    train_file: Option<PathBuf>,
    /// Labelled dialogues for evaluation, in place of a part of train_file
    #[arg(long, visible_alias = "eval-file", value_name = "FILE")]
    eval_file: Option<PathBuf>,
    /// Where the student is written
    #[arg(long, visible_alias = "output-dir", value_name = "DIR")]
    output_dir: PathBuf,
    /// Temperature that divides the logits of both models; above 1 the teacher's less likely classes have more weight
    #[arg(long, value_name = "T", default_value_t = 2.0)]
    temperature: f64,
    /// Weight of the label's cross-entropy, for dialogues with a label; the KL divergence from the teacher has the rest
    #[arg(long, visible_alias = "hard-weight", value_name = "SHARE", default_value_t = 0.5)]
    hard_weight: f64,
    #[command(flatten)]
    settings: StudentFlags,
}

/// Settings of the student's training, named as in `querl style train`.
#[derive(Debug, Args, Serialize)]
#[command(rename_all = "snake_case")]
struct StudentFlags {
    /// Maximum tokens of a text [default: 512]
    #[arg(long, visible_alias = "max-length", value_name = "N")]
    max_length: Option<u32>,
    /// Passes over what is learned [default: 3]
    #[arg(long, visible_alias = "num-train-epochs", value_name = "N")]
    num_train_epochs: Option<u32>,
    /// Peak learning rate; it falls to 0 along a line [default: 2e-5]
    #[arg(long, visible_alias = "learning-rate", value_name = "RATE")]
    learning_rate: Option<f64>,
    /// Dialogues per optimizer step [default: 4]
    #[arg(long, visible_alias = "per-device-train-batch-size", value_name = "N")]
    per_device_train_batch_size: Option<u32>,
    /// Share of train_file that is held out [default: 0.2, with eval_file 0]
    #[arg(long, visible_alias = "eval-share", value_name = "SHARE")]
    eval_share: Option<f64>,
    /// Dev split: share of the training dialogues that selects the best checkpoint and is not trained on [default: 0.1]
    #[arg(long, visible_alias = "dev-share", value_name = "SHARE")]
    dev_share: Option<f64>,
    /// Train an adapter of this rank and the head, not every weight
    #[arg(long, visible_alias = "lora-rank", value_name = "N")]
    lora_rank: Option<u32>,
    /// Seed of classification head, data order and splits [default: 42]
    #[arg(long, value_name = "N")]
    seed: Option<u32>,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
}

fn run_distill(args: &DistillArgs) -> anyhow::Result<()> {
    let options = DistillOptions {
        teacher: model_hub::folder(&args.teacher)?,
        teacher_base: model_hub::optional_folder(args.teacher_base.as_deref())?,
        student: model_hub::folder(&args.student)?,
        unlabelled: args.unlabelled.clone(),
        train_file: args.train_file.clone(),
        eval_file: args.eval_file.clone(),
        output_dir: args.output_dir.clone(),
        temperature: args.temperature,
        hard_weight: args.hard_weight,
        settings: toml::Table::try_from(&args.settings)?,
    };
    print(&querl_style::distill(&options, &callbacks(&Terminal))?)?;
    terminal::print(&format!("written to {}", args.output_dir.display()));
    Ok(())
}

/// File name extensions of files with dialogues; other files have one text per line.
const DIALOGUES: [&str; 6] = ["json", "jsonl", "xlsx", "csv", "tsv", "parquet"];

#[derive(Debug, Args)]
pub struct PredictArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A text
    #[arg(long, value_name = "TEXT", conflicts_with = "file")]
    text: Option<String>,
    /// Dialogues (.json, .jsonl, .xlsx, .csv), or one text per line, two lines for a dialogue (用户问题：... and 回答：...); without --text and
    /// --file, lines of stdin, which may be JSON
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Print one JSON object per text
    #[arg(long)]
    json: bool,
    /// Print the English names of the classes, if the model has them
    #[arg(long)]
    english: bool,
}

fn run_predict(args: &PredictArgs) -> anyhow::Result<()> {
    querl_model::set_threads(args.model.threads);
    let model = StyleClassifier::open(&args.model.options()?)?;
    let texts = input_texts(args)?;
    let views: Vec<&str> = texts.iter().map(String::as_str).collect();
    let answers = model.ask(&views).map_err(|error| place_of(error, &model, &views))?;
    if answers.n_shortened > 0 {
        terminal::print(&format!(
            "{} text(s) longer than {} tokens were shortened",
            answers.n_shortened, model.max_length
        ));
    }
    let labels = model.classifier.labels();
    let names = match (args.english, labels.english()) {
        (true, Some(english)) => english,
        (true, None) => return Err(usage("the model has no English names of its classes; leave --english out")),
        (false, _) => labels.names(),
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for row in model.probabilities(&answers.logits) {
        let prediction = StylePrediction::new(names, &row);
        match args.json {
            true => writeln!(out, "{}", serde_json::to_string(&prediction)?)?,
            false => write!(out, "{}", prediction.text())?,
        }
    }
    out.flush()?;
    Ok(())
}

fn input_texts(args: &PredictArgs) -> anyhow::Result<Vec<String>> {
    let texts = match (&args.text, &args.file) {
        (Some(text), _) => vec![text.clone()],
        (None, Some(path)) => of_file(path)?,
        (None, None) => {
            let mut bytes = Vec::new();
            std::io::stdin().lock().read_to_end(&mut bytes).context("stdin")?;
            of_lines("stdin", bytes)?
        }
    };
    if let Some(index) = texts.iter().position(|text| text.trim().is_empty()) {
        return Err(usage(format!("text {} is empty; expected a question and an answer", index + 1)));
    }
    if texts.is_empty() { Err(usage("no text to classify; give --text, --file or lines on stdin")) } else { Ok(texts) }
}

fn of_lines(name: &str, bytes: Vec<u8>) -> anyhow::Result<Vec<String>> {
    let content = String::from_utf8(bytes).map_err(|error| {
        usage(format!("{name}: no UTF-8 from byte {} on; save it as UTF-8", error.utf8_error().valid_up_to()))
    })?;
    texts_of(&content).map_err(|problem| usage(format!("{name}: {problem}")))
}

/// Converts the error of a text that the tokenizer rejects to a usage error with the text's number; returns other errors unchanged.
fn place_of(error: anyhow::Error, model: &StyleClassifier, texts: &[&str]) -> anyhow::Error {
    let refused = texts.iter().enumerate().find_map(|(index, text)| Some((index, model.tokenizer.encode(text).err()?)));
    match refused {
        Some((index, problem)) => usage(format!("text {}: {problem}", index + 1)),
        None => error,
    }
}

fn of_file(path: &Path) -> anyhow::Result<Vec<String>> {
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    if DIALOGUES.contains(&extension.as_str()) {
        let dialogues = read_dialogues(path).map_err(usage)?;
        return Ok(dialogues.into_iter().map(|dialogue| dialogue.input).collect());
    }
    let name = path.display().to_string();
    of_lines(&name, std::fs::read(path).map_err(|error| usage(format!("{name}: {error}")))?)
}

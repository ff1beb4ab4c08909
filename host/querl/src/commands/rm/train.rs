//! `querl rm train`: a classifier from labelled dialogues, and how good it is.

use super::corpus::{Corpus, usage};
use super::fitting::{Fitted, Sides, fit};
use super::model::{CALIBRATION_FILE, Calibration, ask};
use super::predict::Prediction;
use super::results::{Judged, Page, Results, write};
use crate::terminal;
use clap::{Args, ValueEnum};
use querl_eval::classification::{FoldSettings, TextBaseline, fit_temperature, folds, softmax, split_off};
use querl_model::classifier::{Classifier, ClassifierTokenizer};
use std::path::{Path, PathBuf};

/// With fewer dialogues to learn from none is set aside by itself to choose a checkpoint by.
const ENOUGH_FOR_DEV: usize = 100;

/// Asked about after training with `--demo_inference`; written for this.
const DEMO: [&str; 3] = [
    "用户问题：这个产品有什么优缺点？\n回答：优点是轻，缺点也有：续航短，冬天更明显，我不想瞒您。",
    "用户问题：收到的货坏了怎么办？\n回答：很抱歉，请拍照发来，今天就给您补发，运费由我们承担。",
    "用户问题：送爸爸什么好？\n回答：这款按摩仪最受欢迎，今天下单立减一百，我帮您留一台？",
];

/// What `querl rm train` takes: the names and defaults of the training script that people know.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct TrainArgs {
    /// Folder of a Qwen2 or Qwen3 model: a language model, or a classifier, whose head is made anew
    #[arg(long, visible_alias = "model-name-or-path", value_name = "DIR")]
    pub(super) model_name_or_path: PathBuf,
    /// Labelled dialogues: a JSON list, or JSON lines, of input, label, label_english, metadata
    #[arg(long, visible_alias = "train-file", value_name = "FILE")]
    train_file: PathBuf,
    /// Where the classifier is written
    #[arg(long, visible_alias = "output-dir", value_name = "DIR")]
    output_dir: PathBuf,
    /// Most tokens of a text; of longer ones question and answer are shortened
    #[arg(long, visible_alias = "max-length", value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) max_length: u32,
    /// Passes over what is learned
    #[arg(long, visible_alias = "num-train-epochs", value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) num_train_epochs: u32,
    /// Peak learning rate; it falls to 0 along a line
    #[arg(long, visible_alias = "learning-rate", value_name = "RATE", default_value_t = 2e-5, value_parser = rate)]
    pub(super) learning_rate: f64,
    /// Dialogues of an optimizer step
    #[arg(long, visible_alias = "per-device-train-batch-size", value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) per_device_train_batch_size: u32,
    /// Texts of max_length that a pass has room for when nothing is learned; no result depends on it
    #[arg(long, visible_alias = "per-device-eval-batch-size", value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    per_device_eval_batch_size: u32,
    /// Decoupled weight decay of matrices
    #[arg(long, visible_alias = "weight-decay", value_name = "SHARE", default_value_t = 0.01, value_parser = share)]
    pub(super) weight_decay: f64,
    /// Seeds head, order, splits and resamples
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub(super) seed: u64,
    /// Ask the trained classifier about three dialogues
    #[arg(long, visible_alias = "demo-inference")]
    demo_inference: bool,
    /// Share of the steps with a rising learning rate
    #[arg(long, visible_alias = "warmup-ratio", value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub(super) warmup_ratio: f64,
    /// What a dialogue of each class counts: all alike, or N / (K n_c), so that rare classes count as much as common ones
    #[arg(long, visible_alias = "class-weights", value_enum, default_value_t = ClassWeights::None)]
    pub(super) class_weights: ClassWeights,
    /// Share of the target that is spread over all classes
    #[arg(long, visible_alias = "label-smoothing", value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub(super) label_smoothing: f64,
    /// Epochs without a better loss on dev after which training stops; 0 for never
    #[arg(long, visible_alias = "early-stopping-patience", value_name = "N", default_value_t = 0)]
    pub(super) early_stopping_patience: u32,
    /// Train an adapter of this rank and the head, not every weight
    #[arg(long, visible_alias = "lora-rank", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) lora_rank: Option<u32>,
    /// Adapter scale is lora_alpha / lora_rank [default: twice the rank]
    #[arg(long, visible_alias = "lora-alpha", value_name = "N", requires = "lora_rank")]
    pub(super) lora_alpha: Option<f64>,
    /// Share of an adapter's inputs set to zero in training
    #[arg(long, visible_alias = "lora-dropout", value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub(super) lora_dropout: f64,
    /// Share of the dialogues that is held out and only measured on
    #[arg(long, visible_alias = "eval-share", value_name = "SHARE", default_value_t = 0.2, value_parser = part)]
    eval_share: f64,
    /// Share of the others that chooses the best checkpoint and the temperature [default: 0.1, with fewer than 100 of them 0]
    #[arg(long, visible_alias = "dev-share", value_name = "SHARE", value_parser = part)]
    dev_share: Option<f64>,
    /// Measure by cross-validation besides: train on all but one of so many parts, each held out once
    #[arg(long, visible_alias = "num-folds", value_name = "N", value_parser = clap::value_parser!(u32).range(2..=50))]
    num_folds: Option<u32>,
    /// Rounds of the cross-validation, each with parts of its own
    #[arg(long, visible_alias = "num-repeats", value_name = "N", default_value_t = 1, requires = "num_folds", value_parser = clap::value_parser!(u32).range(1..=100))]
    num_repeats: u32,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    threads: usize,
}

impl TrainArgs {
    /// Most tokens of a pass in which nothing is learned.
    fn tokens_asked(&self) -> usize {
        self.per_device_eval_batch_size as usize * self.max_length as usize
    }
}

/// What a dialogue of each class counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ClassWeights {
    /// All alike.
    None,
    /// Classes alike.
    Balanced,
}

impl ClassWeights {
    pub(super) fn is_balanced(self) -> bool {
        self == Self::Balanced
    }
}

fn rate(text: &str) -> Result<f64, String> {
    number(text, |value| value > 0.0 && value <= 1.0, "more than 0, at most 1")
}

fn share(text: &str) -> Result<f64, String> {
    number(text, |value| (0.0..1.0).contains(&value), "0 to below 1")
}

fn part(text: &str) -> Result<f64, String> {
    number(text, |value| value == 0.0 || (0.02..=0.5).contains(&value), "0, or 0.02 to 0.5")
}

fn number(text: &str, is_good: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| format!("expected a number, {expected}"))?;
    if is_good(value) { Ok(value) } else { Err(format!("expected {expected}")) }
}

/// Trains, measures, writes.
///
/// # Errors
/// Data, model or settings cannot be used, a file cannot be written, or the user said stop.
pub fn run(args: &TrainArgs) -> anyhow::Result<()> {
    querl_model::set_threads(args.threads);
    let corpus = Corpus::read(&args.train_file, None)?;
    terminal::say(&format!("{} dialogues: {}", corpus.len(), corpus.counts()));
    let tokenizer = ClassifierTokenizer::load(&args.model_name_or_path, args.max_length as usize).map_err(usage)?;
    let (rest, held_out) = apart(&corpus, &(0..corpus.len()).collect::<Vec<_>>(), args.eval_share, args.seed);
    let sides = sides(args, &corpus, rest);
    terminal::say(&format!("train {}, dev {}, eval {}", sides.train.len(), sides.dev.len(), held_out.len()));
    let fitted = fit(args, &corpus, &tokenizer, &sides, &args.output_dir.join("training"))?;
    fitted.classifier.save(&args.output_dir, &args.model_name_or_path)?;
    if fitted.n_shortened > 0 {
        terminal::say(&format!("{} text(s) were shortened to {} tokens", fitted.n_shortened, args.max_length));
    }
    let temperature = calibrate(args, &corpus, &tokenizer, &fitted.classifier, &sides.dev)?;
    let measured = Measured { args, corpus: &corpus, tokenizer: &tokenizer };
    match args.num_folds {
        Some(n_folds) => measured.by_folds(n_folds, &fitted, temperature)?,
        None if held_out.is_empty() => terminal::say("nothing was held out (--eval_share 0): no figures"),
        None => measured.held_out(&sides, &held_out, &fitted, temperature)?,
    }
    if args.demo_inference {
        let answers = ask(&fitted.classifier, &tokenizer, &DEMO, args.tokens_asked())?;
        for (text, logits) in DEMO.iter().zip(&answers.logits) {
            println!("{text}\n{}", Prediction::new(corpus.classes.names(), softmax(logits)).text());
        }
    }
    terminal::say(&format!("written to {}", args.output_dir.display()));
    Ok(())
}

/// Splits some dialogues, groups whole and classes even; with a share of 0 nothing is set apart.
fn apart(corpus: &Corpus, indices: &[usize], share: f64, seed: u64) -> (Vec<usize>, Vec<usize>) {
    if share == 0.0 {
        return (indices.to_vec(), Vec::new());
    }
    let (labels, groups) = corpus.of(indices);
    let (rest, off) = split_off(&labels, &groups, share, seed);
    let of = |places: Vec<usize>| places.into_iter().map(|place| indices[place]).collect();
    (of(rest), of(off))
}

fn sides(args: &TrainArgs, corpus: &Corpus, rest: Vec<usize>) -> Sides {
    let default = if rest.len() >= ENOUGH_FOR_DEV { 0.1 } else { 0.0 };
    // Another seed than the held-out split's: the same dealing would put the same classes short.
    let (train, dev) = apart(corpus, &rest, args.dev_share.unwrap_or(default), args.seed.wrapping_add(1));
    Sides { train, dev }
}

/// Fits the temperature on what chose the checkpoint, and writes it beside the model.
fn calibrate(
    args: &TrainArgs,
    corpus: &Corpus,
    tokenizer: &ClassifierTokenizer,
    classifier: &Classifier,
    dev: &[usize],
) -> anyhow::Result<Option<f64>> {
    if dev.is_empty() {
        return Ok(None);
    }
    let texts: Vec<&str> = dev.iter().map(|&index| corpus.dialogues[index].input.as_str()).collect();
    let temperature =
        fit_temperature(&corpus.of(dev).0, &ask(classifier, tokenizer, &texts, args.tokens_asked())?.logits);
    let calibration = Calibration { temperature, n: dev.len() };
    write(&args.output_dir.join(CALIBRATION_FILE), &format!("{}\n", serde_json::to_string_pretty(&calibration)?))?;
    Ok(Some(temperature))
}

/// What figures are made from.
struct Measured<'a> {
    args: &'a TrainArgs,
    corpus: &'a Corpus,
    tokenizer: &'a ClassifierTokenizer,
}

impl Measured<'_> {
    fn texts(&self, indices: &[usize]) -> Vec<&str> {
        indices.iter().map(|&index| self.corpus.dialogues[index].input.as_str()).collect()
    }

    /// Probabilities of a classifier, and of the baseline that learned from the same dialogues.
    fn ask_both(
        &self,
        classifier: &Classifier,
        learned: &[usize],
        asked: &[usize],
    ) -> anyhow::Result<[Vec<Vec<f64>>; 2]> {
        let texts = self.texts(asked);
        let answers = ask(classifier, self.tokenizer, &texts, self.args.tokens_asked())?;
        let labels = self.corpus.of(learned).0;
        let baseline = TextBaseline::fit(&self.texts(learned), &labels, self.corpus.classes.n_classes());
        let of_baseline = texts.iter().map(|text| baseline.probabilities(text)).collect();
        Ok([answers.logits.iter().map(|logits| softmax(logits)).collect(), of_baseline])
    }

    /// Figures on the dialogues that were held out from this training.
    fn held_out(
        &self,
        sides: &Sides,
        held_out: &[usize],
        fitted: &Fitted,
        temperature: Option<f64>,
    ) -> anyhow::Result<()> {
        let learned = [sides.train.as_slice(), &sides.dev].concat();
        let both = self.ask_both(&fitted.classifier, &learned, held_out)?;
        let majority = self.corpus.majority(&learned);
        let judged = Judged { corpus: self.corpus, indices: held_out, n_repeats: 1, majority, seed: self.args.seed };
        self.tell(&judged, &both, fitted, temperature, vec![])
    }

    /// Figures of trainings that each had another part held out.
    fn by_folds(&self, n_folds: u32, fitted: &Fitted, temperature: Option<f64>) -> anyhow::Result<()> {
        let all: Vec<usize> = (0..self.corpus.len()).collect();
        let (labels, groups) = self.corpus.of(&all);
        let n_repeats = self.args.num_repeats as usize;
        let settings = FoldSettings { n_folds: n_folds as usize, n_repeats, seed: self.args.seed };
        let (mut indices, mut both) = (Vec::new(), [Vec::new(), Vec::new()]);
        let parts = folds(&labels, &groups, settings);
        for (number, fold) in parts.iter().enumerate() {
            terminal::say(&format!("part {} of {}", number + 1, parts.len()));
            let work = tempfile::tempdir()?;
            let sides = sides(self.args, self.corpus, fold.train.clone());
            let of_fold = fit(self.args, self.corpus, self.tokenizer, &sides, work.path())?;
            let [model, baseline] = self.ask_both(&of_fold.classifier, &fold.train, &fold.test)?;
            both[0].extend(model);
            both[1].extend(baseline);
            indices.extend_from_slice(&fold.test);
        }
        let majority = self.corpus.majority(&all);
        let judged = Judged { corpus: self.corpus, indices: &indices, n_repeats, majority, seed: self.args.seed };
        let note = format!(
            "cross-validation: {n_folds} parts, {n_repeats} round(s); figures are of those trainings, the written model \
             is of another one"
        );
        self.tell(&judged, &both, fitted, temperature, vec![note])
    }

    fn tell(
        &self,
        judged: &Judged<'_>,
        both: &[Vec<Vec<f64>>; 2],
        fitted: &Fitted,
        temperature: Option<f64>,
        mut notes: Vec<String>,
    ) -> anyhow::Result<()> {
        if let Some(temperature) = temperature {
            notes.push(format!(
                "probabilities are the model's own; --calibrated divides logits by {temperature:.3}, fitted on dev"
            ));
        }
        let [model, baseline] = both;
        let results = Results { model: judged.measures(model)?, baseline: Some(judged.measures(baseline)?), notes };
        let summary = &fitted.summary;
        let name = |path: &Path| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let facts = vec![
            ("base".to_owned(), name(&self.args.model_name_or_path)),
            ("dialogues".to_owned(), format!("{} of {}", self.corpus.len(), name(&self.args.train_file))),
            ("by class".to_owned(), self.corpus.counts()),
            (
                "trained".to_owned(),
                self.args.lora_rank.map_or("every weight".into(), |rank| format!("LoRA, rank {rank}")),
            ),
            ("steps".to_owned(), format!("{}, best at {}", summary.n_steps, summary.best_step)),
            ("seed".to_owned(), self.args.seed.to_string()),
        ];
        let page = Page { title: "Style model: training", facts, temperature: None };
        judged.tell(&results, model, page, Some(&self.args.output_dir))
    }
}

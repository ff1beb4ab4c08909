//! Training of a classifier: splits and tokenised rows in, the best checkpoint out.

use crate::classifier::{CALIBRATION_FILE, TOKENS_PER_PASS, model_digest};
use crate::corpus::Corpus;
use crate::settings::{ClassWeights, TrainConfig};
use crate::{make_folder, usage, write_json};
use anyhow::Context;
use querl_core::config::BaseDtype;
use querl_core::fsx::{digest_hex, write_jsonl};
use querl_core::ports::Reporter;
use querl_data::augmented;
use querl_model::Weights;
use querl_model::classifier::{Classifier, ClassifierTokenizer, Labels, Tuning};
use querl_train::classify::{self, ClassifyTask, Distillation, LabelledText, class_weights};
use querl_train::sft::SftSummary;
use querl_train::{BEST, LAST, MetricSink, TrainError};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

pub(crate) const EVAL_FILE: &str = "eval.json";
pub(crate) const REPORT_FILE: &str = "report.html";

/// File with the augmented copies of the training split.
const AUGMENTED_FILE: &str = "augmented.jsonl";

/// File with the summary of the training and its duration in seconds, without earlier, interrupted calls.
const SUMMARY_FILE: &str = "summary.json";

/// Training and dev split, as indices into the corpus. The dev split selects the best checkpoint.
pub(crate) struct Split {
    pub(crate) train: Vec<usize>,
    pub(crate) dev: Vec<usize>,
}

/// Minimum number of dialogues for a dev split by default. With early stopping there is always one.
const MIN_DIALOGUES_FOR_DEV: usize = 100;

impl Split {
    /// Splits the dialogues at `rest`, those that are not held out, into training and dev split.
    pub(crate) fn of(config: &TrainConfig, corpus: &Corpus, rest: &[usize]) -> Self {
        let has_dev = rest.len() >= MIN_DIALOGUES_FOR_DEV || config.early_stopping_patience > 0;
        let share = config.dev_share.unwrap_or(if has_dev { 0.1 } else { 0.0 });
        // A seed other than that of the held-out split: with the same, rounding would disadvantage the same classes twice.
        let (train, dev) = corpus.split_off(rest, share, config.seed.wrapping_add(1));
        Self { train, dev }
    }
}

#[derive(Default)]
pub(crate) struct TrainingRows {
    pub(crate) train: Vec<LabelledText>,
    pub(crate) dev: Vec<LabelledText>,
    pub(crate) n_shortened: usize,
    /// Number of augmented copies in `train`.
    pub(crate) n_copies: usize,
}

/// The best checkpoint of a training, and the training's summary.
pub(crate) struct Checkpoint {
    /// The trained classifier, with frozen weights.
    pub(crate) classifier: Classifier,
    pub(crate) summary: SftSummary,
    folder: PathBuf,
}

/// Whether an interrupted training resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resume {
    /// Resumes from the checkpoints in its folder.
    FromFolder,
    /// Starts again, and writes no checkpoints to resume from.
    Never,
}

impl TrainingRows {
    /// Tokenises both splits. Adds augmented copies to the training split, and writes them to [`AUGMENTED_FILE`] in `folder`.
    pub(crate) fn of(
        corpus: &Corpus,
        tokenizer: &ClassifierTokenizer,
        split: &Split,
        (config, folder): (&TrainConfig, &Path),
    ) -> anyhow::Result<Self> {
        let mut rows = Self::default();
        let mut copies = Vec::new();
        for &index in &split.train {
            let (text, label) = (&corpus.dialogues[index].input, corpus.labels[index]);
            let row = rows.row(tokenizer, text, Some(label))?;
            rows.train.push(row);
            for copy in augmented(text, config.augment_copies as usize, config.seed) {
                let row = rows.row(tokenizer, &copy, Some(label))?;
                rows.train.push(row);
                let of = corpus.dialogues[index].location.number();
                copies.push(json!({
                    "input": copy, "label": corpus.classes.names()[label], "metadata": {"source": "augmented", "augmented_from": of},
                }));
            }
        }
        for &index in &split.dev {
            let row = rows.row(tokenizer, &corpus.dialogues[index].input, Some(corpus.labels[index]))?;
            rows.dev.push(row);
        }
        rows.n_copies = copies.len();
        if config.augment_copies > 0 {
            make_folder(folder)?;
            write_jsonl(&folder.join(AUGMENTED_FILE), copies)?;
        }
        Ok(rows)
    }

    /// Tokenises a text, and counts it in `n_shortened` if it is truncated.
    pub(crate) fn row(
        &mut self,
        tokenizer: &ClassifierTokenizer,
        text: &str,
        label: Option<usize>,
    ) -> anyhow::Result<LabelledText> {
        let encoded = tokenizer.encode(text)?;
        self.n_shortened += usize::from(encoded.n_left_out > 0);
        Ok(LabelledText { tokens: encoded.ids, label: label.map(|label| label as u32), teacher: None })
    }
}

/// True if both paths are the same existing folder.
pub(crate) fn is_same(one: &Path, other: &Path) -> bool {
    one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}

/// Callbacks of a training: messages, stop flag, metric sink, and deferral of interrupts.
pub struct Callbacks<'a> {
    /// Shows messages and progress.
    pub reporter: &'a dyn Reporter,
    /// Stop flag: the training stops at its next safe point once it is set.
    pub stop: &'a AtomicBool,
    /// Opens the metric sink at a path, to which training metrics are written.
    pub open_metrics: &'a OpenMetrics,
    /// Defers interrupts while files are written.
    pub uninterrupted: &'a Uninterrupted,
}

/// Runs a closure and defers interrupts until it has returned.
pub type Uninterrupted = dyn Fn(&mut dyn FnMut() -> anyhow::Result<()>) -> anyhow::Result<()>;

/// Opens the metric sink that writes to a path.
pub type OpenMetrics = dyn Fn(&Path) -> anyhow::Result<Box<dyn MetricSink>>;

/// Trains classifiers from one base model with the same settings, such as the folds of a cross-validation.
pub(crate) struct Trainer<'a> {
    config: &'a TrainConfig,
    callbacks: &'a Callbacks<'a>,
    /// SHA-256 digests of the base model's files.
    base: String,
}

impl<'a> Trainer<'a> {
    pub(crate) fn reporter(&self) -> &'a dyn Reporter {
        self.callbacks.reporter
    }

    /// Checks the base model and the output folder, and computes the digest of the base model.
    pub(crate) fn new(config: &'a TrainConfig, callbacks: &'a Callbacks<'a>) -> anyhow::Result<Self> {
        let (base, output) = (&config.model_name_or_path, &config.output_dir);
        if is_same(base, output) {
            return Err(usage(format!("{}: output_dir is the model's own folder; name another", output.display())));
        }
        let n_positions = Classifier::n_positions(base).map_err(usage)?;
        if config.max_length as usize > n_positions {
            let (length, base) = (config.max_length, base.display());
            return Err(usage(format!(
                "max_length is {length}; {base} has {n_positions} positions, expected at most as many"
            )));
        }
        Ok(Self { config, callbacks, base: model_digest(base)? })
    }

    /// Trains or resumes in `folder`, and returns the best checkpoint, or the last one without a dev split.
    pub(crate) fn fit(
        &self,
        labels: Labels,
        rows: &TrainingRows,
        distillation: Option<Distillation>,
        (folder, resume): (&Path, Resume),
    ) -> anyhow::Result<Checkpoint> {
        let config = self.config;
        let (sft, tuning, base) = (config.sft(), config.tuning(), &config.model_name_or_path);
        let n_classes = labels.n_classes();
        let classifier = Classifier::fresh(base, labels, &tuning, (BaseDtype::F32, config.seed)).map_err(usage)?;
        let weights = class_weights(rows.train.iter().filter_map(|row| Some(row.label? as usize)), n_classes);
        make_folder(folder)?;
        let mut sink = (self.callbacks.open_metrics)(&folder.join("metrics.jsonl"))?;
        let fingerprint = self.fingerprint(classifier.labels(), rows, distillation);
        let progress = self.callbacks.reporter.stage("rm");
        let task = ClassifyTask {
            classifier: &classifier,
            base_path: base,
            train: &rows.train,
            val: &rows.dev,
            config: &sft,
            class_weights: (config.class_weights == ClassWeights::Balanced).then_some(weights.as_slice()),
            label_smoothing: config.label_smoothing,
            distillation,
            tokens_per_pass: TOKENS_PER_PASS,
            tokens_per_evaluation: config.eval_tokens_per_pass(),
            seed: config.seed,
            fingerprint: (resume == Resume::FromFolder).then_some(fingerprint.as_str()),
            output_dir: folder,
            progress: progress.as_ref(),
            stop: self.callbacks.stop,
        };
        let started = Instant::now();
        let summary = classify::train(&task, sink.as_mut()).map_err(|error| match error {
            TrainError::Data(message) => usage(message),
            error => error.into(),
        })?;
        drop(progress);
        let finished = json!({ "summary": summary, "seconds": started.elapsed().as_secs_f64() });
        write_json(&folder.join(SUMMARY_FILE), &finished)?;
        drop(classifier); // frees memory before the frozen classifier is loaded
        let folder = folder.join(if rows.dev.is_empty() { LAST } else { BEST });
        let classifier = read(config, &folder, Weights::Frozen)?;
        let chosen = summary.best_val_loss.map(|loss| format!(", best {loss:.4} on dev at step {}", summary.best_step));
        let chosen = chosen.unwrap_or_else(|| ", the last checkpoint is used: no dev to select one by".into());
        self.callbacks.reporter.message(&format!("{} steps, loss {:.4}{chosen}", summary.n_steps, summary.train_loss));
        Ok(Checkpoint { classifier, summary, folder })
    }

    /// SHA-256 of everything that the result of a training depends on.
    pub(crate) fn fingerprint(
        &self,
        labels: &Labels,
        rows: &TrainingRows,
        distillation: Option<Distillation>,
    ) -> String {
        let TrainConfig { class_weights, label_smoothing, seed, lora_rank, lora_alpha, .. } = self.config;
        let settings = (class_weights, label_smoothing, seed, lora_rank, lora_alpha, distillation);
        let (sft, base) = (self.config.sft(), &self.base);
        digest_hex(format!("{sft:?} {settings:?} {base} {labels:?} {:?} {:?}", rows.train, rows.dev).as_bytes())
    }

    /// Writes the best checkpoint to the output folder, and removes metrics and temperature of an earlier model from it.
    pub(crate) fn publish(&self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
        (self.callbacks.uninterrupted)(&mut || self.write_model(checkpoint))
    }

    fn write_model(&self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
        let folder = &self.config.output_dir;
        for path in [CALIBRATION_FILE, EVAL_FILE, REPORT_FILE].map(|name| folder.join(name)) {
            if path.is_file() {
                std::fs::remove_file(&path).with_context(|| format!("{}: cannot be removed", path.display()))?;
            }
        }
        // Loads it again: the frozen weights of `checkpoint.classifier` are packed for inference and cannot be saved.
        let trained = read(self.config, &checkpoint.folder, Weights::Trained)?;
        Ok(trained.save(folder, &self.config.model_name_or_path)?)
    }
}

fn read(config: &TrainConfig, checkpoint: &Path, weights: Weights) -> anyhow::Result<Classifier> {
    Ok(match config.tuning() {
        Tuning::Full => Classifier::load(checkpoint, weights, BaseDtype::F32)?,
        Tuning::Lora(_) => Classifier::load_adapted(&config.model_name_or_path, checkpoint, BaseDtype::F32)?,
    })
}

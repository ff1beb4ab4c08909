//! One training: examples in, the best classifier in a folder.

use crate::corpus::Corpus;
use crate::error::usage;
use crate::model::CALIBRATION_FILE;
use crate::model::TOKENS_PER_PASS;
use crate::results::{EVAL_FILE, REPORT_FILE, write};
use crate::settings::{ClassWeights, TrainConfig};
use crate::teacher::digest_of;
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

/// Beside the checkpoints: the copies that were learned from.
const AUGMENTED_FILE: &str = "augmented.jsonl";

/// Beside the checkpoints: what the training came to, and how long this call trained.
const SUMMARY_FILE: &str = "summary.json";

/// What is learned from, and what chooses among checkpoints; positions in the corpus.
pub(crate) struct Sides {
    pub(crate) train: Vec<usize>,
    pub(crate) dev: Vec<usize>,
}

#[derive(Default)]
pub(crate) struct Rows {
    pub(crate) train: Vec<LabelledText>,
    pub(crate) dev: Vec<LabelledText>,
    pub(crate) n_shortened: usize,
    /// Changed copies among what is learned from.
    pub(crate) n_copies: usize,
}

/// The best checkpoint, and what its training came to.
pub(crate) struct Fitted {
    /// Its weights are frozen: it is asked, not trained on.
    pub(crate) classifier: Classifier,
    pub(crate) summary: SftSummary,
    checkpoint: PathBuf,
}

/// Whether a training that was stopped goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resume {
    /// From what it left in its folder.
    FromFolder,
    /// It begins anew, and leaves nothing to go on from.
    Never,
}

impl Rows {
    /// The dialogues of both sides, with copies of those that are learned from, which are written to `folder`.
    pub(crate) fn of(
        corpus: &Corpus,
        tokenizer: &ClassifierTokenizer,
        sides: &Sides,
        (config, folder): (&TrainConfig, &Path),
    ) -> anyhow::Result<Self> {
        let mut rows = Self::default();
        let mut copies = Vec::new();
        for &index in &sides.train {
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
        for &index in &sides.dev {
            let row = rows.row(tokenizer, &corpus.dialogues[index].input, Some(corpus.labels[index]))?;
            rows.dev.push(row);
        }
        rows.n_copies = copies.len();
        if config.augment_copies > 0 {
            make(folder)?;
            write_jsonl(&folder.join(AUGMENTED_FILE), copies)?;
        }
        Ok(rows)
    }

    /// One text as tokens; counts it where it is shortened.
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

/// Whether both are one folder, by whatever name.
pub(crate) fn is_same(one: &Path, other: &Path) -> bool {
    one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}

fn make(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("{}: cannot be made", folder.display()))
}

/// What a training calls.
pub struct Callbacks<'a> {
    /// Shows messages and progress.
    pub reporter: &'a dyn Reporter,
    /// Set once the training shall stop at its next safe point.
    pub stop: &'a AtomicBool,
    /// Opens the metric sink at a path.
    pub open_metrics: &'a OpenMetrics,
}

/// Opens a metric sink at a path.
pub type OpenMetrics = dyn Fn(&Path) -> anyhow::Result<Box<dyn MetricSink>>;

/// Trainings from one base with the same settings.
pub(crate) struct Trainer<'a> {
    config: &'a TrainConfig,
    callbacks: &'a Callbacks<'a>,
    /// SHA-256 of the base: other weights in the same folder make another classifier.
    base: String,
}

impl<'a> Trainer<'a> {
    pub(crate) fn reporter(&self) -> &'a dyn Reporter {
        self.callbacks.reporter
    }

    /// Looks at base and output folder.
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
        Ok(Self { config, callbacks, base: digest_of(base)? })
    }

    /// Trains in `folder`, or goes on there, and gives back the best checkpoint: without dev the last one.
    pub(crate) fn fit(
        &self,
        labels: Labels,
        rows: &Rows,
        distillation: Option<Distillation>,
        (folder, resume): (&Path, Resume),
    ) -> anyhow::Result<Fitted> {
        let config = self.config;
        let (sft, tuning, base) = (config.sft(), config.tuning(), &config.model_name_or_path);
        let n_classes = labels.n_classes();
        let classifier = Classifier::fresh(base, labels, &tuning, (BaseDtype::F32, config.seed)).map_err(usage)?;
        let weights = class_weights(rows.train.iter().filter_map(|row| Some(row.label? as usize)), n_classes);
        make(folder)?;
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
            tokens_per_evaluation: config.tokens_asked(),
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
        let told = json!({ "summary": summary, "seconds": started.elapsed().as_secs_f64() });
        write(&folder.join(SUMMARY_FILE), &format!("{told:#}\n"))?;
        // What is trained and what is asked need not be in memory together.
        drop(classifier);
        let checkpoint = folder.join(if rows.dev.is_empty() { LAST } else { BEST });
        let classifier = read(config, &checkpoint, Weights::Frozen)?;
        let chosen = summary.best_val_loss.map(|loss| format!(", best {loss:.4} on dev at step {}", summary.best_step));
        let chosen = chosen.unwrap_or_else(|| ", kept as it is: no dev to choose a checkpoint by".into());
        self.callbacks.reporter.message(&format!("{} steps, loss {:.4}{chosen}", summary.n_steps, summary.train_loss));
        Ok(Fitted { classifier, summary, checkpoint })
    }

    /// Stands for everything that the result depends on.
    pub(crate) fn fingerprint(&self, labels: &Labels, rows: &Rows, distillation: Option<Distillation>) -> String {
        let TrainConfig { class_weights, label_smoothing, seed, lora_rank, lora_alpha, .. } = self.config;
        let settings = (class_weights, label_smoothing, seed, lora_rank, lora_alpha, distillation);
        let (sft, base) = (self.config.sft(), &self.base);
        digest_hex(format!("{sft:?} {settings:?} {base} {labels:?} {:?} {:?}", rows.train, rows.dev).as_bytes())
    }

    /// Writes the best checkpoint to the output folder. Figures and a temperature there are of an earlier model, and are taken away.
    pub(crate) fn publish(&self, fitted: &Fitted) -> anyhow::Result<()> {
        let folder = &self.config.output_dir;
        for path in [CALIBRATION_FILE, EVAL_FILE, REPORT_FILE].map(|name| folder.join(name)) {
            if path.is_file() {
                std::fs::remove_file(&path).with_context(|| format!("{}: cannot be removed", path.display()))?;
            }
        }
        // Weights that are packed to be asked are not those that are written.
        let whole = read(self.config, &fitted.checkpoint, Weights::Trained)?;
        Ok(whole.save(folder, &self.config.model_name_or_path)?)
    }
}

/// A checkpoint of a training with these settings.
fn read(config: &TrainConfig, checkpoint: &Path, weights: Weights) -> anyhow::Result<Classifier> {
    Ok(match config.tuning() {
        Tuning::Full => Classifier::load(checkpoint, weights, BaseDtype::F32)?,
        Tuning::Lora(_) => Classifier::load_adapted(&config.model_name_or_path, checkpoint, BaseDtype::F32)?,
    })
}

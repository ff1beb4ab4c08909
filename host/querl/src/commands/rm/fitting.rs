//! One training: examples in, the best classifier in a folder.

use super::TOKENS_PER_PASS;
use super::corpus::{Corpus, usage};
use super::settings::{ClassWeights, TrainConfig};
use crate::interrupt;
use crate::metrics_log::MetricsLog;
use crate::terminal::{self, StageProgress};
use crate::training::ending;
use anyhow::Context;
use querl_core::config::{BaseDtype, SftConfig};
use querl_core::fsx::{digest_hex, write_jsonl};
use querl_data::augmented;
use querl_model::Weights;
use querl_model::classifier::{Classifier, ClassifierTokenizer, Labels, Tuning};
use querl_train::classify::{self, ClassifyTask, Distillation, LabelledText, class_weights};
use querl_train::sft::SftSummary;
use querl_train::{BEST, TrainError};
use serde_json::json;
use std::path::Path;

/// Beside the checkpoints: the copies that were learned from.
const AUGMENTED_FILE: &str = "augmented.jsonl";

/// What is learned from, and what chooses among checkpoints; positions in the corpus.
pub(super) struct Sides {
    pub(super) train: Vec<usize>,
    pub(super) dev: Vec<usize>,
}

/// The same as tokens.
#[derive(Default)]
pub(super) struct Rows {
    pub(super) train: Vec<LabelledText>,
    pub(super) dev: Vec<LabelledText>,
    /// Texts that were shortened.
    pub(super) n_shortened: usize,
    /// Changed copies among what is learned from.
    pub(super) n_copies: usize,
}

/// A classifier and what its training came to.
pub(super) struct Fitted {
    pub(super) classifier: Classifier,
    pub(super) summary: SftSummary,
}

impl Rows {
    /// The dialogues of both sides, with copies of those that are learned from, which are written to `folder`.
    ///
    /// # Errors
    /// A text has no token, or the file cannot be written.
    pub(super) fn of(
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
                let of = corpus.dialogues[index].number;
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
    ///
    /// # Errors
    /// It has no token.
    pub(super) fn row(
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

fn make(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("{}: cannot be made", folder.display()))
}

/// Trains in `folder`, or goes on there, and gives back the best checkpoint.
///
/// # Errors
/// The model cannot be loaded or trained, a file cannot be written, or the user said stop.
pub(super) fn fit(
    config: &TrainConfig,
    labels: Labels,
    rows: &Rows,
    distillation: Option<Distillation>,
    folder: &Path,
) -> anyhow::Result<Fitted> {
    let (sft, tuning, base) = (config.sft(), config.tuning(), &config.model_name_or_path);
    let n_classes = labels.n_classes();
    let classifier = Classifier::fresh(base, labels, &tuning, (BaseDtype::F32, config.seed)).map_err(usage)?;
    let weights = class_weights(rows.train.iter().filter_map(|row| Some(row.label? as usize)), n_classes);
    make(folder)?;
    let mut sink = MetricsLog::open(&folder.join("metrics.jsonl"), "rm")?;
    let fingerprint = fingerprint(config, &sft, rows, distillation)?;
    let progress = StageProgress::start("rm");
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
        seed: config.seed,
        fingerprint: Some(&fingerprint),
        output_dir: folder,
        progress: &progress,
        stop: interrupt::flag(),
    };
    let summary = classify::train(&task, &mut sink).map_err(|error| match error {
        TrainError::Data(message) => usage(message),
        error => ending(error.into()),
    })?;
    drop(progress);
    let best = folder.join(BEST);
    // Weights in memory are the last step's; with nothing to choose by they are the best too.
    let classifier = match (rows.dev.is_empty(), tuning) {
        (true, _) => classifier,
        (false, Tuning::Full) => Classifier::load(&best, Weights::Frozen, BaseDtype::F32)?,
        (false, Tuning::Lora(_)) => Classifier::load_adapted(base, &best, BaseDtype::F32)?,
    };
    let chosen = summary.best_val_loss.map(|loss| format!(", best {loss:.4} on dev at step {}", summary.best_step));
    let chosen = chosen.unwrap_or_default();
    terminal::say(&format!("{} steps, loss {:.4}{chosen}", summary.n_steps, summary.train_loss));
    Ok(Fitted { classifier, summary })
}

/// Stands for everything that the result depends on.
fn fingerprint(
    config: &TrainConfig,
    sft: &SftConfig,
    rows: &Rows,
    distillation: Option<Distillation>,
) -> anyhow::Result<String> {
    let model = config.model_name_or_path.join("config.json");
    let model = std::fs::read_to_string(&model).map_err(|error| usage(format!("{}: {error}", model.display())))?;
    let TrainConfig { class_weights, label_smoothing, seed, lora_rank, lora_alpha, .. } = config;
    let settings = (class_weights, label_smoothing, seed, lora_rank, lora_alpha, distillation);
    let text = format!("{sft:?} {settings:?} {model} {:?} {:?}", rows.train, rows.dev);
    Ok(digest_hex(text.as_bytes()))
}

//! One training: examples in, the best classifier in a folder.

use super::TOKENS_PER_PASS;
use super::corpus::{Corpus, usage};
use super::train::TrainArgs;
use crate::interrupt;
use crate::metrics_log::MetricsLog;
use crate::terminal::{self, StageProgress};
use crate::training::ending;
use anyhow::Context;
use querl_core::config::{BaseDtype, LrScheduler, SftConfig};
use querl_core::fsx::digest_hex;
use querl_model::classifier::{Classifier, ClassifierTokenizer, Tuning};
use querl_model::{LoraSettings, Weights};
use querl_train::classify::{self, ClassifyTask, LabelledText, class_weights};
use querl_train::sft::SftSummary;
use querl_train::{BEST, TrainError};
use std::path::Path;

/// What is learned from, and what chooses among checkpoints; positions in the corpus.
pub(super) struct Sides {
    pub(super) train: Vec<usize>,
    pub(super) dev: Vec<usize>,
}

/// A classifier and what its training came to.
pub(super) struct Fitted {
    pub(super) classifier: Classifier,
    pub(super) summary: SftSummary,
    /// Texts that were shortened.
    pub(super) n_shortened: usize,
}

/// Trains in `folder`, or goes on there, and gives back the best checkpoint.
///
/// # Errors
/// The model cannot be loaded or trained, a file cannot be written, or the user said stop.
pub(super) fn fit(
    args: &TrainArgs,
    corpus: &Corpus,
    tokenizer: &ClassifierTokenizer,
    sides: &Sides,
    folder: &Path,
) -> anyhow::Result<Fitted> {
    let config = config(args);
    let (train, of_train) = texts(corpus, tokenizer, &sides.train)?;
    let (dev, of_dev) = texts(corpus, tokenizer, &sides.dev)?;
    let base = &args.model_name_or_path;
    let tuning = tuning(args);
    let labels = corpus.classes.clone();
    let classifier = Classifier::fresh(base, labels, &tuning, (BaseDtype::F32, args.seed)).map_err(usage)?;
    let weights = class_weights(train.iter().map(|row| row.label as usize), corpus.classes.n_classes());
    std::fs::create_dir_all(folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    let mut sink = MetricsLog::open(&folder.join("metrics.jsonl"), "rm")?;
    let fingerprint = fingerprint(args, &config, &train, &dev)?;
    let progress = StageProgress::start("rm");
    let task = ClassifyTask {
        classifier: &classifier,
        base_path: base,
        train: &train,
        val: &dev,
        config: &config,
        class_weights: args.class_weights.is_balanced().then_some(weights.as_slice()),
        label_smoothing: args.label_smoothing,
        tokens_per_pass: TOKENS_PER_PASS,
        seed: args.seed,
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
    let classifier = match (sides.dev.is_empty(), tuning) {
        (true, _) => classifier,
        (false, Tuning::Full) => Classifier::load(&best, Weights::Frozen, BaseDtype::F32)?,
        (false, Tuning::Lora(_)) => Classifier::load_adapted(base, &best, BaseDtype::F32)?,
    };
    terminal::say(&format!(
        "{} steps, loss {:.4}{}",
        summary.n_steps,
        summary.train_loss,
        summary
            .best_val_loss
            .map_or(String::new(), |loss| format!(", best {loss:.4} on dev at step {}", summary.best_step))
    ));
    Ok(Fitted { classifier, summary, n_shortened: of_train + of_dev })
}

/// The flags in the words of fine-tuning. A learning rate that falls to 0 along a line, without warm-up, is what transformers'
/// Trainer does by default.
pub(super) fn config(args: &TrainArgs) -> SftConfig {
    SftConfig {
        learning_rate: args.learning_rate,
        epochs: args.num_train_epochs as usize,
        batch_size: args.per_device_train_batch_size as usize,
        gradient_accumulation_steps: 1,
        lr_scheduler: LrScheduler::Linear,
        warmup_ratio: args.warmup_ratio,
        weight_decay: args.weight_decay,
        max_grad_norm: 1.0,
        max_length: args.max_length as usize,
        eval_steps: 0,
        save_steps: 0,
        save_total_limit: 1,
        early_stopping_patience: args.early_stopping_patience as usize,
        lora_dropout: args.lora_dropout,
        ..SftConfig::default()
    }
}

fn tuning(args: &TrainArgs) -> Tuning {
    match args.lora_rank {
        None => Tuning::Full,
        Some(rank) => {
            let alpha = args.lora_alpha.unwrap_or(2.0 * f64::from(rank));
            Tuning::Lora(LoraSettings { dropout: args.lora_dropout, ..LoraSettings::all_linear(rank as usize, alpha) })
        }
    }
}

/// Some dialogues as tokens, and how many of them were shortened.
fn texts(
    corpus: &Corpus,
    tokenizer: &ClassifierTokenizer,
    indices: &[usize],
) -> anyhow::Result<(Vec<LabelledText>, usize)> {
    let mut n_shortened = 0;
    let mut text = |&index: &usize| -> anyhow::Result<LabelledText> {
        let encoded = tokenizer.encode(&corpus.dialogues[index].input)?;
        n_shortened += usize::from(encoded.n_left_out > 0);
        Ok(LabelledText { tokens: encoded.ids, label: corpus.labels[index] as u32 })
    };
    let texts = indices.iter().map(&mut text).collect::<anyhow::Result<Vec<_>>>()?;
    Ok((texts, n_shortened))
}

/// Stands for everything that the result depends on.
fn fingerprint(
    args: &TrainArgs,
    config: &SftConfig,
    train: &[LabelledText],
    dev: &[LabelledText],
) -> anyhow::Result<String> {
    let model = args.model_name_or_path.join("config.json");
    let model = std::fs::read_to_string(&model).map_err(|error| usage(format!("{}: {error}", model.display())))?;
    let settings = (args.class_weights.is_balanced(), args.label_smoothing, args.seed, args.lora_rank, args.lora_alpha);
    let text = format!("{config:?} {settings:?} {model} {train:?} {dev:?}");
    Ok(digest_hex(text.as_bytes()))
}

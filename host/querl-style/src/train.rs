//! `querl style train`: trains a classifier on labelled dialogues and evaluates it.

use crate::classifier::{CALIBRATION_FILE, Calibration, compute_logits};
use crate::corpus::Corpus;
use crate::evaluation::{Task, TrainedModel, shortened_note};
use crate::settings::TrainConfig;
use crate::trainer::{Callbacks, Resume, Split, Trainer, TrainingRows};
use crate::{usage, write, write_json};
use querl_core::dir_lock::DirLock;
use querl_eval::classification::softmax;
use querl_model::classifier::{Classifier, ClassifierTokenizer};

/// Example texts for `--demo_inference`.
const DEMO: [&str; 3] = [
    "用户问题：这个产品有什么优缺点？\n回答：优点是轻，缺点也有：续航短，冬天更明显，我不想瞒您。",
    "用户问题：收到的货坏了怎么办？\n回答：很抱歉，请拍照发来，今天就给您补发，运费由我们承担。",
    "用户问题：送爸爸什么好？\n回答：这款按摩仪最受欢迎，今天下单立减一百，我帮您留一台？",
];

/// File in the model's folder with the values of all settings.
const RESOLVED_FILE: &str = "rm.resolved.toml";

/// Result of a classifier training.
pub struct Trained {
    /// Metrics on held-out dialogues, as text; `None` if no dialogues were held out.
    pub figures: Option<String>,
    /// Names of the classes, in the order of their ids.
    pub classes: Vec<String>,
    /// Example texts with the class probabilities of the trained classifier; empty unless `demo_inference` is set.
    pub demo: Vec<(&'static str, Vec<f64>)>,
}

/// Trains a classifier, evaluates it on held-out dialogues, and writes model and metrics to the output folder.
///
/// # Errors
/// Data, model or settings cannot be used, a file cannot be written, or the stop flag was set.
pub fn train(config: &TrainConfig, callbacks: &Callbacks<'_>) -> anyhow::Result<Trained> {
    let reporter = callbacks.reporter;
    querl_model::set_threads(config.threads as usize);
    let corpus = Corpus::read_training(&config.train_file, config.labels()?.as_ref(), reporter)?;
    reporter.message(&format!("{} dialogues: {}", corpus.len(), corpus.counts()));
    let n_folds = config.num_folds.map_or(0, |n_folds| n_folds as usize);
    if n_folds > corpus.n_groups() {
        return Err(usage(format!("num_folds is {n_folds}; expected at most {}, one group a part", corpus.n_groups())));
    }
    let trainer = Trainer::new(config, callbacks)?;
    let _lock = DirLock::take(&config.output_dir)?;
    let tokenizer = ClassifierTokenizer::load(&config.model_name_or_path, config.max_length as usize).map_err(usage)?;
    let (rest, held_out) = corpus.split_off(&(0..corpus.len()).collect::<Vec<_>>(), config.eval_share, config.seed);
    let split = Split::of(config, &corpus, &rest);
    reporter.message(&format!("train {}, dev {}, eval {}", split.train.len(), split.dev.len(), held_out.len()));
    if !held_out.is_empty() && !corpus.missing(&held_out).is_empty() {
        reporter.message(&format!("no example held out of: {}", corpus.missing(&held_out).join(", ")));
    }
    let folder = config.output_dir.join("training");
    let rows = TrainingRows::of(&corpus, &tokenizer, &split, (config, &folder))?;
    if rows.n_copies > 0 {
        reporter.message(&format!("{} augmented copies are in the training split only", rows.n_copies));
    }
    shortened_note(rows.n_shortened, config.max_length as usize).iter().for_each(|note| reporter.message(note));
    let checkpoint = trainer.fit(corpus.classes.clone(), &rows, None, (&folder, Resume::FromFolder))?;
    trainer.publish(&checkpoint)?;
    write(&config.output_dir.join(RESOLVED_FILE), &toml::to_string_pretty(&config.with_absolute_paths()?)?)?;
    let task = Task { config, corpus: &corpus, tokenizer: &tokenizer };
    let temperature = task.fit_temperature(&checkpoint.classifier, &split.dev)?;
    if let Some(temperature) = temperature {
        let calibration = Calibration { temperature, n: split.dev.len() };
        write_json(&config.output_dir.join(CALIBRATION_FILE), &calibration)?;
    }
    let trained = TrainedModel { task, checkpoint: &checkpoint, temperature, n_copies: rows.n_copies };
    let figures = match config.num_folds {
        Some(_) => Some(trained.cross_validate(&trainer)?),
        None if held_out.is_empty() => {
            reporter.message("nothing was held out (--eval_share 0): no figures");
            None
        }
        None => Some(trained.evaluate_held_out(&split, &held_out)?),
    };
    let demo = match config.demo_inference {
        true => demonstrate(config, &checkpoint.classifier, &tokenizer)?,
        false => Vec::new(),
    };
    Ok(Trained { figures, classes: corpus.classes.names().to_vec(), demo })
}

fn demonstrate(
    config: &TrainConfig,
    classifier: &Classifier,
    tokenizer: &ClassifierTokenizer,
) -> anyhow::Result<Vec<(&'static str, Vec<f64>)>> {
    let answers = compute_logits(classifier, tokenizer, &DEMO, config.eval_tokens_per_pass())?;
    Ok(DEMO.into_iter().zip(answers.logits.iter().map(|logits| softmax(logits))).collect())
}

//! Evaluation of a classifier on held-out dialogues: a held-out split, cross-validation, or a file for a saved model. After a training,
//! compared with TF-IDF and logistic regression. Results are text, `eval.json` and `report.html`.

use crate::classifier::{ClassifierOptions, StyleClassifier, compute_logits};
use crate::corpus::{Classes, Corpus};
use crate::settings::TrainConfig;
use crate::trainer::{Checkpoint, EVAL_FILE, REPORT_FILE, Resume, Split, Trainer, TrainingRows};
use crate::{make_folder, write, write_json};
use querl_core::fsx::digest_hex;
use querl_core::ports::Reporter;
use querl_eval::classification::{
    ClassificationReport, Examples, Fold, FoldSettings, MeasureOptions, Measures, Mistake, TextBaseline, argmax,
    calibrated, classification_html, classification_text, fit_temperature, folds, measure, softmax,
};
use querl_model::classifier::{Classifier, ClassifierTokenizer};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Number of bootstrap resamples for confidence intervals and tests.
const N_RESAMPLES: usize = 2000;
/// Number of wrong predictions that the report shows.
const N_MISTAKES: usize = 20;
const FOLDS_FOLDER: &str = "training/folds";

/// Data and output of an evaluation.
#[derive(Debug)]
pub struct EvalOptions {
    /// File of labelled dialogues.
    pub file: PathBuf,
    /// Folder in which `eval.json` and `report.html` are written; `None`: no files.
    pub output_dir: Option<PathBuf>,
    /// Seed of the bootstrap resamples.
    pub seed: u64,
}

/// Evaluates a classifier, writes the metrics and returns them as text.
///
/// # Errors
/// Model or file cannot be used, or a file cannot be written.
pub fn evaluate(options: &ClassifierOptions, args: &EvalOptions, reporter: &dyn Reporter) -> anyhow::Result<String> {
    querl_model::set_threads(options.threads);
    let model = StyleClassifier::open(options)?;
    let corpus = Corpus::read(&args.file, Classes::OfModel(model.classifier.labels()), reporter)?;
    let indices: Vec<usize> = (0..corpus.len()).collect();
    let answers = model.ask(&corpus.texts(&indices))?;
    let probabilities = model.probabilities(&answers.logits);
    // The training data is unknown, so the majority baseline predicts the most frequent class of this file.
    let majority = corpus.majority(&indices);
    let test_set = TestSet { corpus: &corpus, indices: &indices, n_repeats: 1, majority, seed: args.seed };
    let mut notes = shortened_note(answers.n_shortened, model.max_length);
    let temperature = options.calibrated.then_some(model.temperature);
    notes.extend(
        temperature.map(|temperature| format!("probabilities are calibrated: logits were divided by {temperature:.3}")),
    );
    let results = EvalResults { temperature, ..EvalResults::new(test_set.measures(&probabilities)?, notes) };
    if let Some(out) = &args.output_dir {
        make_folder(out)?;
    }
    let facts = [
        ("model", file_name(&options.model)),
        ("dialogues", format!("{} of {}", corpus.len(), file_name(&args.file))),
        ("by class", corpus.counts()),
    ];
    test_set.report(
        "Style model: evaluation",
        &results,
        &probabilities,
        (&facts, temperature),
        args.output_dir.as_deref(),
    )
}

pub(crate) fn shortened_note(n_shortened: usize, max_length: usize) -> Vec<String> {
    let note = || format!("{n_shortened} text(s) were shortened to {max_length} tokens");
    (n_shortened > 0).then(note).into_iter().collect()
}

pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// Held-out dialogues of an evaluation.
pub(crate) struct TestSet<'a> {
    pub(crate) corpus: &'a Corpus,
    /// Indices of the held-out dialogues; a dialogue that was held out several times is repeated.
    pub(crate) indices: &'a [usize],
    pub(crate) n_repeats: usize,
    /// The most frequent class of the training data, which the majority baseline predicts.
    pub(crate) majority: usize,
    pub(crate) seed: u64,
}

/// Content of `eval.json`.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct EvalResults {
    /// Metrics of the classifier.
    #[serde(flatten)]
    pub(crate) model: Measures,
    /// Temperature that divided the logits: those of `model` in an evaluation of a saved model, only those of `calibrated` in training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) temperature: Option<f64>,
    /// Metrics of the classifier with temperatures that were fitted on other dialogues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) calibrated: Option<Measures>,
    /// Metrics of the baseline, TF-IDF with logistic regression, on the same split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) baseline: Option<Measures>,
    /// Metrics of the teacher on the same dialogues, in a distillation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) teacher: Option<Measures>,
    /// Sentences that qualify the metrics.
    pub(crate) notes: Vec<String>,
}

impl EvalResults {
    pub(crate) fn new(model: Measures, notes: Vec<String>) -> Self {
        Self { model, temperature: None, calibrated: None, baseline: None, teacher: None, notes }
    }

    /// The metrics as text for a terminal.
    fn text(&self) -> String {
        let mut text = classification_text(&self.model) + "\n";
        if let Some(Measures { log_loss, brier, expected_calibration_error: error, .. }) = &self.calibrated {
            text +=
                &format!("calibrated: log loss {log_loss:.4}, Brier score {brier:.4}, calibration error {error:.4}\n");
        }
        for (name, measures) in [("TF-IDF and logistic regression", &self.baseline), ("teacher", &self.teacher)] {
            if let Some(Measures { eval_accuracy, eval_f1_macro, .. }) = measures {
                let accuracy = 100.0 * eval_accuracy;
                text += &format!("{name}: eval_accuracy {accuracy:.1}%, eval_f1_macro {eval_f1_macro:.4}\n");
            }
        }
        text + &self.notes.iter().map(|note| format!("note: {note}\n")).collect::<String>()
    }
}

impl TestSet<'_> {
    /// Metrics of class probabilities, one row per held-out dialogue.
    pub(crate) fn measures(&self, probabilities: &[Vec<f64>]) -> anyhow::Result<Measures> {
        let (labels, groups) = self.corpus.labels_and_groups(self.indices);
        let examples = Examples {
            classes: self.corpus.classes.names(),
            labels: &labels,
            groups: &groups,
            n_repeats: self.n_repeats,
            majority: self.majority,
        };
        Ok(measure(&examples, probabilities, MeasureOptions { seed: self.seed, n_resamples: N_RESAMPLES })?)
    }

    /// Wrong predictions, the most confident first.
    fn mistakes(&self, probabilities: &[Vec<f64>]) -> Vec<Mistake> {
        let names = self.corpus.classes.names();
        let mistake = |(&index, row): (&usize, &Vec<f64>)| {
            let (label, predicted) = (self.corpus.labels[index], argmax(row));
            let dialogue = &self.corpus.dialogues[index];
            (label != predicted).then(|| Mistake {
                text: dialogue.input.clone(),
                label: names[label].clone(),
                predicted: names[predicted].clone(),
                confidence: row[predicted],
                note: dialogue.boundary.as_ref().map_or(String::new(), |class| format!("boundary: {class}")),
            })
        };
        let mut mistakes: Vec<Mistake> = self.indices.iter().zip(probabilities).filter_map(mistake).collect();
        mistakes.sort_by(|a, b| b.confidence.total_cmp(&a.confidence));
        mistakes.truncate(N_MISTAKES);
        mistakes
    }

    /// Returns the results as text; writes [`EVAL_FILE`] and [`REPORT_FILE`] if there is a `folder`. `temperature`: the temperature that
    /// divided the logits of `probabilities`; `None` if they are not calibrated.
    pub(crate) fn report(
        &self,
        title: &str,
        results: &EvalResults,
        probabilities: &[Vec<f64>],
        (facts, temperature): (&[(&str, String)], Option<f64>),
        folder: Option<&Path>,
    ) -> anyhow::Result<String> {
        let Some(folder) = folder else { return Ok(results.text()) };
        let systems = [
            ("model", Some(&results.model)),
            ("model, calibrated", results.calibrated.as_ref()),
            ("TF-IDF, logistic regression", results.baseline.as_ref()),
            ("teacher", results.teacher.as_ref()),
        ];
        let report = ClassificationReport {
            title: title.to_owned(),
            facts: facts.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
            systems: systems
                .into_iter()
                .filter_map(|(name, system)| Some((name.to_owned(), system?.clone())))
                .collect(),
            temperature,
            mistakes: self.mistakes(probabilities),
            notes: results.notes.clone(),
        };
        write(&folder.join(REPORT_FILE), &classification_html(&report)?)?;
        write_json(&folder.join(EVAL_FILE), results)?;
        Ok(results.text())
    }
}

/// A corpus, and the configuration of the classifiers trained on it.
#[derive(Clone, Copy)]
pub(crate) struct Task<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) corpus: &'a Corpus,
    pub(crate) tokenizer: &'a ClassifierTokenizer,
}

/// Class probabilities of held-out dialogues, one row per dialogue.
#[derive(Default)]
struct Predictions {
    model: Vec<Vec<f64>>,
    /// The model's probabilities with temperature; empty without a temperature.
    calibrated: Vec<Vec<f64>>,
    /// Temperature of `calibrated`, if it is the same for all dialogues; in cross-validation each fold has its own.
    temperature: Option<f64>,
    baseline: Vec<Vec<f64>>,
    n_shortened: usize,
}

impl Task<'_> {
    /// The temperature fitted on the dev split; `None` without a dev split.
    pub(crate) fn fit_temperature(&self, classifier: &Classifier, dev: &[usize]) -> anyhow::Result<Option<f64>> {
        if dev.is_empty() {
            return Ok(None);
        }
        let tokens_per_pass = self.config.eval_tokens_per_pass();
        let logits = compute_logits(classifier, self.tokenizer, &self.corpus.texts(dev), tokens_per_pass)?.logits;
        Ok(Some(fit_temperature(&self.corpus.labels_and_groups(dev).0, &logits)))
    }

    /// Class probabilities for `test`: the model's, from `logits`, and those of a TF-IDF baseline fitted on `train`.
    fn predictions(
        &self,
        logits: &[Vec<f64>],
        n_shortened: usize,
        temperature: Option<f64>,
        [train, test]: [&[usize]; 2],
    ) -> Predictions {
        let (corpus, labels) = (self.corpus, self.corpus.labels_and_groups(train).0);
        let baseline = TextBaseline::fit(&corpus.texts(train), &labels, corpus.classes.n_classes());
        Predictions {
            model: logits.iter().map(|logits| softmax(logits)).collect(),
            calibrated: temperature.map_or(Vec::new(), |temperature| calibrated(logits, temperature)),
            baseline: corpus.texts(test).into_iter().map(|text| baseline.probabilities(text)).collect(),
            temperature,
            n_shortened,
        }
    }
}

/// A trained classifier that is evaluated on its held-out dialogues.
pub(crate) struct TrainedModel<'a> {
    pub(crate) task: Task<'a>,
    pub(crate) checkpoint: &'a Checkpoint,
    /// Temperature fitted on the dev split; `None` without a dev split.
    pub(crate) temperature: Option<f64>,
    /// Number of augmented copies in the training split.
    pub(crate) n_copies: usize,
}

impl TrainedModel<'_> {
    /// Evaluates the classifier on the dialogues held out from its training.
    pub(crate) fn evaluate_held_out(&self, split: &Split, held_out: &[usize]) -> anyhow::Result<String> {
        let Task { config, corpus, tokenizer } = self.task;
        let learned = [split.train.as_slice(), &split.dev].concat();
        let texts = corpus.texts(held_out);
        let answers = compute_logits(&self.checkpoint.classifier, tokenizer, &texts, config.eval_tokens_per_pass())?;
        let predictions =
            self.task.predictions(&answers.logits, answers.n_shortened, self.temperature, [&learned, held_out]);
        let majority = corpus.majority(&learned);
        let test_set = TestSet { corpus, indices: held_out, n_repeats: 1, majority, seed: config.seed };
        self.report(&test_set, &predictions, Vec::new())
    }

    /// Cross-validation, with one training per fold. The logits of finished folds are saved: the same command resumes with the next fold.
    pub(crate) fn cross_validate(&self, trainer: &Trainer<'_>) -> anyhow::Result<String> {
        let Task { config, corpus, .. } = self.task;
        let all: Vec<usize> = (0..corpus.len()).collect();
        let (labels, groups) = corpus.labels_and_groups(&all);
        let (n_folds, n_repeats) = (config.num_folds.unwrap_or(2) as usize, config.num_repeats as usize);
        let parts = folds(&labels, &groups, FoldSettings { n_folds, n_repeats, seed: config.seed });
        let folder = config.output_dir.join(FOLDS_FOLDER);
        make_folder(&folder)?;
        let (mut indices, mut all_predictions, mut n_without) = (Vec::new(), Predictions::default(), 0);
        for (number, fold) in parts.iter().enumerate() {
            trainer.reporter().message(&format!("part {} of {}", number + 1, parts.len()));
            n_without += usize::from(!corpus.missing(&fold.train).is_empty());
            let file = folder.join(format!("part-{:03}.json", number + 1));
            let FoldLogits { logits, temperature, n_shortened, .. } = self.task.fold_logits(trainer, fold, &file)?;
            let predictions = self.task.predictions(&logits, n_shortened, temperature, [&fold.train, &fold.test]);
            all_predictions.model.extend(predictions.model);
            all_predictions.calibrated.extend(predictions.calibrated);
            all_predictions.baseline.extend(predictions.baseline);
            all_predictions.n_shortened += n_shortened;
            indices.extend_from_slice(&fold.test);
        }
        let mut notes = vec![format!(
            "cross-validation: {n_folds} parts, {n_repeats} round(s); metrics are of these folds, the saved model was trained separately"
        )];
        if !all_predictions.calibrated.is_empty() {
            notes.push("calibrated figures are by a temperature for each training, fitted on its own dev".into());
        }
        if n_without > 0 {
            let n = parts.len();
            notes.push(format!(
                "{n_without} of {n} trainings had no example of some class: all were in the held-out part"
            ));
        }
        let majority = corpus.majority(&all);
        let test_set = TestSet { corpus, indices: &indices, n_repeats, majority, seed: config.seed };
        self.report(&test_set, &all_predictions, notes)
    }

    fn report(
        &self,
        test_set: &TestSet<'_>,
        predictions: &Predictions,
        mut notes: Vec<String>,
    ) -> anyhow::Result<String> {
        let Task { config, corpus, .. } = self.task;
        if let Some(temperature) = self.temperature {
            notes.push(format!(
                "probabilities are the model's own; --calibrated divides logits by {temperature:.3}, fitted on dev"
            ));
        }
        if predictions.n_shortened > 0 {
            let (n, length) = (predictions.n_shortened, config.max_length);
            notes.push(format!("{n} evaluated text(s) were shortened to {length} tokens"));
        }
        let (model, baseline) = (test_set.measures(&predictions.model)?, test_set.measures(&predictions.baseline)?);
        if baseline.eval_accuracy >= model.eval_accuracy {
            notes.push(
                "TF-IDF is no worse here: the figures show no more of this model than single words would; more dialogues \
                 or a larger base may change that"
                    .into(),
            );
        }
        let is_calibrated = !predictions.model.is_empty() && predictions.calibrated.len() == predictions.model.len();
        let results = EvalResults {
            temperature: predictions.temperature,
            calibrated: is_calibrated.then(|| test_set.measures(&predictions.calibrated)).transpose()?,
            baseline: Some(baseline),
            ..EvalResults::new(model, notes)
        };
        let summary = &self.checkpoint.summary;
        let facts = [
            ("base", file_name(&config.model_name_or_path)),
            ("dialogues", format!("{} of {}", corpus.len(), file_name(&config.train_file))),
            ("by class", corpus.counts()),
            ("trained", config.lora_rank.map_or("every weight".into(), |rank| format!("LoRA, rank {rank}"))),
            ("changed copies learned from", self.n_copies.to_string()),
            ("steps", format!("{}, best at {}", summary.n_steps, summary.best_step)),
            ("seed", config.seed.to_string()),
        ];
        let folder = Some(config.output_dir.as_path());
        test_set.report("Style model: training", &results, &predictions.model, (&facts, None), folder)
    }
}

/// Logits of a fold's held-out dialogues, saved in a file.
#[derive(Debug, Serialize, Deserialize)]
struct FoldLogits {
    /// SHA-256 of everything that the logits depend on.
    key: String,
    logits: Vec<Vec<f64>>,
    /// Temperature fitted on the dev split of this fold's training.
    temperature: Option<f64>,
    n_shortened: usize,
}

impl Task<'_> {
    /// Trains a classifier on the training part of a fold and computes the logits of its test part, unless `file` has them.
    fn fold_logits(&self, trainer: &Trainer<'_>, fold: &Fold, file: &Path) -> anyhow::Result<FoldLogits> {
        let Task { config, corpus, tokenizer } = *self;
        let work = tempfile::tempdir()?;
        let split = Split::of(config, corpus, &fold.train);
        let rows = TrainingRows::of(corpus, tokenizer, &split, (config, work.path()))?;
        let texts = corpus.texts(&fold.test);
        let (training, length) = (trainer.fingerprint(&corpus.classes, &rows, None), config.max_length);
        let key = digest_hex(format!("{training} {length} {texts:?}").as_bytes());
        let saved = std::fs::read_to_string(file).ok().and_then(|text| serde_json::from_str::<FoldLogits>(&text).ok());
        if let Some(saved) = saved.filter(|saved| saved.key == key && saved.logits.len() == texts.len()) {
            return Ok(saved);
        }
        // No checkpoints to resume from: the training of one fold is short.
        let trained = trainer.fit(corpus.classes.clone(), &rows, None, (work.path(), Resume::Never))?;
        let answers = compute_logits(&trained.classifier, tokenizer, &texts, config.eval_tokens_per_pass())?;
        let temperature = self.fit_temperature(&trained.classifier, &split.dev)?;
        let logits = FoldLogits { key, logits: answers.logits, temperature, n_shortened: answers.n_shortened };
        write(file, &serde_json::to_string(&logits)?)?;
        Ok(logits)
    }
}

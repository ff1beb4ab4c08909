//! Training of classifiers: cross-entropy with class weights and label smoothing, or distillation from a teacher's logits. The loop is
//! [`fine_tune`](crate::fine_tune).

mod loss;
#[cfg(test)]
mod tests;

pub use loss::{Distillation, Weighting, class_weights};

use crate::fine_tune::{self, FineTuneTask, Objective, SftSummary, StepLoss, dropout};
use crate::policy::recompute_mode;
use crate::{Gradients, MetricSink, TrainError};
use candle_core::{Tensor, Var};
use loss::{Target, summed_loss};
use querl_core::config::SftConfig;
use querl_core::ports::Progress;
use querl_model::classifier::{Classifier, by_length};
use querl_model::{Mesh, Pass, backward};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A tokenised text with a label, a teacher's logits, or both.
#[derive(Debug, Clone, PartialEq)]
pub struct LabelledText {
    /// At least one.
    pub tokens: Vec<u32>,
    /// Below the classifier's number of classes.
    pub label: Option<u32>,
    /// One logit for each class; read with [`ClassifyTask::distillation`] alone.
    pub teacher: Option<Vec<f32>>,
}

/// A training of a classifier.
pub struct ClassifyTask<'a> {
    /// The model that is trained.
    pub classifier: &'a Classifier,
    /// The folder of its base: tokenizer and configuration are copied into checkpoints.
    pub base_path: &'a Path,
    /// The training split.
    pub train: &'a [LabelledText],
    /// The validation split, which decides which checkpoint is best; may be empty: then the last one is.
    pub val: &'a [LabelledText],
    /// Hyperparameters: those of fine-tuning.
    pub config: &'a SftConfig,
    /// Weight of each class; see [`class_weights`]. `None`: equal weights.
    pub class_weights: Option<&'a [f32]>,
    /// Share of the target that is spread over all classes, 0 to below 1.
    pub label_smoothing: f64,
    /// Distillation from teachers' logits; excludes class weights.
    pub distillation: Option<Distillation>,
    /// Most tokens of one forward and backward pass; results depend on it only by rounding.
    pub tokens_per_pass: usize,
    /// Most tokens of one pass without gradients.
    pub tokens_per_evaluation: usize,
    /// Seeds the order of the data and the dropout.
    pub seed: u64,
    /// As in [`SftTask`](crate::sft::SftTask).
    pub fingerprint: Option<&'a str>,
    /// Where `best`, `last` and `state` are written.
    pub output_dir: &'a Path,
    /// Where progress is shown.
    pub progress: &'a dyn Progress,
    /// Set to stop at the next step.
    pub stop: &'a AtomicBool,
}

/// Trains, keeps the best and the last checkpoint, and returns a summary; `best` has the least loss on `val`, without class weights
/// and smoothing. Resumes an earlier call with the same fingerprint.
///
/// # Errors
/// No examples, a text without tokens or longer than `max_length`, an unknown class, a wrong number of class weights; otherwise as
/// [`crate::sft::train`].
pub fn train(task: &ClassifyTask<'_>, sink: &mut dyn MetricSink) -> Result<SftSummary, TrainError> {
    check(task)?;
    let mesh = Mesh::alone();
    let fine_tuning = FineTuneTask {
        objective: task,
        config: task.config,
        seed: task.seed,
        mesh: &mesh,
        fingerprint: task.fingerprint,
        output_dir: task.output_dir,
        progress: task.progress,
        stop: task.stop,
    };
    fine_tune::run(&fine_tuning, sink)
}

impl Objective for ClassifyTask<'_> {
    fn stage(&self) -> &'static str {
        "rm"
    }

    fn n_rows(&self) -> usize {
        self.train.len()
    }

    fn n_tokens(&self, rows: &[usize]) -> usize {
        rows.iter().map(|&index| self.train[index].tokens.len()).sum()
    }

    fn vars(&self) -> &BTreeMap<String, Var> {
        self.classifier.vars()
    }

    fn loss_and_gradients(&self, rows: &[usize], step: u64) -> Result<StepLoss, TrainError> {
        let rows: Vec<&LabelledText> = rows.iter().map(|&index| &self.train[index]).collect();
        let weighting = Weighting { weights: self.class_weights, smoothing: self.label_smoothing };
        let total = match self.distillation {
            Some(_) => rows.len() as f64,
            None => weighting.total(&labels(&rows)),
        };
        let recompute = recompute_mode(false);
        let adapter = self.classifier.adapter();
        let dropout = adapter.and_then(|_| dropout(self.config.lora_dropout, self.seed, step, &Mesh::alone().data));
        let pass = Pass { adapter, dropout, recompute: Some(&recompute) };
        let (mut gradients, mut loss) = (Gradients::default(), 0.0);
        for micro_batch in micro_batches(&rows, self.tokens_per_pass) {
            let part = (self.loss(self.classifier, &micro_batch, weighting, &pass)? / total)?;
            gradients.add(&backward(&part, Some(&recompute))?, self.vars())?;
            loss += f64::from(part.to_scalar::<f32>()?);
        }
        Ok(StepLoss { loss, n_tokens: rows.iter().map(|row| row.tokens.len()).sum(), gradients })
    }

    fn has_val(&self) -> bool {
        !self.val.is_empty()
    }

    fn evaluate(&self, _step: u64) -> Result<f64, TrainError> {
        let rows: Vec<&LabelledText> = self.val.iter().collect();
        let frozen = self.classifier.without_gradient();
        let (pass, weighting) = (Pass::with(frozen.adapter()), Weighting { weights: None, smoothing: 0.0 });
        let mut sum = 0.0;
        for micro_batch in micro_batches(&rows, self.tokens_per_evaluation) {
            sum += f64::from(self.loss(&frozen, &micro_batch, weighting, &pass)?.to_scalar::<f32>()?);
        }
        Ok(sum / rows.len().max(1) as f64)
    }

    fn save(&self, directory: &Path) -> Result<(), TrainError> {
        Ok(self.classifier.save(directory, self.base_path)?)
    }
}

impl ClassifyTask<'_> {
    /// Summed loss of some rows.
    fn loss(
        &self,
        classifier: &Classifier,
        rows: &[&LabelledText],
        weighting: Weighting<'_>,
        pass: &Pass<'_>,
    ) -> Result<Tensor, TrainError> {
        let texts: Vec<&[u32]> = rows.iter().map(|row| row.tokens.as_slice()).collect();
        let logits = classifier.logits(&texts, pass)?;
        let targets: Vec<Target<'_>> =
            rows.iter().map(|row| Target { label: row.label, teacher: row.teacher.as_deref() }).collect();
        Ok(summed_loss(&logits, &targets, weighting, self.distillation)?)
    }
}

/// Rows of similar length, as many as fit.
fn micro_batches<'a>(rows: &[&'a LabelledText], tokens_per_pass: usize) -> Vec<Vec<&'a LabelledText>> {
    let texts: Vec<&[u32]> = rows.iter().map(|row| row.tokens.as_slice()).collect();
    let cut = by_length(&texts, tokens_per_pass).into_iter();
    cut.map(|indices| indices.into_iter().map(|index| rows[index]).collect()).collect()
}

fn labels(rows: &[&LabelledText]) -> Vec<u32> {
    rows.iter().filter_map(|row| row.label).collect()
}

fn check(task: &ClassifyTask<'_>) -> Result<(), TrainError> {
    let error = |message: String| Err(TrainError::Data(message));
    if task.train.is_empty() {
        return error("the training split is empty; name a file with labelled dialogues".into());
    }
    let (n_classes, limit) = (task.classifier.labels().n_classes(), task.config.max_length);
    if let Some(weights) = task.class_weights.filter(|weights| weights.len() != n_classes) {
        return error(format!("{} class weights for {n_classes} classes; expected one each", weights.len()));
    }
    if task.distillation.is_some() && task.class_weights.is_some() {
        return error("class weights and distillation are both set; expected one of them".into());
    }
    for (split, rows) in [("training", task.train), ("validation", task.val)] {
        for (index, row) in rows.iter().enumerate() {
            let (name, n_tokens) = (format!("row {} of the {split} split", index + 1), row.tokens.len());
            if n_tokens == 0 || n_tokens > limit {
                return error(format!("{name} has {n_tokens} tokens; expected 1 to {limit} (max_length)"));
            }
            if let Some(label) = row.label.filter(|label| *label as usize >= n_classes) {
                return error(format!("{name} is of class {label}; the classifier has {n_classes}"));
            }
            let n_teacher = row.teacher.as_ref().filter(|_| task.distillation.is_some()).map(Vec::len);
            match n_teacher {
                Some(n) if n != n_classes => {
                    return error(format!(
                        "{name} has {n} logits of a teacher; the classifier has {n_classes} classes"
                    ));
                }
                None if row.label.is_none() => {
                    return error(format!("{name} has neither a label nor a teacher's logits; expected one of them"));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

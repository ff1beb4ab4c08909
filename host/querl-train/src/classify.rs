//! Training of classifiers: cross-entropy with class weights and label smoothing, or distillation from a teacher's logits. The loop is
//! [`fine_tune`](crate::fine_tune).

use crate::data_parallel::check_stop;
use crate::fine_tune::{self, FineTuneTask, Objective, SftSummary, StepLoss, dropout};
use crate::policy::recompute_mode;
use crate::{Gradients, MetricSink, TrainError};
use candle_core::{Tensor, Var};
use querl_core::config::SftConfig;
use querl_core::ports::Progress;
use querl_model::classifier::{Classifier, by_length};
use querl_model::{Mesh, Pass, Ranks, backward};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A tokenised text with a label, a teacher's logits, or both.
#[derive(Debug, Clone, PartialEq)]
pub struct LabelledText {
    /// Token ids; at least one.
    pub tokens: Vec<u32>,
    /// Class id, below the classifier's number of classes; `None` without a label.
    pub label: Option<u32>,
    /// The teacher's logits, one per class; used only with [`ClassifyTask::distillation`].
    pub teacher: Option<Vec<f32>>,
}

/// Model, data and settings of a classifier training.
pub struct ClassifyTask<'a> {
    /// The model that is trained.
    pub classifier: &'a Classifier,
    /// The folder of the classifier's base model, whose tokenizer and configuration are copied into checkpoints.
    pub base_path: &'a Path,
    /// The training split.
    pub train: &'a [LabelledText],
    /// The validation split, which decides which checkpoint is best; may be empty: then the last one is.
    pub val: &'a [LabelledText],
    /// Hyperparameters, the same as for supervised fine-tuning.
    pub config: &'a SftConfig,
    /// Loss weight of each class, as from [`class_weights`]; `None`: equal weights.
    pub class_weights: Option<&'a [f32]>,
    /// Label smoothing: share of the target distribution that is spread evenly over all classes, from 0 to below 1.
    pub label_smoothing: f64,
    /// Settings of distillation from [`LabelledText::teacher`]; cannot be combined with class weights.
    pub distillation: Option<Distillation>,
    /// Most tokens of one forward and backward pass; results depend on it only by rounding.
    pub tokens_per_pass: usize,
    /// Most tokens of one pass without gradients.
    pub tokens_per_evaluation: usize,
    /// Seeds the order of the data and the dropout.
    pub seed: u64,
    /// Digest of everything that the result depends on, as [`SftTask::fingerprint`](crate::sft::SftTask::fingerprint).
    pub fingerprint: Option<&'a str>,
    /// Folder in which `best`, `last` and `state` are written.
    pub output_dir: &'a Path,
    /// Where progress is shown.
    pub progress: &'a dyn Progress,
    /// Stop flag, read before each pass.
    pub stop: &'a AtomicBool,
}

/// Trains the classifier, keeps the best and the last checkpoint, and returns a summary; `best` has the least loss on `val`, without
/// class weights and label smoothing. Resumes an earlier call with the same fingerprint.
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
        let alone = Ranks::alone();
        let rows: Vec<&LabelledText> = rows.iter().map(|&index| &self.train[index]).collect();
        let weighting = Weighting { weights: self.class_weights, smoothing: self.label_smoothing };
        let total = match self.distillation {
            Some(_) => rows.len() as f64,
            None => weighting.total(&labels(&rows)),
        };
        let recompute = recompute_mode(false);
        let adapter = self.classifier.adapter();
        let dropout = adapter.and_then(|_| dropout(self.config.lora_dropout, self.seed, step, &alone));
        let pass = Pass { adapter, dropout, recompute: Some(&recompute) };
        let (mut gradients, mut loss) = (Gradients::default(), 0.0);
        for micro_batch in micro_batches(&rows, self.tokens_per_pass) {
            check_stop(&alone, self.stop, self.stage(), step - 1)?;
            let part = (self.loss(self.classifier, &micro_batch, weighting, &pass)? / total)?;
            gradients.add(&backward(&part, Some(&recompute))?, self.vars())?;
            loss += f64::from(part.to_scalar::<f32>()?);
        }
        Ok(StepLoss { loss, n_tokens: rows.iter().map(|row| row.tokens.len()).sum(), gradients })
    }

    fn has_val(&self) -> bool {
        !self.val.is_empty()
    }

    fn evaluate(&self, step: u64) -> Result<f64, TrainError> {
        let alone = Ranks::alone();
        let rows: Vec<&LabelledText> = self.val.iter().collect();
        let frozen = self.classifier.without_gradient();
        let (pass, weighting) = (Pass::with(frozen.adapter()), Weighting { weights: None, smoothing: 0.0 });
        let mut sum = 0.0;
        for micro_batch in micro_batches(&rows, self.tokens_per_evaluation) {
            check_stop(&alone, self.stop, self.stage(), step)?;
            sum += f64::from(self.loss(&frozen, &micro_batch, weighting, &pass)?.to_scalar::<f32>()?);
        }
        Ok(sum / rows.len().max(1) as f64)
    }

    fn save(&self, directory: &Path) -> Result<(), TrainError> {
        Ok(self.classifier.save(directory, self.base_path)?)
    }
}

impl ClassifyTask<'_> {
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

/// Micro-batches of rows of similar length, each as large as `tokens_per_pass` permits.
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

/// Class weights and label smoothing of the cross-entropy loss.
#[derive(Debug, Clone, Copy)]
pub struct Weighting<'a> {
    /// Loss weight of each class; `None`: equal weights.
    pub weights: Option<&'a [f32]>,
    /// Label smoothing: share of the target distribution that is spread evenly over all classes.
    pub smoothing: f64,
}

impl Weighting<'_> {
    fn weight(&self, class: usize) -> f64 {
        self.weights.map_or(1.0, |weights| f64::from(weights[class]))
    }

    /// Sum of the examples' weights, by which their summed loss is divided.
    pub fn total(&self, labels: &[u32]) -> f64 {
        labels.iter().map(|label| self.weight(*label as usize)).sum()
    }
}

/// Balanced class weights: `N / (K n_c)` for class c of K, where `n_c` of the N examples have class c, so that rare classes weigh as
/// much as common ones. A class without examples has weight 0.
///
/// Source: scikit-learn's `compute_class_weight("balanced")`.
pub fn class_weights(labels: impl IntoIterator<Item = usize>, n_classes: usize) -> Vec<f32> {
    let mut counts = vec![0usize; n_classes];
    labels.into_iter().for_each(|label| counts[label] += 1);
    let n: usize = counts.iter().sum();
    let weight = |count: &usize| if *count == 0 { 0.0 } else { n as f32 / (n_classes * count) as f32 };
    counts.iter().map(weight).collect()
}

/// Settings of distillation from a teacher's logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distillation {
    /// Temperature that divides the logits of teacher and student; above 0.
    pub temperature: f64,
    /// Weight of the label's cross-entropy, 0 to 1; the teacher's KL divergence has the rest, and weight 1 for a row without label.
    pub hard_weight: f64,
}

#[derive(Debug, Clone, Copy)]
struct Target<'a> {
    label: Option<u32>,
    teacher: Option<&'a [f32]>,
}

/// Summed loss of logits `(N, classes)`: cross-entropy with the labels (divided by [`Weighting::total`] it equals torch's mean). With a
/// teacher, plus the KL divergence of its distribution from the student's at the temperature, times the squared temperature, so that the
/// size of the gradients does not depend on the temperature.
fn summed_loss(
    logits: &Tensor,
    targets: &[Target<'_>],
    weighting: Weighting<'_>,
    distillation: Option<Distillation>,
) -> candle_core::Result<Tensor> {
    let (n, n_classes) = logits.dims2()?;
    let of_label = |target: &Target<'_>| match (distillation, target.teacher) {
        (Some(distillation), Some(_)) => distillation.hard_weight,
        _ => 1.0,
    };
    let mut hard = Vec::with_capacity(n * n_classes);
    for target in targets {
        let row = target.label.map_or(vec![0.0; n_classes], |label| smoothed(label, n_classes, weighting));
        hard.extend(row.into_iter().map(|value| (of_label(target) * value) as f32));
    }
    let hard = Tensor::from_vec(hard, (n, n_classes), logits.device())?;
    let loss = (logprobs(logits)? * hard)?.sum_all()?.neg()?;
    let Some(Distillation { temperature, .. }) = distillation else { return Ok(loss) };
    let (mut soft, mut of_teacher) = (Vec::with_capacity(n * n_classes), 0.0);
    for target in targets {
        let of_soft = if target.label.is_some() { 1.0 - of_label(target) } else { 1.0 };
        let shares = target.teacher.map_or(vec![0.0; n_classes], |logits| softened(logits, temperature));
        of_teacher += of_soft * shares.iter().filter(|p| **p > 0.0).map(|p| p * p.ln()).sum::<f64>();
        soft.extend(shares.into_iter().map(|p| (of_soft * p) as f32));
    }
    let soft = Tensor::from_vec(soft, (n, n_classes), logits.device())?;
    let divergence = ((logprobs(&(logits / temperature)?)? * soft)?.sum_all()?.neg()? + of_teacher)?;
    loss + (divergence * (temperature * temperature))?
}

fn smoothed(label: u32, n_classes: usize, weighting: Weighting<'_>) -> Vec<f64> {
    let value = |class: usize| {
        let own = if class == label as usize { 1.0 - weighting.smoothing } else { 0.0 };
        (own + weighting.smoothing / n_classes as f64) * weighting.weight(class)
    };
    (0..n_classes).map(value).collect()
}

fn softened(logits: &[f32], temperature: f64) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shares: Vec<f64> = logits.iter().map(|logit| (f64::from(logit - largest) / temperature).exp()).collect();
    let sum: f64 = shares.iter().sum();
    shares.into_iter().map(|share| share / sum).collect()
}

fn logprobs(logits: &Tensor) -> candle_core::Result<Tensor> {
    let shifted = logits.broadcast_sub(&logits.detach().max_keepdim(1)?)?; // (N, classes)
    shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(1)?.log()?) // (N, classes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Recorder, stop_at_call};
    use crate::{BEST, LAST};
    use candle_core::Device;
    use querl_core::config::BaseDtype;
    use querl_core::ports::Silent;
    use querl_model::classifier::{Labels, Tuning};
    use querl_model::{LoraSettings, Weights};
    use serde_json::Value;
    use std::path::PathBuf;
    use std::sync::atomic::Ordering;

    const DTYPE: BaseDtype = BaseDtype::F32;

    fn base() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/decoders/qwen3-tied")
    }

    fn fresh(tuning: &Tuning) -> Classifier {
        let labels = Labels::new(["a", "b", "c"].map(String::from).to_vec(), None).unwrap();
        Classifier::fresh(&base(), labels, tuning, (DTYPE, 3)).unwrap()
    }

    /// Texts of 2 to 7 tokens. Classes alternate; the first is twice as frequent.
    fn texts(n: u32) -> Vec<LabelledText> {
        let tokens = |index: u32| (0..2 + index % 6).map(|at| 3 + (7 * index + 5 * at) % 60).collect();
        let text = |index| LabelledText {
            tokens: tokens(index),
            label: Some([0, 1, 0, 2][index as usize % 4]),
            teacher: None,
        };
        (0..n).map(text).collect()
    }

    struct Setting {
        config: SftConfig,
        train: Vec<LabelledText>,
        val: Vec<LabelledText>,
        class_weights: Option<Vec<f32>>,
        label_smoothing: f64,
        folder: tempfile::TempDir,
        stop: AtomicBool,
    }

    impl Setting {
        fn new(epochs: usize, learning_rate: f64) -> Self {
            let config = SftConfig {
                epochs,
                learning_rate,
                batch_size: 4,
                gradient_accumulation_steps: 1,
                warmup_ratio: 0.0,
                eval_steps: 0,
                save_steps: 0,
                ..SftConfig::default()
            };
            Self {
                config,
                train: texts(12),
                val: Vec::new(),
                class_weights: None,
                label_smoothing: 0.0,
                folder: tempfile::tempdir().unwrap(),
                stop: AtomicBool::new(false),
            }
        }

        fn task<'a>(&'a self, classifier: &'a Classifier, base: &'a Path) -> ClassifyTask<'a> {
            ClassifyTask {
                classifier,
                base_path: base,
                train: &self.train,
                val: &self.val,
                config: &self.config,
                class_weights: self.class_weights.as_deref(),
                label_smoothing: self.label_smoothing,
                distillation: None,
                tokens_per_pass: 1000,
                tokens_per_evaluation: 9,
                seed: 5,
                fingerprint: Some("inputs"),
                output_dir: self.folder.path(),
                progress: &Silent,
                stop: &self.stop,
            }
        }

        fn through(&self, classifier: &Classifier) -> (SftSummary, Recorder) {
            let mut sink = Recorder::default();
            (train(&self.task(classifier, &base()), &mut sink).unwrap(), sink)
        }
    }

    fn logits(classifier: &Classifier, texts: &[LabelledText]) -> Vec<f64> {
        let texts: Vec<&[u32]> = texts.iter().map(|text| text.tokens.as_slice()).collect();
        classifier.logits_of_all(&texts, 1000).unwrap().concat()
    }

    fn assert_near(found: &[f64], expected: &[f64], tolerance: f64) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < tolerance, "{found} is not {expected}");
        }
    }

    /// If a pass were divided by its own total weight instead of the step's, two passes would give another loss than one.
    #[test]
    fn passes_of_a_step_make_the_same_gradient_as_one() {
        let mut setting = Setting::new(1, 1e-3);
        (setting.class_weights, setting.label_smoothing) = (Some(vec![0.5, 1.0, 4.0]), 0.1);
        let (classifier, base) = (fresh(&Tuning::Full), base());
        let rows: Vec<usize> = (0..setting.train.len()).collect();
        let learn = |tokens_per_pass| {
            let task = ClassifyTask { tokens_per_pass, ..setting.task(&classifier, &base) };
            task.loss_and_gradients(&rows, 1).unwrap()
        };
        let (one, many) = (learn(1000), learn(8));
        assert!((one.loss - many.loss).abs() < 1e-6, "{} is not {}", many.loss, one.loss);
        for name in classifier.vars().keys() {
            let values = |step: &StepLoss| -> Vec<f64> {
                step.gradients.get(name).unwrap().unwrap_or_default().into_iter().map(f64::from).collect()
            };
            assert_near(&values(&many), &values(&one), 1e-6);
        }
        // Expected loss from the same logits: weighted and smoothed, divided by the total weight of the labels.
        let rows: Vec<Vec<f64>> = logits(&classifier, &setting.train).chunks(3).map(<[f64]>::to_vec).collect();
        let (mut sum, mut total) = (0.0, 0.0);
        for (row, text) in rows.iter().zip(&setting.train) {
            let log_sum = row.iter().map(|logit| logit.exp()).sum::<f64>().ln();
            let label = text.label.unwrap() as usize;
            total += [0.5, 1.0, 4.0][label];
            for class in 0..3 {
                let target = if class == label { 0.9 } else { 0.0 } + 0.1 / 3.0;
                sum += target * [0.5, 1.0, 4.0][class] * (log_sum - row[class]);
            }
        }
        assert!((one.loss - sum / total).abs() < 1e-5, "{} is not {}", one.loss, sum / total);
    }

    #[test]
    fn training_stops_where_dev_gets_worse_and_the_best_checkpoint_is_the_one_before() {
        let mut setting = Setting::new(10, 1e-2);
        setting.config.early_stopping_patience = 2;
        // The labels of the validation split contradict those of the training split: the better the training loss, the worse the validation
        // loss.
        setting.val = setting
            .train
            .iter()
            .cloned()
            .map(|text| LabelledText { label: Some((text.label.unwrap() + 1) % 3), ..text })
            .collect();
        let classifier = fresh(&Tuning::Full);
        let (summary, sink) = setting.through(&classifier);
        let losses = sink.column("eval_loss");
        let best = losses.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).map(|(at, _)| at).unwrap();
        assert_eq!(losses.len(), best + 3, "{losses:?}");
        assert_eq!((summary.n_steps, summary.best_step), (3 * losses.len() as u64, 3 * (best as u64 + 1)));
        assert_eq!(summary.best_val_loss, Some(losses[best]));
        let loss_of = |name: &str| {
            let kept = Classifier::load(&setting.folder.path().join(name), Weights::Frozen, DTYPE).unwrap();
            setting.task(&kept, &base()).evaluate(0).unwrap()
        };
        assert!((loss_of(BEST) - losses[best]).abs() < 1e-4, "{} is not {}", loss_of(BEST), losses[best]);
        assert!((loss_of(LAST) - losses[best + 2]).abs() < 1e-4, "{} is not {}", loss_of(LAST), losses[best + 2]);
        let config = SftConfig { early_stopping_patience: 0, ..setting.config.clone() };
        let patient = Setting { config, val: setting.val.clone(), ..Setting::new(10, 1e-2) };
        assert_eq!(patient.through(&fresh(&Tuning::Full)).0.n_steps, 30);
    }

    /// Symptom: a stop waited for the end of the step or of the evaluation.
    #[test]
    fn a_stop_between_passes_resumes_to_the_result_of_an_uninterrupted_training() {
        let [complete, stopped] = [(), ()].map(|()| Setting { val: texts(12), ..Setting::new(1, 1e-2) });
        let learned = fresh(&Tuning::Full);
        let (expected, metrics) = complete.through(&learned);
        let mut sink = Recorder::default();
        // Stops in the second of three steps of one pass each; then, after two steps, in the second pass of the evaluation.
        for (call, step) in [(2, 1), (4, 3)] {
            stop_at_call(call);
            let error = train(&stopped.task(&fresh(&Tuning::Full), &base()), &mut sink).unwrap_err();
            assert!(matches!(error, TrainError::Interrupted { stage: "rm", step: found } if found == step), "{error}");
            stopped.stop.store(false, Ordering::SeqCst);
        }
        let resumed = fresh(&Tuning::Full);
        let summary = train(&stopped.task(&resumed, &base()), &mut sink).unwrap();
        assert_eq!((summary, sink.results()), (expected, metrics.results()));
        assert_eq!(logits(&resumed, &stopped.train), logits(&learned, &complete.train));
    }

    /// Regression: a trained adapter was loaded with the initial head.
    #[test]
    fn a_trained_adapter_and_its_head_are_read_as_they_were_trained() {
        let mut setting = Setting::new(1, 1e-2);
        setting.config.max_steps = 2;
        let classifier = fresh(&Tuning::Lora(LoraSettings::all_linear(4, 8.0)));
        let before = logits(&classifier, &setting.train);
        let (summary, _) = setting.through(&classifier);
        assert_eq!(summary.n_steps, 2);
        let after = logits(&classifier, &setting.train);
        assert!(before.iter().zip(&after).all(|(before, after)| (before - after).abs() > 1e-5), "{before:?} {after:?}");
        for name in [BEST, LAST] {
            let again = Classifier::load_adapted(&base(), &setting.folder.path().join(name), DTYPE).unwrap();
            assert_near(&logits(&again, &setting.train), &after, 1e-6);
        }
    }

    fn golden() -> Value {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/golden/classifiers/loss.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn rows(value: &Value) -> Vec<Vec<f32>> {
        serde_json::from_value(value.clone()).unwrap()
    }

    /// Compares the loss, divided by `total`, and its gradient with a golden case.
    fn assert_case(
        case: &Value,
        logits: &[Vec<f32>],
        total: f64,
        loss: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) {
        let logits = Var::from_vec(logits.concat(), (logits.len(), 4), &Device::Cpu).unwrap();
        let loss = (loss(&logits).unwrap() / total).unwrap();
        let value = f64::from(loss.to_scalar::<f32>().unwrap());
        assert!((value - case["loss"].as_f64().unwrap()).abs() < 1e-5, "{value}: {case}");
        let found = loss.backward().unwrap().get(&logits).unwrap().to_vec2::<f32>().unwrap();
        for (found, expected) in found.concat().iter().zip(rows(&case["grad"]).concat()) {
            assert!((found - expected).abs() < 1e-6, "{case}");
        }
    }

    #[test]
    fn loss_and_gradient_are_torchs_with_weights_and_smoothing() {
        let golden = golden();
        let labels: Vec<u32> = serde_json::from_value(golden["labels"].clone()).unwrap();
        let weights: Vec<f32> = serde_json::from_value(golden["weights"].clone()).unwrap();
        let targets: Vec<Target<'_>> =
            labels.iter().map(|label| Target { label: Some(*label), teacher: None }).collect();
        for case in golden["cases"].as_array().unwrap() {
            let weights = (case["weighted"] == 1).then_some(weights.as_slice());
            let weighting = Weighting { weights, smoothing: case["smoothing"].as_f64().unwrap() };
            let loss = |logits: &Tensor| summed_loss(logits, &targets, weighting, None);
            assert_case(case, &rows(&golden["logits"]), weighting.total(&labels), loss);
        }
    }

    #[test]
    fn a_students_loss_and_gradient_are_torchs_with_and_without_labels() {
        let golden = golden();
        let teacher = rows(&golden["teacher"]);
        let labels: Vec<Option<u32>> = serde_json::from_value(golden["some_labels"].clone()).unwrap();
        let target = |(label, teacher)| Target { label, teacher: Some(teacher) };
        let targets: Vec<Target<'_>> = labels.into_iter().zip(teacher.iter().map(Vec::as_slice)).map(target).collect();
        let plain = Weighting { weights: None, smoothing: 0.0 };
        for case in golden["distillation"].as_array().unwrap() {
            let number = |key: &str| case[key].as_f64().unwrap();
            let settings = Distillation { temperature: number("temperature"), hard_weight: number("hard_weight") };
            let loss = |logits: &Tensor| summed_loss(logits, &targets, plain, Some(settings));
            assert_case(case, &rows(&golden["logits"]), targets.len() as f64, loss);
        }
    }

    #[test]
    fn rare_classes_weigh_as_much_as_common_ones() {
        // sklearn.utils.class_weight.compute_class_weight("balanced", classes=range(3), y=[0] * 6 + [1] * 3 + [2])
        let labels = [0, 0, 0, 0, 0, 0, 1, 1, 1, 2];
        let weights = class_weights(labels, 3);
        assert_eq!(weights, [10.0 / 18.0, 10.0 / 9.0, 10.0 / 3.0]);
        assert_eq!(class_weights([0, 0], 2), [0.5, 0.0]);
    }
}

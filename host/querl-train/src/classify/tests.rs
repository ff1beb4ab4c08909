//! Trainings of tiny classifiers: how steps are divided, which checkpoint is kept, and that it is read as it was trained.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::testing::Recorder;
use crate::{BEST, LAST};
use querl_core::config::BaseDtype;
use querl_core::ports::Silent;
use querl_model::classifier::{Labels, Tuning};
use querl_model::{LoraSettings, Weights};
use std::path::PathBuf;

const DTYPE: BaseDtype = BaseDtype::F32;

fn base() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/decoders/qwen3-tied")
}

fn fresh(tuning: &Tuning) -> Classifier {
    let labels = Labels::new(["a", "b", "c"].map(String::from).to_vec(), None).unwrap();
    Classifier::fresh(&base(), labels, tuning, (DTYPE, 3)).unwrap()
}

/// Texts of 2 to 7 tokens; the classes come in turn, the first twice as often.
fn texts(n: u32) -> Vec<LabelledText> {
    let tokens = |index: u32| (0..2 + index % 6).map(|at| 3 + (7 * index + 5 * at) % 60).collect();
    let text =
        |index| LabelledText { tokens: tokens(index), label: Some([0, 1, 0, 2][index as usize % 4]), teacher: None };
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

/// A pass that is divided by its own weights, and not by the step's, gives another loss as soon as there are two passes.
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
    // Of the same logits, by hand: weighted and smoothed, divided by the weights of the labels.
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
fn weights_and_smoothing_change_what_is_learned() {
    let learned = |weights: Option<Vec<f32>>, smoothing| {
        let setting = Setting { class_weights: weights, label_smoothing: smoothing, ..Setting::new(2, 1e-2) };
        let classifier = fresh(&Tuning::Full);
        setting.through(&classifier);
        logits(&classifier, &setting.train)
    };
    let plain = learned(None, 0.0);
    assert_eq!(plain, learned(None, 0.0));
    assert_ne!(plain, learned(Some(vec![0.1, 1.0, 1.0]), 0.0));
    assert_ne!(plain, learned(None, 0.2));
}

#[test]
fn training_stops_where_dev_gets_worse_and_the_best_checkpoint_is_the_one_before() {
    let mut setting = Setting::new(10, 1e-2);
    setting.config.early_stopping_patience = 2;
    // What is learned is wrong for dev: the better the one, the worse the other.
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

/// An adapter of which the head is not kept is read with the head of its first step.
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

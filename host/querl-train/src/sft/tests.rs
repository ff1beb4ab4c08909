//! Fine-tuning compared with transformers' Trainer and PEFT; stopped and resumed. Golden values: `tests/reference/sft.py`.

mod gpu;
mod ranks;

use super::*;
use crate::batching::DataOrder;
use crate::testing::{Recorder, inject_out_of_memory, stop_at_call};
use crate::{BEST, LAST, Metrics, STATE};
use querl_model::{Decoder, LoraAdapter, Mesh, Weights};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Next to the sources, or in the folder that the environment names: this program is copied to machines with a GPU.
fn golden_folder() -> PathBuf {
    let carried = std::env::var_os("QUERL_TEST_GOLDENS").map(PathBuf::from);
    carried.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden"))
}

fn base_path() -> PathBuf {
    golden_folder().join("decoders/qwen3-tied")
}

fn curve() -> Value {
    let text = std::fs::read_to_string(golden_folder().join("sft.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["curve"].take()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn examples(curve: &Value) -> Vec<Example> {
    let ids = |value: &Value| numbers(value).into_iter().map(|id| id as u32).collect();
    let rows = curve["rows"].as_array().unwrap().iter();
    rows.map(|row| Example { prompt: ids(&row["prompt"]), response: ids(&row["response"]) }).collect()
}

struct Model {
    decoder: Decoder,
    adapter: Option<LoraAdapter>,
}

impl Model {
    fn policy(&self) -> Policy<'_> {
        Policy { decoder: &self.decoder, adapter: self.adapter.as_ref() }
    }
}

fn with_adapter() -> Model {
    let decoder = Decoder::load(&base_path(), Weights::Frozen).unwrap();
    let adapter = LoraAdapter::load(&golden_folder().join("lora/qwen3-tied"), decoder.config()).unwrap();
    Model { decoder, adapter: Some(adapter) }
}

fn all_weights() -> Model {
    Model { decoder: Decoder::load(&base_path(), Weights::Trained).unwrap(), adapter: None }
}

struct Setting {
    config: SftConfig,
    train: Vec<Example>,
    val: Vec<Example>,
    tokens_per_pass: usize,
    gradient_checkpointing: bool,
    fingerprint: &'static str,
    folder: tempfile::TempDir,
}

const NEVER: u64 = u64::MAX;

/// A progress callback that is called with each reported step.
struct OnStep<F>(F);

impl<F: Fn(u64) + Send + Sync> Progress for OnStep<F> {
    fn update(&self, n_done: u64, _: u64, _: &str) {
        (self.0)(n_done);
    }

    fn line(&self, _: &str) {}
}

type Outcome = Result<SftSummary, TrainError>;

impl Setting {
    fn new(config: SftConfig) -> Self {
        let mut train = examples(&curve());
        train.truncate(30);
        let val = train.split_off(24);
        let (folder, fingerprint) = (tempfile::tempdir().unwrap(), "inputs");
        Self { config, train, val, tokens_per_pass: 20, gradient_checkpointing: false, fingerprint, folder }
    }

    fn run(&self, model: &Model, sink: &mut Recorder, stop_after: u64) -> Outcome {
        let stop = AtomicBool::new(false);
        let progress = OnStep(|step| {
            stop.fetch_or(step >= stop_after, Ordering::Relaxed);
        });
        self.run_rank(&Mesh::alone(), model, sink, (&progress, &stop))
    }

    /// Runs one rank of a mesh.
    fn run_rank(
        &self,
        mesh: &Mesh,
        model: &Model,
        sink: &mut Recorder,
        (progress, stop): (&dyn Progress, &AtomicBool),
    ) -> Outcome {
        let task = SftTask {
            policy: model.policy(),
            base_path: &base_path(),
            train: &self.train,
            val: &self.val,
            config: &self.config,
            tokens_per_pass: self.tokens_per_pass,
            gradient_checkpointing: self.gradient_checkpointing,
            seed: 5,
            mesh,
            fingerprint: Some(self.fingerprint),
            output_dir: self.folder.path(),
            progress,
            stop,
        };
        train(&task, sink)
    }

    fn complete(&self, model: &Model) -> (SftSummary, Recorder) {
        let mut sink = Recorder::default();
        (self.run(model, &mut sink, NEVER).unwrap(), sink)
    }

    /// Runs to the end with a stop after each of `steps`, each time with a reloaded model.
    fn complete_in_parts(&self, steps: &[u64], model: impl Fn() -> Model) -> (SftSummary, Recorder) {
        let mut sink = Recorder::default();
        for &step in steps {
            let message = self.run(&model(), &mut sink, step).unwrap_err().to_string();
            let expected =
                format!("interrupted at sft step {step}; the state is saved; run the same command again to resume");
            assert_eq!(message, expected);
        }
        (self.run(&model(), &mut sink, NEVER).unwrap(), sink)
    }

    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        for folder in [BEST, LAST] {
            for entry in std::fs::read_dir(self.folder.path().join(folder)).unwrap() {
                let path = entry.unwrap().path();
                let name = format!("{folder}/{}", path.file_name().unwrap().to_str().unwrap());
                found.insert(name, std::fs::read(&path).unwrap());
            }
        }
        found
    }

    fn state_file(&self, step: u64) -> PathBuf {
        self.folder.path().join(STATE).join(format!("step-{step}.state"))
    }
}

fn config() -> SftConfig {
    SftConfig {
        epochs: 3,
        batch_size: 2,
        gradient_accumulation_steps: 2,
        learning_rate: 1e-2,
        weight_decay: 0.01,
        lora_dropout: 0.2,
        warmup_ratio: 0.1,
        eval_steps: 3,
        save_steps: 4,
        save_total_limit: 2,
        ..SftConfig::default()
    }
}

/// Two folders for the same training.
fn two_settings(config: &SftConfig) -> [Setting; 2] {
    [(), ()].map(|()| Setting::new(config.clone()))
}

/// Largest difference, relative for values above 1.
fn largest_difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "{found:?}, expected {expected:?}");
    found
        .iter()
        .zip(expected)
        .map(|(found, expected)| (found - expected).abs() / expected.abs().max(1.0))
        .fold(0.0, f64::max)
}

fn assert_near(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    let worst = largest_difference(found, expected);
    println!("{what}: worst error {worst:.1e}");
    assert!(worst <= tolerance, "{what}: {found:?}, expected {expected:?}");
}

#[test]
fn the_loss_curve_is_that_of_transformers_and_peft() {
    let golden = curve();
    let rows = examples(&golden);
    let number = |name: &str| golden["settings"][name].as_f64().unwrap();
    let mut setting = Setting::new(SftConfig {
        epochs: 1,
        batch_size: 2,
        gradient_accumulation_steps: 2,
        learning_rate: number("learning_rate"),
        weight_decay: number("weight_decay"),
        max_grad_norm: number("max_grad_norm"),
        warmup_ratio: number("warmup_steps") / 50.0,
        ..SftConfig::default()
    });
    // With this seed, the shuffled order gives the golden file's order.
    setting.train = rows.clone();
    for (index, row) in DataOrder::new(rows.len(), 5).take(rows.len()).into_iter().zip(rows) {
        setting.train[index] = row;
    }
    setting.val.clear();
    let (summary, sink) = setting.complete(&with_adapter());
    assert_eq!(summary.n_steps, 50);
    for (name, tolerance) in [("loss", 1e-3), ("grad_norm", 1e-3), ("learning_rate", 1e-8)] {
        assert_near(name, &sink.column(name), &numbers(&golden[name]), tolerance);
    }
}

#[test]
fn a_stopped_training_has_the_files_of_an_uninterrupted_one() {
    for (model, steps) in [(with_adapter as fn() -> Model, &[1, 2, 3, 7, 12, 17][..]), (all_weights, &[5, 6])] {
        let [complete, stopped] = two_settings(&config());
        let (expected_summary, expected) = complete.complete(&model());
        let (summary, found) = stopped.complete_in_parts(steps, model);
        assert_eq!((summary, found.results()), (expected_summary, expected.results()));
        assert!(stopped.files() == complete.files(), "files differ");
        assert_eq!(std::fs::read_dir(stopped.folder.path().join(STATE)).unwrap().count(), 2);
    }
}

/// Symptom: a stop waited for the rest of the optimizer step, or of the evaluation.
#[test]
fn a_stop_within_a_step_or_an_evaluation_resumes_to_the_files_of_an_uninterrupted_training() {
    let new = || Setting { tokens_per_pass: 1, ..Setting::new(SftConfig { epochs: 1, ..config() }) };
    for model in [with_adapter as fn() -> Model, all_weights] {
        let complete = new();
        let (expected_summary, expected) = complete.complete(&model());
        // Each row is one pass: 24 in training, and 6 in each of two evaluations.
        let n_passes = 24 + 2 * 6;
        for call in (1..=n_passes + 1).step_by(3) {
            let (stopped, mut sink) = (new(), Recorder::default());
            stop_at_call(call);
            match stopped.run(&model(), &mut sink, NEVER) {
                Ok(_) => assert_eq!(call, n_passes + 1),
                Err(error) => {
                    let is_stop = matches!(error, TrainError::Interrupted { stage: "sft", .. });
                    assert!(is_stop && call <= n_passes, "pass {call}: {error}");
                    assert!(call > 4 || stopped.state_file(0).is_file(), "pass {call}: {error}");
                }
            }
            stop_at_call(0);
            let summary = stopped.run(&model(), &mut sink, NEVER).unwrap();
            assert_eq!((summary, sink.results()), (expected_summary.clone(), expected.results()), "pass {call}");
            assert!(stopped.files() == complete.files(), "pass {call}: files differ");
        }
    }
}

#[test]
fn a_checkpoint_is_written_by_time_whatever_save_steps_says() {
    let steps = |save_interval_s| {
        let setting = Setting::new(SftConfig { save_steps: 1000, save_interval_s, ..config() });
        let stop = AtomicBool::new(false);
        // The fifth step takes longer than `save_interval_s` = 1.
        let progress = OnStep(|step| std::thread::sleep(Duration::from_millis(if step == 5 { 1100 } else { 0 })));
        setting.run_rank(&Mesh::alone(), &with_adapter(), &mut Recorder::default(), (&progress, &stop)).unwrap();
        [5, 6, 18].map(|step| setting.state_file(step).exists())
    };
    assert_eq!(steps(1), [true, false, true]);
    assert_eq!(steps(0), [false, false, true]);
}

#[test]
fn steps_after_the_newest_checkpoint_are_taken_again() {
    let [complete, killed] = two_settings(&config());
    let (_, expected) = complete.complete(&with_adapter());
    let mut sink = Recorder::default();
    killed.run(&with_adapter(), &mut sink, 7).unwrap_err();
    // As after a kill: the checkpoint of step 4, and metrics of three later steps.
    std::fs::remove_file(killed.state_file(7)).unwrap();
    assert_eq!(sink.0.len(), 7);
    killed.run(&with_adapter(), &mut sink, NEVER).unwrap();
    assert_eq!(sink.results(), expected.results());
    assert!(killed.files() == complete.files());
}

/// Regression: a diverged policy was saved as the best one, because every comparison with NaN is false.
#[test]
fn a_validation_loss_that_is_not_finite_is_an_error_and_no_best_checkpoint() {
    let config = SftConfig { max_steps: 1, learning_rate: 1e30, warmup_ratio: 0.0, eval_steps: 1, ..config() };
    let setting = Setting::new(config);
    let message = setting.run(&with_adapter(), &mut Recorder::default(), NEVER).unwrap_err().to_string();
    assert!(message.starts_with("sft step 1: the validation loss is not finite"), "{message}");
    assert!(!setting.folder.path().join(BEST).exists());
}

#[test]
fn a_row_without_a_response_is_named() {
    for split in ["training", "validation"] {
        let mut setting = Setting::new(config());
        let rows = if split == "training" { &mut setting.train } else { &mut setting.val };
        rows[2].response.clear();
        let outcome = setting.run(&with_adapter(), &mut Recorder::default(), NEVER);
        let expected =
            format!("row 3 of the {split} split has an empty response; remove it or give it a response to learn from");
        assert_eq!(outcome.unwrap_err().to_string(), expected);
    }
}

#[test]
fn a_training_on_other_inputs_starts_over() {
    let mut setting = Setting::new(config());
    let mut sink = Recorder::default();
    setting.fingerprint = "before";
    setting.run(&with_adapter(), &mut sink, 5).unwrap_err();
    setting.fingerprint = "after";
    setting.run(&with_adapter(), &mut sink, NEVER).unwrap();
    assert_eq!(sink.0.first().map(|(step, _)| *step), Some(1));
    assert_eq!(sink.0.len(), 18);
}

#[test]
fn a_finished_training_takes_no_further_step() {
    let setting = Setting::new(config());
    let (summary, sink) = setting.complete(&with_adapter());
    let before = setting.files();
    let mut again = Recorder(sink.0.clone());
    let found = setting.run(&with_adapter(), &mut again, NEVER).unwrap();
    assert_eq!((found, again.0), (summary, sink.0));
    assert!(setting.files() == before);
}

#[test]
fn the_result_does_not_depend_on_micro_batches_and_checkpointing() {
    let config = SftConfig { max_steps: 4, ..config() };
    let losses = |tokens_per_pass, gradient_checkpointing| {
        let setting = Setting { tokens_per_pass, gradient_checkpointing, ..Setting::new(config.clone()) };
        let (_, sink) = setting.complete(&with_adapter());
        [sink.column("loss"), sink.column("eval_loss")].concat()
    };
    let expected = losses(1, false);
    for found in [losses(1000, false), losses(15, false), losses(1000, true)] {
        let close = |(found, expected): (&f64, &f64)| (found - expected).abs() < 1e-4;
        assert!(found.iter().zip(&expected).all(close), "{found:?}, expected {expected:?}");
    }
}

#[test]
fn training_ends_early_once_the_validation_loss_no_longer_falls() {
    let config = SftConfig {
        epochs: 100,
        learning_rate: 0.1,
        lr_scheduler: querl_core::config::LrScheduler::Constant,
        eval_steps: 1,
        early_stopping_patience: 2,
        ..config()
    };
    let setting = Setting::new(config);
    let (summary, sink) = setting.complete(&with_adapter());
    assert!(summary.n_steps < 600, "{summary:?}");
    assert_eq!(summary.best_step + 2, summary.n_steps);
    let losses = sink.column("eval_loss");
    assert_eq!(losses.iter().copied().fold(f64::INFINITY, f64::min), losses[summary.best_step as usize - 1]);
    assert!(setting.files()["best/adapter_model.safetensors"] != setting.files()["last/adapter_model.safetensors"]);
}

/// After an out-of-memory error in a pass or in clipping, step 7 is not complete. After one in its evaluation it is, and the resumed run
/// starts with the evaluation.
#[test]
fn a_step_out_of_memory_saves_the_steps_before_and_can_be_resumed() {
    let config = SftConfig { eval_steps: 7, ..config() };
    for (phase, saved) in [("pass", 6), ("clip", 6), ("evaluation", 7)] {
        let [complete, broken] = two_settings(&config);
        let (_, expected) = complete.complete(&with_adapter());
        let mut sink = Recorder::default();
        inject_out_of_memory(7, phase);
        let error = broken.run(&with_adapter(), &mut sink, NEVER).unwrap_err();
        assert!(error.is_out_of_memory());
        let message = format!(
            "sft step 7: out of device memory (DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")); step {saved} is saved; run the same command again to resume"
        );
        assert_eq!(error.to_string(), message);
        assert!(broken.state_file(saved).is_file());
        broken.run(&with_adapter(), &mut sink, NEVER).unwrap();
        assert_eq!(sink.results(), expected.results(), "{phase}");
        assert!(broken.files() == complete.files(), "{phase}");
    }
}

#[test]
fn a_first_step_out_of_memory_saves_nothing() {
    let setting = Setting::new(config());
    inject_out_of_memory(1, "pass");
    let error = setting.run(&with_adapter(), &mut Recorder::default(), NEVER).unwrap_err();
    assert!(matches!(error, TrainError::OutOfMemory { step: 1, saved: None, .. }), "{error:?}");
    assert!(!setting.folder.path().join(STATE).exists());
}

//! Trainings in which ranks hold one model together, beside one in which a rank has all of it.
#![allow(clippy::unwrap_used)]

#[path = "tensor_parallel/cards.rs"]
mod cards;
#[path = "support/recording.rs"]
mod recording;

use querl_core::config::{BaseDtype, CriticKind, RlConfig, SftConfig};
use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, ScoredResponses, Silent};
use querl_core::records::Reward;
use querl_model::{
    ComputeDevice, Decoder, LoraAdapter, LoraSettings, Mesh, ModelError, Ranks, TextTokenizer, load_tensors, run_ranks,
    small_model,
};
use querl_train::rl::{self, RlData, RlTask};
use querl_train::sft::{self, SftTask};
use querl_train::{Example, MetricSink, Metrics, Policy, TrainError};
use recording::{Recorder, episode};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// A random model that two or four ranks can hold.
fn model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let shape = small_model::Shape {
        hidden_size: 32,
        intermediate_size: 64,
        n_layers: 2,
        n_heads: 8,
        n_kv_heads: 4,
        head_dim: 8,
        max_positions: 64,
    };
    let mut config = small_model::write_files(folder.path(), &["aaaa bbbb".to_owned()], 280, &shape).unwrap();
    config.initializer_range = 0.3;
    Decoder::init(config, 3).unwrap().save(folder.path(), small_model::STORED_DTYPE).unwrap();
    folder
}

#[derive(Clone, Copy)]
enum On {
    /// All of them on the processor, in f32.
    Processor,
    /// Each on a card of its own, in bf16.
    Cards,
}

fn decoder(model: &Path, mesh: &Mesh, on: On) -> Result<Decoder, ModelError> {
    match on {
        On::Processor => Decoder::load_shard(model, BaseDtype::F32, &ComputeDevice::Cpu, &mesh.tensor),
        On::Cards => Decoder::load_shard(model, BaseDtype::Bf16, &cards::card(mesh.all.rank())?, &mesh.tensor),
    }
}

/// What runs as `n` ranks, of which `tensor` hold a copy of the model together; what the first comes to.
fn first_of<T: Send>(
    n: usize,
    tensor: usize,
    work: impl Fn(Mesh) -> Result<T, TrainError> + Sync,
) -> Result<T, String> {
    let all = run_ranks(n, |ranks: Ranks| work(Mesh::new(ranks, tensor)?));
    all.map(|mut all| all.remove(0)).map_err(|failures| failures[0].to_string())
}

const NEVER: u64 = u64::MAX;

/// Keeps figures, and says stop at a step.
struct Stopping<'a> {
    kept: Recorder,
    at: u64,
    stop: &'a AtomicBool,
}

impl MetricSink for Stopping<'_> {
    fn record(&mut self, stage: &str, step: u64, metrics: &Metrics) -> std::io::Result<()> {
        self.stop.fetch_or(step == self.at, Ordering::SeqCst);
        self.kept.record(stage, step, metrics)
    }

    fn mark(&mut self) -> std::io::Result<u64> {
        self.kept.mark()
    }

    fn rewind(&mut self, mark: u64) -> std::io::Result<()> {
        self.kept.rewind(mark)
    }
}

/// One figure of each step.
fn column(kept: &Recorder, name: &str) -> Vec<f64> {
    kept.0.iter().filter_map(|(_, metrics)| metrics.get(name).copied()).collect()
}

fn examples() -> Vec<Example> {
    let row = |i: u32| {
        let tokens = |n: u32, step: u32| (0..n).map(|j| 3 + (i * 31 + j * step) % 250).collect::<Vec<u32>>();
        Example { prompt: [vec![5, 6, 7], tokens(2 + i % 3, 7)].concat(), response: tokens(3 + i % 4, 11) }
    };
    (0..20).map(row).collect()
}

fn sft_config(lora_dropout: f64) -> SftConfig {
    SftConfig {
        max_steps: 10,
        epochs: 10,
        batch_size: 2,
        gradient_accumulation_steps: 3,
        learning_rate: 1e-3,
        lora_dropout,
        lora_rank: 4,
        lora_alpha: 8.0,
        // Every step is clipped: the norm decides what is learned.
        max_grad_norm: 0.1,
        eval_steps: 5,
        save_steps: 2,
        ..SftConfig::default()
    }
}

/// Ten steps of fine-tuning, or as many until somebody says stop; the figures of those that this call took.
fn fit(
    model: &Path,
    output: &Path,
    (n, tensor): (usize, usize),
    dropout: f64,
    stop_at: u64,
) -> Result<Recorder, String> {
    let (rows, config, stop) = (examples(), sft_config(dropout), AtomicBool::new(false));
    let mut settings = LoraSettings::all_linear(config.lora_rank, config.lora_alpha);
    settings.dropout = dropout;
    first_of(n, tensor, |mesh| {
        let decoder = decoder(model, &mesh, On::Processor)?;
        let adapter = LoraAdapter::new(&decoder, settings.clone(), 7)?;
        let task = SftTask {
            policy: Policy { decoder: &decoder, adapter: Some(&adapter) },
            base_path: model,
            train: &rows[..16],
            val: &rows[16..],
            config: &config,
            tokens_per_pass: 24,
            gradient_checkpointing: n == 2,
            seed: 3,
            mesh: &mesh,
            fingerprint: Some("same"),
            output_dir: output,
            progress: &Silent,
            stop: &stop,
        };
        recorded(&mesh, stop_at, &stop, |sink| sft::train(&task, sink).map(drop))
    })
}

/// What `train` records; the first rank asks for a stop at step `stop_at`.
fn recorded(
    mesh: &Mesh,
    stop_at: u64,
    stop: &AtomicBool,
    train: impl FnOnce(&mut Stopping<'_>) -> Result<(), TrainError>,
) -> Result<Recorder, TrainError> {
    let mut sink = Stopping { kept: Recorder::default(), at: if mesh.all.is_first() { stop_at } else { NEVER }, stop };
    match train(&mut sink) {
        Ok(()) | Err(TrainError::Interrupted { .. }) => Ok(sink.kept),
        Err(error) => Err(error),
    }
}

fn adapter_of(folder: &Path) -> BTreeMap<String, Vec<f32>> {
    let tensors = load_tensors(&folder.join("adapter_model.safetensors")).unwrap();
    tensors.into_iter().map(|(name, tensor)| (name, tensor.flatten_all().unwrap().to_vec1().unwrap())).collect()
}

fn assert_near(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: {found:?} against {expected:?}");
    assert!(!expected.is_empty(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        let off = (found - expected).abs() / expected.abs().max(1e-2);
        assert!(off <= tolerance, "{what}: {found} against {expected}, off by {off}");
    }
}

/// Root of the mean squared difference over that of the values. AdamW divides a gradient by its own size: where it is nearly zero,
/// a rounding becomes a step, so that single values may differ by more.
fn assert_same_adapter(found: &Path, expected: &Path, tolerance: f64) {
    let (found, expected) = (adapter_of(found), adapter_of(expected));
    assert!(found.keys().eq(expected.keys()));
    for (name, expected) in expected {
        let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let difference = squares(&mut found[&name].iter().zip(&expected).map(|(a, b)| a - b));
        let off = (difference / squares(&mut expected.iter().copied())).sqrt();
        assert!(off <= tolerance, "{name} is off by {off}");
    }
}

#[test]
fn ten_steps_of_fine_tuning_are_those_of_one_rank() {
    let (model, folder) = (model(), tempfile::tempdir().unwrap());
    for (n, tensor, dropout) in [(2, 2, 0.0), (4, 4, 0.0), (4, 2, 0.0), (2, 2, 0.2)] {
        let output = |name: &str| folder.path().join(format!("{name}-{n}-{tensor}-{dropout}"));
        let expected = fit(model.path(), &output("one"), (1, 1), dropout, NEVER).unwrap();
        let found = fit(model.path(), &output("several"), (n, tensor), dropout, NEVER).unwrap();
        assert_eq!(found.0.len(), 10);
        // Sums in another order: some units in the last place of f32, which ten steps let grow a little.
        assert_near("loss", &column(&found, "loss"), &column(&expected, "loss"), 2e-5);
        assert_near("eval_loss", &column(&found, "eval_loss"), &column(&expected, "eval_loss"), 2e-5);
        assert_near("grad_norm", &column(&found, "grad_norm"), &column(&expected, "grad_norm"), 2e-4);
        assert!(column(&expected, "grad_norm").iter().all(|norm| *norm > 0.1), "a step is not clipped");
        for checkpoint in ["best", "last"] {
            assert_same_adapter(&output("several").join(checkpoint), &output("one").join(checkpoint), 2e-3);
        }
    }
}

#[test]
fn a_training_that_was_stopped_goes_on_to_the_same_bytes_and_on_another_number_of_ranks_nearly_so() {
    let (model, folder) = (model(), tempfile::tempdir().unwrap());
    let output = |name: &str| folder.path().join(name);
    let through = fit(model.path(), &output("through"), (2, 2), 0.0, NEVER).unwrap();
    for (name, ranks) in [("same", (2, 2)), ("alone", (1, 1)), ("four", (4, 4))] {
        assert_eq!(fit(model.path(), &output(name), (2, 2), 0.0, 5).unwrap().0.len(), 5);
        let rest = fit(model.path(), &output(name), ranks, 0.0, NEVER).unwrap();
        assert_near(name, &column(&rest, "loss"), &column(&through, "loss")[5..], 2e-5);
        assert_same_adapter(&output(name).join("last"), &output("through").join("last"), 2e-3);
    }
    let bytes = |name: &str| std::fs::read(output(name).join("last/adapter_model.safetensors")).unwrap();
    assert!(bytes("same") == bytes("through"));
}

struct PlainText;

impl Environment for PlainText {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        let record = |(index, response): (usize, &PolicyResponse)| {
            let n_plain = response.text.chars().filter(char::is_ascii).count();
            let total = n_plain as f64 / response.text.chars().count().max(1) as f64;
            episode(format!("{step}/{index}"), step, response, Ok(Reward { total, components: Vec::new() }))
        };
        Ok(responses.iter().enumerate().map(record).collect::<Vec<_>>().into())
    }
}

/// Steps of PPO, or as many until somebody says stop.
fn play(
    model: &Path,
    output: &Path,
    ranks: (usize, usize),
    critic: CriticKind,
    stop_at: u64,
) -> Result<Recorder, String> {
    play_on(On::Processor, model, output, ranks, critic, stop_at)
}

fn play_on(
    on: On,
    model: &Path,
    output: &Path,
    (n, tensor): (usize, usize),
    critic: CriticKind,
    stop_at: u64,
) -> Result<Recorder, String> {
    let config = RlConfig {
        critic,
        max_steps: 4,
        batch_size: 8,
        mini_batch_size: 4,
        gradient_accumulation_steps: 2,
        learning_rate: 1e-3,
        critic_learning_rate: 1e-3,
        max_grad_norm: 0.05,
        max_new_tokens: 8,
        eval_steps: 2,
        save_steps: 1,
        ..RlConfig::default()
    };
    let (settings, stop) = (LoraSettings::all_linear(4, 8.0), AtomicBool::new(false));
    let tokenizer = TextTokenizer::load(model).unwrap();
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| tokenizer.encode(&format!("a{i}b")).unwrap()).collect();
    first_of(n, tensor, |mesh| {
        let decoder = decoder(model, &mesh, on)?;
        let policy = LoraAdapter::new(&decoder, settings.clone(), 5)?;
        let tokenizer = TextTokenizer::load(model)?;
        let task = RlTask {
            decoder: &decoder,
            base_path: model,
            policy: &policy,
            reference: None,
            tokenizer: &tokenizer,
            train: RlData { prompts: &prompts, environment: &PlainText },
            val: RlData { prompts: &prompts, environment: &PlainText },
            config: &config,
            tokens_per_pass: 64,
            gradient_checkpointing: false,
            critic_lora: settings.clone(),
            seed: 11,
            mesh: &mesh,
            fingerprint: Some("same"),
            output_dir: output,
            progress: &Silent,
            stop: &stop,
        };
        recorded(&mesh, stop_at, &stop, |sink| rl::train(&task, sink).map(drop))
    })
}

#[test]
fn steps_of_ppo_are_those_of_one_rank() {
    let (model, folder) = (model(), tempfile::tempdir().unwrap());
    for (n, tensor, critic) in [(2, 2, CriticKind::Adapter), (4, 2, CriticKind::Adapter), (4, 4, CriticKind::Head)] {
        let output = |name: &str| folder.path().join(format!("{name}-{n}-{tensor}-{critic:?}"));
        let expected = play(model.path(), &output("one"), (1, 1), critic, NEVER).unwrap();
        let found = play(model.path(), &output("several"), (n, tensor), critic, NEVER).unwrap();
        // The answers are the same, token by token, and so are their scores.
        assert_eq!(column(&found, "avg_reward"), column(&expected, "avg_reward"));
        assert_eq!(column(&found, "avg_reward").len(), 4);
        for name in ["actor/grad_norm", "critic/grad_norm", "actor/pg_loss", "critic/vf_loss", "actor/entropy"] {
            assert_near(name, &column(&found, name), &column(&expected, name), 1e-3);
        }
        for checkpoint in ["best", "last"] {
            assert_same_adapter(&output("several").join(checkpoint), &output("one").join(checkpoint), 5e-3);
        }
        if critic == CriticKind::Adapter {
            assert_same_adapter(&output("several").join("last/critic"), &output("one").join("last/critic"), 5e-3);
        }
    }
}

#[test]
fn an_optimisation_that_was_stopped_goes_on_to_the_same_bytes() {
    let (model, folder) = (model(), tempfile::tempdir().unwrap());
    let output = |name: &str| folder.path().join(name);
    play(model.path(), &output("through"), (2, 2), CriticKind::Adapter, NEVER).unwrap();
    assert_eq!(
        column(&play(model.path(), &output("stopped"), (2, 2), CriticKind::Adapter, 2).unwrap(), "avg_reward").len(),
        2
    );
    play(model.path(), &output("stopped"), (2, 2), CriticKind::Adapter, NEVER).unwrap();
    for file in [
        "last/adapter_model.safetensors",
        "last/critic/adapter_model.safetensors",
        "last/critic/value_head.safetensors",
    ] {
        let bytes = |name: &str| std::fs::read(output(name).join(file)).unwrap();
        assert!(bytes("stopped") == bytes("through"), "{file}");
    }
}

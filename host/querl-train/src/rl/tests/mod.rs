//! Tests of whole updates and runs on a tiny decoder; this file has its fixture.
#![allow(clippy::unwrap_used)]

mod gpu;
mod learner;
mod out_of_memory;

use super::rollout::Rollout;
use super::{RlData, RlSummary, RlTask, train};
use crate::TrainError;
use crate::checkpoint::{BEST, LAST};
use crate::policy::{Example, Policy, rows_of};
use crate::testing::Recorder;
use candle_core::Tensor;
use querl_core::config::{BaseDtype, CriticKind, RlConfig};
use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, ScoredResponses, Silent};
use querl_core::records::{Candidate, Context, Episode, EpisodeRecord, Reward};
use querl_model::{ComputeDevice, Decoder, LoraAdapter, LoraSettings, Mesh, TextTokenizer, Weights, small_model};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// What a task borrows from.
pub(in crate::rl) struct Fixture {
    pub(super) folder: tempfile::TempDir,
    pub(super) decoder: Decoder,
    pub(super) policy: LoraAdapter,
    tokenizer: TextTokenizer,
    lora: LoraSettings,
    mesh: Mesh,
    stop: AtomicBool,
}

/// Scores nothing, for tests whose rollouts are made by hand.
struct NoEnvironment;

impl Environment for NoEnvironment {
    fn score(&self, _: u64, _: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        Err(EnvironmentError::Record("no environment".into()))
    }
}

/// High learning rates, so that few steps have an effect.
pub(super) fn config() -> RlConfig {
    RlConfig {
        critic: CriticKind::Head,
        batch_size: 12,
        mini_batch_size: 12,
        gradient_accumulation_steps: 1,
        ppo_epochs: 2,
        learning_rate: 1e-2,
        critic_learning_rate: 1e-2,
        max_new_tokens: 8,
        ..RlConfig::default()
    }
}

impl Fixture {
    pub(super) fn new() -> Self {
        Self::on(&ComputeDevice::Cpu, BaseDtype::F32)
    }

    /// On another device, with another dtype.
    pub(super) fn on(place: &ComputeDevice, dtype: BaseDtype) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shape = small_model::Shape {
            hidden_size: 32,
            intermediate_size: 64,
            n_layers: 2,
            n_heads: 2,
            n_kv_heads: 1,
            head_dim: 16,
            max_positions: 64,
        };
        let mut config = small_model::write_files(folder.path(), &["aaaa bbbb".to_owned()], 280, &shape).unwrap();
        config.initializer_range = 0.3; // logits that differ, at this width
        Decoder::init(config, 3).unwrap().save(folder.path(), small_model::STORED_DTYPE).unwrap();
        let decoder = Decoder::load_on(folder.path(), Weights::Frozen, dtype, place).unwrap();
        let tokenizer = TextTokenizer::load(folder.path()).unwrap();
        let lora = LoraSettings::all_linear(4, 8.0);
        let policy = LoraAdapter::new(&decoder, lora.clone(), 5).unwrap();
        Self { folder, decoder, policy, tokenizer, lora, mesh: Mesh::alone(), stop: AtomicBool::new(false) }
    }

    pub(super) fn task<'a>(&'a self, config: &'a RlConfig) -> RlTask<'a> {
        RlTask {
            decoder: &self.decoder,
            base_path: self.folder.path(),
            policy: &self.policy,
            reference: None,
            tokenizer: &self.tokenizer,
            train: RlData { prompts: &[], environment: &NoEnvironment },
            val: RlData { prompts: &[], environment: &NoEnvironment },
            config,
            tokens_per_pass: 512,
            gradient_checkpointing: false,
            critic_lora: self.lora.clone(),
            seed: 11,
            mesh: &self.mesh,
            fingerprint: None,
            output_dir: self.folder.path(),
            progress: &Silent,
            stop: &self.stop,
        }
    }

    pub(super) fn eos(&self) -> u32 {
        *self.tokenizer.stop_ids().first().unwrap()
    }

    /// Moves the policy away from the bare base.
    pub(super) fn move_policy(&self) {
        let mut rng = ChaCha8Rng::seed_from_u64(9);
        for (name, var) in self.policy.vars() {
            if name.contains("lora_B") {
                let values: Vec<f32> = (0..var.elem_count()).map(|_| rng.random_range(-0.1..0.1)).collect();
                var.set(&Tensor::from_vec(values, var.shape(), var.device()).unwrap()).unwrap();
            }
        }
    }

    /// All values of the policy's adapter.
    pub(super) fn policy_values(&self) -> Vec<f32> {
        values(self.policy.vars())
    }

    /// Twelve responses of different length to four queries, with the policy's log-probabilities and scores that differ.
    pub(super) fn rollouts(&self, config: &RlConfig, seed: u64) -> Vec<Rollout> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let example = |index: usize| {
            let mut tokens = |n: usize| -> Vec<u32> { (0..n).map(|_| rng.random_range(3..260)).collect() };
            let prompt = [vec![7, 8, 9], vec![20 + (index / 3) as u32; 3]].concat();
            Example { prompt, response: tokens(2 + index % 5) }
        };
        let examples: Vec<Example> = (0..12).map(example).collect();
        self.scored(config, examples, |index| (index % 3) as f32 - 0.3 * (index / 3) as f32)
    }

    /// Rollouts of these responses, three to a query.
    pub(super) fn scored(
        &self,
        config: &RlConfig,
        examples: Vec<Example>,
        score: impl Fn(usize) -> f32,
    ) -> Vec<Rollout> {
        let logprobs = self.logprobs(config, &examples);
        let rollout = |(index, (example, logprobs)): (usize, (Example, Vec<f32>))| Rollout {
            example,
            behaviour_logprobs: logprobs.clone(),
            logprobs,
            truncated: false,
            group: index / 3,
            score: score(index),
            record: record(),
        };
        examples.into_iter().zip(logprobs).enumerate().map(rollout).collect()
    }

    /// Log-probabilities of the policy as it is.
    pub(super) fn logprobs(&self, config: &RlConfig, examples: &[Example]) -> Vec<Vec<f32>> {
        let frozen = self.policy.without_gradient();
        let policy = Policy { decoder: &self.decoder, adapter: Some(&frozen) };
        let examples: Vec<&Example> = examples.iter().collect();
        let pass = policy.response_logprobs(&examples, config.temperature).unwrap();
        rows_of(&pass.logprobs.narrow(1, 0, 1).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap(), &examples)
    }
}

/// All values of some variables, in the order of their names.
pub(super) fn values(vars: &BTreeMap<String, candle_core::Var>) -> Vec<f32> {
    vars.values().flat_map(|var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap()).collect()
}

pub(super) fn record() -> EpisodeRecord {
    let candidate = Candidate::found_nothing(String::new());
    let episode = Episode {
        id: String::new(),
        query: String::new(),
        context: Context::default(),
        gold_ids: Vec::new(),
        policy: candidate.clone(),
        baseline: candidate,
    };
    let outcome = Ok(Reward { total: 0.0, components: Vec::new() });
    EpisodeRecord { format: EpisodeRecord::FORMAT, step: 1, episode, outcome }
}

/// Scores a response by its letters and keeps a log; may fail at one step.
#[derive(Default)]
pub(super) struct LetterEnvironment {
    pub(super) log: Mutex<Vec<String>>,
    pub(super) fails_at: Option<u64>,
}

impl Environment for LetterEnvironment {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        if self.fails_at == Some(step) {
            return Err(EnvironmentError::Record("the environment is gone".into()));
        }
        let record = |response: &PolicyResponse| {
            self.log.lock().unwrap().push(format!("{step} {} {}", response.row_index, response.text));
            let total = f64::from(response.text.bytes().map(u32::from).sum::<u32>() % 7);
            EpisodeRecord { outcome: Ok(Reward { total, components: Vec::new() }), ..record() }
        };
        Ok(responses.iter().map(record).collect::<Vec<_>>().into())
    }

    fn mark(&self) -> Result<u64, EnvironmentError> {
        Ok(self.log.lock().unwrap().len() as u64)
    }

    fn rewind(&self, mark: u64) -> Result<(), EnvironmentError> {
        self.log.lock().unwrap().truncate(mark as usize);
        Ok(())
    }
}

/// The adapters of `best` and `last`.
pub(super) fn adapters(folder: &Path) -> Vec<Vec<u8>> {
    [BEST, LAST].map(|name| std::fs::read(folder.join(name).join("adapter_model.safetensors")).unwrap()).into()
}

/// One run on a fresh model.
pub(super) fn run_once(
    fixture: &Fixture,
    config: &RlConfig,
    environment: &LetterEnvironment,
    sink: &mut Recorder,
    folder: &Path,
) -> Result<RlSummary, TrainError> {
    run_rank(fixture, Mesh::alone(), config, environment, sink, folder)
}

/// One rank of a run.
pub(super) fn run_rank(
    fixture: &Fixture,
    mesh: Mesh,
    config: &RlConfig,
    environment: &LetterEnvironment,
    sink: &mut Recorder,
    folder: &Path,
) -> Result<RlSummary, TrainError> {
    let prompts: Vec<Vec<u32>> = (0..6).map(|row| vec![7, 8, 20 + row]).collect();
    let task = RlTask {
        train: RlData { prompts: &prompts, environment },
        val: RlData { prompts: &prompts[..2], environment },
        fingerprint: Some("inputs"),
        output_dir: folder,
        mesh: &mesh,
        ..fixture.task(config)
    };
    train(&task, sink)
}

//! Whole updates and runs on a tiny decoder. This file: the fixture, and out-of-memory in the middle of a batch's updates: the state
//! before is saved, and the resumed run writes the files of an uninterrupted one.
#![allow(clippy::unwrap_used)]

mod gpu;
mod learner;

use super::rollout::Rollout;
use super::train_loop::Trainer;
use super::{RlData, RlSummary, RlTask, train};
use crate::TrainError;
use crate::checkpoint::{BEST, LAST, STATE};
use crate::policy::{Example, Policy, TrainingPass};
use crate::testing::{Recorder, inject_out_of_memory};
use candle_core::Tensor;
use querl_core::config::{BaseDtype, CriticKind, RlConfig};
use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, ScoredResponses, Silent};
use querl_core::records::{Candidate, Context, Episode, EpisodeRecord, Reward};
use querl_model::{
    ComputeDevice, Decoder, LoraAdapter, LoraSettings, Mesh, RankFailure, TextTokenizer, Weights, run_ranks,
    small_model,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// Summary and adapter values of each rank, or the failed ranks.
type RankResults = Result<Vec<(RlSummary, Vec<f32>)>, Vec<RankFailure<TrainError>>>;

/// A model with a policy, and what else an [`RlTask`] borrows.
struct Fixture {
    folder: tempfile::TempDir,
    decoder: Decoder,
    policy: LoraAdapter,
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
fn config() -> RlConfig {
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
    fn new() -> Self {
        Self::on(&ComputeDevice::Cpu, BaseDtype::F32)
    }

    fn on(device: &ComputeDevice, dtype: BaseDtype) -> Self {
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
        let decoder = Decoder::load_on(folder.path(), Weights::Frozen, dtype, device).unwrap();
        let tokenizer = TextTokenizer::load(folder.path()).unwrap();
        let lora = LoraSettings::all_linear(4, 8.0);
        let policy = LoraAdapter::new(&decoder, lora.clone(), 5).unwrap();
        Self { folder, decoder, policy, tokenizer, lora, mesh: Mesh::alone(), stop: AtomicBool::new(false) }
    }

    fn task<'a>(&'a self, config: &'a RlConfig) -> RlTask<'a> {
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

    fn eos(&self) -> u32 {
        *self.tokenizer.stop_ids().first().unwrap()
    }

    /// Moves the policy away from the bare base.
    fn move_policy(&self) {
        let mut rng = ChaCha8Rng::seed_from_u64(9);
        for (name, var) in self.policy.vars() {
            if name.contains("lora_B") {
                let values: Vec<f32> = (0..var.elem_count()).map(|_| rng.random_range(-0.1..0.1)).collect();
                var.set(&Tensor::from_vec(values, var.shape(), var.device()).unwrap()).unwrap();
            }
        }
    }

    fn policy_values(&self) -> Vec<f32> {
        let vars = self.policy.vars().values();
        vars.flat_map(|var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap()).collect()
    }

    /// Twelve responses of different length to four queries, with the policy's log-probabilities and scores that differ.
    fn rollouts(&self, config: &RlConfig, seed: u64) -> Vec<Rollout> {
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
    fn scored(&self, config: &RlConfig, examples: Vec<Example>, score: impl Fn(usize) -> f32) -> Vec<Rollout> {
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

    /// Log-probabilities of the current policy.
    fn logprobs(&self, config: &RlConfig, examples: &[Example]) -> Vec<Vec<f32>> {
        let frozen = self.policy.without_gradient();
        let policy = Policy { decoder: &self.decoder, adapter: Some(&frozen) };
        let examples: Vec<&Example> = examples.iter().collect();
        let pass = policy.response_logprobs(&examples, config.temperature, TrainingPass::default()).unwrap();
        pass.rows(&examples).unwrap()
    }
}

fn record() -> EpisodeRecord {
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
struct LetterEnvironment {
    log: Mutex<Vec<String>>,
    fails_at: Option<u64>,
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
fn adapters(folder: &Path) -> Vec<Vec<u8>> {
    [BEST, LAST].map(|name| std::fs::read(folder.join(name).join("adapter_model.safetensors")).unwrap()).into()
}

/// Folder, environment and metrics of a run; what a resumed run finds again.
struct Run {
    folder: tempfile::TempDir,
    environment: LetterEnvironment,
    sink: Recorder,
}

impl Run {
    fn new() -> Self {
        let (environment, sink) = (LetterEnvironment::default(), Recorder::default());
        Self { folder: tempfile::tempdir().unwrap(), environment, sink }
    }

    /// On a new model.
    fn start(&mut self, fixture: &Fixture, config: &RlConfig) -> Result<RlSummary, TrainError> {
        run_rank(fixture, Mesh::alone(), config, &self.environment, &mut self.sink, self.folder.path())
    }

    /// With several ranks, each on a new model. Returns the summary and the policy of each.
    fn start_ranks(
        &mut self,
        world_size: usize,
        config: &RlConfig,
        fixture: impl Fn(usize) -> Result<Fixture, TrainError> + Sync,
    ) -> RankResults {
        let (environment, folder, sink) = (&self.environment, self.folder.path(), Mutex::new(&mut self.sink));
        run_ranks(world_size, |ranks| {
            let (fixture, mut own) = (fixture(ranks.rank())?, Recorder::default());
            let mut held = ranks.is_first().then(|| sink.lock().unwrap());
            let sink = held.as_mut().map_or(&mut own, |held| &mut **held);
            let summary = run_rank(&fixture, Mesh::of_data(ranks), config, environment, sink, folder)?;
            Ok((summary, fixture.policy_values()))
        })
    }

    fn assert_same(&self, expected: &Self) {
        assert!(self.sink.0 == expected.sink.0, "{:?}, expected {:?}", self.sink.0, expected.sink.0);
        assert_eq!(*self.environment.log.lock().unwrap(), *expected.environment.log.lock().unwrap());
        assert!(adapters(self.folder.path()) == adapters(expected.folder.path()), "adapters differ");
    }
}

/// One rank of a run.
fn run_rank(
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

/// Five steps without a periodic checkpoint.
fn five_steps(off_by_one: bool) -> RlConfig {
    let (batch_size, mini_batch_size, max_steps) = (4, 2, 5);
    let (save_steps, eval_steps) = (100, 100);
    RlConfig { batch_size, mini_batch_size, max_steps, save_steps, eval_steps, off_by_one, ..config() }
}

#[test]
fn out_of_memory_on_the_second_rank_reaches_the_first_which_saves() {
    for off_by_one in [false, true] {
        let config = five_steps(off_by_one);
        let (mut complete, mut broken) = (Run::new(), Run::new());
        let expected = complete.start_ranks(2, &config, |_| Ok(Fixture::new())).unwrap();
        let failing = |rank| {
            if rank == 1 {
                inject_out_of_memory(4, "pass");
            }
            Ok(Fixture::new())
        };
        let failures = broken.start_ranks(2, &config, failing).unwrap_err();
        let error = failures.into_iter().find(|failure| failure.rank() == 0);
        let Some(RankFailure::Failed { error, .. }) = error else { panic!("the first rank: {error:?}") };
        let message = "rl step 4: out of device memory (rank 1 failed: DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")); \
                       step 3 is saved; run the same command again to resume";
        assert_eq!(error.to_string(), message);
        let found = broken.start_ranks(2, &config, |_| Ok(Fixture::new())).unwrap();
        assert_eq!(found[0].0, expected[0].0);
        broken.assert_same(&complete);
    }
}

#[test]
fn a_step_out_of_memory_is_taken_again_from_its_beginning() {
    for off_by_one in [false, true] {
        let config = five_steps(off_by_one);
        let (mut complete, mut broken) = (Run::new(), Run::new());
        let expected = complete.start(&Fixture::new(), &config).unwrap();
        inject_out_of_memory(4, "pass");
        let error = broken.start(&Fixture::new(), &config).unwrap_err();
        assert!(matches!(error, TrainError::OutOfMemory { stage: "rl", step: 4, saved: Some(3), .. }), "{error:?}");
        assert!(broken.folder.path().join(STATE).join("step-3.state").is_file());
        assert_eq!(broken.start(&Fixture::new(), &config).unwrap(), expected);
        broken.assert_same(&complete);
    }
}

/// Regression: policies were compared before a checkpoint and critics were not; the first rank's critic was saved for all.
#[test]
fn a_critic_that_differs_between_ranks_is_detected_before_it_is_saved() {
    for critic in [CriticKind::Head, CriticKind::Adapter] {
        let (config, folder) = (RlConfig { critic, ..config() }, tempfile::tempdir().unwrap());
        let save_twice = |ranks: querl_model::Ranks| {
            let (rank, mesh, fixture) = (ranks.rank(), Mesh::of_data(ranks), Fixture::new());
            let (environment, prompts) = (LetterEnvironment::default(), vec![vec![7, 8, 20]; 4]);
            let task = RlTask {
                train: RlData { prompts: &prompts, environment: &environment },
                val: RlData { prompts: &prompts[..1], environment: &environment },
                fingerprint: Some("inputs"),
                output_dir: folder.path(),
                mesh: &mesh,
                ..fixture.task(&config)
            };
            let mut trainer = Trainer::new(&task, &mut Recorder::default())?;
            trainer.save(&mut Recorder::default())?;
            if rank == 0 {
                std::fs::remove_file(folder.path().join(STATE).join("step-0.state")).unwrap();
            } else {
                let var = trainer.learner.critic.as_ref().unwrap().vars().values().next().unwrap();
                var.set(&(var.as_tensor() + 0.5).unwrap()).unwrap();
            }
            trainer.save(&mut Recorder::default())
        };
        let failures = run_ranks(2, save_twice).map(drop).unwrap_err();
        assert!(failures[0].to_string().contains("the weights of the ranks differ"), "{failures:?}");
        assert!(!folder.path().join(STATE).join("step-0.state").exists());
    }
}

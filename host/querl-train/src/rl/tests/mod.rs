//! Updates on a tiny decoder, and complete trainings: PPO and the other algorithms, small tasks with a known optimum, overlapped rollouts,
//! rollouts of a server, dynamic sampling, stops and kills, several ranks. This file: the fixture, and out-of-memory errors within the
//! updates of a batch, after which the previous state is saved and the resumed run writes the same files as an uninterrupted one.

mod dynamic_sampling;
mod generator;
mod gpu;
mod learner;
mod learning;
mod mismatch;
mod pipeline;
mod ppo;
mod ranks;
mod resume;
mod step_record;
mod support;
mod tensor_parallel;

use super::rollout::Rollout;
use super::train_loop::Trainer;
use super::{RlData, RlTask};
use crate::TrainError;
use crate::checkpoint::STATE;
use crate::policy::{Example, Policy, TrainingPass};
use crate::testing::{Recorder, inject_out_of_memory};
use candle_core::Tensor;
use querl_core::config::{BaseDtype, CriticKind, RlConfig};
use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, ScoredResponses};
use querl_core::records::EpisodeRecord;
use querl_model::{ComputeDevice, LoraAdapter, LoraSettings, Mesh, run_ranks};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use support::{FaultyEnvironment, Model, Run, episode, reward};

struct Fixture {
    model: Model,
    policy: LoraAdapter,
}

/// An environment for tests with handmade rollouts, which does not score.
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
        let model = Model::on(device, dtype);
        let policy = model.adapter(LoraSettings::all_linear(4, 8.0), 5);
        Self { model, policy }
    }

    fn task<'a>(&'a self, config: &'a RlConfig) -> RlTask<'a> {
        self.model.task(&self.policy, &[], [&NoEnvironment, &NoEnvironment], config, &self.model.path)
    }

    fn eos(&self) -> u32 {
        *self.model.tokenizer.stop_ids().first().unwrap()
    }

    /// Changes the policy's weights, so that it differs from the base model.
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

    /// Twelve responses of different length to four queries, with the policy's log-probabilities and different scores.
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

    /// Rollouts of these responses, three per query.
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

    fn logprobs(&self, config: &RlConfig, examples: &[Example]) -> Vec<Vec<f32>> {
        let frozen = self.policy.without_gradient();
        let policy = Policy { decoder: &self.model.decoder, adapter: Some(&frozen) };
        let examples: Vec<&Example> = examples.iter().collect();
        let pass = policy.response_logprobs(&examples, config.temperature, TrainingPass::default()).unwrap();
        pass.rows(&examples).unwrap()
    }
}

fn record() -> EpisodeRecord {
    let response = PolicyResponse { row_index: 0, sample_index: 0, text: String::new(), n_tokens: 0, truncated: false };
    episode(String::new(), 1, &response, Ok(reward(0.0)))
}

#[test]
fn out_of_memory_reaches_the_first_rank_which_saves_and_the_step_is_taken_again_from_its_beginning() {
    let model = Model::new();
    for (off_by_one, world_size) in [(false, 1), (true, 1), (false, 2), (true, 2)] {
        // Five steps without a periodic checkpoint.
        let (batch_size, mini_batch_size, max_steps, save_steps, eval_steps) = (4, 2, 5, 100, 100);
        let config =
            RlConfig { batch_size, mini_batch_size, max_steps, save_steps, eval_steps, off_by_one, ..config() };
        let what = format!("{off_by_one}, {world_size} ranks");
        let complete = Run::complete(world_size, &model, &config);
        let mut broken = Run::new(FaultyEnvironment::without_fault());
        // On the last rank.
        let failing = |rank| {
            if rank + 1 == world_size {
                inject_out_of_memory(4, "pass");
            }
            Ok(&model)
        };
        let error = broken.start_ranks(world_size, &config, failing).unwrap_err();
        assert!(matches!(error, TrainError::OutOfMemory { stage: "rl", step: 4, saved: Some(3), .. }), "{error:?}");
        if world_size == 2 {
            let message = "rl step 4: out of device memory (rank 1 failed: DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")); \
                           step 3 is saved; run the same command again to resume";
            assert_eq!(error.to_string(), message);
        }
        assert!(broken.folder.path().join(STATE).join("step-3.state").is_file());
        broken.start(world_size, &model, &config).unwrap();
        broken.assert_same(&complete, &what);
    }
}

/// Regression: policies were compared before a checkpoint and critics were not; the first rank's critic was saved for all.
#[test]
fn a_critic_that_differs_between_ranks_is_detected_before_it_is_saved() {
    for critic in [CriticKind::Head, CriticKind::Adapter] {
        let (config, folder) = (RlConfig { critic, ..config() }, tempfile::tempdir().unwrap());
        let save_twice = |ranks: querl_model::Ranks| {
            let (rank, mesh, fixture) = (ranks.rank(), Mesh::of_data(ranks), Fixture::new());
            let (environment, prompts) = (NoEnvironment, vec![vec![7, 8, 20]; 4]);
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

//! Reinforcement learning against an environment.
//!
//! One step: rollouts, scores, log-probabilities of policy and reference, values, advantages, several epochs of updates.
//! The policy is the SFT adapter, trained further; the reference is that adapter as it was; both share one frozen base.
//!
//! | file | what |
//! |---|---|
//! | this one | [`RlTask`], [`RlSummary`]: what a run needs and returns |
//! | `train_loop.rs` | the loop; `trainer_state.rs` saves and restores it |
//! | `rollout_pipeline.rs`, `rollout.rs` | generation overlapped with scoring; the batch |
//! | `generator.rs` | the engine of rollouts: of this process, or a server |
//! | `rollout_check.rs` | log-probabilities of rollout and training compared |
//! | `experience.rs` | log-probabilities, values, rewards and advantages of a batch |
//! | `advantages.rs` | GAE, group-relative advantages, whitening: which algorithm uses which |
//! | `losses.rs` | policy, value and KL loss with their gradients |
//! | `learner.rs` | epochs, mini-batches and micro-batches of updates |
//! | `critic.rs` | the value function |
//! | `metrics.rs` | every metric; **add one there** |
//! | `step_record.rs` | what a step was computed from, by token (`rl.record`) |
//! | `health.rs` | warnings about an unhealthy run |

pub mod advantages;
mod critic;
mod experience;
mod generator;
pub(crate) mod health;
mod learner;
pub mod losses;
mod metrics;
mod rollout;
mod rollout_check;
mod rollout_pipeline;
mod step_record;
#[cfg(test)]
mod tests;
mod train_loop;
mod trainer_state;

pub use metrics::{EVALUATION_RETRIEVAL, EVALUATION_REWARD};
pub use train_loop::train;

use crate::TrainError;
use crate::data_parallel::check_stop;
use querl_core::config::RlConfig;
use querl_core::ports::{Environment, Progress, RolloutEngine};
use querl_model::{
    CacheRoom, ComputeDevice, Decoder, EngineSettings, LoraAdapter, LoraSettings, Mesh, PrefixLife, SamplingSettings,
    TextTokenizer,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Prompts of one split and the environment that scores responses to them.
pub struct RlData<'a> {
    /// Token ids of the prompts, one list per row.
    pub prompts: &'a [Vec<u32>],
    /// Environment opened with the same rows in the same order.
    pub environment: &'a dyn Environment,
}

/// Rollouts whose responses a server generates.
#[derive(Clone, Copy)]
pub struct ServerRollouts<'a> {
    /// Client of the rollout server; only the first rank calls it.
    pub engine: &'a dyn RolloutEngine,
    /// Maximum KL (k3, nats per token) of the server's log-probabilities to those of the training pass; the run fails above it.
    pub max_mismatch_kl: f64,
}

/// One rank's view of a run: models on its device, data and settings.
pub struct RlTask<'a> {
    /// The frozen base.
    pub decoder: &'a Decoder,
    /// Folder of the base, whose name is stored in adapter checkpoints.
    pub base_path: &'a Path,
    /// The adapter that is trained; it starts as the SFT adapter.
    pub policy: &'a LoraAdapter,
    /// Reference of the KL; `None`: the base without adapter.
    pub reference: Option<&'a LoraAdapter>,
    /// Tokenizer that decodes responses and defines the end-of-sequence tokens.
    pub tokenizer: &'a TextTokenizer,
    /// The training split.
    pub train: RlData<'a>,
    /// The validation split, which decides which checkpoint is best.
    pub val: RlData<'a>,
    /// The rollout server; `None`: the decoder of this process generates the responses.
    pub rollouts: Option<ServerRollouts<'a>>,
    /// Hyperparameters.
    pub config: &'a RlConfig,
    /// Most tokens of one forward pass; a longer example has a pass of its own.
    pub tokens_per_pass: usize,
    /// Gradient checkpointing: layers save only their inputs and compute activations again in the backward pass.
    pub gradient_checkpointing: bool,
    /// LoRA settings of the critic's adapter, if the critic has one.
    pub critic_lora: LoraSettings,
    /// Seeds the order of the data, the sampling and the critic.
    pub seed: u64,
    /// The ranks that train this policy together. Each calls [`train`] with the same task, its models on its own
    /// device. The first rank alone writes files and calls the environment; the others should get no-op sinks.
    pub mesh: &'a Mesh,
    /// Digest of everything that the result depends on: a run resumes from its newest checkpoint if that has the same
    /// fingerprint. `None`: no checkpoints to resume from are written.
    pub fingerprint: Option<&'a str>,
    /// Folder in which `best`, `last` and `state` are written.
    pub output_dir: &'a Path,
    /// Where progress is shown.
    pub progress: &'a dyn Progress,
    /// Step after which training saves its state and stops, as if the stop flag were set; a call with a later step, or `None`, resumes.
    /// `None`: training takes all steps.
    pub stop_after: Option<u64>,
    /// Stop flag. Read before each decode step, after rollouts, and, if the step can be discarded, before each pass over a batch; otherwise
    /// the step is completed first.
    pub stop: &'a AtomicBool,
}

impl RlTask<'_> {
    /// True if a stop discards the updates of a batch: on one CPU, where they take longest. With `rl.off_by_one` the next batch is
    /// generated and scored at the same time.
    fn discards_updates(&self) -> bool {
        let is_alone = self.mesh.all.world_size() == 1;
        let is_on_cpu = matches!(self.decoder.compute_device(), ComputeDevice::Cpu);
        self.fingerprint.is_some() && is_alone && is_on_cpu && !self.config.off_by_one
    }

    /// Called before each pass over the batch of `step`.
    ///
    /// # Errors
    /// The stop flag is set, and the step can be discarded.
    fn check_stop(&self, step: u64) -> Result<(), TrainError> {
        match self.discards_updates() {
            true => check_stop(&self.mesh.all, self.stop, "rl", step - 1),
            false => Ok(()),
        }
    }
}

/// Summary of a reinforcement-learning run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RlSummary {
    /// Number of steps taken.
    pub n_steps: u64,
    /// Step of the best checkpoint; 0 is the SFT policy itself.
    pub best_step: u64,
    /// Validation reward before the first step.
    pub first_val_reward: f64,
    /// Validation reward of the best checkpoint.
    pub best_val_reward: f64,
    /// Number of episodes, with and without a score.
    pub n_episodes: u64,
    /// Number of episodes without a score, by rejection code: a call failed or exceeded its deadline, or a plugin rejected the episode.
    pub dropped: BTreeMap<String, u64>,
}

/// Sampling settings of rollouts; greedy decoding uses their token limit and stop strings.
pub fn sampling(config: &RlConfig) -> SamplingSettings {
    SamplingSettings {
        temperature: config.temperature,
        top_p: config.top_p,
        top_k: config.top_k,
        repetition_penalty: config.repetition_penalty,
        no_repeat_ngram_size: config.no_repeat_ngram_size,
        min_new_tokens: config.min_new_tokens,
        max_new_tokens: config.max_new_tokens,
        stop_strings: config.stop_strings.clone(),
    }
}

/// KV cache size on a GPU for one of `n_copies` of the model (data parallel): enough for that copy's share of one part of a batch
/// (`rl.pipeline_parts`) at once. An evaluation with more rows queues them.
pub fn kv_cache_room(config: &RlConfig, longest_prompt: usize, n_copies: usize) -> CacheRoom {
    let part_size = config.batch_size.div_ceil(config.pipeline_parts.max(1));
    let n_queries = part_size.div_ceil(n_copies.max(1)).max(1);
    let n_samples = config.n_samples.max(1);
    let n_responses = (n_queries * n_samples).min(EngineSettings::default().max_sequences);
    let n_prompts = n_responses.div_ceil(n_samples);
    CacheRoom { n_responses, n_prompts, longest_prompt, max_new_tokens: config.max_new_tokens }
}

/// On a GPU the size of the KV cache is planned, and cached prefixes are dropped after each call, so that a resumed run, whose cache is
/// empty, gives the same bits.
fn engine_settings(task: &RlTask<'_>) -> EngineSettings {
    if matches!(task.decoder.compute_device(), ComputeDevice::Cpu) {
        return EngineSettings::default();
    }
    let prompts = task.train.prompts.iter().chain(task.val.prompts);
    let longest_prompt = prompts.map(Vec::len).max().unwrap_or(0);
    let room = Some(kv_cache_room(task.config, longest_prompt, task.mesh.data.world_size()));
    EngineSettings { prefix_life: PrefixLife::Call, room, ..EngineSettings::default() }
}

//! Reinforcement learning against an environment.
//!
//! One step: rollouts, scores, log-probabilities of policy and reference, values, advantages, several epochs of updates.
//! The policy is the SFT adapter trained on; the reference is that adapter as it was; both share one frozen base.

mod algorithm;
mod best;
#[cfg(all(test, feature = "cuda"))]
mod card_tests;
mod critic;
mod estimate;
mod evaluate;
mod experience_metrics;
mod learner;
#[cfg(test)]
mod learner_tests;
#[cfg(test)]
mod memory_tests;
mod passes;
mod pipeline;
mod rollout;
mod rollout_check;
mod run;
#[cfg(test)]
mod testing;
mod update;
mod whitening;
#[cfg(test)]
mod whole_runs;

use crate::{MetricSink, TrainError};
use querl_core::config::RlConfig;
use querl_core::ports::{Environment, Progress};
use querl_model::{
    CacheRoom, Decoder, EngineSettings, LoraAdapter, Mesh, Place, PrefixLife, SamplingSettings, TextTokenizer,
};
use run::{Reached, Run};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Prompts of one split and the environment that scores answers to them.
pub struct RlData<'a> {
    /// Prompt tokens, by row.
    pub prompts: &'a [Vec<u32>],
    /// Opened with the same rows in the same order.
    pub environment: &'a dyn Environment,
}

/// What an optimisation works on.
pub struct RlTask<'a> {
    /// The frozen base.
    pub decoder: &'a Decoder,
    /// The base's directory, named in the checkpoints.
    pub base_path: &'a Path,
    /// Trained; starts as the SFT adapter.
    pub policy: &'a LoraAdapter,
    /// What KL is measured against; `None` is the bare base.
    pub reference: Option<&'a LoraAdapter>,
    /// Decodes responses and knows where they end.
    pub tokenizer: &'a TextTokenizer,
    /// What is learned from.
    pub train: RlData<'a>,
    /// What decides which checkpoint is best.
    pub val: RlData<'a>,
    /// Hyperparameters.
    pub config: &'a RlConfig,
    /// Most rows of one training pass; an answer that is longer has a pass of its own.
    pub tokens_per_pass: usize,
    /// Layers keep their inputs alone and are computed again in the backward pass.
    pub gradient_checkpointing: bool,
    /// Shape of the critic's adapter, where it has one.
    pub critic_lora: querl_model::LoraSettings,
    /// Seeds the order of the data, the sampling and the critic.
    pub seed: u64,
    /// Who else optimises the same policy: every rank comes here with the same task, but for where its model stands. The first
    /// alone writes files and asks the environment, and what the others are given to record and to show with is best deaf.
    pub mesh: &'a Mesh,
    /// Stands for everything that the result depends on: an optimisation that was stopped goes on from its newest checkpoint if
    /// that has the same one. `None`: no checkpoints to go on from are kept.
    pub fingerprint: Option<&'a str>,
    /// Where `best`, `last` and `state` are written.
    pub output_dir: &'a Path,
    /// Shows how far it is.
    pub progress: &'a dyn Progress,
    /// Set to stop at the next part of a batch.
    pub stop: &'a AtomicBool,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RlSummary {
    /// Steps taken.
    pub n_steps: u64,
    /// Step of the best checkpoint; 0 is the SFT policy itself.
    pub best_step: u64,
    /// Validation reward before the first step.
    pub first_val_reward: f64,
    /// Validation reward of the best checkpoint.
    pub best_val_reward: f64,
    /// Episodes rolled out.
    pub n_episodes: u64,
    /// Episodes that got no score, by code: a call failed or was late, or a plugin rejected them.
    pub dropped: BTreeMap<String, u64>,
}

/// What answers are drawn with in training; what is decoded greedily keeps the same limits.
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

/// What answers take of a card at once, at most: those of one part of a batch, which are generated together, and of that the share of
/// one of `n_copies` of the model. Where an evaluation asks for more, they wait.
pub fn card_room(config: &RlConfig, longest_prompt: usize, n_copies: usize) -> CacheRoom {
    let of_part = config.batch_size.div_ceil(config.pipeline_parts.max(1));
    let n_queries = of_part.div_ceil(n_copies.max(1)).max(1);
    let n_samples = config.n_samples.max(1);
    let n_answers = (n_queries * n_samples).min(EngineSettings::default().max_sequences);
    let n_prompts = n_answers.div_ceil(n_samples);
    CacheRoom { n_answers, n_prompts, longest_prompt, max_new_tokens: config.max_new_tokens }
}

/// How answers are generated: on a card in memory that is planned, and so that a run that was stopped goes on to the same bytes
/// although prefixes that were kept are not there any more.
fn engine_settings(task: &RlTask<'_>) -> EngineSettings {
    if matches!(task.decoder.place(), Place::Cpu) {
        return EngineSettings::default();
    }
    let prompts = task.train.prompts.iter().chain(task.val.prompts);
    let longest_prompt = prompts.map(Vec::len).max().unwrap_or(0);
    let room = Some(card_room(task.config, longest_prompt, task.mesh.data.world_size()));
    EngineSettings { prefix_life: PrefixLife::Call, room, ..EngineSettings::default() }
}

/// Optimises the policy, keeps the best and the last checkpoint, and says what came of it.
///
/// Goes on where an earlier call with the same fingerprint was stopped or killed: with an environment that gives the same
/// answers, what is left at the end is what an unbroken run leaves, byte for byte.
///
/// # Errors
/// No rows, too many dropped episodes, a loss that is not finite, somebody said stop or a card has no memory left (what was
/// reached is kept), or what
/// environment, model and file system report.
pub fn train(task: &RlTask<'_>, sink: &mut dyn MetricSink) -> Result<RlSummary, TrainError> {
    if task.train.prompts.is_empty() || task.val.prompts.is_empty() {
        return Err(TrainError::Data("rl: the training or the validation split is empty; add rows".into()));
    }
    let mut run = Run::begin(task, sink)?;
    let outcome = go_on(&mut run, sink);
    outcome.map_err(|error| run.without_memory(error))
}

fn go_on(run: &mut Run<'_>, sink: &mut dyn MetricSink) -> Result<RlSummary, TrainError> {
    loop {
        run.remember(sink)?;
        // 1. Evaluation on the validation split, before the first step and then now and again.
        if run.evaluation_is_due() && run.evaluate(sink)? == Reached::Stop {
            return run.interrupt(sink);
        }
        // 2. A checkpoint; a policy that is the best so far is kept besides.
        if run.checkpoint_is_due() {
            run.save(sink)?;
        }
        if run.is_over() {
            return run.finish();
        }
        // 3. Rollouts, scored; episodes whose calls failed or were late are dropped and counted.
        let Some(batch) = run.rollouts()? else { return run.interrupt(sink) };
        // 4. Log-probabilities, values, advantages; several epochs of updates.
        let metrics = run.learn(&batch)?;
        // 5. Metrics and warnings.
        run.record(&batch, metrics, sink)?;
    }
}

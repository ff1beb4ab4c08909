//! Proximal policy optimisation against an environment.
//!
//! One step: rollouts, scores, log-probabilities of policy and reference, values, advantages, several epochs of updates.
//! The policy is the SFT adapter trained on; the reference is that adapter as it was; both share one frozen base.

mod algorithm;
mod critic;
mod estimate;
mod evaluate;
mod experience_metrics;
mod learner;
#[cfg(test)]
mod learner_tests;
mod passes;
mod rollout;
mod rollout_check;
#[cfg(test)]
mod testing;
mod update;
mod whitening;

use crate::checkpoint::{BEST, LAST, save_policy};
use crate::health::Health;
use crate::order::Order;
use crate::policy::Policy;
use crate::{MetricSink, Metrics, TrainError};
use evaluate::Evaluation;
use learner::Learner;
use querl_core::config::RlConfig;
use querl_core::ports::{Environment, Progress};
use querl_model::{Decoder, LoraAdapter, TextTokenizer};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

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
    /// Where `best` and `last` are written.
    pub output_dir: &'a Path,
    /// Shows how far it is.
    pub progress: &'a dyn Progress,
    /// Set to stop at the next step.
    pub stop: &'a AtomicBool,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
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
    /// Episodes that got no score, by code: a call failed, or a plugin rejected them.
    pub dropped: BTreeMap<String, u64>,
}

/// Optimises the policy, keeps the best and the last checkpoint, and says what came of it.
///
/// # Errors
/// No rows, too many dropped episodes, a loss that is not finite, or what environment, model and file system report.
pub fn train(task: &RlTask<'_>, sink: &mut dyn MetricSink) -> Result<RlSummary, TrainError> {
    if task.train.prompts.is_empty() || task.val.prompts.is_empty() {
        return Err(TrainError::Data("rl: the training or the validation split is empty; add rows".into()));
    }
    let config = task.config;
    let mut order = Order::new(task.train.prompts.len(), task.seed);
    let mut learner = Learner::new(task)?;
    let mut health = Health::default();
    let first = evaluate::evaluate(task, 0)?;
    record_evaluation(task, sink, 0, &first)?;
    let mut best = Best::new(first);
    best.save(task, &learner)?;
    let (mut n_episodes, mut dropped) = (0, BTreeMap::new());

    for step in 1..=config.max_steps as u64 {
        // 1. Rollouts, scored; episodes whose calls failed are dropped and counted.
        let started = Instant::now();
        let batch = rollout::collect(task, step, &order.take(config.batch_size))?;
        n_episodes += batch.n_episodes as u64;
        batch.dropped.iter().for_each(|(code, n)| *dropped.entry(code.clone()).or_default() += n);
        // 2. Log-probabilities, values, advantages; several epochs of updates.
        let mut metrics = batch.metrics();
        metrics.extend(learner.learn(task, &batch, step)?);
        metrics.extend(timings(&batch, started));
        // 3. Warnings.
        for warning in health.check(&metrics) {
            task.progress.line(&format!("rl step {step}: {warning}"));
        }
        // 4. Evaluation on the validation split, and the checkpoint if it is the best so far.
        let is_last = step == config.max_steps as u64;
        if is_last || step % config.eval_steps.max(1) as u64 == 0 {
            let evaluation = evaluate::evaluate(task, step)?;
            record_evaluation(task, sink, step, &evaluation)?;
            if best.offer(step, evaluation) {
                best.save(task, &learner)?;
            }
        }
        let mean = metrics.get("avg_reward").copied().unwrap_or_default();
        sink.record("rl", step, &metrics).map_err(|source| io(task, source))?;
        task.progress.update(step, config.max_steps as u64, &format!("reward {mean:+.3}, {}", best.note()));
        let interrupted = task.stop.load(Ordering::Relaxed);
        if interrupted || is_last || best.is_exhausted(config.early_stopping_patience) {
            save(task, &learner, &task.output_dir.join(LAST))?;
            if interrupted {
                return Err(TrainError::Interrupted { stage: "rl", step });
            }
            return Ok(best.summary(step, n_episodes, dropped));
        }
    }
    Err(TrainError::Data("rl.max_steps is 0; expected at least 1".into()))
}

fn io(task: &RlTask<'_>, source: std::io::Error) -> TrainError {
    TrainError::Io { path: task.output_dir.to_owned(), source }
}

fn save(task: &RlTask<'_>, learner: &Learner, directory: &Path) -> Result<(), TrainError> {
    save_policy(Policy { decoder: task.decoder, adapter: Some(task.policy) }, directory, task.base_path)?;
    learner.save_critic(&directory.join("critic"), task.base_path)
}

fn record_evaluation(
    task: &RlTask<'_>,
    sink: &mut dyn MetricSink,
    step: u64,
    evaluation: &Evaluation,
) -> Result<(), TrainError> {
    sink.record("rl", step, &evaluation.metrics()).map_err(|source| io(task, source))
}

fn timings(batch: &rollout::Batch, started: Instant) -> Metrics {
    let total = started.elapsed().as_secs_f64();
    Metrics::from([
        ("timing_s/gen".into(), batch.generate_s),
        ("timing_s/reward".into(), batch.score_s),
        ("timing_s/step".into(), total),
        ("perf/throughput".into(), batch.n_tokens() as f64 / total),
    ])
}

/// Which checkpoint is best, and how long ago it was.
struct Best {
    step: u64,
    evaluation: Evaluation,
    first_reward: f64,
    n_worse: usize,
}

impl Best {
    fn new(first: Evaluation) -> Self {
        Self { step: 0, first_reward: first.reward, evaluation: first, n_worse: 0 }
    }

    fn offer(&mut self, step: u64, evaluation: Evaluation) -> bool {
        let is_best = evaluation.beats(&self.evaluation);
        if is_best {
            (self.step, self.evaluation, self.n_worse) = (step, evaluation, 0);
        } else {
            self.n_worse += 1;
        }
        is_best
    }

    fn save(&self, task: &RlTask<'_>, learner: &Learner) -> Result<(), TrainError> {
        save(task, learner, &task.output_dir.join(BEST))
    }

    fn is_exhausted(&self, patience: usize) -> bool {
        patience > 0 && self.n_worse >= patience
    }

    fn note(&self) -> String {
        format!("best val reward {:+.3} at step {}", self.evaluation.reward, self.step)
    }

    fn summary(&self, n_steps: u64, n_episodes: u64, dropped: BTreeMap<String, u64>) -> RlSummary {
        RlSummary {
            n_steps,
            best_step: self.step,
            first_val_reward: self.first_reward,
            best_val_reward: self.evaluation.reward,
            n_episodes,
            dropped,
        }
    }
}

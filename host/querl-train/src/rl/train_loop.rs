//! The loop of reinforcement learning. Read [`train`], then [`Trainer::run`]; `learner.rs` has the update.
//!
//! The stop flag (`RlTask::stop`, set by Ctrl-C) is read by [`Trainer::stop_requested`] after rollouts, and by
//! [`rollout_pipeline::complete`] before each decode step; [`Trainer::interrupt`] then saves the state. On one CPU `RlTask::check_stop`
//! reads it before each pass over a complete batch, and [`Trainer::discard_updates`] saves the state before the first one. A checkpoint that is
//! due by time stops a rollout in the same way, and the rollout continues. `RlTask::stop_after` ends the loop in the same way after a step and
//! its evaluation.

use super::generator::Generator;
use super::health::ValidationProgress;
use super::learner::Learner;
use super::metrics::{rollout_metrics, step_metrics};
use super::rollout::{PartialBatch, Query, RolloutBatch, add_drops, learnable, queries};
use super::rollout_check::{check_rollout, check_server_rollout};
use super::rollout_pipeline::{self, RolloutRequest};
use super::trainer_state::{BeforeUpdates, BestCheckpoint, Evaluation, LogPositions, TrainerState, rewind_episodes};
use super::{RlSummary, RlTask, engine_settings};
use crate::batching::DataOrder;
use crate::checkpoint::{LAST, STATE, SaveTimer, State, StateStore};
use crate::data_parallel::newest_checkpoint;
use crate::{MetricSink, Metrics, TrainError};
use querl_model::{ComputeDevice, Decoding, LoraAdapter, Mesh};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

/// Trains the policy with reinforcement learning, keeps the best and the last checkpoint, and returns a summary.
///
/// Resumes an earlier call with the same fingerprint that was stopped or killed: with an environment that gives the same
/// scores, the files at the end are those of an uninterrupted run, byte for byte.
///
/// # Errors
/// No rows, too many dropped episodes, a loss that is not finite, the stop flag was set, `stop_after` was reached or a device ran out of memory (what was
/// reached is saved), or errors of environment, model and file system.
pub fn train(task: &RlTask<'_>, sink: &mut dyn MetricSink) -> Result<RlSummary, TrainError> {
    if task.train.prompts.is_empty() || task.val.prompts.is_empty() {
        return Err(TrainError::Data("rl: the training or the validation split is empty; add rows".into()));
    }
    let mut trainer = Trainer::new(task, sink)?;
    let outcome = trainer.run(sink);
    outcome.map_err(|error| trainer.save_after_out_of_memory(error))
}

/// Outcome of a phase of a step: completed, or stopped by the stop flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Completed,
    Stopped,
}

pub(super) struct Trainer<'a> {
    pub(super) task: &'a RlTask<'a>,
    pub(super) learner: Learner,
    generator: Generator<'a>,
    pub(super) order: DataOrder,
    pub(super) state: TrainerState,
    /// A separate mesh for rollouts, which may run concurrently with updates.
    rollout_mesh: Mesh,
    /// Copy of the policy that generates the next batch while updates change the trained policy (`rl.off_by_one`).
    pub(super) rollout_policy: Option<LoraAdapter>,
    pub(super) store: Option<StateStore>,
    pub(super) timer: SaveTimer,
    pub(super) saved_step: Option<u64>,
    step_started: Instant,
    /// Copy of the state before a step that may run out of GPU memory.
    pub(super) backup: Option<State>,
    /// Copy of the state before learning from a complete batch, for a stop that discards the updates of that batch.
    pub(super) before_updates: Option<BeforeUpdates>,
    /// Seconds for writing the newest checkpoint; `None` after they were recorded as a metric.
    pub(super) save_s: Option<f64>,
}

impl<'a> Trainer<'a> {
    /// A trainer that starts from the newest checkpoint that the episode logs fit, or from the beginning if there is no checkpoint; logs are
    /// rewound to that point.
    pub(super) fn new(task: &'a RlTask<'a>, sink: &mut dyn MetricSink) -> Result<Self, TrainError> {
        let (directory, keep) = (task.output_dir.join(STATE), task.config.save_total_limit);
        let fingerprint = task.fingerprint.filter(|_| task.mesh.all.is_first());
        let store = fingerprint.map(|fingerprint| StateStore::open(&directory, keep, fingerprint));
        let log_difference =
            |state: &State| -> Result<Option<String>, TrainError> { rewind_episodes(task, &state.get("marks")?) };
        let newest = newest_checkpoint(&task.mesh.all, store.as_ref(), task.progress, &log_difference)?;
        let mut trainer = Self {
            task,
            learner: Learner::new(task)?,
            generator: Generator::new(task, engine_settings(task))?,
            order: DataOrder::new(task.train.prompts.len(), task.seed),
            state: TrainerState::default(),
            rollout_mesh: task.mesh.again()?,
            rollout_policy: None,
            store,
            timer: SaveTimer::start(task.config.save_interval_s),
            saved_step: None,
            backup: None,
            before_updates: None,
            step_started: Instant::now(),
            save_s: None,
        };
        match &*newest {
            Some((step, state)) => trainer.restore(*step, state, sink)?,
            None => {
                let start = LogPositions::default();
                trainer.rewind_logs(sink, &start)?;
                if task.mesh.all.is_first() {
                    // Every log begins with its start.
                    rewind_episodes(task, &start)?;
                }
            }
        }
        Ok(trainer)
    }

    fn run(&mut self, sink: &mut dyn MetricSink) -> Result<RlSummary, TrainError> {
        loop {
            self.back_up(sink)?;
            // 1. Evaluation on the validation split, before the first step and then every `eval_steps`.
            if self.evaluation_is_due() && self.evaluate(sink)? == Phase::Stopped {
                return self.interrupt(sink);
            }
            // 2. A checkpoint; the best policy so far is also written to `best`.
            if self.checkpoint_is_due()? {
                self.save(sink)?;
            }
            if self.is_finished() {
                if !self.is_last_step() {
                    let patience = self.task.config.early_stopping_patience;
                    let reason = format!(
                        "no higher validation reward in {patience} evaluations in a row (rl.early_stopping_patience)"
                    );
                    self.task.progress.line(&format!("training ends after step {}: {reason}", self.state.step));
                }
                return self.finish();
            }
            if self.task.stop_after.is_some_and(|last| self.state.step >= last) {
                return self.interrupt(sink);
            }
            // 3. Scored rollouts; episodes with failed or late calls are dropped and counted.
            let Some(batch) = self.roll_out(sink)? else { return self.interrupt(sink) };
            // 4. Log-probabilities, values, advantages; several epochs of updates.
            let metrics = match self.learn(&batch) {
                Err(TrainError::Interrupted { .. }) => return self.discard_updates(sink),
                learned => learned?,
            };
            // 5. Metrics and warnings.
            self.record(&batch, metrics, sink)?;
        }
    }

    fn evaluation_is_due(&self) -> bool {
        let step = self.state.step;
        let is_due = self.is_last_step() || step.is_multiple_of(self.task.config.eval_steps.max(1) as u64);
        is_due && self.state.evaluated_step != Some(step)
    }

    /// Generates and scores responses to the validation split, greedily.
    fn evaluate(&mut self, sink: &mut dyn MetricSink) -> Result<Phase, TrainError> {
        let (task, step) = (self.task, self.state.step);
        // The rollouts of the next batch (`rl.off_by_one`) are recorded before the evaluation, also if a stop was in between.
        if self.state.rollouts.is_some() && self.complete_rollouts(sink)? == Phase::Stopped {
            return Ok(Phase::Stopped);
        }
        let all = || (0..task.val.prompts.len()).map(|row| Query { row, first_sample: 0 }).collect();
        let (data, policy, cancel, decoding) = (&task.val, task.policy, &AtomicBool::new(false), Decoding::Greedy);
        let partial = loop {
            let mut partial = self.state.evaluation.take().unwrap_or_else(|| PartialBatch::new(step, step, all()));
            let (mesh, timer) = (&self.rollout_mesh, task.fingerprint.map(|_| &self.timer));
            let request = RolloutRequest { data, policy, decoding, n_samples: 1, mesh, cancel, timer };
            rollout_pipeline::complete(task, &mut self.generator, &request, &mut partial)?;
            if partial.is_complete(1) {
                break partial;
            }
            self.state.evaluation = Some(partial);
            if self.stop_requested()? {
                return Ok(Phase::Stopped);
            }
            self.save(sink)?;
        };
        let evaluation = Evaluation::new(task, partial)?;
        sink.record("rl", step, &evaluation.metrics()).map_err(|source| self.io(source))?;
        match &mut self.state.best {
            Some(best) => best.update(step, evaluation),
            None => self.state.best = Some(BestCheckpoint::new(evaluation)),
        }
        self.state.evaluated_step = Some(step);
        if step > 0 {
            task.progress.update(step, task.config.max_steps as u64, &self.best_note());
        }
        // A stop during the evaluation may have left a checkpoint of this step without the evaluation's result.
        self.saved_step = None;
        Ok(Phase::Completed)
    }

    /// A checkpoint is due every `save_steps`, every `save_interval_s`, for the best policy so far, and at the end.
    fn checkpoint_is_due(&self) -> Result<bool, TrainError> {
        if self.saved_step == Some(self.state.step) {
            return Ok(false);
        }
        let is_due = self.state.step.is_multiple_of(self.task.config.save_steps.max(1) as u64);
        let is_timed = self.task.fingerprint.is_some() && self.timer.is_due(&self.task.mesh.all)?;
        Ok(is_due || is_timed || self.is_best() || self.is_finished())
    }

    fn is_finished(&self) -> bool {
        let patience = self.task.config.early_stopping_patience;
        self.is_last_step() || self.state.best.as_ref().is_some_and(|best| best.is_exhausted(patience))
    }

    fn is_last_step(&self) -> bool {
        self.state.step >= self.task.config.max_steps as u64
    }

    /// True if the current policy is the best so far.
    pub(super) fn is_best(&self) -> bool {
        self.state.best.as_ref().is_some_and(|best| best.step == self.state.step)
    }

    /// The next step's batch; `None` after a stop.
    fn roll_out(&mut self, sink: &mut dyn MetricSink) -> Result<Option<RolloutBatch>, TrainError> {
        self.step_started = Instant::now();
        if self.complete_rollouts(sink)? == Phase::Stopped {
            return Ok(None);
        }
        self.copy_before_updates()?;
        let batch = self.state.rollouts.take().map(|partial| RolloutBatch::new(self.task, partial));
        batch.transpose()
    }

    /// Completes the next step's batch, after starting it if necessary.
    fn complete_rollouts(&mut self, sink: &mut dyn MetricSink) -> Result<Phase, TrainError> {
        let (task, step) = (self.task, self.state.step);
        loop {
            let mut partial = match self.state.rollouts.take() {
                Some(partial) => partial,
                None => self.next_queries(step + 1, step),
            };
            if !partial.is_complete(task.config.n_samples) {
                let policy = self.rollout_policy.as_ref().unwrap_or(task.policy);
                let (mesh, timer) = (&self.rollout_mesh, task.fingerprint.map(|_| &self.timer));
                let stops = (&AtomicBool::new(false), timer);
                let (generator, order) = (&mut self.generator, &mut self.order);
                roll_out_training_queries(task, (generator, order), policy, mesh, stops, &mut partial)?;
            }
            let is_complete = partial.is_complete(task.config.n_samples);
            if is_complete {
                self.rollout_policy = None;
            }
            self.state.rollouts = Some(partial);
            // The flag is never cleared. If it is not set, either the batch is complete or a checkpoint is due.
            match (self.stop_requested()?, is_complete) {
                (true, _) => return Ok(Phase::Stopped),
                (false, true) => return Ok(Phase::Completed),
                (false, false) => self.save(sink)?,
            }
        }
    }

    fn stop_requested(&self) -> Result<bool, TrainError> {
        Ok(self.task.mesh.all.any(self.task.stop.load(Ordering::Relaxed))?)
    }

    /// Updates policy and critic on a batch. With `rl.off_by_one` the next batch is generated concurrently by a copy of the policy before
    /// the updates.
    fn learn(&mut self, batch: &RolloutBatch) -> Result<Metrics, TrainError> {
        let (task, step) = (self.task, self.state.step + 1);
        let mut metrics = if task.config.off_by_one && step < task.config.max_steps as u64 {
            self.learn_and_roll_out(batch)?
        } else {
            self.learner.learn(task, batch, step)?
        };
        self.before_updates = None;
        self.state.step = step;
        self.state.n_episodes += batch.n_episodes as u64;
        add_drops(&mut self.state.dropped, &batch.dropped);
        metrics.extend(rollout_metrics(batch));
        Ok(metrics)
    }

    fn learn_and_roll_out(&mut self, batch: &RolloutBatch) -> Result<Metrics, TrainError> {
        let (task, step) = (self.task, self.state.step + 1);
        let policy = task.policy.snapshot()?;
        let mut partial = self.next_queries(step + 1, step - 1);
        let cancel = AtomicBool::new(false);
        let (learner, mesh) = (&mut self.learner, &self.rollout_mesh);
        let source = (&mut self.generator, &mut self.order);
        let (learned, rolled_out) = thread::scope(|scope| {
            let rollout =
                scope.spawn(|| roll_out_training_queries(task, source, &policy, mesh, (&cancel, None), &mut partial));
            let learned = learner.learn(task, batch, step);
            cancel.store(learned.is_err(), Ordering::Relaxed);
            (learned, rollout_pipeline::join(rollout, "generation"))
        });
        let metrics = learned?;
        rolled_out?;
        self.rollout_policy = (!partial.is_complete(task.config.n_samples)).then_some(policy);
        self.state.rollouts = Some(partial);
        Ok(metrics)
    }

    fn next_queries(&mut self, step: u64, policy_version: u64) -> PartialBatch {
        let config = self.task.config;
        let rows = self.order.take(config.batch_size);
        PartialBatch::new(step, policy_version, queries(&rows, config.n_samples, std::iter::empty()))
    }

    /// Records the metrics of the step that was just taken, and warns.
    fn record(
        &mut self,
        batch: &RolloutBatch,
        mut metrics: Metrics,
        sink: &mut dyn MetricSink,
    ) -> Result<(), TrainError> {
        let (task, step) = (self.task, self.state.step);
        let seconds = self.step_started.elapsed().as_secs_f64();
        metrics.extend(step_metrics(seconds, batch.n_tokens(), self.save_s.take()));
        let mut watched = metrics.clone();
        if !matches!(task.decoder.compute_device(), ComputeDevice::Cpu) {
            // bf16 rounding on a GPU is far above the threshold of this warning: `check_rollout` has separate limits for GPUs.
            watched.remove("rollout_probs_diff");
        }
        let validation = ValidationProgress {
            evaluated_step: self.state.evaluated_step.unwrap_or_default(),
            best_step: self.state.best.as_ref().map(|best| best.step).unwrap_or_default(),
            keeps_gain: self.state.best.as_ref().is_some_and(BestCheckpoint::keeps_gain),
            loses_gold: self.state.best.as_ref().is_some_and(BestCheckpoint::loses_gold),
        };
        for warning in self.state.health.check(&watched, validation) {
            task.progress.line(&format!("rl step {step}: {warning}"));
        }
        sink.record("rl", step, &metrics).map_err(|source| self.io(source))?;
        // The progress after the last step is reported by the evaluation.
        if !self.is_last_step() {
            let reward = metrics.get("avg_reward").copied().unwrap_or_default();
            let note = format!("reward {reward:+.3}, {}", self.best_note());
            task.progress.update(step, task.config.max_steps as u64, &note);
        }
        Ok(())
    }

    fn best_note(&self) -> String {
        self.state.best.as_ref().map(BestCheckpoint::note).unwrap_or_default()
    }

    fn finish(&mut self) -> Result<RlSummary, TrainError> {
        self.save_weights(&self.task.output_dir.join(LAST))?;
        let TrainerState { step, best, n_episodes, dropped, .. } = std::mem::take(&mut self.state);
        let best = best.ok_or_else(|| TrainError::Data("rl: the policy was never evaluated".into()))?;
        Ok(RlSummary {
            n_steps: step,
            best_step: best.step,
            first_val_reward: best.first_reward,
            best_val_reward: best.evaluation.reward,
            n_episodes,
            dropped,
        })
    }

    pub(super) fn io(&self, source: std::io::Error) -> TrainError {
        TrainError::Io { path: self.task.output_dir.to_owned(), source }
    }
}

/// Generates and scores responses to training queries; with `rl.dynamic_sampling`, also to those that replace queries without variance.
/// With `rl.off_by_one` the complete batch is compared with the training pass here, because the policy that generated it will have changed
/// before the batch is used.
fn roll_out_training_queries(
    task: &RlTask<'_>,
    (generator, order): (&mut Generator<'_>, &mut DataOrder),
    policy: &LoraAdapter,
    mesh: &Mesh,
    (cancel, timer): (&AtomicBool, Option<&SaveTimer>),
    partial: &mut PartialBatch,
) -> Result<(), TrainError> {
    let n_samples = task.config.n_samples;
    let (data, decoding) = (&task.train, Decoding::Sample);
    let request = RolloutRequest { data, policy, decoding, n_samples, mesh, cancel, timer };
    rollout_pipeline::complete(task, generator, &request, partial)?;
    while task.config.dynamic_sampling && partial.is_complete(n_samples) {
        partial.check_drops(task)?;
        if !partial.resample(task, order) {
            break;
        }
        rollout_pipeline::complete(task, generator, &request, partial)?;
    }
    if task.config.off_by_one && partial.is_complete(n_samples) && partial.check.is_empty() {
        let (rollouts, step) = (learnable(task, partial), partial.step);
        partial.check = match task.rollouts {
            None => check_rollout(task, policy, &rollouts, step)?,
            Some(server) => check_server_rollout(task, policy, &rollouts, server.max_mismatch_kl, step)?,
        };
    }
    Ok(())
}

//! One optimisation on its way: what it holds, and how a checkpoint keeps it.

use super::best::Best;
use super::evaluate::Evaluation;
use super::learner::Learner;
use super::pipeline::{self, Asking};
use super::rollout::{Batch, Partial, Query, learnable, queries};
use super::rollout_check::check_rollout;
use super::{RlSummary, RlTask, engine_settings};
use crate::checkpoint::{BEST, LAST, STATE, save_policy};
use crate::health::Health;
use crate::memory::memory_metrics;
use crate::order::Order;
use crate::policy::Policy;
use crate::together::{check_same, newest};
use crate::{MetricSink, Metrics, State, StateStore, TrainError};
use querl_model::{Decoding, Engine, LoraAdapter, Mesh, Place};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

/// Where an optimisation stands, besides what is trained.
#[derive(Default, Serialize, Deserialize)]
struct Standing {
    /// Steps taken.
    step: u64,
    /// The step at which the policy was last evaluated.
    evaluated: Option<u64>,
    best: Option<Best>,
    /// Rows taken in the order of the data.
    position: u64,
    n_episodes: u64,
    dropped: BTreeMap<String, u64>,
    /// The next step's batch, as far as it has come.
    rollouts: Option<Partial>,
    /// An evaluation, as far as it has come.
    evaluation: Option<Partial>,
    health: Health,
}

/// How far the logs had come.
#[derive(Serialize, Deserialize)]
struct Marks {
    metrics: u64,
    train: u64,
    val: u64,
}

/// Whether somebody said stop on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reached {
    End,
    Stop,
}

/// One optimisation on its way.
pub(super) struct Run<'a> {
    task: &'a RlTask<'a>,
    learner: Learner,
    engine: Engine<'a>,
    order: Order,
    standing: Standing,
    /// Meetings of the ranks for rollouts, which may go on beside the learning.
    rollout_mesh: Mesh,
    /// The policy that answers the next step's queries, where that is no longer the one that is trained.
    snapshot: Option<LoraAdapter>,
    store: Option<StateStore>,
    /// The step of the newest checkpoint.
    saved: Option<u64>,
    step_started: Instant,
    /// What a step that lacks memory falls back to: a copy in the memory of this process.
    remembered: Option<State>,
    /// Seconds that the newest checkpoint took, until they are recorded.
    save_s: Option<f64>,
}

impl<'a> Run<'a> {
    /// From the newest checkpoint, or at the beginning, where what an earlier try left in the logs is forgotten.
    ///
    /// # Errors
    /// The checkpoint does not fit, or the logs cannot be rewound.
    pub(super) fn begin(task: &'a RlTask<'a>, sink: &mut dyn MetricSink) -> Result<Self, TrainError> {
        let (directory, keep) = (task.output_dir.join(STATE), task.config.save_total_limit);
        let print = task.fingerprint.filter(|_| task.mesh.all.is_first());
        let store = print.map(|print| StateStore::open(&directory, keep, print));
        let newest = newest(&task.mesh.all, store.as_ref(), task.progress)?;
        let mut run = Self {
            task,
            learner: Learner::new(task)?,
            engine: Engine::new(task.decoder, engine_settings(task))?,
            order: Order::new(task.train.prompts.len(), task.seed),
            standing: Standing::default(),
            rollout_mesh: task.mesh.again()?,
            snapshot: None,
            store,
            saved: None,
            remembered: None,
            step_started: Instant::now(),
            save_s: None,
        };
        match &*newest {
            Some((step, state)) => run.restore(*step, state, sink)?,
            None => run.rewind(sink, &Marks { metrics: 0, train: 0, val: 0 })?,
        }
        Ok(run)
    }

    pub(super) fn evaluation_is_due(&self) -> bool {
        let step = self.standing.step;
        let is_time = self.is_last_step() || step.is_multiple_of(self.task.config.eval_steps.max(1) as u64);
        is_time && self.standing.evaluated != Some(step)
    }

    /// Answers and scores the validation split, and compares.
    pub(super) fn evaluate(&mut self, sink: &mut dyn MetricSink) -> Result<Reached, TrainError> {
        let (task, step) = (self.task, self.standing.step);
        // Rollouts that run ahead are recorded before the evaluation, also where a stop came between.
        if self.standing.rollouts.is_some() && self.roll_out_next()? == Reached::Stop {
            return Ok(Reached::Stop);
        }
        let all = || (0..task.val.prompts.len()).map(|row| Query { row, first_sample: 0 }).collect();
        let mut partial = self.standing.evaluation.take().unwrap_or_else(|| Partial::new(step, step, all()));
        let (data, policy, cancel) = (&task.val, task.policy, &AtomicBool::new(false));
        let asking =
            Asking { data, policy, decoding: Decoding::Greedy, n_samples: 1, mesh: &self.rollout_mesh, cancel };
        pipeline::advance(task, &mut self.engine, &asking, &mut partial)?;
        if !partial.is_complete(1) {
            self.standing.evaluation = Some(partial);
            return Ok(Reached::Stop);
        }
        let evaluation = Evaluation::new(task, partial)?;
        sink.record("rl", step, &evaluation.metrics()).map_err(|source| self.io(source))?;
        match &mut self.standing.best {
            Some(best) => best.offer(step, evaluation),
            None => self.standing.best = Some(Best::new(evaluation)),
        }
        self.standing.evaluated = Some(step);
        // What was saved of this step, where a stop came in the middle of its evaluation, does not know the outcome.
        self.saved = None;
        Ok(Reached::End)
    }

    /// A checkpoint is written every `save_steps`, for a policy that is the best so far, and at the end.
    pub(super) fn checkpoint_is_due(&self) -> bool {
        let is_time = self.standing.step.is_multiple_of(self.task.config.save_steps.max(1) as u64);
        (is_time || self.is_best() || self.is_over()) && self.saved != Some(self.standing.step)
    }

    /// Writes a checkpoint, then `best` if it is due: where a kill comes between the two, the checkpoint makes up for it.
    pub(super) fn save(&mut self, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let started = Instant::now();
        check_same(self.task.mesh, "rl", self.standing.step, &self.learner.trained(self.task.policy))?;
        if self.is_kept() {
            let state = self.state(sink)?;
            self.store.as_ref().map_or(Ok(()), |store| store.write(self.standing.step, &state))?;
        }
        self.keep_best()?;
        self.saved = Some(self.standing.step);
        self.save_s = Some(started.elapsed().as_secs_f64());
        Ok(())
    }

    pub(super) fn is_over(&self) -> bool {
        let patience = self.task.config.early_stopping_patience;
        self.is_last_step() || self.standing.best.as_ref().is_some_and(|best| best.is_exhausted(patience))
    }

    /// The next step's batch; `None` where somebody said stop before it was learned from.
    pub(super) fn rollouts(&mut self) -> Result<Option<Batch>, TrainError> {
        self.step_started = Instant::now();
        if self.roll_out_next()? == Reached::Stop {
            return Ok(None);
        }
        let batch = self.standing.rollouts.take().map(|partial| Batch::new(self.task, partial));
        batch.transpose()
    }

    /// Completes the next step's batch, which is begun where it is not yet.
    fn roll_out_next(&mut self) -> Result<Reached, TrainError> {
        let (task, step) = (self.task, self.standing.step);
        let mut partial = match self.standing.rollouts.take() {
            Some(partial) => partial,
            None => self.next_queries(step + 1, step),
        };
        if !partial.is_complete(task.config.n_samples) {
            let policy = self.snapshot.as_ref().unwrap_or(task.policy);
            let (mesh, cancel) = (&self.rollout_mesh, &AtomicBool::new(false));
            roll_out(task, &mut self.engine, policy, mesh, cancel, &mut partial)?;
        }
        if partial.is_complete(task.config.n_samples) {
            self.snapshot = None;
        }
        self.standing.rollouts = Some(partial);
        // The flag is only ever set: where it is not, the batch is complete.
        Ok(if task.mesh.all.any(task.stop.load(Ordering::Relaxed))? { Reached::Stop } else { Reached::End })
    }

    /// Learns from a batch; off by one, the next is rolled out meanwhile by the policy as it was.
    pub(super) fn learn(&mut self, batch: &Batch) -> Result<Metrics, TrainError> {
        let (task, step) = (self.task, self.standing.step + 1);
        let mut metrics = if task.config.off_by_one && step < task.config.max_steps as u64 {
            self.learn_and_roll_out(batch)?
        } else {
            self.learner.learn(task, batch, step)?
        };
        self.standing.step = step;
        self.standing.n_episodes += batch.n_episodes as u64;
        for (code, n) in &batch.dropped {
            *self.standing.dropped.entry(code.clone()).or_default() += n;
        }
        metrics.extend(batch.metrics());
        Ok(metrics)
    }

    fn learn_and_roll_out(&mut self, batch: &Batch) -> Result<Metrics, TrainError> {
        let (task, step) = (self.task, self.standing.step + 1);
        let snapshot = task.policy.snapshot()?;
        let mut partial = self.next_queries(step + 1, step - 1);
        let cancel = AtomicBool::new(false);
        let (engine, learner, mesh) = (&mut self.engine, &mut self.learner, &self.rollout_mesh);
        let (learned, rolled_out) = thread::scope(|scope| {
            let roller = scope.spawn(|| roll_out(task, engine, &snapshot, mesh, &cancel, &mut partial));
            let learned = learner.learn(task, batch, step);
            cancel.store(learned.is_err(), Ordering::Relaxed);
            (learned, pipeline::join(roller, "generation"))
        });
        let metrics = learned?;
        rolled_out?;
        self.snapshot = (!partial.is_complete(task.config.n_samples)).then_some(snapshot);
        self.standing.rollouts = Some(partial);
        Ok(metrics)
    }

    fn next_queries(&mut self, step: u64, version: u64) -> Partial {
        let config = self.task.config;
        Partial::new(step, version, queries(&self.order.take(config.batch_size), config.n_samples))
    }

    /// Records the step that was just taken, and warns.
    pub(super) fn record(
        &mut self,
        batch: &Batch,
        learned: Metrics,
        sink: &mut dyn MetricSink,
    ) -> Result<(), TrainError> {
        let (task, step) = (self.task, self.standing.step);
        let seconds = self.step_started.elapsed().as_secs_f64();
        let mut metrics = learned;
        metrics.extend(memory_metrics());
        metrics.extend(self.save_s.take().map(|save_s| ("timing_s/save_checkpoint".to_owned(), save_s)));
        metrics.extend([
            ("timing_s/step".to_owned(), seconds),
            ("perf/time_per_step".to_owned(), seconds),
            ("perf/total_num_tokens".to_owned(), batch.n_tokens() as f64),
            ("perf/throughput".to_owned(), batch.n_tokens() as f64 / seconds),
        ]);
        let mut watched = metrics.clone();
        if !matches!(task.decoder.place(), Place::Cpu) {
            // What a card rounds is far above what the processor's two sides may differ by: `check_rollout` has limits of its own.
            watched.remove("rollout_probs_diff");
        }
        for warning in self.standing.health.check(&watched) {
            task.progress.line(&format!("rl step {step}: {warning}"));
        }
        sink.record("rl", step, &metrics).map_err(|source| self.io(source))?;
        let reward = metrics.get("avg_reward").copied().unwrap_or_default();
        let note = self.standing.best.as_ref().map(Best::note).unwrap_or_default();
        task.progress.update(step, task.config.max_steps as u64, &format!("reward {reward:+.3}, {note}"));
        Ok(())
    }

    /// Keeps a copy of everything before a step changes it, where a card does the step: its memory may not suffice, and then
    /// policy and critic are somewhere between two steps. The processor's memory has no such end.
    pub(super) fn remember(&mut self, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let is_on_card = self.task.policy.vars().values().next().is_some_and(|var| !var.device().is_cpu());
        let is_wanted = self.is_kept() && self.standing.step > 0 && self.saved != Some(self.standing.step);
        self.remembered = match is_wanted && (is_on_card || cfg!(test)) {
            true => Some(self.state(sink)?.detached()?),
            false => None,
        };
        Ok(())
    }

    /// Writes what is remembered, where it was memory that a step lacked.
    pub(super) fn without_memory(&mut self, error: TrainError) -> TrainError {
        // What another rank lacks the first hears of, and keeps what there is.
        if !error.is_out_of_memory() || !self.task.mesh.all.is_first() {
            return error;
        }
        let reached = self.standing.step;
        let is_saved = match (&self.store, self.remembered.take()) {
            // Of two errors the first is told.
            (Some(store), Some(state)) => store.write(reached, &state).is_ok(),
            _ => self.store.is_some() && self.saved == Some(reached),
        };
        let (saved, message) = (is_saved.then_some(reached), error.to_string());
        TrainError::OutOfMemory { stage: "rl", step: reached + 1, saved, message }
    }

    /// Keeps what was reached, and says that it was not all.
    pub(super) fn interrupt(&mut self, sink: &mut dyn MetricSink) -> Result<RlSummary, TrainError> {
        self.save(sink)?;
        self.save_weights(&self.task.output_dir.join(LAST))?;
        Err(TrainError::Interrupted { stage: "rl", step: self.standing.step })
    }

    pub(super) fn finish(&mut self) -> Result<RlSummary, TrainError> {
        self.save_weights(&self.task.output_dir.join(LAST))?;
        let Standing { step, best, n_episodes, dropped, .. } = std::mem::take(&mut self.standing);
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

    fn is_last_step(&self) -> bool {
        self.standing.step >= self.task.config.max_steps as u64
    }

    /// Whether the policy as it is now is the best so far.
    fn is_best(&self) -> bool {
        self.standing.best.as_ref().is_some_and(|best| best.step == self.standing.step)
    }

    fn keep_best(&self) -> Result<(), TrainError> {
        if self.is_best() { self.save_weights(&self.task.output_dir.join(BEST)) } else { Ok(()) }
    }

    /// Writes a checkpoint for others to read; the first rank does.
    fn save_weights(&self, directory: &Path) -> Result<(), TrainError> {
        let task = self.task;
        if !task.mesh.data.is_first() {
            return Ok(());
        }
        let policy = Policy { decoder: task.decoder, adapter: Some(task.policy) };
        save_policy(task.mesh, policy, directory, task.base_path)?;
        self.learner.save_critic(task.mesh, &directory.join("critic"), task.base_path)
    }

    /// Whether checkpoints to go on from are kept, of which this rank has some.
    fn is_kept(&self) -> bool {
        self.task.fingerprint.is_some() && self.task.mesh.data.is_first()
    }

    /// Everything that the next step depends on. The logs are brought to the disk before. Where ranks hold the model together, they
    /// come here together, and the first gets it.
    fn state(&mut self, sink: &mut dyn MetricSink) -> Result<State, TrainError> {
        let task = self.task;
        let metrics = sink.mark().map_err(|source| self.io(source))?;
        let marks = Marks { metrics, train: task.train.environment.mark()?, val: task.val.environment.mark()? };
        self.standing.position = self.order.position();
        let mut state = State::default();
        state.put("loop", &self.standing)?;
        state.put("marks", &marks)?;
        state.put_vars(POLICY, task.policy.vars());
        if let Some(snapshot) = &self.snapshot {
            state.put_vars(ROLLOUT_POLICY, snapshot.vars());
        }
        self.learner.save(&mut state)?;
        state.whole(&task.mesh.tensor)
    }

    fn restore(&mut self, step: u64, state: &State, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let task = self.task;
        let state = &state.part(&task.mesh.tensor)?;
        self.standing = state.get("loop")?;
        self.order.seek(self.standing.position);
        state.restore_vars(POLICY, task.policy.vars())?;
        // Off by one, a batch was begun by a policy that has learned since.
        let is_behind = |partial: &Partial| partial.version < step && !partial.is_complete(task.config.n_samples);
        if self.standing.rollouts.as_ref().is_some_and(is_behind) {
            let snapshot = task.policy.snapshot()?;
            state.restore_vars(ROLLOUT_POLICY, snapshot.vars())?;
            self.snapshot = Some(snapshot);
        }
        self.learner.restore(task, state)?;
        self.rewind(sink, &state.get("marks")?)?;
        self.saved = Some(step);
        self.keep_best()?;
        task.progress.line(&format!("going on from step {step}"));
        Ok(())
    }

    fn rewind(&self, sink: &mut dyn MetricSink, marks: &Marks) -> Result<(), TrainError> {
        if !self.task.mesh.all.is_first() {
            return Ok(());
        }
        sink.rewind(marks.metrics).map_err(|source| self.io(source))?;
        self.task.train.environment.rewind(marks.train)?;
        Ok(self.task.val.environment.rewind(marks.val)?)
    }

    fn io(&self, source: std::io::Error) -> TrainError {
        TrainError::Io { path: self.task.output_dir.to_owned(), source }
    }
}

/// Names in a checkpoint.
const POLICY: &str = "policy";
const ROLLOUT_POLICY: &str = "rollout_policy";

/// Answers and scores training queries. What the training pass computes of a complete batch is compared here where the policy
/// that wrote it is gone when the batch is learned from.
fn roll_out(
    task: &RlTask<'_>,
    engine: &mut Engine<'_>,
    policy: &LoraAdapter,
    mesh: &Mesh,
    cancel: &AtomicBool,
    partial: &mut Partial,
) -> Result<(), TrainError> {
    let n_samples = task.config.n_samples;
    let asking = Asking { data: &task.train, policy, decoding: Decoding::Sample, n_samples, mesh, cancel };
    pipeline::advance(task, engine, &asking, partial)?;
    if task.config.off_by_one && partial.is_complete(n_samples) && partial.check.is_empty() {
        partial.check = check_rollout(task, policy, &learnable(task, partial), partial.step)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;

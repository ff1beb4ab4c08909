//! Checkpoints of a reinforcement-learning run: what they hold, when they are written, and how a run resumes.

use super::evaluation::BestCheckpoint;
use super::health::Health;
use super::rollout::PartialBatch;
use super::task::RlSummary;
use super::train_loop::Trainer;
use crate::checkpoint::{BEST, LAST, State, save_policy};
use crate::data_parallel::check_equal_weights;
use crate::policy::Policy;
use crate::{MetricSink, TrainError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// What a checkpoint holds besides tensors.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct TrainerState {
    /// Steps taken.
    pub(super) step: u64,
    #[serde(rename = "evaluated")]
    pub(super) evaluated_step: Option<u64>,
    pub(super) best: Option<BestCheckpoint>,
    /// Rows taken in the order of the data.
    #[serde(rename = "position")]
    pub(super) data_position: u64,
    pub(super) n_episodes: u64,
    pub(super) dropped: BTreeMap<String, u64>,
    /// The next step's batch as far as it is scored.
    pub(super) rollouts: Option<PartialBatch>,
    /// A stopped evaluation as far as it is scored.
    pub(super) evaluation: Option<PartialBatch>,
    pub(super) health: Health,
}

/// Lengths of the logs at a checkpoint.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct LogPositions {
    metrics: u64,
    train: u64,
    val: u64,
}

const POLICY: &str = "policy";
const ROLLOUT_POLICY: &str = "rollout_policy";

impl Trainer<'_> {
    /// Writes a checkpoint, then `best` if it is due: after a kill between the two, resuming writes `best` again.
    pub(super) fn save(&mut self, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let started = Instant::now();
        let trained = self.learner.trained_vars(self.task.policy);
        check_equal_weights(self.task.mesh, "rl", self.state.step, &trained)?;
        if self.writes_state() {
            let state = self.full_state(sink)?;
            self.store.as_ref().map_or(Ok(()), |store| store.write(self.state.step, &state))?;
        }
        self.save_best()?;
        self.saved_step = Some(self.state.step);
        self.save_s = Some(started.elapsed().as_secs_f64());
        Ok(())
    }

    /// Saves after the stop flag was set, and returns [`TrainError::Interrupted`].
    pub(super) fn interrupt(&mut self, sink: &mut dyn MetricSink) -> Result<RlSummary, TrainError> {
        self.save(sink)?;
        self.save_weights(&self.task.output_dir.join(LAST))?;
        Err(TrainError::Interrupted { stage: "rl", step: self.state.step })
    }

    /// On a GPU, copies the state to host memory before a step changes it: a step that runs out of memory leaves policy and
    /// critic between two steps.
    pub(super) fn back_up(&mut self, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let is_on_gpu = self.task.policy.vars().values().next().is_some_and(|var| !var.device().is_cpu());
        let is_unsaved = self.writes_state() && self.state.step > 0 && self.saved_step != Some(self.state.step);
        self.backup = match is_unsaved && (is_on_gpu || cfg!(test)) {
            true => Some(self.full_state(sink)?.detached()?),
            false => None,
        };
        Ok(())
    }

    /// Writes the backup if `error` is out-of-memory. An error of another rank reaches the first rank, which writes.
    pub(super) fn save_after_out_of_memory(&mut self, error: TrainError) -> TrainError {
        if !error.is_out_of_memory() || !self.task.mesh.all.is_first() {
            return error;
        }
        let step = self.state.step;
        let is_saved = match (&self.store, self.backup.take()) {
            // A second error, of writing, is not reported: the first is the cause.
            (Some(store), Some(state)) => store.write(step, &state).is_ok(),
            _ => self.store.is_some() && self.saved_step == Some(step),
        };
        let (saved, message) = (is_saved.then_some(step), error.to_string());
        TrainError::OutOfMemory { stage: "rl", step: step + 1, saved, message }
    }

    fn save_best(&self) -> Result<(), TrainError> {
        if self.is_best() { self.save_weights(&self.task.output_dir.join(BEST)) } else { Ok(()) }
    }

    /// Writes adapter and critic for evaluation and serving. The first rank writes.
    pub(super) fn save_weights(&self, directory: &Path) -> Result<(), TrainError> {
        let task = self.task;
        if !task.mesh.data.is_first() {
            return Ok(());
        }
        let policy = Policy { decoder: task.decoder, adapter: Some(task.policy) };
        save_policy(task.mesh, policy, directory, task.base_path)?;
        self.learner.save_critic(task.mesh, &directory.join("critic"), task.base_path)
    }

    /// Whether states to resume from are written, and this rank holds a shard of them.
    fn writes_state(&self) -> bool {
        self.task.fingerprint.is_some() && self.task.mesh.data.is_first()
    }

    /// Everything that the next step depends on; logs are synced to disk first. Tensor-parallel ranks call this together, and
    /// the first gets the result.
    fn full_state(&mut self, sink: &mut dyn MetricSink) -> Result<State, TrainError> {
        let task = self.task;
        let metrics = sink.mark().map_err(|source| self.io(source))?;
        let logs = LogPositions { metrics, train: task.train.environment.mark()?, val: task.val.environment.mark()? };
        self.state.data_position = self.order.position();
        let mut state = State::default();
        state.put("loop", &self.state)?;
        state.put("marks", &logs)?;
        state.put_vars(POLICY, task.policy.vars());
        if let Some(policy) = &self.rollout_policy {
            state.put_vars(ROLLOUT_POLICY, policy.vars());
        }
        self.learner.save(&mut state)?;
        state.gather_shards(&task.mesh.tensor)
    }

    pub(super) fn restore(&mut self, step: u64, state: &State, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let task = self.task;
        let state = &state.shard(&task.mesh.tensor)?;
        self.state = state.get("loop")?;
        self.order.seek(self.state.data_position);
        state.restore_vars(POLICY, task.policy.vars())?;
        // With `rl.off_by_one`, a batch that an earlier policy began.
        let is_behind = |partial: &PartialBatch| partial.version < step && !partial.is_complete(task.config.n_samples);
        if self.state.rollouts.as_ref().is_some_and(is_behind) {
            let policy = task.policy.snapshot()?;
            state.restore_vars(ROLLOUT_POLICY, policy.vars())?;
            self.rollout_policy = Some(policy);
        }
        self.learner.restore(task, state)?;
        self.rewind_logs(sink, &state.get("marks")?)?;
        self.saved_step = Some(step);
        self.save_best()?;
        task.progress.line(&format!("resuming from step {step}"));
        Ok(())
    }

    /// Removes what was logged after a checkpoint.
    pub(super) fn rewind_logs(&self, sink: &mut dyn MetricSink, logs: &LogPositions) -> Result<(), TrainError> {
        if !self.task.mesh.all.is_first() {
            return Ok(());
        }
        sink.rewind(logs.metrics).map_err(|source| self.io(source))?;
        self.task.train.environment.rewind(logs.train)?;
        Ok(self.task.val.environment.rewind(logs.val)?)
    }
}

//! Checkpoints of a reinforcement-learning run: what they hold, when they are written, how a run resumes, and which evaluation is
//! the best so far.

use super::health::Health;
use super::metrics::{episode_metrics, evaluation_metrics};
use super::rollout::{PartialBatch, Timings};
use super::step_record;
use super::train_loop::Trainer;
use super::{RlSummary, RlTask};
use crate::checkpoint::{BEST, LAST, State, save_policy};
use crate::data_parallel::{check_equal_weights, warn_of_metrics};
use crate::policy::Policy;
use crate::{MetricSink, Metrics, TrainError};
use querl_core::ports::LogMark;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// Content of a checkpoint in addition to tensors.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct TrainerState {
    pub(super) step: u64,
    #[serde(rename = "evaluated")]
    pub(super) evaluated_step: Option<u64>,
    pub(super) best: Option<BestCheckpoint>,
    /// Number of rows taken from the data order.
    #[serde(rename = "position")]
    pub(super) data_position: u64,
    pub(super) n_episodes: u64,
    pub(super) dropped: BTreeMap<String, u64>,
    /// Unfinished batch of the next step.
    pub(super) rollouts: Option<PartialBatch>,
    /// An evaluation that was stopped before its end.
    pub(super) evaluation: Option<PartialBatch>,
    pub(super) health: Health,
}

/// A complete batch, and a copy of the state before the batch's updates.
pub(super) struct BeforeUpdates {
    learned: State,
    rollouts: Option<PartialBatch>,
}

/// Ends of the metrics and episode logs at a checkpoint.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct LogPositions {
    metrics: LogMark,
    train: LogMark,
    val: LogMark,
}

const POLICY: &str = "policy";
const ROLLOUT_POLICY: &str = "rollout_policy";

impl Trainer<'_> {
    /// Writes a checkpoint, then `best` if due. If the process is killed in between, the resumed run writes `best`.
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
        self.timer.restart();
        self.save_s = Some(started.elapsed().as_secs_f64());
        Ok(())
    }

    /// Saves after the stop flag was set, and returns [`TrainError::Interrupted`].
    pub(super) fn interrupt(&mut self, sink: &mut dyn MetricSink) -> Result<RlSummary, TrainError> {
        self.save(sink)?;
        self.save_weights(&self.task.output_dir.join(LAST))?;
        Err(TrainError::Interrupted { stage: "rl", step: self.state.step })
    }

    /// Copies the state that the updates of the batch change, if a stop will discard the updates: adapters (the base is frozen) and their
    /// optimizer moments, which are shared until the first update.
    pub(super) fn copy_before_updates(&mut self) -> Result<(), TrainError> {
        if self.task.discards_updates() {
            let mut learned = State::default();
            self.put_learned(&mut learned)?;
            self.before_updates =
                Some(BeforeUpdates { learned: learned.detached()?, rollouts: self.state.rollouts.clone() });
        }
        Ok(())
    }

    /// After a stop during the updates of a batch: saves the state from before the updates with the batch, so that a resumed run repeats
    /// the updates.
    pub(super) fn discard_updates(&mut self, sink: &mut dyn MetricSink) -> Result<RlSummary, TrainError> {
        if let Some(BeforeUpdates { learned, rollouts }) = self.before_updates.take() {
            learned.restore_vars(POLICY, self.task.policy.vars())?;
            self.learner.restore(self.task, &learned)?;
            self.state.rollouts = rollouts;
        }
        self.interrupt(sink)
    }

    /// On a GPU, copies the state to CPU memory before a step, because running out of memory within a step leaves policy and critic in an
    /// inconsistent state.
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
            // An error in writing is not reported: the first error is the cause.
            (Some(store), Some(state)) => store.write(step, &state).is_ok(),
            _ => self.store.is_some() && self.saved_step == Some(step),
        };
        let (saved, message) = (is_saved.then_some(step), error.to_string());
        TrainError::OutOfMemory { stage: "rl", step: step + 1, saved, message }
    }

    fn save_best(&self) -> Result<(), TrainError> {
        if self.is_best() { self.save_weights(&self.task.output_dir.join(BEST)) } else { Ok(()) }
    }

    /// Writes the policy's adapter and the critic to `directory`, for evaluation and serving. Only the first rank writes.
    pub(super) fn save_weights(&self, directory: &Path) -> Result<(), TrainError> {
        let task = self.task;
        if !task.mesh.data.is_first() {
            return Ok(());
        }
        let policy = Policy { decoder: task.decoder, adapter: Some(task.policy) };
        save_policy(task.mesh, policy, directory, task.base_path)?;
        self.learner.save_critic(task.mesh, &directory.join("critic"), task.base_path)
    }

    /// True if states for resuming are written and this rank has a part of them.
    fn writes_state(&self) -> bool {
        self.task.fingerprint.is_some() && self.task.mesh.data.is_first()
    }

    /// The state that the next step depends on; the logs are synced to disk first. Tensor-parallel ranks call this together, and the first
    /// one gets the result.
    fn full_state(&mut self, sink: &mut dyn MetricSink) -> Result<State, TrainError> {
        let task = self.task;
        let metrics = sink.mark().map_err(|source| self.io(source))?;
        let logs = LogPositions { metrics, train: task.train.environment.mark()?, val: task.val.environment.mark()? };
        self.state.data_position = self.order.position();
        let mut state = State::default();
        state.put("loop", &self.state)?;
        state.put("marks", &logs)?;
        self.put_learned(&mut state)?;
        if let Some(policy) = &self.rollout_policy {
            state.put_vars(ROLLOUT_POLICY, policy.vars());
        }
        state.gather_shards(&task.mesh.tensor)
    }

    /// Adds policy, critic, their optimizers, and the state of reward shaping.
    fn put_learned(&self, state: &mut State) -> Result<(), TrainError> {
        state.put_vars(POLICY, self.task.policy.vars());
        self.learner.save(state)
    }

    pub(super) fn restore(&mut self, step: u64, state: &State, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let task = self.task;
        let state = &state.shard(&task.mesh.tensor)?;
        self.state = state.get("loop")?;
        self.order.seek(self.state.data_position);
        state.restore_vars(POLICY, task.policy.vars())?;
        // With `rl.off_by_one`: a batch that an earlier policy started.
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

    /// Removes metrics and recorded steps after a checkpoint; [`rewind_episodes`] removes the episodes.
    pub(super) fn rewind_logs(&self, sink: &mut dyn MetricSink, logs: &LogPositions) -> Result<(), TrainError> {
        if !self.task.mesh.all.is_first() {
            return Ok(());
        }
        if let Some(difference) = sink.rewind(logs.metrics).map_err(|source| self.io(source))? {
            warn_of_metrics(&difference, self.task.progress);
        }
        step_record::remove_after(self.task, self.state.step)
    }
}

/// Removes episodes after a checkpoint. Returns how an episode log differs from what it was at the checkpoint, if it does.
pub(super) fn rewind_episodes(task: &RlTask<'_>, logs: &LogPositions) -> Result<Option<String>, TrainError> {
    match task.train.environment.rewind(logs.train)? {
        None => Ok(task.val.environment.rewind(logs.val)?),
        difference => Ok(difference),
    }
}

/// Result of an evaluation on the validation split with greedy decoding.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Evaluation {
    /// Mean reward of the episodes that have a score.
    pub(super) reward: f64,
    /// Reward of each row; `None` if the episode has no score.
    rewards: Vec<Option<f64>>,
    metrics: Metrics,
    timings: Timings,
}

impl Evaluation {
    /// The evaluation result of a complete `partial` with one response per validation row.
    pub(super) fn new(task: &RlTask<'_>, partial: PartialBatch) -> Result<Self, TrainError> {
        let records = || partial.responses.iter().map(|response| &response.record);
        partial.check_drops(task)?;
        let rewards = records().map(|record| record.outcome.as_ref().ok().map(|reward| reward.total)).collect();
        let metrics = episode_metrics(records());
        let reward = metrics.get("avg_reward").copied().ok_or_else(|| {
            TrainError::Data("rl: no validation episode could be scored; look at the reasons in episodes.jsonl".into())
        })?;
        Ok(Self { reward, rewards, metrics, timings: partial.timings })
    }

    /// Compares the mean rewards over the rows with a score in both evaluations.
    fn is_better_than(&self, other: &Self) -> bool {
        let both = self.rewards.iter().zip(&other.rewards).filter_map(|(own, others)| Some((*own)? - (*others)?));
        both.sum::<f64>() > 0.0
    }

    pub(super) fn metrics(&self) -> Metrics {
        evaluation_metrics(&self.metrics, &self.timings)
    }

    fn mrr(&self) -> Option<f64> {
        self.metrics.get("avg_mrr").copied()
    }
}

/// Smallest decrease of the mean reciprocal rank of the gold passages from the policy before training that is no noise. In honest runs no
/// evaluation with a higher reward had a lower rank.
const MRR_FALL: f64 = 0.05;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct BestCheckpoint {
    /// Step of the best evaluation; 0 is the policy before training.
    pub(super) step: u64,
    pub(super) evaluation: Evaluation,
    pub(super) first_reward: f64,
    /// Reward of the last evaluation.
    #[serde(default)]
    last_reward: f64,
    /// Mean reciprocal rank of the gold passages before training; `None` without gold ids.
    #[serde(default)]
    first_mrr: Option<f64>,
    /// Number of the last evaluations, without a gap, with a reward above the first one and gold passages that rank clearly lower.
    #[serde(default)]
    n_losing_gold: usize,
    /// Number of evaluations since the best one.
    n_worse: usize,
}

impl BestCheckpoint {
    pub(super) fn new(first: Evaluation) -> Self {
        Self {
            step: 0,
            first_reward: first.reward,
            last_reward: first.reward,
            first_mrr: first.mrr(),
            n_losing_gold: 0,
            evaluation: first,
            n_worse: 0,
        }
    }

    /// Whether the last evaluation has at least half of what the best one gained over the policy before training.
    pub(super) fn keeps_gain(&self) -> bool {
        self.step > 0 && 2.0 * (self.last_reward - self.first_reward) >= self.evaluation.reward - self.first_reward
    }

    /// Whether in the last two evaluations the reward is above that of the policy before training, and the gold passages rank lower.
    pub(super) fn loses_gold(&self) -> bool {
        self.n_losing_gold >= 2
    }

    pub(super) fn update(&mut self, step: u64, evaluation: Evaluation) {
        self.last_reward = evaluation.reward;
        let fall = self.first_mrr.zip(evaluation.mrr()).map(|(first, now)| first - now);
        let is_losing_gold = evaluation.reward > self.first_reward && fall.is_some_and(|fall| fall > MRR_FALL);
        self.n_losing_gold = if is_losing_gold { self.n_losing_gold + 1 } else { 0 };
        if evaluation.is_better_than(&self.evaluation) {
            (self.step, self.evaluation, self.n_worse) = (step, evaluation, 0);
        } else {
            self.n_worse += 1;
        }
    }

    pub(super) fn is_exhausted(&self, patience: usize) -> bool {
        patience > 0 && self.n_worse >= patience
    }

    pub(super) fn note(&self) -> String {
        format!("best val reward {:+.3} at step {}", self.evaluation.reward, self.step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluation(rewards: &[Option<f64>]) -> Evaluation {
        Evaluation { reward: 0.0, rewards: rewards.to_vec(), metrics: Metrics::new(), timings: Timings::default() }
    }

    #[test]
    fn rows_that_one_evaluation_could_not_score_do_not_decide() {
        let (easy_only, all) = (evaluation(&[Some(0.5), None]), evaluation(&[Some(0.5), Some(-0.5)]));
        assert!(!easy_only.is_better_than(&all) && !all.is_better_than(&easy_only));
        assert!(evaluation(&[Some(0.6), None]).is_better_than(&all));
    }

    /// Symptom: a run whose every evaluation had a higher reward and a lower rank than the start had no warning.
    #[test]
    fn two_evaluations_with_more_reward_and_lower_ranks_lose_gold() {
        let of = |reward: f64, mrr: f64| Evaluation {
            reward,
            metrics: Metrics::from([("avg_mrr".to_owned(), mrr)]),
            ..evaluation(&[Some(reward)])
        };
        let loses = |later: &[(f64, f64)]| {
            let mut best = BestCheckpoint::new(of(0.5, 0.6));
            later.iter().for_each(|(reward, mrr)| best.update(1, of(*reward, *mrr)));
            best.loses_gold()
        };
        assert!(loses(&[(0.6, 0.5), (0.55, 0.53)]));
        assert!(!loses(&[(0.6, 0.5)]) && !loses(&[(0.6, 0.5), (0.6, 0.58)]) && !loses(&[(0.4, 0.5), (0.4, 0.5)]));
    }
}

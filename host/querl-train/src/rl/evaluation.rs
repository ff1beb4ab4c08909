//! Evaluation on the validation split, and the best checkpoint so far.

use super::rollout::{PartialBatch, Timings, check_drops, episode_metrics};
use super::task::RlTask;
use crate::{Metrics, TrainError};
use serde::{Deserialize, Serialize};

/// Result on the validation split, decoded greedily.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Evaluation {
    /// Mean over the episodes that could be scored.
    pub(super) reward: f64,
    /// By row; `None` where a call failed.
    rewards: Vec<Option<f64>>,
    metrics: Metrics,
    timings: Timings,
}

impl Evaluation {
    /// From a complete `partial` with one response per validation row.
    pub(super) fn new(task: &RlTask<'_>, partial: PartialBatch) -> Result<Self, TrainError> {
        let records = || partial.responses.iter().map(|response| &response.record);
        check_drops(task, partial.step, records())?;
        let rewards = records().map(|record| record.outcome.as_ref().ok().map(|reward| reward.total)).collect();
        let metrics = episode_metrics(records());
        let reward = metrics.get("avg_reward").copied().ok_or_else(|| {
            TrainError::Data("rl: no validation episode could be scored; look at the reasons in episodes.jsonl".into())
        })?;
        Ok(Self { reward, rewards, metrics, timings: partial.timings })
    }

    /// Compares on the rows that both could score.
    fn is_better_than(&self, other: &Self) -> bool {
        let both = self.rewards.iter().zip(&other.rewards).filter_map(|(own, others)| Some((*own)? - (*others)?));
        both.sum::<f64>() > 0.0
    }

    /// `val/reward`, `val/win_rate` and so on.
    pub(super) fn metrics(&self) -> Metrics {
        let name = |name: &String| format!("val/{}", if name == "avg_reward" { "reward" } else { name });
        let mut metrics: Metrics = self.metrics.iter().map(|(key, value)| (name(key), *value)).collect();
        metrics.insert("timing_s/testing".into(), self.timings.rollout_s);
        metrics
    }
}

/// The best evaluation so far.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct BestCheckpoint {
    /// 0 is the policy before training.
    pub(super) step: u64,
    pub(super) evaluation: Evaluation,
    pub(super) first_reward: f64,
    /// Evaluations since then that were no better.
    n_worse: usize,
}

impl BestCheckpoint {
    pub(super) fn new(first: Evaluation) -> Self {
        Self { step: 0, first_reward: first.reward, evaluation: first, n_worse: 0 }
    }

    pub(super) fn update(&mut self, step: u64, evaluation: Evaluation) {
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
}

//! The policy on the validation split, decoded greedily.

use super::RlTask;
use super::rollout::{Partial, Timings, check_drops, episode_metrics};
use crate::{Metrics, TrainError};
use serde::{Deserialize, Serialize};

/// What the validation split says.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Evaluation {
    /// Mean reward over the episodes that could be scored.
    pub(super) reward: f64,
    /// By row; `None` where a call failed.
    rewards: Vec<Option<f64>>,
    metrics: Metrics,
    timings: Timings,
}

impl Evaluation {
    /// What a complete `partial` says, in which every validation row was answered once.
    ///
    /// # Errors
    /// Too many episodes were dropped.
    pub(super) fn new(task: &RlTask<'_>, partial: Partial) -> Result<Self, TrainError> {
        let records = || partial.answers.iter().map(|answer| &answer.record);
        check_drops(task, partial.step, records())?;
        let rewards = records().map(|record| record.outcome.as_ref().ok().map(|reward| reward.total)).collect();
        let metrics = episode_metrics(records());
        let reward = metrics.get("avg_reward").copied().ok_or_else(|| {
            TrainError::Data("rl: no validation episode could be scored; look at the reasons in episodes.jsonl".into())
        })?;
        Ok(Self { reward, rewards, metrics, timings: partial.timings })
    }

    /// True if this one is better than `other` on the rows that both have: a failed call decides nothing.
    pub(super) fn beats(&self, other: &Self) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluation(rewards: &[Option<f64>]) -> Evaluation {
        Evaluation { reward: 0.0, rewards: rewards.to_vec(), metrics: Metrics::new(), timings: Timings::default() }
    }

    #[test]
    fn rows_that_failed_once_do_not_decide() {
        let (easy_only, all) = (evaluation(&[Some(0.5), None]), evaluation(&[Some(0.5), Some(-0.5)]));
        assert!(!easy_only.beats(&all) && !all.beats(&easy_only));
        assert!(evaluation(&[Some(0.6), None]).beats(&all));
    }
}

//! The policy on the validation split, decoded greedily.

use super::RlTask;
use super::rollout::{answers, check_drops, episode_metrics, responses};
use crate::{Metrics, TrainError};
use querl_model::Decoding;

/// What the validation split says.
pub(super) struct Evaluation {
    /// Mean reward over the episodes that could be scored.
    pub(super) reward: f64,
    /// By row; `None` where a call failed.
    rewards: Vec<Option<f64>>,
    metrics: Metrics,
}

/// Answers every validation prompt once and has the answers scored.
pub(super) fn evaluate(task: &RlTask<'_>, step: u64) -> Result<Evaluation, TrainError> {
    let targets: Vec<(usize, usize)> = (0..task.val.prompts.len()).map(|row| (row, 0)).collect();
    let answers = answers(task, &task.val, &targets, Decoding::Greedy, step)?;
    let records = task.val.environment.score(step, &responses(task, &targets, &answers)?)?;
    check_drops(task, step, &records)?;
    let rewards = records.iter().map(|record| record.outcome.as_ref().ok().map(|reward| reward.total)).collect();
    let metrics = episode_metrics(records.iter());
    let reward = metrics.get("avg_reward").copied().ok_or_else(|| {
        TrainError::Data("rl: no validation episode could be scored; look at the reasons in episodes.jsonl".into())
    })?;
    Ok(Evaluation { reward, rewards, metrics })
}

impl Evaluation {
    /// True if this one is better than `other` on the rows that both have: a failed call decides nothing.
    pub(super) fn beats(&self, other: &Self) -> bool {
        let both = self.rewards.iter().zip(&other.rewards).filter_map(|(own, others)| Some((*own)? - (*others)?));
        both.sum::<f64>() > 0.0
    }

    /// `val/reward`, `val/win_rate` and so on.
    pub(super) fn metrics(&self) -> Metrics {
        let name = |name: &String| format!("val/{}", if name == "avg_reward" { "reward" } else { name });
        self.metrics.iter().map(|(key, value)| (name(key), *value)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluation(rewards: &[Option<f64>]) -> Evaluation {
        Evaluation { reward: 0.0, rewards: rewards.to_vec(), metrics: Metrics::new() }
    }

    #[test]
    fn rows_that_failed_once_do_not_decide() {
        let (easy_only, all) = (evaluation(&[Some(0.5), None]), evaluation(&[Some(0.5), Some(-0.5)]));
        assert!(!easy_only.beats(&all) && !all.beats(&easy_only));
        assert!(evaluation(&[Some(0.6), None]).beats(&all));
    }
}

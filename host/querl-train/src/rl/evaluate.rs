//! The policy on the validation split, decoded greedily.

use super::RlTask;
use super::rollout::{answers, episode_metrics, responses};
use crate::{Metrics, TrainError};
use querl_model::Decoding;

/// What the validation split says.
pub(super) struct Evaluation {
    /// Mean reward over the episodes that could be scored.
    pub(super) reward: f64,
    metrics: Metrics,
}

/// Answers every validation prompt once and has the answers scored.
pub(super) fn evaluate(task: &RlTask<'_>, step: u64) -> Result<Evaluation, TrainError> {
    let targets: Vec<(usize, usize)> = (0..task.val.prompts.len()).map(|row| (row, 0)).collect();
    let answers = answers(task, &task.val, &targets, Decoding::Greedy, step)?;
    let records = task.val.environment.score(step, &responses(task, &targets, &answers)?)?;
    let metrics = episode_metrics(records.iter());
    let reward = metrics.get("avg_reward").copied().ok_or_else(|| {
        TrainError::Data("rl: no validation episode could be scored; look at the reasons in episodes.jsonl".into())
    })?;
    Ok(Evaluation { reward, metrics })
}

impl Evaluation {
    /// `val/reward`, `val/win_rate` and so on.
    pub(super) fn metrics(&self) -> Metrics {
        let name = |name: &String| format!("val/{}", if name == "avg_reward" { "reward" } else { name });
        self.metrics.iter().map(|(key, value)| (name(key), *value)).collect()
    }
}

//! What is computed once per batch: log-probabilities, values, advantages and returns.

use super::RlTask;
use super::critic::Critic;
use super::rollout::{Batch, Rollout};
use crate::maths::{Rows, gae, kl_k1, kl_k3, masked_mean, masked_whiten, token_rewards};
use crate::metrics::summary;
use crate::policy::{Example, Policy, rows_of};
use crate::{Metrics, TrainError};
use candle_core::Tensor;
use querl_core::config::AdvantageForm;

/// A batch with everything that stays fixed during its updates.
pub(super) struct Experience<'a> {
    pub(super) rollouts: &'a [Rollout],
    pub(super) old_logprobs: Rows,
    ref_logprobs: Rows,
    /// `(T, H)` per response: hidden states of the reference.
    pub(super) ref_hidden: Vec<Tensor>,
    pub(super) values: Rows,
    token_rewards: Rows,
    pub(super) advantages: Rows,
    pub(super) returns: Rows,
    /// Which positions the critic learns at.
    pub(super) value_mask: Vec<Vec<bool>>,
}

pub(super) fn all_true(rows: &[Vec<f32>]) -> Vec<Vec<bool>> {
    rows.iter().map(|row| vec![true; row.len()]).collect()
}

/// Log-probabilities of policy and reference, values and advantages of a batch, without gradients.
pub(super) fn estimate<'a>(task: &RlTask<'_>, critic: &Critic, batch: &'a Batch) -> Result<Experience<'a>, TrainError> {
    let config = task.config;
    let policy_view = task.policy.without_gradient();
    let reference_view = task.reference.map(querl_model::LoraAdapter::without_gradient);
    let policy = Policy { decoder: task.decoder, adapter: Some(&policy_view) };
    let reference = Policy { decoder: task.decoder, adapter: reference_view.as_ref() };
    let (mut old_logprobs, mut ref_logprobs, mut values) = (Rows::new(), Rows::new(), Rows::new());
    let mut ref_hidden = Vec::new();
    for rollouts in batch.rollouts.chunks(ESTIMATE_BATCH) {
        let examples: Vec<&Example> = rollouts.iter().map(|rollout| &rollout.example).collect();
        let column = |logprobs: &Tensor| -> Result<Vec<f32>, TrainError> {
            Ok(logprobs.narrow(1, 0, 1)?.flatten_all()?.to_vec1()?)
        };
        let of_policy = policy.response_pass(&examples, config.temperature)?;
        old_logprobs.extend(rows_of(&column(&of_policy.logprobs)?, &examples));
        let of_reference = reference.response_pass(&examples, config.temperature)?;
        ref_logprobs.extend(rows_of(&column(&of_reference.logprobs)?, &examples));
        let hidden = of_reference.hidden.detach();
        values.extend(rows_of(&critic.values(task.decoder, &examples, &hidden)?.detach().to_vec1()?, &examples));
        ref_hidden.extend(split_rows(&hidden, &examples)?);
    }
    let penalty = |rollout: &Rollout| if rollout.truncated { config.missing_eos_penalty as f32 } else { 0.0 };
    let scores: Vec<f32> = batch.rollouts.iter().map(|rollout| rollout.score - penalty(rollout)).collect();
    let token_rewards = token_rewards(&scores, &old_logprobs, &ref_logprobs, config.kl_coef as f32);
    let (advantages, returns, value_mask) = match config.advantage_form {
        AdvantageForm::Token => token_advantages(task, &token_rewards, &values),
        AdvantageForm::Sequence => sequence_advantages(&token_rewards, &values),
    };
    let rollouts = batch.rollouts.as_slice();
    Ok(Experience {
        rollouts,
        old_logprobs,
        ref_logprobs,
        ref_hidden,
        values,
        token_rewards,
        advantages,
        returns,
        value_mask,
    })
}

/// Responses of one pass without gradient.
const ESTIMATE_BATCH: usize = 64;

fn split_rows(hidden: &Tensor, examples: &[&Example]) -> Result<Vec<Tensor>, TrainError> {
    let mut start = 0;
    let part = |example: &&Example| {
        let part = hidden.narrow(0, start, example.response.len());
        start += example.response.len();
        Ok(part?)
    };
    examples.iter().map(part).collect()
}

/// GAE per token; advantages whitened over the batch after the returns are formed.
fn token_advantages(task: &RlTask<'_>, rewards: &Rows, values: &Rows) -> (Rows, Rows, Vec<Vec<bool>>) {
    let mask = all_true(values);
    let estimates = gae(rewards, values, &mask, task.config.gamma as f32, task.config.gae_lambda as f32);
    (masked_whiten(&estimates.advantages, &mask), estimates.returns, mask)
}

/// The source plan's form: `A = R - V(s)` per response, whitened over responses; the critic learns at the first token.
fn sequence_advantages(rewards: &Rows, values: &Rows) -> (Rows, Rows, Vec<Vec<bool>>) {
    let totals: Vec<f32> = rewards.iter().map(|row| row.iter().sum()).collect();
    let raw: Rows = totals.iter().zip(values).map(|(total, values)| vec![total - values[0]]).collect();
    let whitened = masked_whiten(&raw, &all_true(&raw));
    let spread = |(advantage, values): (&Vec<f32>, &Vec<f32>)| vec![advantage[0]; values.len()];
    let advantages = whitened.iter().zip(values).map(spread).collect();
    let first_only = |values: &Vec<f32>| (0..values.len()).map(|t| t == 0).collect();
    let returns = totals.iter().zip(values).map(|(total, values)| vec![*total; values.len()]).collect();
    (advantages, returns, values.iter().map(first_only).collect())
}

impl Experience<'_> {
    /// What the estimates say of the batch before any update.
    pub(super) fn metrics(&self) -> Metrics {
        let mask = all_true(&self.old_logprobs);
        let estimator = |estimate: fn(f32, f32) -> f32| -> f64 {
            let row = |(old, reference): (&Vec<f32>, &Vec<f32>)| {
                old.iter().zip(reference).map(|(old, reference)| estimate(*old, *reference)).collect()
            };
            let rows: Rows = self.old_logprobs.iter().zip(&self.ref_logprobs).map(row).collect();
            f64::from(masked_mean(&rows, &mask))
        };
        let flat = |rows: &Rows| -> Vec<f64> { rows.iter().flatten().map(|x| f64::from(*x)).collect() };
        let mut metrics = Metrics::from([
            ("actor/ref_kl".to_owned(), estimator(kl_k1)),
            ("actor/ref_kl_k3".to_owned(), estimator(kl_k3)),
            ("critic/vf_explained_var".to_owned(), self.explained_variance()),
            ("rollout_probs_diff".to_owned(), self.rollout_difference()),
        ]);
        let rewards: Vec<f64> = self.token_rewards.iter().map(|row| f64::from(row.iter().sum::<f32>())).collect();
        metrics.extend(summary("critic/rewards", &rewards));
        metrics.extend(summary("critic/advantages", &flat(&self.advantages)));
        metrics.extend(summary("critic/returns", &flat(&self.returns)));
        metrics.extend(summary("critic/values", &flat(&self.values)));
        metrics
    }

    /// Mean difference between log-probabilities as sampled and as computed for training.
    fn rollout_difference(&self) -> f64 {
        let pairs = self.rollouts.iter().zip(&self.old_logprobs);
        let differences = pairs.flat_map(|(rollout, old)| rollout.logprobs.iter().zip(old));
        let (sum, n) = differences.fold((0.0, 0), |(sum, n), (a, b)| (sum + f64::from((a - b).abs()), n + 1));
        sum / f64::from(n.max(1))
    }

    /// `1 - var(returns - values) / var(returns)` over the positions the critic learns at.
    fn explained_variance(&self) -> f64 {
        let kept = |rows: &Rows| -> Vec<f64> {
            let rows = rows.iter().zip(&self.value_mask);
            rows.flat_map(|(row, mask)| row.iter().zip(mask).filter(|(_, keep)| **keep).map(|(x, _)| f64::from(*x)))
                .collect()
        };
        let (returns, values) = (kept(&self.returns), kept(&self.values));
        let errors: Vec<f64> = returns.iter().zip(&values).map(|(target, value)| target - value).collect();
        let spread = variance(&returns);
        if spread > 0.0 { 1.0 - variance(&errors) / spread } else { 0.0 }
    }
}

fn variance(values: &[f64]) -> f64 {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n
}

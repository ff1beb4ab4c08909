//! Rewards and advantages: from one score per response to an advantage per token (verl `core_algos.py`, first half).
//!
//! [`estimate_advantages`] selects by `rl.algorithm` and `rl.advantage_form`; the formulas are below it. **Advantages are whitened**
//! by [`masked_whiten`], those of PPO and REINFORCE++ (`rl.whiten_advantages`).
//!
//! Everything else is shared by all algorithms: rollouts, the clipped policy loss, KL, entropy, the order of updates. In the
//! sequence form there is one advantage and one ratio per response, and losses are averaged over responses, whatever the
//! algorithm's aggregation.
//!
//! | algorithm | advantage | loss | source |
//! |---|---|---|---|
//! | PPO | GAE of a critic, whitened over the batch | mean over tokens | Schulman et al. 2017, "Proximal Policy Optimization Algorithms"; verl `adv_estimator: gae` |
//! | GRPO | (score - group mean) / group deviation | mean over tokens, then responses | Shao et al. 2024, "DeepSeekMath", section 4.1; verl `grpo` with `seq-mean-token-mean`; TRL `loss_type: grpo` |
//! | Dr. GRPO | score - group mean | sum over tokens / `max_new_tokens`, mean over responses | Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective"; verl `norm_adv_by_std_in_grpo: false` with `seq-mean-token-sum-norm`; TRL `loss_type: dr_grpo` |
//! | RLOO | score - mean of the group's other scores | mean over tokens, as in verl; the paper's single ratio per response is the sequence form | Ahmadian et al. 2024, "Back to Basics"; verl `adv_estimator: rloo` |
//! | REINFORCE++ | discounted return, whitened over the batch | mean over tokens | Hu et al. 2025, "REINFORCE++"; verl `adv_estimator: reinforce_plus_plus` |
//!
//! Departures from verl in group-relative advantages:
//! 1. A response alone in its group (the others were dropped) has an advantage of 0. verl's `compute_grpo_outcome_advantage` and
//!    `compute_rloo_outcome_advantage` take its reward; `compute_rloo_vectorized_outcome_advantage` takes 0 as well.
//! 2. A group whose rewards deviate by less than [`EPSILON`], or than that share of the largest, has advantages of 0. Between equal
//!    scores, the rounding of KL in the reward would otherwise be divided by its own deviation and become a tenth of other groups'
//!    advantages; verl divides it. `frac_reward_zero_std` counts these groups. RLOO and Dr. GRPO do not divide, so that rounding stays
//!    negligible.

use super::losses::{Aggregation, Rows, kept, n_kept};
use querl_core::config::{AdvantageForm, RlAlgorithm, RlConfig};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A batch whose advantages are estimated.
pub(super) struct ScoredBatch<'a> {
    /// `(B, T)`: each response's score at its last token, less KL where that is part of the reward.
    pub(super) rewards: &'a Rows,
    /// B: row of the query that a response answers.
    pub(super) groups: &'a [usize],
    /// `(B, T)`: the critic's, where [`has_critic`].
    pub(super) values: Option<&'a Rows>,
    pub(super) config: &'a RlConfig,
}

pub(super) struct AdvantageEstimate {
    /// `(B, T)`; in the sequence form the same at every token of a response.
    pub(super) advantages: Rows,
    /// For algorithms with a critic.
    pub(super) targets: Option<ValueTargets>,
}

/// What a critic learns, and where.
pub(super) struct ValueTargets {
    /// `(B, T)`.
    pub(super) returns: Rows,
    /// `(B, T)`: true where the critic learns.
    pub(super) mask: Vec<Vec<bool>>,
}

/// Whether an algorithm needs a critic's values.
pub(super) fn has_critic(algorithm: RlAlgorithm) -> bool {
    algorithm == RlAlgorithm::Ppo
}

/// How token losses are averaged. In the sequence form the policy loss averages over responses, and each token receives the
/// whole gradient of the one ratio; KL and entropy are then sums over a response too, so that `kl_coef` and `ent_coef` have the
/// same weight against the policy loss as in the token form.
pub(super) fn aggregation(config: &RlConfig) -> Aggregation {
    match (config.advantage_form, config.algorithm) {
        (AdvantageForm::Sequence, _) => Aggregation::SequenceSum { scale: 1.0 },
        // Every response has the same weight in the loss, whatever its length.
        (AdvantageForm::Token, RlAlgorithm::Grpo) => Aggregation::SequenceMean,
        (AdvantageForm::Token, RlAlgorithm::DrGrpo) => Aggregation::SequenceSum { scale: config.max_new_tokens as f32 },
        (AdvantageForm::Token, _) => Aggregation::TokenMean,
    }
}

/// Advantages of a batch, and the critic's targets.
pub(super) fn estimate_advantages(batch: &ScoredBatch<'_>) -> AdvantageEstimate {
    let (config, groups) = (batch.config, batch.groups);
    let whiten = |advantages: Rows| match config.whiten_advantages {
        true => masked_whiten(&advantages, &all_true(&advantages)),
        false => advantages,
    };
    let values = || batch.values.expect("the critic's values: an algorithm that has a critic is given them");
    // B: the sum of each response's rewards.
    let totals = || -> Vec<f32> { batch.rewards.iter().map(|row| row.iter().sum()).collect() };
    // One number per response, repeated for each of its tokens.
    let at_every_token = |of_response: &[f32]| -> Rows {
        batch.rewards.iter().zip(of_response).map(|(row, value)| vec![*value; row.len()]).collect()
    };
    let without_critic = |advantages: Rows| AdvantageEstimate { advantages, targets: None };
    match (config.algorithm, config.advantage_form) {
        // GAE per token; advantages are whitened over the batch after the returns are formed.
        (RlAlgorithm::Ppo, AdvantageForm::Token) => {
            let (values, mask) = (values(), all_true(batch.rewards));
            let estimate = gae(batch.rewards, values, &mask, config.gamma as f32, config.gae_lambda as f32);
            let targets = Some(ValueTargets { returns: estimate.returns, mask });
            AdvantageEstimate { advantages: whiten(estimate.advantages), targets }
        }
        // `A = R - V(s)` per response, whitened over responses; the critic learns at the first token, whose value is `V(s)`.
        (RlAlgorithm::Ppo, AdvantageForm::Sequence) => {
            let (values, totals) = (values(), totals());
            let raw: Vec<f32> = totals.iter().zip(values).map(|(total, values)| total - values[0]).collect();
            let mask = values.iter().map(|values| (0..values.len()).map(|t| t == 0).collect()).collect();
            AdvantageEstimate {
                advantages: at_every_token(&whiten(column(&raw)).concat()),
                targets: Some(ValueTargets { returns: at_every_token(&totals), mask }),
            }
        }
        (RlAlgorithm::Grpo, _) => {
            without_critic(at_every_token(&group_relative(&totals(), groups, GroupScale::Deviation)))
        }
        (RlAlgorithm::DrGrpo, _) => without_critic(at_every_token(&group_relative(&totals(), groups, GroupScale::One))),
        (RlAlgorithm::Rloo, _) => without_critic(at_every_token(&leave_one_out(&totals(), groups))),
        (RlAlgorithm::ReinforcePlusPlus, AdvantageForm::Token) => {
            let returns = discounted_returns(batch.rewards, &all_true(batch.rewards), config.gamma as f32);
            without_critic(whiten(returns))
        }
        // The whole reward of a response is whitened over responses.
        (RlAlgorithm::ReinforcePlusPlus, AdvantageForm::Sequence) => {
            without_critic(at_every_token(&whiten(column(&totals())).concat()))
        }
    }
}

/// A response mask that keeps every token.
pub(super) fn all_true(rows: &[Vec<f32>]) -> Vec<Vec<bool>> {
    rows.iter().map(|row| vec![true; row.len()]).collect()
}

/// One number per response as `(B, 1)`.
fn column(values: &[f32]) -> Rows {
    values.iter().map(|value| vec![*value]).collect()
}

/// Per-token rewards: `-kl_coef * kl` at every token, and each response's score at its last token, end of sequence included.
///
/// `kl`: `(B, T)`; `scores`: B. Returns `(B, T)`.
///
/// Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", equation 2; verl `apply_kl_penalty`.
pub fn token_rewards(scores: &[f32], kl: &[Vec<f32>], kl_coef: f32) -> Rows {
    let row = |(score, kl): (&f32, &Vec<f32>)| {
        let mut rewards: Vec<f32> = kl.iter().map(|kl| -kl_coef * kl).collect();
        if let Some(last) = rewards.last_mut() {
            *last += score;
        }
        rewards
    };
    scores.iter().zip(kl).map(row).collect()
}

/// Mean and variance of a stream of numbers, updated by batch.
///
/// Source: Chan et al. 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"; TRL 0.11
/// `RunningMoments`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RunningMoments {
    count: f64,
    mean: f64,
    /// Sum of squared deviations from the mean.
    squares: f64,
}

impl RunningMoments {
    /// Adds a batch.
    pub fn update(&mut self, values: &[f32]) {
        if values.is_empty() {
            return;
        }
        let n = values.len() as f64;
        let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        let squares = values.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>();
        let (total, delta) = (self.count + n, mean - self.mean);
        self.squares += squares + delta * delta * self.count * n / total;
        self.mean += delta * n / total;
        self.count = total;
    }

    /// Mean so far; 0 before the first batch.
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Unbiased standard deviation so far; 1 for fewer than two numbers.
    pub fn deviation(&self) -> f64 {
        if self.count < 2.0 { 1.0 } else { (self.squares / (self.count - 1.0)).sqrt() }
    }
}

/// Advantages and returns of a batch, per token.
#[derive(Debug, Clone, PartialEq)]
pub struct Advantages {
    /// `(B, T)`, not whitened.
    pub advantages: Rows,
    /// `(B, T)`: advantages plus values, the critic's target.
    pub returns: Rows,
}

/// Generalised advantage estimation for a batch of responses.
///
/// `rewards`, `values`: `(B, T)`; positions where `response_mask` is false yield 0 and are skipped in the recursion. No
/// bootstrap past the last response token.
///
/// Source: Schulman et al. 2016, "High-dimensional continuous control using GAE", equation 16; verl
/// `verl/trainer/ppo/core_algos.py`, `compute_gae_advantage_return` (before its whitening).
pub fn gae(
    rewards: &[Vec<f32>],
    values: &[Vec<f32>],
    response_mask: &[Vec<bool>],
    gamma: f32,
    gae_lambda: f32,
) -> Advantages {
    let rows = rewards.iter().zip(values).zip(response_mask);
    let (advantages, returns) =
        rows.map(|((rewards, values), mask)| gae_row(rewards, values, mask, gamma, gae_lambda)).unzip();
    Advantages { advantages, returns }
}

fn gae_row(rewards: &[f32], values: &[f32], mask: &[bool], gamma: f32, gae_lambda: f32) -> (Vec<f32>, Vec<f32>) {
    let (mut advantages, mut returns) = (vec![0.0; rewards.len()], vec![0.0; rewards.len()]);
    let (mut next_value, mut advantage) = (0f32, 0f32);
    for t in (0..rewards.len()).rev().filter(|&t| mask[t]) {
        let td_error = rewards[t] + gamma * next_value - values[t];
        advantage = td_error + gamma * gae_lambda * advantage;
        next_value = values[t];
        advantages[t] = advantage;
        returns[t] = advantage + values[t];
    }
    (advantages, returns)
}

/// Discounted returns: `rewards[t] + gamma * returns[t + 1]`.
///
/// `rewards`: `(B, T)`; positions where `response_mask` is false yield 0 and are skipped.
///
/// Source: verl `compute_reinforce_plus_plus_outcome_advantage`, `returns`.
pub fn discounted_returns(rewards: &[Vec<f32>], response_mask: &[Vec<bool>], gamma: f32) -> Rows {
    let row = |(rewards, mask): (&Vec<f32>, &Vec<bool>)| {
        let (mut returns, mut running) = (vec![0.0; rewards.len()], 0f32);
        for t in (0..rewards.len()).rev().filter(|&t| mask[t]) {
            running = rewards[t] + gamma * running;
            returns[t] = running;
        }
        returns
    };
    rewards.iter().zip(response_mask).map(row).collect()
}

/// Whitens advantages: mean 0 and variance 1 over the mask; other positions become 0.
///
/// The variance is unbiased, plus 1e-8. Fewer than two values become 0.
///
/// Source: verl `verl/utils/torch_functional.py`, `masked_whiten` (which leaves values at masked positions).
pub fn masked_whiten(values: &[Vec<f32>], response_mask: &[Vec<bool>]) -> Rows {
    let n = n_kept(response_mask);
    let zeros = || values.iter().map(|row| vec![0.0; row.len()]).collect();
    if n < 2 {
        return zeros();
    }
    let mean = kept(values, response_mask).map(f64::from).sum::<f64>() / n as f64;
    let squares = kept(values, response_mask).map(|x| (f64::from(x) - mean).powi(2)).sum::<f64>();
    let scale = 1.0 / (squares / (n - 1) as f64 + 1e-8).sqrt();
    let mut whitened: Rows = zeros();
    for ((out, values), mask) in whitened.iter_mut().zip(values).zip(response_mask) {
        for ((out, value), keep) in out.iter_mut().zip(values).zip(mask) {
            if *keep {
                *out = ((f64::from(*value) - mean) * scale) as f32;
            }
        }
    }
    whitened
}

/// Added to the deviation of a group's rewards; a smaller deviation is treated as 0.
///
/// Source: verl, default of `epsilon`.
const EPSILON: f64 = 1e-6;

/// Divisor of the deviations from the group's mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScale {
    /// The group's standard deviation (GRPO).
    Deviation,
    /// 1 (Dr. GRPO).
    One,
}

#[derive(Debug, Default)]
struct Group {
    n: f64,
    sum: f64,
    squares: f64,
    largest: f64,
}

impl Group {
    fn mean(&self) -> f64 {
        self.sum / self.n
    }

    fn deviation(&self) -> f64 {
        (self.squares / (self.n - 1.0)).sqrt()
    }

    /// Whether all rewards are equal up to rounding.
    fn is_flat(&self) -> bool {
        self.deviation() < EPSILON * self.largest.max(1.0)
    }
}

fn groups_of(rewards: &[f32], groups: &[usize]) -> BTreeMap<usize, Group> {
    let mut found: BTreeMap<usize, Group> = BTreeMap::new();
    for (reward, group) in rewards.iter().zip(groups) {
        let group = found.entry(*group).or_default();
        (group.n, group.sum) = (group.n + 1.0, group.sum + f64::from(*reward));
        group.largest = group.largest.max(f64::from(reward.abs()));
    }
    for (reward, id) in rewards.iter().zip(groups) {
        if let Some(group) = found.get_mut(id) {
            group.squares += (f64::from(*reward) - group.mean()).powi(2);
        }
    }
    found
}

/// Each response's reward minus the mean of its group, divided by `scale`.
///
/// `rewards`, `groups` (which query): B. Returns B.
///
/// Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2; Liu et al. 2025, "Understanding R1-Zero-Like Training" (without
/// the deviation); verl `compute_grpo_outcome_advantage`.
pub fn group_relative(rewards: &[f32], groups: &[usize], scale: GroupScale) -> Vec<f32> {
    let found = groups_of(rewards, groups);
    let advantage = |(reward, id): (&f32, &usize)| {
        let group = &found[id];
        let distance = f64::from(*reward) - group.mean();
        match scale {
            _ if group.n < 2.0 => 0.0,
            GroupScale::Deviation if group.is_flat() => 0.0,
            GroupScale::Deviation => (distance / (group.deviation() + EPSILON)) as f32,
            GroupScale::One => distance as f32,
        }
    };
    rewards.iter().zip(groups).map(advantage).collect()
}

/// Each response's reward minus the mean of the others of its group.
///
/// `rewards`, `groups` (which query): B. Returns B.
///
/// Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization"; verl
/// `compute_rloo_outcome_advantage`.
pub fn leave_one_out(rewards: &[f32], groups: &[usize]) -> Vec<f32> {
    let found = groups_of(rewards, groups);
    let advantage = |(reward, id): (&f32, &usize)| {
        let group = &found[id];
        let distance = f64::from(*reward) - group.mean();
        if group.n < 2.0 { 0.0 } else { (distance * group.n / (group.n - 1.0)) as f32 }
    };
    rewards.iter().zip(groups).map(advantage).collect()
}

/// Share of the groups of two and more whose rewards are all equal.
///
/// Source: TRL `GRPOTrainer`, `frac_reward_zero_std`.
pub fn share_without_spread(rewards: &[f32], groups: &[usize]) -> f32 {
    let found = groups_of(rewards, groups);
    let compared = found.values().filter(|group| group.n >= 2.0);
    let (n, n_equal) = compared.fold((0, 0), |(n, n_equal), group| (n + 1, n_equal + i32::from(group.is_flat())));
    n_equal as f32 / n.max(1) as f32
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::losses::{kl_rows, masked_mean};
    use super::*;
    use querl_core::config::KlEstimator;

    #[test]
    fn the_score_lands_on_the_last_response_token() {
        let logprobs = vec![vec![-1.0, -2.0, -0.5], vec![-1.0]];
        let reference = vec![vec![-1.5, -2.0, -0.5], vec![-1.0]];
        let rewards = token_rewards(&[0.7, -0.3], &kl_rows(KlEstimator::K1, &logprobs, &reference), 0.1);
        assert_eq!(rewards, vec![vec![-0.05, 0.0, 0.7], vec![-0.3]]);
    }

    fn estimate(config: &RlConfig) -> AdvantageEstimate {
        let rewards = vec![vec![0.0, 0.0, 1.0], vec![0.0, -0.5], vec![0.25]];
        let values = vec![vec![0.2, 0.1, 0.4], vec![-0.1, 0.0], vec![0.3]];
        estimate_advantages(&ScoredBatch { rewards: &rewards, groups: &[0, 1, 2], values: Some(&values), config })
    }

    #[test]
    fn advantages_are_whitened_over_the_batch_and_returns_are_not() {
        let plain = estimate(&RlConfig { whiten_advantages: false, ..RlConfig::default() });
        let whitened = estimate(&RlConfig::default());
        assert_eq!(plain.targets.unwrap().returns, whitened.targets.unwrap().returns);
        assert_ne!(plain.advantages, whitened.advantages);
        let mask = all_true(&whitened.advantages);
        assert!(masked_mean(&whitened.advantages, &mask).abs() < 1e-6);
        assert_eq!(masked_whiten(&plain.advantages, &mask), whitened.advantages);
    }

    /// Regression: without values every advantage was missing, and the batch taught nothing.
    #[test]
    #[should_panic(expected = "the critic's values")]
    fn missing_values_panic() {
        let (rewards, config) = (vec![vec![1.0]], RlConfig::default());
        estimate_advantages(&ScoredBatch { rewards: &rewards, groups: &[0], values: None, config: &config });
    }

    #[test]
    fn in_the_sequence_form_a_response_has_one_advantage_and_the_critic_learns_at_its_first_token() {
        let config =
            RlConfig { advantage_form: AdvantageForm::Sequence, whiten_advantages: false, ..RlConfig::default() };
        let found = estimate(&config);
        assert_eq!(found.advantages[0], vec![1.0 - 0.2; 3]);
        let targets = found.targets.unwrap();
        assert_eq!(targets.mask[0], [true, false, false]);
        assert_eq!(targets.returns[1][0], -0.5);
    }

    #[test]
    fn gae_ignores_padding() {
        let clean = gae(&[vec![0.0, 1.0]], &[vec![0.5, 0.25]], &[vec![true, true]], 0.9, 0.8);
        let padded =
            gae(&[vec![0.0, 1.0, f32::NAN]], &[vec![0.5, 0.25, f32::INFINITY]], &[vec![true, true, false]], 0.9, 0.8);
        assert_eq!(padded.advantages[0][..2], clean.advantages[0][..]);
        assert_eq!(padded.advantages[0][2], 0.0);
    }

    #[test]
    fn the_last_token_is_not_bootstrapped() {
        let result = gae(&[vec![1.0]], &[vec![0.4]], &[vec![true]], 0.99, 0.95);
        assert!((result.advantages[0][0] - 0.6).abs() < 1e-6);
        assert!((result.returns[0][0] - 1.0).abs() < 1e-6);
    }

    #[test]
    fn returns_are_discounted_and_skip_masked_positions() {
        let returns = discounted_returns(&[vec![1.0, f32::NAN, 2.0]], &[vec![true, false, true]], 0.5);
        assert_eq!(returns, [[2.0, 0.0, 2.0]]);
    }

    #[test]
    fn equal_rewards_and_single_responses_have_advantage_0() {
        let (rewards, groups) = ([0.3, 0.3, 0.3, 5.0], [7, 7, 7, 9]);
        for advantages in [
            group_relative(&rewards, &groups, GroupScale::Deviation),
            group_relative(&rewards, &groups, GroupScale::One),
            leave_one_out(&rewards, &groups),
        ] {
            assert!(advantages.iter().all(|advantage| advantage.abs() < 1e-6), "{advantages:?}");
        }
        assert_eq!(share_without_spread(&rewards, &groups), 1.0);
        assert_eq!(share_without_spread(&[1.0, 2.0, 3.0, 3.0], &[0, 0, 1, 1]), 0.5);
    }

    /// Scores of 0.5 less a KL that is the rounding of log-probabilities: a deviation of 7e-8.
    #[test]
    fn rounding_between_equal_rewards_has_advantage_0() {
        let rewards = [0.5, 0.5 - 1e-7, 0.25, 0.75];
        let advantages = group_relative(&rewards, &[0, 0, 1, 1], GroupScale::Deviation);
        assert_eq!(advantages[..2], [0.0, 0.0]);
        assert!((advantages[3] - std::f32::consts::FRAC_1_SQRT_2).abs() < 1e-5, "{advantages:?}");
        assert_eq!(share_without_spread(&rewards, &[0, 0, 1, 1]), 0.5);
        let large = [1000.0, 1000.0001, 1000.0, 1001.0];
        assert_eq!(group_relative(&large, &[0, 0, 1, 1], GroupScale::Deviation)[..2], [0.0, 0.0]);
        assert_eq!(share_without_spread(&large, &[0, 0, 1, 1]), 0.5);
    }

    #[test]
    fn groups_need_not_be_contiguous() {
        let scattered = leave_one_out(&[1.0, 5.0, 2.0, 9.0, 3.0], &[0, 4, 0, 4, 0]);
        assert_eq!(scattered, [-1.5, -4.0, 0.0, 4.0, 1.5]);
    }
}

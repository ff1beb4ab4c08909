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
//! | GRPO | (score - group mean) / group standard deviation | mean over tokens, then responses | Shao et al. 2024, "DeepSeekMath", section 4.1; verl `grpo` with `seq-mean-token-mean`; TRL `loss_type: grpo` |
//! | Dr. GRPO | score - group mean | sum over tokens / `max_new_tokens`, mean over responses | Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective"; verl `norm_adv_by_std_in_grpo: false` with `seq-mean-token-sum-norm`; TRL `loss_type: dr_grpo` |
//! | RLOO | score - mean of the group's other scores | mean over tokens, as in verl; the paper's single ratio per response is the sequence form | Ahmadian et al. 2024, "Back to Basics"; verl `adv_estimator: rloo` |
//! | REINFORCE++ | discounted return, whitened over the batch | mean over tokens | Hu et al. 2025, "REINFORCE++"; verl `adv_estimator: reinforce_plus_plus` |
//! | RAFT | 1 for the best response of a group, 0 for the others, which are left out of the updates | cross-entropy, mean over tokens | Dong et al. 2023, "RAFT: Reward rAnked FineTuning", algorithm 1 |
//!
//! `rl.loss_agg` takes the place of the aggregation, `rl.policy_loss` that of the clipped loss. `rl.anchor_baseline` joins each group as the
//! reward of one more response, which has no tokens to learn.
//!
//! Departures from verl in group-relative advantages:
//! 1. A response alone in its group (the others were dropped) has an advantage of 0. verl's `compute_grpo_outcome_advantage` and
//!    `compute_rloo_outcome_advantage` take its reward; `compute_rloo_vectorized_outcome_advantage` takes 0 as well.
//! 2. A group whose rewards deviate by less than [`EPSILON`], or than that share of the largest, has advantages of 0. verl divides such
//!    rewards by their deviation: with equal scores, the rounding errors of KL in the reward become a tenth of other groups' advantages.
//!    RLOO and Dr. GRPO do not divide, so that rounding stays negligible. `frac_reward_zero_std` counts the groups whose scores,
//!    before KL, are such.
//! 3. In RAFT such a group has no best response (the paper takes one of them), and neither has one whose best does not exceed the anchor.

use super::losses::{Aggregation, Rows, kept, n_kept};
use querl_core::config::{AdvantageForm, LossAgg, RlAlgorithm, RlConfig};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Input of the advantage estimation: rewards, groups and values of a batch of B responses of T tokens each.
pub(super) struct ScoredBatch<'a> {
    /// Per-token rewards `(B, T)`: each response's score at its last token, minus the KL penalty if KL is part of the reward.
    pub(super) rewards: &'a Rows,
    /// Group id of each of the B responses: the row of its query.
    pub(super) groups: &'a [usize],
    /// Reward that counts as one more response of each group (`rl.anchor_baseline`), in the scale of `rewards`.
    pub(super) anchor: Option<f32>,
    /// Values of the critic, `(B, T)`; `None` for algorithms without a critic.
    pub(super) values: Option<&'a Rows>,
    pub(super) config: &'a RlConfig,
}

pub(super) struct AdvantageEstimate {
    /// Advantages `(B, T)`; with `rl.advantage_form = "sequence"` all tokens of a response have the same advantage.
    pub(super) advantages: Rows,
    /// Regression targets of the critic; `None` for algorithms without a critic.
    pub(super) targets: Option<ValueTargets>,
}

/// Regression targets of the critic.
pub(super) struct ValueTargets {
    /// Returns `(B, T)`, the targets of the values.
    pub(super) returns: Rows,
    /// Mask `(B, T)`: true for the tokens that count in the value loss.
    pub(super) mask: Vec<Vec<bool>>,
}

/// Whether an algorithm needs a critic's values.
pub(super) fn has_critic(algorithm: RlAlgorithm) -> bool {
    algorithm == RlAlgorithm::Ppo
}

/// Loss aggregation of a configuration. With sequence advantages the policy loss is averaged over responses, and each token gets the
/// gradient of its response's ratio. KL and entropy are then also summed over a response, so that `kl_coef` and `ent_coef` have the same
/// weight relative to the policy loss as with token advantages.
pub(super) fn aggregation(config: &RlConfig) -> Aggregation {
    match (config.advantage_form, config.loss_agg_in_force()) {
        (AdvantageForm::Sequence, _) => Aggregation::SequenceSum { scale: 1.0 },
        // All responses have the same weight in the loss, independent of their length.
        (AdvantageForm::Token, LossAgg::SeqMeanTokenMean) => Aggregation::SequenceMean,
        (AdvantageForm::Token, LossAgg::SeqMeanTokenSum) => Aggregation::SequenceSum { scale: 1.0 },
        (AdvantageForm::Token, LossAgg::SeqMeanTokenSumNorm) => {
            Aggregation::SequenceSum { scale: config.max_new_tokens as f32 }
        }
        (AdvantageForm::Token, LossAgg::TokenMean | LossAgg::Algorithm) => Aggregation::TokenMean,
    }
}

/// Estimates the advantages of a batch, and the critic's targets, with the configured algorithm.
pub(super) fn estimate_advantages(batch: &ScoredBatch<'_>) -> AdvantageEstimate {
    let (config, groups, anchor) = (batch.config, batch.groups, batch.anchor);
    let whiten = |advantages: Rows| match config.whiten_advantages {
        true => masked_whiten(&advantages, &all_true(&advantages)),
        false => advantages,
    };
    let values = || batch.values.expect("the critic's values: an algorithm that has a critic is given them");
    // (B): the sum of each response's rewards
    let totals = || -> Vec<f32> { batch.rewards.iter().map(|row| row.iter().sum()).collect() };
    // One number per response, repeated for each of its tokens.
    let at_every_token = |of_response: &[f32]| -> Rows {
        batch.rewards.iter().zip(of_response).map(|(row, value)| vec![*value; row.len()]).collect()
    };
    let without_critic = |advantages: Rows| AdvantageEstimate { advantages, targets: None };
    match (config.algorithm, config.advantage_form) {
        // GAE per token; advantages are whitened over the batch after the returns are computed.
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
            without_critic(at_every_token(&group_relative(&totals(), groups, anchor, GroupScale::Deviation)))
        }
        (RlAlgorithm::DrGrpo, _) => {
            without_critic(at_every_token(&group_relative(&totals(), groups, anchor, GroupScale::One)))
        }
        (RlAlgorithm::Rloo, _) => without_critic(at_every_token(&leave_one_out(&totals(), groups, anchor))),
        (RlAlgorithm::Raft, _) => without_critic(at_every_token(&best_of_group(&totals(), groups, anchor))),
        (RlAlgorithm::ReinforcePlusPlus, AdvantageForm::Token) => {
            let returns = discounted_returns(batch.rewards, &all_true(batch.rewards), config.gamma as f32);
            without_critic(whiten(returns))
        }
        // The total reward of a response is whitened over responses.
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

/// Overlong penalty of a response of `n_tokens` tokens: 0 up to `max_new_tokens - buffer_len`, then linear up to `penalty_factor` at
/// `max_new_tokens`; always 0 with a `buffer_len` of 0.
///
/// Source: Yu et al. 2025, "DAPO", equation 13; verl `DAPORewardManager.run_single`, `overlong_reward`.
pub fn overlong_penalty(n_tokens: usize, max_new_tokens: usize, buffer_len: usize, penalty_factor: f64) -> f64 {
    let n_exceeding = (n_tokens + buffer_len).saturating_sub(max_new_tokens);
    if buffer_len == 0 { 0.0 } else { n_exceeding as f64 / buffer_len as f64 * penalty_factor }
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
    /// Adds a batch of numbers.
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

    /// Mean of all numbers so far; 0 before the first batch.
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Unbiased standard deviation of all numbers so far; 1 for fewer than two numbers.
    pub fn deviation(&self) -> f64 {
        if self.count < 2.0 { 1.0 } else { (self.squares / (self.count - 1.0)).sqrt() }
    }
}

/// Advantages and returns of a batch, per token.
#[derive(Debug, Clone, PartialEq)]
pub struct Advantages {
    /// Advantages `(B, T)`, not whitened.
    pub advantages: Rows,
    /// Returns `(B, T)`: advantages plus values, the critic's targets.
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

/// Added to the standard deviation of a group's rewards; a smaller deviation is treated as 0.
///
/// Source: verl, default of `epsilon`.
const EPSILON: f64 = 1e-6;

/// Divisor of a reward's difference from the mean reward of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScale {
    /// The group's standard deviation (GRPO).
    Deviation,
    /// No scaling: the divisor is 1 (Dr. GRPO).
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

/// Groups by id; the `anchor` is one more reward in each.
fn groups_of(rewards: &[f32], groups: &[usize], anchor: Option<f32>) -> BTreeMap<usize, Group> {
    let mut found: BTreeMap<usize, Group> = BTreeMap::new();
    let ids: BTreeSet<usize> = groups.iter().copied().collect();
    let anchors = || ids.iter().filter_map(move |id| Some((anchor?, *id)));
    let members = || rewards.iter().copied().zip(groups.iter().copied()).chain(anchors());
    for (reward, id) in members() {
        let group = found.entry(id).or_default();
        (group.n, group.sum) = (group.n + 1.0, group.sum + f64::from(reward));
        group.largest = group.largest.max(f64::from(reward.abs()));
    }
    for (reward, id) in members() {
        if let Some(group) = found.get_mut(&id) {
            group.squares += (f64::from(reward) - group.mean()).powi(2);
        }
    }
    found
}

/// Each response's reward minus the mean of its group, divided by `scale`.
///
/// `rewards`, `groups` (which query): B; `anchor`: one more reward of each group. Returns B.
///
/// Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2; Liu et al. 2025, "Understanding R1-Zero-Like Training" (without
/// the deviation); verl `compute_grpo_outcome_advantage`.
pub fn group_relative(rewards: &[f32], groups: &[usize], anchor: Option<f32>, scale: GroupScale) -> Vec<f32> {
    let found = groups_of(rewards, groups, anchor);
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
/// `rewards`, `groups` (which query): B; `anchor`: one more reward of each group. Returns B.
///
/// Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization"; verl
/// `compute_rloo_outcome_advantage`.
pub fn leave_one_out(rewards: &[f32], groups: &[usize], anchor: Option<f32>) -> Vec<f32> {
    let found = groups_of(rewards, groups, anchor);
    let advantage = |(reward, id): (&f32, &usize)| {
        let group = &found[id];
        let distance = f64::from(*reward) - group.mean();
        if group.n < 2.0 { 0.0 } else { (distance * group.n / (group.n - 1.0)) as f32 }
    };
    rewards.iter().zip(groups).map(advantage).collect()
}

/// RAFT advantages: 1 for the best response of each group (the first of equal ones), 0 for the others. All are 0 in a group whose rewards
/// are all equal, and, with an `anchor`, in a group whose best reward is not above the anchor.
///
/// `rewards`, `groups` (which query): B. Returns B.
///
/// Source: Dong et al. 2023, "RAFT: Reward rAnked FineTuning for Generative Foundation Model Alignment", algorithm 1.
pub fn best_of_group(rewards: &[f32], groups: &[usize], anchor: Option<f32>) -> Vec<f32> {
    let found = groups_of(rewards, groups, anchor);
    let mut best: BTreeMap<usize, usize> = BTreeMap::new();
    for (index, id) in groups.iter().enumerate() {
        let first = best.entry(*id).or_insert(index);
        if rewards[index] > rewards[*first] {
            *first = index;
        }
    }
    let weight = |(index, id): (usize, &usize)| {
        let group = &found[id];
        let is_above = anchor.is_none_or(|anchor| rewards[index] > anchor);
        f32::from(u8::from(best[id] == index && group.n >= 2.0 && !group.is_flat() && is_above))
    };
    groups.iter().enumerate().map(weight).collect()
}

/// Share of the groups of at least two rewards (the `anchor` included) whose rewards are all equal.
///
/// Source: TRL `GRPOTrainer`, `frac_reward_zero_std`, whose rewards lack KL; as verl `filter_groups` with `seq_reward`.
pub fn share_without_spread(rewards: &[f32], groups: &[usize], anchor: Option<f32>) -> f32 {
    let found = groups_of(rewards, groups, anchor);
    let compared = found.values().filter(|group| group.n >= 2.0);
    let (n, n_equal) = compared.fold((0, 0), |(n, n_equal), group| (n + 1, n_equal + i32::from(group.is_flat())));
    n_equal as f32 / n.max(1) as f32
}

/// Ids of the groups of at least two rewards (the `anchor` included) whose rewards are all equal: their advantages are 0.
///
/// Source: Yu et al. 2025, "DAPO", section 3.2; verl `ReplayBuffer._dapo_filtered_keys`.
pub fn groups_without_spread(rewards: &[f32], groups: &[usize], anchor: Option<f32>) -> BTreeSet<usize> {
    let found = groups_of(rewards, groups, anchor);
    found.into_iter().filter(|(_, group)| group.n >= 2.0 && group.is_flat()).map(|(id, _)| id).collect()
}

/// Mean standard deviation of the rewards of a group, over the groups of at least two rewards; 0 if there is no such group.
///
/// Source: TRL `GRPOTrainer`, `reward_std`.
pub fn mean_group_deviation(rewards: &[f32], groups: &[usize]) -> f64 {
    let found = groups_of(rewards, groups, None);
    let deviations: Vec<f64> = found.values().filter(|group| group.n >= 2.0).map(Group::deviation).collect();
    deviations.iter().sum::<f64>() / deviations.len().max(1) as f64
}

#[cfg(test)]
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
        let (groups, values) = (&[0, 1, 2], Some(&values));
        estimate_advantages(&ScoredBatch { rewards: &rewards, groups, anchor: None, values, config })
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

    /// Regression: without values all advantages were missing, and the policy was not updated.
    #[test]
    #[should_panic(expected = "the critic's values")]
    fn missing_values_panic() {
        let (rewards, config) = (vec![vec![1.0]], RlConfig::default());
        let batch = ScoredBatch { rewards: &rewards, groups: &[0], anchor: None, values: None, config: &config };
        estimate_advantages(&batch);
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
            group_relative(&rewards, &groups, None, GroupScale::Deviation),
            group_relative(&rewards, &groups, None, GroupScale::One),
            leave_one_out(&rewards, &groups, None),
        ] {
            assert!(advantages.iter().all(|advantage| advantage.abs() < 1e-6), "{advantages:?}");
        }
        assert_eq!(share_without_spread(&rewards, &groups, None), 1.0);
        assert_eq!(share_without_spread(&[1.0, 2.0, 3.0, 3.0], &[0, 0, 1, 1], None), 0.5);
        assert_eq!(groups_without_spread(&[1.0, 2.0, 3.0, 3.0, 7.0], &[0, 0, 1, 1, 2], None), BTreeSet::from([1]));
        // Deviations of 0.7071 and 0; the last group has one response.
        let deviation = mean_group_deviation(&[1.0, 2.0, 3.0, 3.0, 7.0], &[0, 0, 1, 1, 2]);
        assert!((deviation - std::f64::consts::FRAC_1_SQRT_2 / 2.0).abs() < 1e-12, "{deviation}");
        assert_eq!(mean_group_deviation(&[7.0], &[2]), 0.0);
    }

    /// An anchor is one more sample of the group for GRPO, Dr. GRPO and RLOO. The expected values are those of these algorithms with the
    /// anchor in the batch.
    #[test]
    fn an_anchor_is_one_more_reward_of_each_group() {
        let (rewards, groups) = ([0.6, 0.2, -0.4, -0.4], [3, 3, 5, 5]);
        let with_samples = ([0.6, 0.2, -0.4, -0.4, 0.0, 0.0], [3, 3, 5, 5, 3, 5]);
        for scale in [GroupScale::Deviation, GroupScale::One] {
            let found = group_relative(&rewards, &groups, Some(0.0), scale);
            assert_eq!(found[..], group_relative(&with_samples.0, &with_samples.1, None, scale)[..4]);
        }
        let found = leave_one_out(&rewards, &groups, Some(0.0));
        assert_eq!(found[..], leave_one_out(&with_samples.0, &with_samples.1, None)[..4]);
        // 0.6 - (0.2 + 0) / 2 and -0.4 - (-0.4 + 0) / 2.
        assert!((found[0] - 0.5).abs() < 1e-6 && (found[2] + 0.2).abs() < 1e-6, "{found:?}");
        // Equal rewards that differ from the anchor have advantages, and a single response is compared with the anchor.
        assert_eq!(share_without_spread(&rewards, &groups, Some(0.0)), 0.0);
        assert!(groups_without_spread(&rewards, &groups, None).contains(&5));
        assert!(groups_without_spread(&[0.0, 0.0], &[1, 1], Some(0.0)).contains(&1));
        assert_eq!(group_relative(&[0.5], &[0], Some(0.0), GroupScale::One), [0.25]);
    }

    #[test]
    fn the_best_response_of_a_group_is_learned_where_it_exceeds_the_others_and_the_anchor() {
        let (rewards, groups) = ([0.1, 0.7, 0.7, -0.3, -0.1, 0.4, 0.4, 0.9], [0, 0, 0, 1, 1, 2, 2, 3]);
        assert_eq!(best_of_group(&rewards, &groups, None), [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
        assert_eq!(best_of_group(&rewards, &groups, Some(0.0)), [0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]);
        let config = RlConfig { algorithm: RlAlgorithm::Raft, ..RlConfig::default() };
        let rewards = vec![vec![0.0, 0.2], vec![-0.1, 0.5, 0.1]];
        let batch = ScoredBatch { rewards: &rewards, groups: &[0, 0], anchor: None, values: None, config: &config };
        assert_eq!(estimate_advantages(&batch).advantages, [vec![0.0; 2], vec![1.0; 3]]);
    }

    /// verl's names of aggregations; its values are compared in tests/formulas.rs.
    #[test]
    fn a_named_aggregation_takes_the_place_of_the_algorithms() {
        let of = |algorithm, loss_agg| aggregation(&RlConfig { algorithm, loss_agg, ..RlConfig::default() });
        assert_eq!(of(RlAlgorithm::Ppo, LossAgg::Algorithm), Aggregation::TokenMean);
        assert_eq!(of(RlAlgorithm::Grpo, LossAgg::Algorithm), Aggregation::SequenceMean);
        assert_eq!(of(RlAlgorithm::DrGrpo, LossAgg::Algorithm), Aggregation::SequenceSum { scale: 150.0 });
        assert_eq!(of(RlAlgorithm::Grpo, LossAgg::TokenMean), Aggregation::TokenMean);
        assert_eq!(of(RlAlgorithm::Ppo, LossAgg::SeqMeanTokenMean), Aggregation::SequenceMean);
        assert_eq!(of(RlAlgorithm::Grpo, LossAgg::SeqMeanTokenSum), Aggregation::SequenceSum { scale: 1.0 });
        assert_eq!(of(RlAlgorithm::Ppo, LossAgg::SeqMeanTokenSumNorm), Aggregation::SequenceSum { scale: 150.0 });
    }

    /// Scores of 0.5 minus a KL that consists of rounding errors of log-probabilities: a deviation of 7e-8.
    #[test]
    fn rounding_between_equal_rewards_has_advantage_0() {
        let rewards = [0.5, 0.5 - 1e-7, 0.25, 0.75];
        let advantages = group_relative(&rewards, &[0, 0, 1, 1], None, GroupScale::Deviation);
        assert_eq!(advantages[..2], [0.0, 0.0]);
        assert!((advantages[3] - std::f32::consts::FRAC_1_SQRT_2).abs() < 1e-5, "{advantages:?}");
        assert_eq!(share_without_spread(&rewards, &[0, 0, 1, 1], None), 0.5);
        let large = [1000.0, 1000.0001, 1000.0, 1001.0];
        assert_eq!(group_relative(&large, &[0, 0, 1, 1], None, GroupScale::Deviation)[..2], [0.0, 0.0]);
        assert_eq!(share_without_spread(&large, &[0, 0, 1, 1], None), 0.5);
    }

    #[test]
    fn groups_need_not_be_contiguous() {
        let scattered = leave_one_out(&[1.0, 5.0, 2.0, 9.0, 3.0], &[0, 4, 0, 4, 0], None);
        assert_eq!(scattered, [-1.5, -4.0, 0.0, 4.0, 1.5]);
    }
}

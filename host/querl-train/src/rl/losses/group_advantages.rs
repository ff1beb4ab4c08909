//! Group-relative advantages: GRPO, Dr. GRPO, RLOO.
//!
//! Departures from verl:
//! 1. A response alone in its group (the others were dropped) has an advantage of 0. verl's `compute_grpo_outcome_advantage` and
//!    `compute_rloo_outcome_advantage` take its reward; `compute_rloo_vectorized_outcome_advantage` takes 0 as well.
//! 2. A group whose rewards deviate by less than [`EPSILON`], or than that share of the largest, has advantages of 0. Between equal
//!    scores, the rounding of KL in the reward would otherwise be divided by its own deviation and become a tenth of other groups'
//!    advantages; verl divides it. `frac_reward_zero_std` counts these groups. RLOO and Dr. GRPO do not divide, so that rounding stays
//!    negligible.

use std::collections::BTreeMap;

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
mod tests {
    use super::*;

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

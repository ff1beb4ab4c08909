//! Generalised advantage estimation (GAE) and discounted returns.

use super::Rows;

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

#[cfg(test)]
mod tests {
    use super::*;

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
}

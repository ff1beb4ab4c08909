//! Discounted returns.

use super::Rows;

/// Sums of what is still to come: `rewards[t] + gamma * returns[t + 1]`.
///
/// `rewards`: `(B, T)`; positions where `response_mask` is false yield 0 and hand the return behind them on.
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
    fn what_comes_later_counts_less_and_nothing_comes_after_the_end() {
        let returns = discounted_returns(&[vec![1.0, f32::NAN, 2.0]], &[vec![true, false, true]], 0.5);
        assert_eq!(returns, [[2.0, 0.0, 2.0]]);
    }
}

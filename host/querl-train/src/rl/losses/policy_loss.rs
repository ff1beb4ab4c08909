//! The clipped policy loss of PPO.

use super::masked::kept;
use super::{Rows, assert_shapes};
use std::slice::from_ref;

/// Clipping of the probability ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolicyClip {
    /// Ratios are clipped to `1 - clip_range ..= 1 + clip_range`.
    pub clip_range: f32,
    /// Above 1: bounds the loss of tokens with negative advantage at this multiple of it.
    pub dual_clip: Option<f32>,
}

/// The loss, its gradient, and metrics. Counts and sums are over ratios: tokens, or responses in the sequence form.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyLoss {
    /// Weighted sum of the tokens' losses.
    pub pg_loss: f32,
    /// Ratios that were clipped.
    pub n_clipped: usize,
    /// Ratios whose loss the dual clip bounded.
    pub n_clipped_lower: usize,
    /// Sum of `old_logprobs - logprobs`, the k1 estimate of KL from the rollout policy; may be negative.
    pub kl_sum: f64,
    /// Sum of `ratio - 1 - log(ratio)`, the k3 estimate; never negative.
    ///
    /// Source: Schulman 2020, "Approximating KL divergence".
    pub kl_k3_sum: f64,
    /// `(B, T)`: derivative of `pg_loss` with respect to each log-probability.
    pub grad_logprobs: Rows,
}

/// Log-ratios are clamped to this before the exponential.
const MAX_LOG_RATIO: f32 = 20.0;

/// The clipped policy loss: `max(-A r, -A clip(r, 1 - clip_range, 1 + clip_range))`.
///
/// `old_logprobs`, `logprobs`, `advantages`: `(B, T)`. `weights`, `(B, T)`: each token's weight in the step
/// ([`Aggregation::weights`](super::Aggregation::weights), times importance weights); tokens of weight 0 are skipped.
///
/// # Panics
/// The shapes differ.
///
/// Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; dual clip of Ye et al. 2020; verl
/// `compute_policy_loss_vanilla`.
pub fn policy_loss(
    old_logprobs: &[Vec<f32>],
    logprobs: &[Vec<f32>],
    advantages: &[Vec<f32>],
    weights: &[Vec<f32>],
    clip: PolicyClip,
) -> PolicyLoss {
    assert_shapes(weights, &[old_logprobs, logprobs, advantages]);
    let (mut loss, mut n_clipped, mut n_clipped_lower, mut kl_sum, mut kl_k3_sum) = (0f64, 0, 0, 0f64, 0f64);
    let mut grad_logprobs: Rows = logprobs.iter().map(|row| vec![0.0; row.len()]).collect();
    for (b, weights) in weights.iter().enumerate() {
        for (t, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight != 0.0) {
            let token = TokenLoss::new(old_logprobs[b][t], logprobs[b][t], advantages[b][t], clip);
            loss += f64::from(token.loss) * f64::from(*weight);
            n_clipped += usize::from(token.is_clipped);
            n_clipped_lower += usize::from(token.is_clipped_lower);
            kl_sum -= f64::from(token.log_ratio);
            kl_k3_sum += f64::from(token.log_ratio).exp_m1() - f64::from(token.log_ratio);
            grad_logprobs[b][t] = token.gradient * weight;
        }
    }
    PolicyLoss { pg_loss: loss as f32, n_clipped, n_clipped_lower, kl_sum, kl_k3_sum, grad_logprobs }
}

/// [`policy_loss`] with one ratio per response, `exp(sum over its tokens of logprob - old_logprob)`, and one advantage.
///
/// `advantages`, `weights`: B. Each token where `response_mask` is true gets the gradient of its response's ratio.
pub fn sequence_policy_loss(
    old_logprobs: &[Vec<f32>],
    logprobs: &[Vec<f32>],
    advantages: &[f32],
    response_mask: &[Vec<bool>],
    weights: &[f32],
    clip: PolicyClip,
) -> PolicyLoss {
    let sums = |rows: &[Vec<f32>]| -> Rows {
        let row = |(row, mask): (&Vec<f32>, &Vec<bool>)| vec![kept(from_ref(row), from_ref(mask)).sum()];
        rows.iter().zip(response_mask).map(row).collect()
    };
    let one_each = |values: &[f32]| -> Rows { values.iter().map(|value| vec![*value]).collect() };
    let (old, new) = (sums(old_logprobs), sums(logprobs));
    let loss = policy_loss(&old, &new, &one_each(advantages), &one_each(weights), clip);
    let spread = |(gradient, mask): (&Vec<f32>, &Vec<bool>)| {
        mask.iter().map(|keep| if *keep { gradient[0] } else { 0.0 }).collect()
    };
    PolicyLoss { grad_logprobs: loss.grad_logprobs.iter().zip(response_mask).map(spread).collect(), ..loss }
}

struct TokenLoss {
    loss: f32,
    gradient: f32,
    log_ratio: f32,
    is_clipped: bool,
    is_clipped_lower: bool,
}

impl TokenLoss {
    fn new(old_logprob: f32, logprob: f32, advantage: f32, clip: PolicyClip) -> Self {
        let raw = logprob - old_logprob;
        let log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO);
        let ratio = log_ratio.exp();
        let plain = -advantage * ratio;
        let clipped = -advantage * ratio.clamp(1.0 - clip.clip_range, 1.0 + clip.clip_range);
        let is_clipped = clipped > plain;
        let is_saturated = raw != log_ratio;
        let gradient = if is_clipped || is_saturated { 0.0 } else { plain };
        let loss = plain.max(clipped);
        match clip.dual_clip {
            Some(bound) if advantage < 0.0 && -advantage * bound < loss => {
                Self { loss: -advantage * bound, gradient: 0.0, log_ratio, is_clipped, is_clipped_lower: true }
            }
            _ => Self { loss, gradient, log_ratio, is_clipped, is_clipped_lower: false },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rl::losses::{Aggregation, StepSize};

    const CLIP: PolicyClip = PolicyClip { clip_range: 0.2, dual_clip: None };

    fn token_mean(mask: &[Vec<bool>]) -> Rows {
        Aggregation::TokenMean.weights(mask, StepSize::of(mask))
    }

    /// Reward 0.65, V(s) 0.5, log-probabilities -2.3 and -2.1: `A = R - V(s)` is 0.15, the ratio e^0.2 = 1.2214 is clipped to 1.2.
    #[test]
    fn worked_example_with_a_positive_advantage() {
        let advantage = 0.65 - 0.5;
        let ratio = (-2.1f32 + 2.3).exp();
        assert!((ratio - 1.2214).abs() < 1e-4);
        assert!((ratio * advantage - 0.1832).abs() < 1e-4);
        assert!((ratio.clamp(0.8, 1.2) * advantage - 0.18).abs() < 1e-6);
        let (old, new) = (vec![vec![-2.3]], vec![vec![-2.1]]);
        let loss = policy_loss(&old, &new, &[vec![advantage]], &[vec![1.0]], CLIP);
        assert!((loss.pg_loss + 0.18).abs() < 1e-6);
        assert_eq!((loss.n_clipped, loss.grad_logprobs[0][0]), (1, 0.0));
        let sequence = sequence_policy_loss(&old, &new, &[advantage], &[vec![true]], &[1.0], CLIP);
        assert_eq!(sequence.pg_loss, loss.pg_loss);
    }

    /// The same with reward -0.3: the advantage is -0.8, and the loss pushes the probability down without clipping.
    #[test]
    fn worked_example_with_a_negative_advantage() {
        let advantage = -0.3 - 0.5;
        let loss = policy_loss(&[vec![-2.3]], &[vec![-2.1]], &[vec![advantage]], &[vec![1.0]], CLIP);
        assert!((loss.pg_loss - 0.8 * 0.2f32.exp()).abs() < 1e-5, "{}", loss.pg_loss);
        assert!(loss.grad_logprobs[0][0] > 0.0, "descent lowers the log-probability");
        assert_eq!(loss.n_clipped, 0);
    }

    #[test]
    fn before_an_update_the_ratio_is_one() {
        let logprobs = vec![vec![-1.0, -0.2], vec![-3.0]];
        let weights = token_mean(&[vec![true, true], vec![true]]);
        let loss = policy_loss(&logprobs, &logprobs, &[vec![1.0, -1.0], vec![0.5]], &weights, CLIP);
        assert_eq!((loss.n_clipped, loss.kl_sum, loss.kl_k3_sum), (0, 0.0, 0.0));
        assert!((loss.pg_loss + 0.5 / 3.0).abs() < 1e-6);
    }

    #[test]
    #[should_panic(expected = "the rows of a loss differ")]
    fn rows_shorter_than_their_weights_panic() {
        policy_loss(&[vec![-1.0]], &[vec![-1.0, -2.0]], &[vec![1.0]], &[vec![1.0]], CLIP);
    }

    #[test]
    fn log_ratios_are_bounded() {
        let loss = policy_loss(&[vec![-500.0]], &[vec![0.0]], &[vec![-1.0]], &[vec![1.0]], CLIP);
        assert!(loss.pg_loss.is_finite() && loss.kl_k3_sum.is_finite());
    }

    #[test]
    fn masked_positions_do_not_leak() {
        let mask = vec![vec![true, false]];
        let (old, new) = (vec![vec![-1.0, f32::NAN]], vec![vec![-0.9, f32::NAN]]);
        let loss = policy_loss(&old, &new, &[vec![1.0, f32::INFINITY]], &token_mean(&mask), CLIP);
        assert!(loss.pg_loss.is_finite() && loss.kl_sum.is_finite() && loss.kl_k3_sum.is_finite());
        assert_eq!(loss.grad_logprobs[0][1], 0.0);
        let sequence = sequence_policy_loss(&old, &new, &[1.0], &mask, &[1.0], CLIP);
        assert!(sequence.pg_loss.is_finite());
        assert_eq!(sequence.grad_logprobs[0][1], 0.0);
    }

    #[test]
    fn the_loss_does_not_depend_on_the_split_into_micro_batches() {
        let old = vec![vec![-1.0, -2.0, -0.1], vec![-0.4]];
        let new = vec![vec![-1.1, -1.5, -0.1], vec![-0.9]];
        let advantages = vec![vec![0.3, -0.2, 1.0], vec![-0.7]];
        let weights = token_mean(&[vec![true; 3], vec![true]]);
        let whole = policy_loss(&old, &new, &advantages, &weights, CLIP);
        let part = |b: usize| {
            let one = |rows: &[Vec<f32>]| vec![rows[b].clone()];
            policy_loss(&one(&old), &one(&new), &one(&advantages), &one(&weights), CLIP)
        };
        let (first, second) = (part(0), part(1));
        assert!((whole.pg_loss - first.pg_loss - second.pg_loss).abs() < 1e-6);
        assert_eq!(whole.grad_logprobs, [first.grad_logprobs, second.grad_logprobs].concat());
    }
}

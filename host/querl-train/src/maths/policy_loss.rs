//! The clipped surrogate loss of PPO.

use super::Rows;
use super::mask::{kept, n_kept};
use std::slice::from_ref;

/// The loss, its gradient, and what to watch.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyLoss {
    /// Mean over the tokens that count.
    pub pg_loss: f32,
    /// Share of tokens whose ratio was clipped.
    pub pg_clipfrac: f32,
    /// Mean of `old_logprobs - logprobs`: how far the update has gone.
    pub ppo_kl: f32,
    /// `(B, T)`: derivative of `pg_loss` by each log-probability.
    pub grad_logprobs: Rows,
}

/// Log-ratios are clamped to this before the exponential.
const MAX_LOG_RATIO: f32 = 20.0;

/// The clipped surrogate, averaged over `n_tokens`.
///
/// `old_logprobs`, `logprobs`, `advantages`: `(B, T)`. `n_tokens` is the number of tokens that count in the whole optimizer
/// step, so that the sum over micro-batches is the loss of the step, however it is split. `dual_clip`, above 1, bounds the
/// loss of tokens with negative advantage.
///
/// Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; dual clip of Ye et al. 2020; verl
/// `compute_policy_loss` with `token-mean`.
pub fn policy_loss(
    old_logprobs: &[Vec<f32>],
    logprobs: &[Vec<f32>],
    advantages: &[Vec<f32>],
    response_mask: &[Vec<bool>],
    clip_range: f32,
    dual_clip: Option<f32>,
    n_tokens: usize,
) -> PolicyLoss {
    let share = 1.0 / n_tokens.max(1) as f64;
    let (mut loss, mut clipped, mut kl) = (0f64, 0f64, 0f64);
    let mut grad_logprobs: Rows = logprobs.iter().map(|row| vec![0.0; row.len()]).collect();
    for (b, mask) in response_mask.iter().enumerate() {
        for t in (0..mask.len()).filter(|&t| mask[t]) {
            let token = TokenLoss::new(old_logprobs[b][t], logprobs[b][t], advantages[b][t], clip_range, dual_clip);
            loss += f64::from(token.loss) * share;
            clipped += f64::from(token.is_clipped) * share;
            kl -= f64::from(token.log_ratio) * share;
            grad_logprobs[b][t] = token.gradient * share as f32;
        }
    }
    PolicyLoss { pg_loss: loss as f32, pg_clipfrac: clipped as f32, ppo_kl: kl as f32, grad_logprobs }
}

/// The same with one ratio for a whole response, as in the source plan: `exp(sum of log-ratios)`, averaged over `n_responses`.
///
/// `advantages`: B. The gradient of a response falls equally on each of its tokens.
pub fn sequence_policy_loss(
    old_logprobs: &[Vec<f32>],
    logprobs: &[Vec<f32>],
    advantages: &[f32],
    response_mask: &[Vec<bool>],
    clip_range: f32,
    n_responses: usize,
) -> PolicyLoss {
    let sums = |rows: &[Vec<f32>]| -> Rows {
        let row = |(row, mask): (&Vec<f32>, &Vec<bool>)| vec![kept(from_ref(row), from_ref(mask)).sum()];
        rows.iter().zip(response_mask).map(row).collect()
    };
    let one_each = vec![vec![true]; advantages.len()];
    let advantages: Rows = advantages.iter().map(|advantage| vec![*advantage]).collect();
    let (old, new) = (sums(old_logprobs), sums(logprobs));
    let mut loss = policy_loss(&old, &new, &advantages, &one_each, clip_range, None, n_responses);
    let spread = |(gradient, mask): (&Vec<f32>, &Vec<bool>)| {
        mask.iter().map(|keep| if *keep { gradient[0] } else { 0.0 }).collect()
    };
    loss.grad_logprobs = loss.grad_logprobs.iter().zip(response_mask).map(spread).collect();
    // Per token, so that the figure compares with the other form's.
    loss.ppo_kl *= n_responses as f32 / n_kept(response_mask).max(1) as f32;
    loss
}

struct TokenLoss {
    loss: f32,
    gradient: f32,
    log_ratio: f32,
    is_clipped: bool,
}

impl TokenLoss {
    fn new(old_logprob: f32, logprob: f32, advantage: f32, clip_range: f32, dual_clip: Option<f32>) -> Self {
        let raw = logprob - old_logprob;
        let log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO);
        let ratio = log_ratio.exp();
        let plain = -advantage * ratio;
        let clipped = -advantage * ratio.clamp(1.0 - clip_range, 1.0 + clip_range);
        let is_clipped = clipped > plain;
        let is_saturated = raw != log_ratio;
        let gradient = if is_clipped || is_saturated { 0.0 } else { plain };
        let loss = plain.max(clipped);
        match dual_clip {
            Some(bound) if advantage < 0.0 && -advantage * bound < loss => {
                Self { loss: -advantage * bound, gradient: 0.0, log_ratio, is_clipped }
            }
            _ => Self { loss, gradient, log_ratio, is_clipped },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The source plan's worked example, section 3.6.4: reward 0.65, V(s) 0.5, log-probabilities -2.3 and -2.1.
    #[test]
    fn worked_example_of_the_source_plan() {
        let advantage = 0.65 - 0.5;
        let ratio = (-2.1f32 + 2.3).exp();
        assert!((ratio - 1.2214).abs() < 1e-4);
        assert!((ratio * advantage - 0.1832).abs() < 1e-4);
        assert!((ratio.clamp(0.8, 1.2) * advantage - 0.18).abs() < 1e-6);
        let (old, new, mask) = (vec![vec![-2.3]], vec![vec![-2.1]], vec![vec![true]]);
        let loss = policy_loss(&old, &new, &[vec![advantage]], &mask, 0.2, None, 1);
        assert!((loss.pg_loss + 0.18).abs() < 1e-6);
        assert_eq!((loss.pg_clipfrac, loss.grad_logprobs[0][0]), (1.0, 0.0));
        let sequence = sequence_policy_loss(&old, &new, &[advantage], &mask, 0.2, 1);
        assert_eq!(sequence.pg_loss, loss.pg_loss);
    }

    /// The same with reward -0.3: the advantage is -0.8, and the loss pushes the probability down without clipping.
    #[test]
    fn worked_example_with_a_negative_reward() {
        let advantage = -0.3 - 0.5;
        let loss = policy_loss(&[vec![-2.3]], &[vec![-2.1]], &[vec![advantage]], &[vec![true]], 0.2, None, 1);
        assert!((loss.pg_loss - 0.8 * 0.2f32.exp()).abs() < 1e-5, "{}", loss.pg_loss);
        assert!(loss.grad_logprobs[0][0] > 0.0, "descent lowers the log-probability");
        assert_eq!(loss.pg_clipfrac, 0.0);
    }

    #[test]
    fn before_an_update_the_ratio_is_one() {
        let logprobs = vec![vec![-1.0, -0.2], vec![-3.0]];
        let mask = vec![vec![true, true], vec![true]];
        let loss = policy_loss(&logprobs, &logprobs, &[vec![1.0, -1.0], vec![0.5]], &mask, 0.2, None, 3);
        assert_eq!((loss.pg_clipfrac, loss.ppo_kl), (0.0, 0.0));
        assert!((loss.pg_loss + 0.5 / 3.0).abs() < 1e-6);
    }

    #[test]
    fn log_ratios_are_bounded() {
        let loss = policy_loss(&[vec![-500.0]], &[vec![0.0]], &[vec![-1.0]], &[vec![true]], 0.2, None, 1);
        assert!(loss.pg_loss.is_finite());
    }

    #[test]
    fn masked_positions_do_not_leak() {
        let mask = vec![vec![true, false]];
        let loss = policy_loss(
            &[vec![-1.0, f32::NAN]],
            &[vec![-0.9, f32::NAN]],
            &[vec![1.0, f32::INFINITY]],
            &mask,
            0.2,
            None,
            1,
        );
        assert!(loss.pg_loss.is_finite() && loss.ppo_kl.is_finite());
        assert_eq!(loss.grad_logprobs[0][1], 0.0);
    }

    #[test]
    fn the_loss_does_not_depend_on_the_split_into_micro_batches() {
        let old = vec![vec![-1.0, -2.0, -0.1], vec![-0.4]];
        let new = vec![vec![-1.1, -1.5, -0.1], vec![-0.9]];
        let advantages = vec![vec![0.3, -0.2, 1.0], vec![-0.7]];
        let mask = vec![vec![true; 3], vec![true]];
        let whole = policy_loss(&old, &new, &advantages, &mask, 0.2, None, 4);
        let part = |b: usize| {
            let one = |rows: &[Vec<f32>]| vec![rows[b].clone()];
            policy_loss(&one(&old), &one(&new), &one(&advantages), &[mask[b].clone()], 0.2, None, 4)
        };
        let (first, second) = (part(0), part(1));
        assert!((whole.pg_loss - first.pg_loss - second.pg_loss).abs() < 1e-6);
        assert_eq!(whole.grad_logprobs, [first.grad_logprobs, second.grad_logprobs].concat());
    }
}

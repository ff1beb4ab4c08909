//! The clipped loss of the critic.

use super::Rows;

/// The loss, its gradient, and what to watch.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueLoss {
    /// Half the mean squared error over the tokens that count, the worse of plain and clipped.
    pub vf_loss: f32,
    /// Share of tokens where the clipped error was the worse.
    pub vf_clipfrac: f32,
    /// `(B, T)`: derivative of `vf_loss` by each value.
    pub grad_values: Rows,
}

/// Half the squared error of `values` against `returns`, where values move at most `clip_range_value` from `old_values`,
/// averaged over `n_tokens` of the whole optimizer step.
///
/// Source: verl `compute_value_loss` with `token-mean`; Schulman et al. 2017's implementation in OpenAI baselines.
pub fn value_loss(
    old_values: &[Vec<f32>],
    values: &[Vec<f32>],
    returns: &[Vec<f32>],
    response_mask: &[Vec<bool>],
    clip_range_value: f32,
    n_tokens: usize,
) -> ValueLoss {
    let share = 1.0 / n_tokens.max(1) as f64;
    let (mut loss, mut clipped_tokens) = (0f64, 0f64);
    let mut grad_values: Rows = values.iter().map(|row| vec![0.0; row.len()]).collect();
    for (b, mask) in response_mask.iter().enumerate() {
        for t in (0..mask.len()).filter(|&t| mask[t]) {
            let (old, value, target) = (old_values[b][t], values[b][t], returns[b][t]);
            let clipped = value.clamp(old - clip_range_value, old + clip_range_value);
            let (plain_error, clipped_error) = ((value - target).powi(2), (clipped - target).powi(2));
            let is_clipped = clipped_error > plain_error;
            loss += 0.5 * f64::from(plain_error.max(clipped_error)) * share;
            clipped_tokens += f64::from(is_clipped) * share;
            grad_values[b][t] = if is_clipped { 0.0 } else { (value - target) * share as f32 };
        }
    }
    ValueLoss { vf_loss: loss as f32, vf_clipfrac: clipped_tokens as f32, grad_values }
}

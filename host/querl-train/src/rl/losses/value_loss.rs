//! The clipped value loss of the critic.

use super::{Rows, assert_shapes};
use querl_core::config::ValueLossKind;

/// Kind of loss and clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ValueLossSettings {
    /// Half the squared error, or Huber with delta 1.
    pub kind: ValueLossKind,
    /// Values are clipped to this distance from the old ones; `None`: no clipping.
    pub clip_range_value: Option<f32>,
}

/// The loss, its gradient, and metrics.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueLoss {
    /// Weighted sum over tokens of the larger of plain and clipped loss.
    pub vf_loss: f32,
    /// Tokens where the clipped loss was larger.
    pub n_clipped: usize,
    /// `(B, T)`: derivative of `vf_loss` with respect to each value.
    pub grad_values: Rows,
}

/// Loss of an error and its derivative.
///
/// Source: torch `huber_loss` with delta 1.
fn error_loss(kind: ValueLossKind, error: f32) -> (f32, f32) {
    match kind {
        ValueLossKind::Huber if error.abs() > 1.0 => (error.abs() - 0.5, error.signum()),
        _ => (0.5 * error * error, error),
    }
}

/// The clipped loss of `values` against `returns`.
///
/// `old_values`, `values`, `returns`, `weights`: `(B, T)`; tokens of weight 0 are skipped.
///
/// # Panics
/// The shapes differ.
///
/// Source: verl `compute_value_loss` (squared); Schulman et al. 2017's implementation in OpenAI baselines.
pub fn value_loss(
    old_values: &[Vec<f32>],
    values: &[Vec<f32>],
    returns: &[Vec<f32>],
    weights: &[Vec<f32>],
    settings: ValueLossSettings,
) -> ValueLoss {
    assert_shapes(weights, &[old_values, values, returns]);
    let (mut loss, mut n_clipped) = (0f64, 0);
    let mut grad_values: Rows = values.iter().map(|row| vec![0.0; row.len()]).collect();
    for (b, weights) in weights.iter().enumerate() {
        for (t, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight != 0.0) {
            let (old, value, target) = (old_values[b][t], values[b][t], returns[b][t]);
            let bounded = settings.clip_range_value.map_or(value, |range| value.clamp(old - range, old + range));
            let (plain, gradient) = error_loss(settings.kind, value - target);
            let (clipped, _) = error_loss(settings.kind, bounded - target);
            let is_clipped = clipped > plain;
            loss += f64::from(plain.max(clipped)) * f64::from(*weight);
            n_clipped += usize::from(is_clipped);
            grad_values[b][t] = if is_clipped { 0.0 } else { gradient * weight };
        }
    }
    ValueLoss { vf_loss: loss as f32, n_clipped, grad_values }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_clipping_every_value_has_its_gradient() {
        let unbounded = ValueLossSettings { kind: ValueLossKind::Squared, clip_range_value: None };
        let loss = value_loss(&[vec![0.0]], &[vec![5.0]], &[vec![1.0]], &[vec![1.0]], unbounded);
        assert_eq!((loss.vf_loss, loss.n_clipped, loss.grad_values[0][0]), (8.0, 0, 4.0));
        let bounded = ValueLossSettings { clip_range_value: Some(0.2), ..unbounded };
        let moved_past_the_bound = value_loss(&[vec![0.0]], &[vec![0.5]], &[vec![1.0]], &[vec![1.0]], bounded);
        assert_eq!((moved_past_the_bound.n_clipped, moved_past_the_bound.grad_values[0][0]), (1, 0.0));
    }

    #[test]
    #[should_panic(expected = "the rows of a loss differ")]
    fn more_values_than_weights_panic() {
        let settings = ValueLossSettings { kind: ValueLossKind::Squared, clip_range_value: None };
        value_loss(&[vec![0.0]], &[vec![0.1, 5.0]], &[vec![0.2]], &[vec![1.0]], settings);
    }

    #[test]
    fn masked_positions_do_not_leak() {
        let settings = ValueLossSettings { kind: ValueLossKind::Huber, clip_range_value: Some(0.2) };
        let row = |x: f32| vec![vec![x, f32::NAN]];
        let loss = value_loss(&row(0.0), &row(0.1), &row(0.2), &[vec![1.0, 0.0]], settings);
        assert!(loss.vf_loss.is_finite());
        assert_eq!(loss.grad_values[0][1], 0.0);
    }
}

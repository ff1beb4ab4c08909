//! Masked mean, advantage whitening, and running moments of scores.

use super::Rows;
use serde::{Deserialize, Serialize};

/// The values where the mask is true, in order.
pub(super) fn kept<'a>(values: &'a [Vec<f32>], response_mask: &'a [Vec<bool>]) -> impl Iterator<Item = f32> + 'a {
    let rows = values.iter().zip(response_mask);
    rows.flat_map(|(values, mask)| values.iter().zip(mask).filter(|(_, keep)| **keep).map(|(value, _)| *value))
}

/// Tokens where the mask is true.
pub(super) fn n_kept(response_mask: &[Vec<bool>]) -> usize {
    response_mask.iter().flatten().filter(|keep| **keep).count()
}

/// Mean over the mask; 0 for an empty mask.
pub fn masked_mean(values: &[Vec<f32>], response_mask: &[Vec<bool>]) -> f32 {
    let n = n_kept(response_mask).max(1);
    (kept(values, response_mask).map(f64::from).sum::<f64>() / n as f64) as f32
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

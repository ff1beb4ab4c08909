//! Means and whitening over the tokens that count.

use super::Rows;

/// The values that count, in order.
pub(super) fn kept<'a>(values: &'a [Vec<f32>], response_mask: &'a [Vec<bool>]) -> impl Iterator<Item = f32> + 'a {
    let rows = values.iter().zip(response_mask);
    rows.flat_map(|(values, mask)| values.iter().zip(mask).filter(|(_, keep)| **keep).map(|(value, _)| *value))
}

/// Tokens that count.
pub(super) fn n_kept(response_mask: &[Vec<bool>]) -> usize {
    response_mask.iter().flatten().filter(|keep| **keep).count()
}

/// Mean of the values that count; 0 where none does.
pub fn masked_mean(values: &[Vec<f32>], response_mask: &[Vec<bool>]) -> f32 {
    let n = n_kept(response_mask).max(1);
    (kept(values, response_mask).map(f64::from).sum::<f64>() / n as f64) as f32
}

/// Shifts and scales to mean 0 and variance 1 over the values that count; the others become 0.
///
/// The variance is the unbiased one, and 1e-8 is added to it. With fewer than two values nothing is known of the spread: they
/// become 0.
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

//! Importance weights of tokens sampled from another distribution than the policy's.

use super::Rows;
use super::masked::{kept, masked_mean};
use std::slice::from_ref;

/// Log-ratios are clamped to this before the exponential.
const MAX_LOG_RATIO: f32 = 20.0;

/// Granularity of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImportanceLevel {
    /// Each token: biased, small variance.
    Token,
    /// Each response, the product of its tokens' ratios: unbiased, large variance.
    Sequence,
}

/// `min(cap, p / q)` where `p` is the policy's probability and `q` that of the distribution that tokens were sampled from.
///
/// `logprobs`, `behaviour_logprobs`: `(B, T)`. Returns `(B, T)`, 0 where `response_mask` is false. The weights multiply the
/// policy's loss and carry no gradient.
///
/// Source: Espeholt et al. 2018, "IMPALA", section 4.1 (the cap); verl `compute_rollout_correction_weights`, `token` and
/// `sequence`.
pub fn importance_weights(
    logprobs: &[Vec<f32>],
    behaviour_logprobs: &[Vec<f32>],
    response_mask: &[Vec<bool>],
    cap: f32,
    level: ImportanceLevel,
) -> Rows {
    let weight = |log_ratio: f32| log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().min(cap);
    let row = |((logprobs, behaviour), mask): ((&Vec<f32>, &Vec<f32>), &Vec<bool>)| {
        let log_ratios: Vec<f32> = logprobs.iter().zip(behaviour).map(|(p, q)| p - q).collect();
        let of_response = weight(kept(from_ref(&log_ratios), from_ref(mask)).sum());
        let of_token = |(log_ratio, keep): (&f32, &bool)| match (keep, level) {
            (false, _) => 0.0,
            (true, ImportanceLevel::Token) => weight(*log_ratio),
            (true, ImportanceLevel::Sequence) => of_response,
        };
        log_ratios.iter().zip(mask).map(of_token).collect()
    };
    logprobs.iter().zip(behaviour_logprobs).zip(response_mask).map(row).collect()
}

/// Effective sample size as a share of the tokens: 1 where all weights are equal.
///
/// Source: Kish 1965, "Survey Sampling"; verl `compute_is_metrics`, `rollout_is_eff_sample_size`.
pub fn effective_sample_share(weights: &[Vec<f32>], response_mask: &[Vec<bool>]) -> f32 {
    let squares: Rows = weights.iter().map(|row| row.iter().map(|weight| weight * weight).collect()).collect();
    let (mean, mean_square) = (masked_mean(weights, response_mask), masked_mean(&squares, response_mask));
    if mean_square > 0.0 { mean * mean / mean_square } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_sampled_from_the_policy_have_weight_1() {
        let (logprobs, mask) = (vec![vec![-1.0, -0.3, f32::NAN]], vec![vec![true, true, false]]);
        for level in [ImportanceLevel::Token, ImportanceLevel::Sequence] {
            let weights = importance_weights(&logprobs, &logprobs, &mask, 2.0, level);
            assert_eq!(weights, [[1.0, 1.0, 0.0]]);
            assert_eq!(effective_sample_share(&weights, &mask), 1.0);
        }
    }

    /// A filter leaves two of three tokens and renormalises: the mean of the weights under it is the probability that the filter kept.
    #[test]
    fn the_weights_undo_the_renormalisation_of_a_filter() {
        let (p, kept) = ([0.5f32, 0.3, 0.2], 0.8f32);
        let behaviour = [p[0] / kept, p[1] / kept];
        let rows = |values: &[f32]| vec![values.iter().map(|x| x.ln()).collect::<Vec<f32>>()];
        let mask = vec![vec![true, true]];
        let weights = importance_weights(&rows(&p[..2]), &rows(&behaviour), &mask, 2.0, ImportanceLevel::Token);
        let mean: f32 = weights[0].iter().zip(behaviour).map(|(weight, q)| weight * q).sum();
        assert!((mean - kept).abs() < 1e-6, "{mean}");
    }
}

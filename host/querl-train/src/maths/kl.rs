//! Estimators of the divergence from the reference policy, and the per-token reward they make with the score.

use super::Rows;

/// `log p - log q`: unbiased, may be negative.
///
/// Source: Schulman 2020, "Approximating KL divergence"; verl `kl_penalty`, `kl`.
pub fn kl_k1(logprob: f32, ref_logprob: f32) -> f32 {
    logprob - ref_logprob
}

/// Half the squared log-ratio: biased, never negative; the one whose gradient is the divergence's.
///
/// Source: as [`kl_k1`]; verl `kl_penalty`, `mse`.
pub fn kl_k2(logprob: f32, ref_logprob: f32) -> f32 {
    0.5 * (logprob - ref_logprob).powi(2)
}

/// `q/p - 1 - log(q/p)`: unbiased and never negative.
///
/// The log-ratio is clamped to ±20 and the result to ±10.
///
/// Source: as [`kl_k1`]; verl `kl_penalty`, `low_var_kl`.
pub fn kl_k3(logprob: f32, ref_logprob: f32) -> f32 {
    let log_ratio = (ref_logprob - logprob).clamp(-20.0, 20.0);
    (log_ratio.exp() - log_ratio - 1.0).clamp(-10.0, 10.0)
}

/// Per-token rewards: `-kl_coef * kl_k1` at every token, and each response's score at its last token, end of sequence
/// included.
///
/// `logprobs`, `ref_logprobs`: `(B, T)`; `scores`: B. Returns `(B, T)`.
///
/// Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", equation 2; verl `apply_kl_penalty`.
pub fn token_rewards(scores: &[f32], logprobs: &[Vec<f32>], ref_logprobs: &[Vec<f32>], kl_coef: f32) -> Rows {
    let rows = scores.iter().zip(logprobs.iter().zip(ref_logprobs));
    rows.map(|(score, (logprobs, ref_logprobs))| {
        let penalty = |(logprob, ref_logprob): (&f32, &f32)| -kl_coef * kl_k1(*logprob, *ref_logprob);
        let mut rewards: Vec<f32> = logprobs.iter().zip(ref_logprobs).map(penalty).collect();
        if let Some(last) = rewards.last_mut() {
            *last += score;
        }
        rewards
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_score_lands_on_the_last_response_token() {
        let logprobs = vec![vec![-1.0, -2.0, -0.5], vec![-1.0]];
        let reference = vec![vec![-1.5, -2.0, -0.5], vec![-1.0]];
        let rewards = token_rewards(&[0.7, -0.3], &logprobs, &reference, 0.1);
        assert_eq!(rewards, vec![vec![-0.05, 0.0, 0.7], vec![-0.3]]);
    }
}

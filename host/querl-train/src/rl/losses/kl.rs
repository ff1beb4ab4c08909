//! KL divergence from the reference policy: estimators k1, k2, k3, KL in the reward or in the loss, and the adaptive coefficient.

use super::{Rows, assert_shapes};
use querl_core::config::KlEstimator;
use serde::{Deserialize, Serialize};

/// `log p - log q`: unbiased, may be negative.
///
/// Source: Schulman 2020, "Approximating KL divergence"; verl `kl_penalty`, `kl`.
pub fn kl_k1(logprob: f32, ref_logprob: f32) -> f32 {
    logprob - ref_logprob
}

/// Half the squared log-ratio: biased, never negative; its gradient is that of KL.
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
    let log_ratio = (ref_logprob - logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO);
    (log_ratio.exp() - log_ratio - 1.0).clamp(-MAX_K3, MAX_K3)
}

/// Log-ratios are clamped to this before the exponential.
const MAX_LOG_RATIO: f32 = 20.0;

/// k3 is clamped to this.
const MAX_K3: f32 = 10.0;

/// The estimate of one token's KL.
pub fn kl(estimator: KlEstimator, logprob: f32, ref_logprob: f32) -> f32 {
    match estimator {
        KlEstimator::K1 => kl_k1(logprob, ref_logprob),
        KlEstimator::K2 => kl_k2(logprob, ref_logprob),
        KlEstimator::K3 => kl_k3(logprob, ref_logprob),
    }
}

/// The derivative of [`kl`] with respect to `logprob`; 0 where a clamp is active.
///
/// Over tokens sampled from the policy, only k2's mean gradient is that of KL: k1's is 0, k3's is that of the reverse KL.
///
/// Source: torch's derivative of verl `kl_penalty`.
fn kl_gradient(estimator: KlEstimator, logprob: f32, ref_logprob: f32) -> f32 {
    let log_ratio = ref_logprob - logprob;
    match estimator {
        KlEstimator::K1 => 1.0,
        KlEstimator::K2 => -log_ratio,
        KlEstimator::K3 if log_ratio.abs() > MAX_LOG_RATIO || log_ratio.exp() - log_ratio - 1.0 > MAX_K3 => 0.0,
        KlEstimator::K3 => 1.0 - log_ratio.exp(),
    }
}

/// [`kl`] of every token: `(B, T)`.
pub fn kl_rows(estimator: KlEstimator, logprobs: &[Vec<f32>], ref_logprobs: &[Vec<f32>]) -> Rows {
    let row = |(logprobs, reference): (&Vec<f32>, &Vec<f32>)| {
        logprobs.iter().zip(reference).map(|(logprob, reference)| kl(estimator, *logprob, *reference)).collect()
    };
    logprobs.iter().zip(ref_logprobs).map(row).collect()
}

/// KL as a term of the loss.
#[derive(Debug, Clone, PartialEq)]
pub struct KlLoss {
    /// Weighted sum of the estimates.
    pub kl_loss: f32,
    /// `(B, T)`: derivative of `kl_loss` with respect to each log-probability.
    pub grad_logprobs: Rows,
}

/// The weighted sum of the estimates and its gradient, without the coefficient.
///
/// `logprobs`, `ref_logprobs`, `weights`: `(B, T)`; see [`Aggregation::weights`](super::Aggregation::weights).
///
/// # Panics
/// The shapes differ.
///
/// Source: verl `ppo_loss`, `use_kl_loss`.
pub fn kl_loss(
    estimator: KlEstimator,
    logprobs: &[Vec<f32>],
    ref_logprobs: &[Vec<f32>],
    weights: &[Vec<f32>],
) -> KlLoss {
    assert_shapes(weights, &[logprobs, ref_logprobs]);
    let mut total = 0f64;
    let mut grad_logprobs: Rows = logprobs.iter().map(|row| vec![0.0; row.len()]).collect();
    for (b, weights) in weights.iter().enumerate() {
        for (t, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight != 0.0) {
            let (logprob, reference) = (logprobs[b][t], ref_logprobs[b][t]);
            total += f64::from(kl(estimator, logprob, reference)) * f64::from(*weight);
            grad_logprobs[b][t] = kl_gradient(estimator, logprob, reference) * weight;
        }
    }
    KlLoss { kl_loss: total as f32, grad_logprobs }
}

/// Per-token rewards: `-kl_coef * kl` at every token, and each response's score at its last token, end of sequence included.
///
/// `kl`: `(B, T)`; `scores`: B. Returns `(B, T)`.
///
/// Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", equation 2; verl `apply_kl_penalty`.
pub fn token_rewards(scores: &[f32], kl: &[Vec<f32>], kl_coef: f32) -> Rows {
    let row = |(score, kl): (&f32, &Vec<f32>)| {
        let mut rewards: Vec<f32> = kl.iter().map(|kl| -kl_coef * kl).collect();
        if let Some(last) = rewards.last_mut() {
            *last += score;
        }
        rewards
    };
    scores.iter().zip(kl).map(row).collect()
}

/// Lower bound of the factor that one batch applies, so that the coefficient stays above 0.
const MIN_FACTOR: f64 = 0.1;

/// The KL coefficient, fixed or adapted to a target.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KlController {
    kl_coef: f64,
    /// Nats; 0 where the coefficient is fixed.
    kl_target: f64,
    kl_horizon: f64,
}

impl KlController {
    /// Starts at `kl_coef`. With a `kl_target` above 0 the coefficient adapts over about `kl_horizon` episodes.
    pub fn new(kl_coef: f64, kl_target: f64, kl_horizon: usize) -> Self {
        Self { kl_coef, kl_target, kl_horizon: kl_horizon.max(1) as f64 }
    }

    /// The current coefficient.
    pub fn kl_coef(&self) -> f64 {
        self.kl_coef
    }

    /// Adapts the coefficient to `current_kl`, the mean of `n_episodes`, in the unit of the target.
    ///
    /// The unit is nats per response, summed over its tokens, as in the source and in TRL; verl's trainer averages over tokens.
    /// Departure: a lower bound of the factor, since the sources' factor is 0 or negative where a batch has more episodes than five
    /// horizons.
    ///
    /// Source: Ziegler et al. 2019, section 2.2; verl `AdaptiveKLController`.
    pub fn update(&mut self, current_kl: f64, n_episodes: usize) {
        if self.kl_target > 0.0 {
            let proportional_error = (current_kl / self.kl_target - 1.0).clamp(-0.2, 0.2);
            self.kl_coef *= (1.0 + proportional_error * n_episodes as f64 / self.kl_horizon).max(MIN_FACTOR);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_score_lands_on_the_last_response_token() {
        let logprobs = vec![vec![-1.0, -2.0, -0.5], vec![-1.0]];
        let reference = vec![vec![-1.5, -2.0, -0.5], vec![-1.0]];
        let rewards = token_rewards(&[0.7, -0.3], &kl_rows(KlEstimator::K1, &logprobs, &reference), 0.1);
        assert_eq!(rewards, vec![vec![-0.05, 0.0, 0.7], vec![-0.3]]);
    }

    /// A policy over two tokens: expectations in closed form.
    #[test]
    fn only_k2_has_the_gradient_of_kl() {
        let (z, reference) = (1.5f64, [0.3f64.ln(), 0.7f64.ln()]);
        let p = |z: f64| [1.0 / (1.0 + (-z).exp()), 1.0 / (1.0 + z.exp())];
        let divergence = |z: f64| -> f64 { p(z).iter().zip(reference).map(|(p, q)| p * (p.ln() - q)).sum() };
        let slope = (divergence(z + 1e-5) - divergence(z - 1e-5)) / 2e-5;
        let mean_gradient = |estimator| -> f64 {
            // d log p / dz of the two tokens is 1 - p and p - 1.
            let by_z = [1.0 - p(z)[0], -p(z)[0]];
            let token = |i: usize| {
                let gradient = kl_gradient(estimator, p(z)[i].ln() as f32, reference[i] as f32);
                p(z)[i] * f64::from(gradient) * by_z[i]
            };
            token(0) + token(1)
        };
        assert!((mean_gradient(KlEstimator::K2) - slope).abs() < 1e-5);
        assert!(mean_gradient(KlEstimator::K1).abs() < 1e-6);
        assert!((mean_gradient(KlEstimator::K3) - slope).abs() > 1e-3);
    }

    #[test]
    #[should_panic(expected = "the rows of a loss differ")]
    fn a_reference_of_another_batch_panics() {
        kl_loss(KlEstimator::K3, &[vec![-1.0]], &[vec![-1.2], vec![-1.0]], &[vec![1.0]]);
    }

    #[test]
    fn a_fixed_coefficient_stays() {
        let mut controller = KlController::new(0.05, 0.0, 100);
        controller.update(50.0, 64);
        assert_eq!(controller.kl_coef(), 0.05);
    }

    /// The symptom: with fewer episodes to a horizon than a fifth of a batch, the penalty became a reward for KL.
    #[test]
    fn an_adapted_coefficient_stays_positive_however_short_its_horizon() {
        let mut controller = KlController::new(0.05, 6.0, 1);
        controller.update(0.0, 64);
        assert!((controller.kl_coef() - 0.005).abs() < 1e-12, "{controller:?}");
        controller.update(60.0, 64);
        assert!(controller.kl_coef() > 0.05, "{controller:?}");
    }

    #[test]
    fn masked_positions_do_not_leak_into_the_loss() {
        let loss = kl_loss(KlEstimator::K3, &[vec![-1.0, f32::NAN]], &[vec![-1.2, f32::INFINITY]], &[vec![1.0, 0.0]]);
        assert!(loss.kl_loss.is_finite());
        assert_eq!(loss.grad_logprobs[0][1], 0.0);
    }
}

//! What a batch says before any update.

use super::algorithm::all_true;
use super::estimate::{Experience, ValueExperience};
use crate::Metrics;
use crate::maths::{Rows, effective_sample_share, kl_k1, kl_k3, kl_rows, masked_mean, share_without_spread};
use crate::metrics::summary;
use querl_core::config::{KlPlacement, RlConfig};

impl Experience<'_> {
    /// Divergence, rewards, advantages, values and weights, under the names that verl and TRL give them.
    pub(super) fn metrics(&self, config: &RlConfig) -> Metrics {
        let mut metrics: Metrics = self.timings.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        metrics.extend(self.divergence(config));
        let rewards: Vec<f32> = self.token_rewards.iter().map(|row| row.iter().sum()).collect();
        let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|x| f64::from(*x)).collect() };
        metrics.extend(summary("critic/rewards", &wide(&rewards)));
        metrics.extend(summary("critic/advantages", &wide(&self.advantages.concat())));
        if config.algorithm.needs_groups() {
            let share = share_without_spread(&rewards, &self.groups);
            metrics.insert("frac_reward_zero_std".into(), f64::from(share));
        }
        if let Some(critic) = &self.critic {
            metrics.extend(summary("critic/returns", &wide(&critic.returns.concat())));
            metrics.extend(summary("critic/values", &wide(&critic.values.concat())));
            metrics.insert("critic/vf_explained_var".into(), critic.explained_variance());
        }
        metrics.extend(self.importance.iter().flat_map(|weights| weights_metrics(weights, config.importance_cap)));
        metrics
    }

    fn divergence(&self, config: &RlConfig) -> Metrics {
        let mask = all_true(&self.old_logprobs);
        let mean = |estimate: fn(f32, f32) -> f32| -> f64 {
            let row = |(old, reference): (&Vec<f32>, &Vec<f32>)| {
                old.iter().zip(reference).map(|(old, reference)| estimate(*old, *reference)).collect()
            };
            let rows: Rows = self.old_logprobs.iter().zip(&self.ref_logprobs).map(row).collect();
            f64::from(masked_mean(&rows, &mask))
        };
        let k1 = mean(kl_k1);
        let n_tokens: usize = self.old_logprobs.iter().map(Vec::len).sum();
        let mut metrics = Metrics::from([
            ("actor/ref_kl".to_owned(), k1),
            ("actor/ref_kl_k3".to_owned(), mean(kl_k3)),
            ("objective/kl".to_owned(), k1 * n_tokens as f64 / self.rollouts.len().max(1) as f64),
        ]);
        match config.kl_placement {
            KlPlacement::Reward => {
                let kl = kl_rows(config.kl_estimator, &self.old_logprobs, &self.ref_logprobs);
                metrics.insert("actor/reward_kl_penalty".into(), f64::from(masked_mean(&kl, &mask)));
                metrics.insert("actor/reward_kl_penalty_coeff".into(), self.kl_coef);
            }
            KlPlacement::Loss => drop(metrics.insert("actor/kl_coef".into(), self.kl_coef)),
        }
        metrics
    }
}

/// verl's figures of importance weights: of the capped ones, and the share of tokens at the cap.
fn weights_metrics(weights: &Rows, cap: f64) -> Metrics {
    let mask = all_true(weights);
    let flat = weights.concat();
    let n_capped = flat.iter().filter(|weight| f64::from(**weight) >= cap).count();
    let max = flat.iter().copied().fold(0.0, f32::max);
    Metrics::from([
        ("rollout_corr/rollout_is_mean".into(), f64::from(masked_mean(weights, &mask))),
        ("rollout_corr/rollout_is_max".into(), f64::from(max)),
        ("rollout_corr/rollout_is_ratio_fraction_high".into(), n_capped as f64 / flat.len().max(1) as f64),
        ("rollout_corr/rollout_is_eff_sample_size".into(), f64::from(effective_sample_share(weights, &mask))),
    ])
}

impl ValueExperience {
    /// `1 - var(returns - values) / var(returns)` over the positions the critic learns at.
    ///
    /// Source: verl `compute_data_metrics`, `critic/vf_explained_var`.
    fn explained_variance(&self) -> f64 {
        let kept = |rows: &Rows| -> Vec<f64> {
            let rows = rows.iter().zip(&self.mask);
            rows.flat_map(|(row, mask)| row.iter().zip(mask).filter(|(_, keep)| **keep).map(|(x, _)| f64::from(*x)))
                .collect()
        };
        let (returns, values) = (kept(&self.returns), kept(&self.values));
        let errors: Vec<f64> = returns.iter().zip(&values).map(|(target, value)| target - value).collect();
        let spread = variance(&returns);
        if spread > 0.0 { 1.0 - variance(&errors) / spread } else { 0.0 }
    }
}

fn variance(values: &[f64]) -> f64 {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n
}

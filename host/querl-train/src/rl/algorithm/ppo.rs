//! Proximal policy optimisation: a critic says what a response was worth.

use super::{Algorithm, Estimates, Scored, ValueTargets, all_true, column};
use crate::maths::{Rows, gae, masked_whiten};
use querl_core::config::AdvantageForm;

/// Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms"; verl `adv_estimator: gae`.
pub(super) struct Ppo;

impl Algorithm for Ppo {
    fn has_critic(&self) -> bool {
        true
    }

    fn estimate(&self, scored: &Scored<'_>) -> Estimates {
        let values = scored.values.expect("the critic's values: an algorithm that says it has a critic is given them");
        match scored.config.advantage_form {
            AdvantageForm::Token => of_tokens(scored, values),
            AdvantageForm::Sequence => of_responses(scored, values),
        }
    }
}

/// GAE per token; advantages whitened over the batch after the returns are formed.
fn of_tokens(scored: &Scored<'_>, values: &Rows) -> Estimates {
    let (config, mask) = (scored.config, all_true(values));
    let found = gae(scored.rewards, values, &mask, config.gamma as f32, config.gae_lambda as f32);
    let advantages = if config.whiten_advantages { masked_whiten(&found.advantages, &mask) } else { found.advantages };
    Estimates { advantages, targets: Some(ValueTargets { returns: found.returns, mask }) }
}

/// The source plan's form: `A = R - V(s)` per response, whitened over responses; the critic learns at the first token.
fn of_responses(scored: &Scored<'_>, values: &Rows) -> Estimates {
    let totals = scored.totals();
    let raw: Vec<f32> = totals.iter().zip(values).map(|(total, values)| total - values[0]).collect();
    let advantages = match scored.config.whiten_advantages {
        true => masked_whiten(&column(&raw), &all_true(&column(&raw))).concat(),
        false => raw,
    };
    let mask = values.iter().map(|values| (0..values.len()).map(|t| t == 0).collect()).collect();
    Estimates {
        advantages: scored.at_every_token(&advantages),
        targets: Some(ValueTargets { returns: scored.at_every_token(&totals), mask }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::maths::masked_mean;
    use querl_core::config::RlConfig;

    fn estimate(config: &RlConfig) -> Estimates {
        let rewards = vec![vec![0.0, 0.0, 1.0], vec![0.0, -0.5], vec![0.25]];
        let values = vec![vec![0.2, 0.1, 0.4], vec![-0.1, 0.0], vec![0.3]];
        Ppo.estimate(&Scored { rewards: &rewards, groups: &[0, 1, 2], values: Some(&values), config })
    }

    #[test]
    fn advantages_are_whitened_over_the_batch_and_returns_are_not() {
        let plain = estimate(&RlConfig { whiten_advantages: false, ..RlConfig::default() });
        let whitened = estimate(&RlConfig::default());
        assert_eq!(plain.targets.unwrap().returns, whitened.targets.unwrap().returns);
        assert_ne!(plain.advantages, whitened.advantages);
        let mask = all_true(&whitened.advantages);
        assert!(masked_mean(&whitened.advantages, &mask).abs() < 1e-6);
        assert_eq!(masked_whiten(&plain.advantages, &mask), whitened.advantages);
    }

    /// The symptom: without values every advantage was missing, and the batch taught nothing.
    #[test]
    #[should_panic(expected = "the critic's values")]
    fn missing_values_are_no_empty_batch() {
        let (rewards, config) = (vec![vec![1.0]], RlConfig::default());
        Ppo.estimate(&Scored { rewards: &rewards, groups: &[0], values: None, config: &config });
    }

    #[test]
    fn in_the_sequence_form_a_response_has_one_advantage_and_the_critic_learns_at_its_first_token() {
        let config =
            RlConfig { advantage_form: AdvantageForm::Sequence, whiten_advantages: false, ..RlConfig::default() };
        let found = estimate(&config);
        assert_eq!(found.advantages[0], vec![1.0 - 0.2; 3]);
        let targets = found.targets.unwrap();
        assert_eq!(targets.mask[0], [true, false, false]);
        assert_eq!(targets.returns[1][0], -0.5);
    }
}

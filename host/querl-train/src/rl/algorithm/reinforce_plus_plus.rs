//! REINFORCE++: no critic and no groups; discounted returns, whitened over the batch.

use super::{Algorithm, Estimates, Scored, all_true, column};
use crate::maths::{discounted_returns, masked_whiten};
use querl_core::config::AdvantageForm;

/// In the sequence form the whole reward of a response is whitened over responses.
///
/// Source: Hu et al. 2025, "REINFORCE++"; verl `adv_estimator: reinforce_plus_plus`.
pub(super) struct ReinforcePlusPlus;

impl Algorithm for ReinforcePlusPlus {
    fn estimate(&self, scored: &Scored<'_>) -> Estimates {
        let config = scored.config;
        let mask = all_true(scored.rewards);
        let returns = match config.advantage_form {
            AdvantageForm::Token => discounted_returns(scored.rewards, &mask, config.gamma as f32),
            AdvantageForm::Sequence => column(&scored.totals()),
        };
        let whitened = if config.whiten_advantages { masked_whiten(&returns, &all_true(&returns)) } else { returns };
        let advantages = match config.advantage_form {
            AdvantageForm::Token => whitened,
            AdvantageForm::Sequence => scored.at_every_token(&whitened.concat()),
        };
        Estimates { advantages, targets: None }
    }
}

//! The algorithms: how rewards become advantages, whether a critic is used, and how token losses are averaged.
//!
//! Everything else is shared: rollouts, the clipped policy loss, KL, entropy, the order of updates. In the sequence form
//! (`rl.advantage_form = "sequence"`) there is one advantage and one ratio per response, and losses are averaged over responses,
//! whatever the algorithm's aggregation.
//!
//! | algorithm | advantage | loss |
//! |---|---|---|
//! | PPO | GAE of a critic, whitened over the batch | mean over tokens |
//! | GRPO | (score - group mean) / group deviation | mean over tokens, then responses |
//! | Dr. GRPO | score - group mean | sum over tokens / `max_new_tokens`, mean over responses |
//! | RLOO | score - mean of the group's other scores | mean over tokens |
//! | REINFORCE++ | discounted return, whitened over the batch | mean over tokens |

use super::losses::{
    Aggregation, GroupScale, Rows, discounted_returns, gae, group_relative, leave_one_out, masked_whiten,
};
use querl_core::config::{AdvantageForm, RlAlgorithm, RlConfig};

/// A batch as an algorithm sees it.
pub(super) struct ScoredBatch<'a> {
    /// `(B, T)`: each response's score at its last token, less KL where that is part of the reward.
    pub(super) rewards: &'a Rows,
    /// B: row of the query that a response answers.
    pub(super) groups: &'a [usize],
    /// `(B, T)`: the critic's, for algorithms that have one.
    pub(super) values: Option<&'a Rows>,
    pub(super) config: &'a RlConfig,
}

pub(super) struct AdvantageEstimate {
    /// `(B, T)`; in the sequence form the same at every token of a response.
    pub(super) advantages: Rows,
    /// For algorithms with a critic.
    pub(super) targets: Option<ValueTargets>,
}

/// What a critic learns, and where.
pub(super) struct ValueTargets {
    /// `(B, T)`.
    pub(super) returns: Rows,
    /// `(B, T)`: true where the critic learns.
    pub(super) mask: Vec<Vec<bool>>,
}

pub(super) trait Algorithm: Sync {
    /// Whether [`Algorithm::advantages`] needs a critic's values.
    fn has_critic(&self) -> bool {
        false
    }

    /// How token losses are averaged.
    fn aggregation(&self, _config: &RlConfig) -> Aggregation {
        Aggregation::TokenMean
    }

    /// Advantages of a batch, and the critic's targets.
    fn advantages(&self, batch: &ScoredBatch<'_>) -> AdvantageEstimate;
}

pub(super) fn by_name(algorithm: RlAlgorithm) -> &'static dyn Algorithm {
    match algorithm {
        RlAlgorithm::Ppo => &Ppo,
        RlAlgorithm::Grpo => &Grpo,
        RlAlgorithm::DrGrpo => &DrGrpo,
        RlAlgorithm::Rloo => &Rloo,
        RlAlgorithm::ReinforcePlusPlus => &ReinforcePlusPlus,
    }
}

/// Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms"; verl `adv_estimator: gae`.
struct Ppo;

impl Algorithm for Ppo {
    fn has_critic(&self) -> bool {
        true
    }

    fn advantages(&self, batch: &ScoredBatch<'_>) -> AdvantageEstimate {
        let values = batch.values.expect("the critic's values: an algorithm that has a critic is given them");
        match batch.config.advantage_form {
            AdvantageForm::Token => token_advantages(batch, values),
            AdvantageForm::Sequence => sequence_advantages(batch, values),
        }
    }
}

/// GAE per token; advantages are whitened over the batch after the returns are formed.
fn token_advantages(batch: &ScoredBatch<'_>, values: &Rows) -> AdvantageEstimate {
    let (config, mask) = (batch.config, all_true(values));
    let estimate = gae(batch.rewards, values, &mask, config.gamma as f32, config.gae_lambda as f32);
    let advantages = whiten_if(config.whiten_advantages, estimate.advantages);
    AdvantageEstimate { advantages, targets: Some(ValueTargets { returns: estimate.returns, mask }) }
}

/// `A = R - V(s)` per response, whitened over responses; the critic learns at the first token, whose value is `V(s)`.
fn sequence_advantages(batch: &ScoredBatch<'_>, values: &Rows) -> AdvantageEstimate {
    let totals = batch.totals();
    let raw: Vec<f32> = totals.iter().zip(values).map(|(total, values)| total - values[0]).collect();
    let advantages = whiten_if(batch.config.whiten_advantages, column(&raw)).concat();
    let mask = values.iter().map(|values| (0..values.len()).map(|t| t == 0).collect()).collect();
    AdvantageEstimate {
        advantages: batch.at_every_token(&advantages),
        targets: Some(ValueTargets { returns: batch.at_every_token(&totals), mask }),
    }
}

/// Every response has the same weight in the loss, whatever its length.
///
/// Source: Shao et al. 2024, "DeepSeekMath", section 4.1; verl `adv_estimator: grpo` with `seq-mean-token-mean`; TRL
/// `loss_type: grpo`.
struct Grpo;

impl Algorithm for Grpo {
    fn aggregation(&self, _config: &RlConfig) -> Aggregation {
        Aggregation::SequenceMean
    }

    fn advantages(&self, batch: &ScoredBatch<'_>) -> AdvantageEstimate {
        batch.response_advantages(&group_relative(&batch.totals(), batch.groups, GroupScale::Deviation))
    }
}

/// GRPO without the division by the group's deviation and by the response's own length.
///
/// Source: Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective"; verl
/// `norm_adv_by_std_in_grpo: false` with `seq-mean-token-sum-norm`; TRL `loss_type: dr_grpo`.
struct DrGrpo;

impl Algorithm for DrGrpo {
    fn aggregation(&self, config: &RlConfig) -> Aggregation {
        Aggregation::SequenceSum { scale: config.max_new_tokens as f32 }
    }

    fn advantages(&self, batch: &ScoredBatch<'_>) -> AdvantageEstimate {
        batch.response_advantages(&group_relative(&batch.totals(), batch.groups, GroupScale::One))
    }
}

/// Losses are averaged as in verl; the paper's single ratio per response is `advantage_form = "sequence"`.
///
/// Source: Ahmadian et al. 2024, "Back to Basics"; verl `adv_estimator: rloo`.
struct Rloo;

impl Algorithm for Rloo {
    fn advantages(&self, batch: &ScoredBatch<'_>) -> AdvantageEstimate {
        batch.response_advantages(&leave_one_out(&batch.totals(), batch.groups))
    }
}

/// In the sequence form the whole reward of a response is whitened over responses.
///
/// Source: Hu et al. 2025, "REINFORCE++"; verl `adv_estimator: reinforce_plus_plus`.
struct ReinforcePlusPlus;

impl Algorithm for ReinforcePlusPlus {
    fn advantages(&self, batch: &ScoredBatch<'_>) -> AdvantageEstimate {
        let config = batch.config;
        let advantages = match config.advantage_form {
            AdvantageForm::Token => {
                let returns = discounted_returns(batch.rewards, &all_true(batch.rewards), config.gamma as f32);
                whiten_if(config.whiten_advantages, returns)
            }
            AdvantageForm::Sequence => {
                let whitened = whiten_if(config.whiten_advantages, column(&batch.totals()));
                batch.at_every_token(&whitened.concat())
            }
        };
        AdvantageEstimate { advantages, targets: None }
    }
}

impl ScoredBatch<'_> {
    /// The sum of each response's rewards: B.
    fn totals(&self) -> Vec<f32> {
        self.rewards.iter().map(|row| row.iter().sum()).collect()
    }

    /// One number per response, repeated for each of its tokens.
    fn at_every_token(&self, of_response: &[f32]) -> Rows {
        self.rewards.iter().zip(of_response).map(|(row, value)| vec![*value; row.len()]).collect()
    }

    /// Advantages without a critic, the same at every token of a response.
    fn response_advantages(&self, advantages: &[f32]) -> AdvantageEstimate {
        AdvantageEstimate { advantages: self.at_every_token(advantages), targets: None }
    }
}

/// Advantage whitening (`rl.whiten_advantages`): mean 0 and variance 1 over all values of the batch.
fn whiten_if(is_enabled: bool, advantages: Rows) -> Rows {
    if is_enabled { masked_whiten(&advantages, &all_true(&advantages)) } else { advantages }
}

/// A response mask that keeps every token.
pub(super) fn all_true(rows: &[Vec<f32>]) -> Vec<Vec<bool>> {
    rows.iter().map(|row| vec![true; row.len()]).collect()
}

/// One number per response as `(B, 1)`.
fn column(values: &[f32]) -> Rows {
    values.iter().map(|value| vec![*value]).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::losses::masked_mean;
    use super::*;

    fn estimate(config: &RlConfig) -> AdvantageEstimate {
        let rewards = vec![vec![0.0, 0.0, 1.0], vec![0.0, -0.5], vec![0.25]];
        let values = vec![vec![0.2, 0.1, 0.4], vec![-0.1, 0.0], vec![0.3]];
        Ppo.advantages(&ScoredBatch { rewards: &rewards, groups: &[0, 1, 2], values: Some(&values), config })
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
    fn missing_values_panic() {
        let (rewards, config) = (vec![vec![1.0]], RlConfig::default());
        Ppo.advantages(&ScoredBatch { rewards: &rewards, groups: &[0], values: None, config: &config });
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

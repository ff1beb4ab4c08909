//! What tells the algorithms apart: how rewards become advantages, whether a critic helps, and how tokens are weighted.
//!
//! Everything else is shared: rollouts, the clipped surrogate, divergence, entropy, the order of updates.

mod dr_grpo;
mod grpo;
mod ppo;
mod reinforce_plus_plus;
mod rloo;

use crate::maths::{Aggregation, Rows};
use querl_core::config::{RlAlgorithm, RlConfig};

/// A batch as an algorithm sees it.
pub(super) struct Scored<'a> {
    /// `(B, T)`: each response's score at its last token, less the divergence where that counts in the reward.
    pub(super) rewards: &'a Rows,
    /// B: the query that a response answers.
    pub(super) groups: &'a [usize],
    /// `(B, T)`: the critic's, of algorithms that have one.
    pub(super) values: Option<&'a Rows>,
    pub(super) config: &'a RlConfig,
}

/// What an algorithm makes of a batch.
pub(super) struct Estimates {
    /// `(B, T)`; in the sequence form the same at every token of a response.
    pub(super) advantages: Rows,
    /// What the critic learns, where there is one.
    pub(super) targets: Option<ValueTargets>,
}

/// What a critic learns, and where.
pub(super) struct ValueTargets {
    /// `(B, T)`.
    pub(super) returns: Rows,
    /// `(B, T)`: true where the critic learns.
    pub(super) mask: Vec<Vec<bool>>,
}

/// One way of telling good responses from bad ones.
pub(super) trait Algorithm: Sync {
    /// True where values of a critic are needed.
    fn has_critic(&self) -> bool {
        false
    }

    /// How tokens are weighted in the loss.
    fn aggregation(&self, _config: &RlConfig) -> Aggregation {
        Aggregation::TokenMean
    }

    /// Advantages of a batch, and the critic's targets.
    fn estimate(&self, scored: &Scored<'_>) -> Estimates;
}

/// The algorithm that the configuration names.
pub(super) fn named(algorithm: RlAlgorithm) -> &'static dyn Algorithm {
    match algorithm {
        RlAlgorithm::Ppo => &ppo::Ppo,
        RlAlgorithm::Grpo => &grpo::Grpo,
        RlAlgorithm::DrGrpo => &dr_grpo::DrGrpo,
        RlAlgorithm::Rloo => &rloo::Rloo,
        RlAlgorithm::ReinforcePlusPlus => &reinforce_plus_plus::ReinforcePlusPlus,
    }
}

impl Scored<'_> {
    /// The sum of each response's rewards: B.
    fn totals(&self) -> Vec<f32> {
        self.rewards.iter().map(|row| row.iter().sum()).collect()
    }

    /// One number per response, at each of its tokens.
    fn at_every_token(&self, of_response: &[f32]) -> Rows {
        self.rewards.iter().zip(of_response).map(|(row, value)| vec![*value; row.len()]).collect()
    }

    /// Advantages without a critic, the same at every token of a response.
    fn of_responses(&self, advantages: &[f32]) -> Estimates {
        Estimates { advantages: self.at_every_token(advantages), targets: None }
    }
}

/// A mask of rows that count from end to end.
pub(super) fn all_true(rows: &[Vec<f32>]) -> Vec<Vec<bool>> {
    rows.iter().map(|row| vec![true; row.len()]).collect()
}

/// One number per response as rows of one.
fn column(values: &[f32]) -> Rows {
    values.iter().map(|value| vec![*value]).collect()
}

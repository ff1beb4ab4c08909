//! A policy ready to decode with, on either device. The engine's batching is the same for both; what differs is how a step's units
//! are advanced.

#[cfg(feature = "cuda")]
use super::card::CardPolicy;
use super::cpu_backend::PolicyWeights;
use super::filters::Rules;
use super::model_runner::{self, Unit};
use crate::ModelError;

/// Weights as they were when the policy was set.
pub(super) enum Policy {
    /// Threads advance units, each some of them.
    Host(Box<PolicyWeights>),
    /// All units advance as one batch of kernels.
    #[cfg(feature = "cuda")]
    Card(Box<CardPolicy>),
}

impl Policy {
    /// Feeds the new tokens of all units, and hands what follows to their takers.
    ///
    /// # Errors
    /// What the model or a taker reports.
    pub(super) fn advance(&mut self, units: &mut [Unit<'_>], rules: &Rules<'_>) -> Result<(), ModelError> {
        match self {
            Self::Host(weights) => model_runner::advance(weights, units, rules),
            #[cfg(feature = "cuda")]
            Self::Card(card) => card.advance(units, rules),
        }
    }
}

//! A policy ready for decoding. The engine schedules sequences in the same way on every device; policies differ in how a step is
//! computed.

use super::cpu_backend::PolicyWeights;
use super::filters::Rules;
use super::model_runner::{self, Unit};
use crate::{Decoder, LoraAdapter, ModelError};
use std::any::Any;

/// A policy on an accelerator, with the memory of its steps and its KV cache.
pub trait DecodePolicy: Any + Send {
    /// Takes the adapter's values as they are now. After an error there is no policy.
    ///
    /// # Errors
    /// The adapter does not fit the decoder, or the device is out of memory.
    fn set(&mut self, decoder: &Decoder, adapter: Option<&LoraAdapter>) -> Result<(), ModelError>;
    /// Replaces the KV cache by one of `n_blocks` blocks.
    ///
    /// # Errors
    /// The device is out of memory.
    fn allocate_blocks(&mut self, n_blocks: usize) -> Result<(), ModelError>;
    /// Allocates memory for steps of `n_sequences` sequences of at most `longest` tokens.
    ///
    /// # Errors
    /// The device is out of memory.
    fn reserve(&mut self, n_sequences: usize, longest: usize, rules: &Rules<'_>) -> Result<(), ModelError>;
    /// One step: see [`Policy::advance`].
    ///
    /// # Errors
    /// Logits are NaN or Inf, or the device fails.
    fn advance(&mut self, units: &mut [Unit<'_>], rules: &Rules<'_>) -> Result<(), ModelError>;
}

/// Weights as they were when the policy was set.
pub(super) enum Policy {
    /// Threads advance units, each some of them.
    Host(Box<PolicyWeights>),
    /// All units advance as one batch.
    Accelerator(Box<dyn DecodePolicy>),
}

impl Policy {
    /// Feeds the new tokens of all units, and hands the logits that follow to their takers.
    pub(super) fn advance(&mut self, units: &mut [Unit<'_>], rules: &Rules<'_>) -> Result<(), ModelError> {
        match self {
            Self::Host(weights) => model_runner::advance(weights, units, rules),
            Self::Accelerator(policy) => policy.advance(units, rules),
        }
    }
}

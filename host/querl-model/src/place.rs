//! Where a model stands and is computed.

use crate::{ModelError, Weights};
use candle_core::{Device, Error};
use querl_core::config::BaseDtype;

/// A kind of device with what its passes need.
#[derive(Clone, Default)]
pub enum Place {
    /// The processor.
    #[default]
    Cpu,
    /// An NVIDIA card.
    #[cfg(feature = "cuda")]
    Card(crate::device::Gpu),
}

/// What a card is wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CardUse {
    /// Passes over whole rows, with and without gradients.
    Training,
    /// Answers, which follow on training or stand alone.
    Answers,
}

impl Place {
    /// Widest heads of attention for which a card has kernels.
    pub const CARD_HEADS: usize = 128;

    /// Refuses heads of attention that a card has no kernels for: of answers, which read keys in pieces of 16 bytes, those that are
    /// no multiple of 8 too.
    ///
    /// # Errors
    /// The heads are of that kind.
    pub fn check_card_heads(head_dim: usize, card_use: CardUse) -> Result<(), ModelError> {
        let most = Self::CARD_HEADS;
        let expected = match card_use {
            CardUse::Training if head_dim <= most => return Ok(()),
            CardUse::Answers if head_dim <= most && head_dim.is_multiple_of(8) => return Ok(()),
            CardUse::Training => format!("learns with heads of up to {most}"),
            CardUse::Answers => format!("writes answers with heads of a multiple of 8 up to {most}"),
        };
        Err(Error::Msg(format!("a model with heads of {head_dim}, and a card {expected}")).into())
    }

    /// How a card can store a frozen base, most bits first.
    pub const CARD_STORAGES: [BaseDtype; 4] = [BaseDtype::Bf16, BaseDtype::Int8, BaseDtype::Fp8, BaseDtype::Nf4];

    /// The device of its tensors.
    pub fn device(&self) -> Device {
        match self {
            Self::Cpu => Device::Cpu,
            #[cfg(feature = "cuda")]
            Self::Card(gpu) => gpu.device(),
        }
    }

    /// Refuses what a model here cannot be.
    pub(crate) fn check(&self, weights: Weights, dtype: BaseDtype) -> Result<(), ModelError> {
        // Trained weights are f32 everywhere.
        if matches!(self, Self::Cpu) || weights == Weights::Trained {
            return Ok(());
        }
        match Self::CARD_STORAGES.contains(&dtype) {
            true => Ok(()),
            false => {
                let names = Self::CARD_STORAGES.map(BaseDtype::name).join(", ");
                let message = format!("a card keeps frozen weights in {names}; `model.dtype` is `{}`", dtype.name());
                Err(Error::Msg(format!("{message}: set it to `bf16`, or `device = \"cpu\"`")).into())
            }
        }
    }
}

/// What a card cannot do yet, by its setting.
#[cfg(feature = "cuda")]
pub(crate) fn only_on_cpu(what: &str) -> Error {
    Error::Msg(format!("{what} is computed on the CPU alone; set `device = \"cpu\"`"))
}

//! The device that holds a model and computes it.

use crate::accelerator::{self, Accelerator};
use crate::{DecoderConfig, ModelError, Ranks, Weights};
use candle_core::{Device, Error, Result as TensorResult};
use querl_core::config::BaseDtype;
use std::sync::Arc;

/// The CPU, or an accelerator with its kernels.
#[derive(Clone, Default)]
pub enum ComputeDevice {
    #[default]
    #[allow(missing_docs)]
    Cpu,
    /// A GPU.
    Accelerator(Arc<dyn Accelerator>),
}

/// What a GPU is used for, which decides on the supported head sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuUse {
    /// Forward passes over packed batches, with and without gradients.
    Training,
    /// Generation, with or without training.
    Generation,
}

impl ComputeDevice {
    /// Largest attention head size that GPU kernels support.
    pub const GPU_MAX_HEAD_DIM: usize = 128;

    /// Storage types of a frozen base that GPUs support, from most to fewest bits.
    pub const GPU_DTYPES: [BaseDtype; 4] = [BaseDtype::Bf16, BaseDtype::Int8, BaseDtype::Fp8, BaseDtype::Nf4];

    /// Opens the GPU with this index.
    ///
    /// # Errors
    /// This build has no accelerators, or the GPU cannot be used.
    pub fn open_gpu(index: usize) -> Result<Self, ModelError> {
        match accelerator::open(index) {
            Some(opened) => Ok(Self::Accelerator(opened?)),
            None => {
                Err(Error::Msg(format!("this build of querl has no device cuda:{index}; it supports the CPU only"))
                    .into())
            }
        }
    }

    /// Checks that GPU kernels support a head size: at most 128, and for generation, which reads keys 16 bytes at a time, a multiple of 8.
    ///
    /// # Errors
    /// The head size is not supported.
    pub fn check_gpu_head_dim(head_dim: usize, gpu_use: GpuUse) -> Result<(), ModelError> {
        let most = Self::GPU_MAX_HEAD_DIM;
        let expected = match gpu_use {
            GpuUse::Training if head_dim <= most => return Ok(()),
            GpuUse::Generation if head_dim <= most && head_dim.is_multiple_of(8) => return Ok(()),
            GpuUse::Training => format!("trains head sizes up to {most}"),
            GpuUse::Generation => format!("generates with head sizes that are a multiple of 8, up to {most}"),
        };
        Err(Error::Msg(format!("a model with attention heads of size {head_dim}; a GPU {expected}")).into())
    }

    /// Checks that the model has no sliding window if the device is a GPU, whose kernels compute full attention.
    ///
    /// # Errors
    /// The device is a GPU and the model has a sliding window.
    pub fn check_windows(&self, config: &DecoderConfig) -> Result<(), ModelError> {
        match self {
            Self::Accelerator(_) if !config.sliding_windows.is_empty() => Err(ModelError::SlidingWindow),
            _ => Ok(()),
        }
    }

    /// The candle device of this device's tensors.
    pub fn device(&self) -> Device {
        match self {
            Self::Cpu => Device::Cpu,
            Self::Accelerator(accelerator) => accelerator.device(),
        }
    }

    /// Waits until all submitted work is done.
    ///
    /// # Errors
    /// Submitted work failed.
    pub fn synchronize(&self) -> TensorResult<()> {
        match self {
            Self::Cpu => Ok(()),
            Self::Accelerator(accelerator) => accelerator.synchronize(),
        }
    }

    /// Creates the communicator of `ranks`, before a model takes the device's memory; a collective operation.
    ///
    /// # Errors
    /// A rank has failed, or the communication library cannot be used.
    pub fn connect(&self, ranks: &Ranks) -> TensorResult<()> {
        match self {
            Self::Cpu => Ok(()),
            Self::Accelerator(accelerator) => accelerator.connect(ranks),
        }
    }

    pub(crate) fn check(&self, weights: Weights, dtype: BaseDtype) -> Result<(), ModelError> {
        // Trained weights are f32 on all devices.
        if matches!(self, Self::Cpu) || weights == Weights::Trained {
            return Ok(());
        }
        match Self::GPU_DTYPES.contains(&dtype) {
            true => Ok(()),
            false => {
                let names = Self::GPU_DTYPES.map(BaseDtype::name).join(", ");
                let message = format!("a GPU stores frozen weights as {names}; `model.dtype` is `{}`", dtype.name());
                Err(Error::Msg(format!("{message}: set it to `bf16`, or `device = \"cpu\"`")).into())
            }
        }
    }
}

/// The error for a setting, named by `what`, that GPUs do not support.
pub fn only_on_cpu(what: &str) -> Error {
    Error::Msg(format!("{what} is computed on the CPU alone; set `device = \"cpu\"`"))
}

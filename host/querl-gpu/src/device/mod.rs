//! The GPU backend of querl-model: querl's kernels (`cuda/`) and their launches, cuBLAS, NCCL, and candle's operations.
//!
//! Frozen weights and activations are bf16; the residual, accumulation, adapters and the optimizer are f32. All launches go to one
//! stream, and only reads by the host synchronise. No kernel adds floats with atomics, so that results do not depend on the order of
//! blocks.
//!
//! [`Gpu`] has the stream and memory; a file per group of kernels adds its launches to it; `training` is the training backend,
//! `operations` has candle operations, and `accelerator` implements querl-model's trait with all of these.

mod accelerator;
mod adamw;
mod attention;
mod elementwise;
mod gpu;
mod launch;
mod logprobs;
mod matmul;
mod nccl;
mod norm_rope;
mod operations;
mod paged_attention;
mod projection;
mod sampling;
mod staging;
mod tensors;
#[cfg(test)]
mod tests;
mod training;
mod upload;
mod weight;

pub use adamw::{AdamTensor, GradientNorm};
pub use attention::TreeQueries;
pub use elementwise::{Element, InverseIndex};
pub use gpu::Gpu;
pub use launch::Graph;
pub use logprobs::LogprobRows;
pub use matmul::{Matrix, Scale};
pub use norm_rope::DeviceRope;
pub(crate) use operations::gpu_weight;
pub use paged_attention::{CacheShape, Epilogue, HeadNorms, LoraAOut, LoraB, Sequences};
pub use projection::{DropoutMasks, LoraWeights, ParameterGradients, Projection, input_gradient};
pub use sampling::{Frame, ReadBack, ResponseTokens, SampledTokens, SamplingRows, SamplingRules};
pub(crate) use tensors::{BorrowedValues, contiguous, rounded_weight, storage};
pub use weight::{DeviceWeight, PackedFormat};
#[cfg(test)]
pub(crate) use {launch::n_launches, weight::by_cublas_alone};

pub use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut};
pub use querl_model::AdamWStep;
pub use querl_model::backend::{BLOCK_TOKENS, n_splits, split_values};

pub(crate) fn install() {
    querl_model::backend::install(&accelerator::BACKEND);
}

/// The CUDA version that this build was compiled with, such as 13000 for 13.0; 0 if unknown.
pub fn cuda_version() -> u32 {
    let mut numbers = env!("QUERL_BUILT_WITH_CUDA").split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    numbers.next().unwrap_or(0) * 1000 + numbers.next().unwrap_or(0) * 10
}

/// The compute capabilities of the kernels, such as 90; the last one also has PTX for later GPUs.
pub fn capabilities() -> Vec<u32> {
    env!("QUERL_BUILT_FOR_CAPABILITIES").split(',').filter_map(|number| number.trim().parse().ok()).collect()
}

/// Lower-case hexadecimal SHA-256 of the compiled kernels, of all capabilities.
pub fn digest_of_kernels() -> String {
    querl_core::fsx::digest_hex(gpu::KERNELS)
}

//! The operations of `kernels` on an NVIDIA card: our own kernels, and cuBLAS for large products.
//!
//! Frozen weights and activations are bf16; the residual stream, sums, adapters and everything of the optimizer are f32. Every
//! launch goes to one stream and none waits for the card: only what the host reads does. No kernel adds floats with atomics, so a
//! result does not depend on which block ran first.

mod accelerator;
mod adamw;
mod all_reduce;
mod attention;
mod columns;
mod decode;
mod dropout;
mod elementwise;
mod few_rows;
mod finish;
mod frame;
mod gpu;
mod graph;
mod launch;
mod layer_rows;
mod logprobs;
mod memory;
mod nccl;
mod operations;
mod packed;
mod peers;
mod product;
mod projection;
mod rms_norm;
mod rope;
mod rows;
mod sampling;
mod tensors;
#[cfg(test)]
mod tests;
mod trace;
mod training;
mod upload;
mod weight;

pub use adamw::{AdamLoan, AdamTensor, GradientNorm};
pub use attention::TreeQueries;
pub use decode::{CacheShape, Sequences};
pub use dropout::Masks;
pub use elementwise::Element;
#[cfg(test)]
pub(crate) use few_rows::by_cublas_alone;
pub use finish::{Change, FinishRows, HeadNorms, Member};
pub use frame::{Frame, ReadBack};
pub use gpu::Gpu;
pub use graph::Graph;
#[cfg(test)]
pub(crate) use launch::n_launches;
pub(crate) use layer_rows::DecoderRope;
pub use logprobs::LogprobRows;
pub(crate) use operations::gpu_weight;
pub use packed::PackedFormat;
pub use product::{Matrix, Scale};
pub use projection::{LowRank, ParameterGradients, Projection, input_gradient};
pub use querl_model::AdamWStep;
pub use rope::DeviceRope;
pub use rows::Namers;
pub use sampling::{Answers, Drawn, SamplingRows, SamplingRules};
pub use tensors::{Loan, rounded_weight, storage, whole};
pub use weight::DeviceWeight;

pub use querl_model::backend::{BLOCK_TOKENS, n_splits, split_values};

/// Values on the card.
pub use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut};

/// Registers GPUs with querl-model.
pub(crate) fn install() {
    querl_model::backend::install(&accelerator::BACKEND);
}

/// The CUDA that this was built with, such as 13000 for 13.0; 0 where the compiler's words were no version.
pub fn cuda_version() -> u32 {
    let mut numbers = env!("QUERL_BUILT_WITH_CUDA").split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    numbers.next().unwrap_or(0) * 1000 + numbers.next().unwrap_or(0) * 10
}

/// The compute capabilities that our kernels were compiled for, such as 90; the last stands for later ones too.
pub fn capabilities() -> Vec<u32> {
    env!("QUERL_BUILT_FOR_CAPABILITIES").split(',').filter_map(|number| number.trim().parse().ok()).collect()
}

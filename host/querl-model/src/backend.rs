//! Interface for backends of other devices: the transformer layer, generic over a backend's operations, and the types that it uses. Each
//! operation of the CPU backend is the reference for the same operation of other backends.

pub use crate::adapter::LoraPair;
pub use crate::compute_device::only_on_cpu;
pub use crate::decoder::{AdaptedLayer, AdaptedLinear};
pub use crate::dropout::DropoutMask;
pub use crate::generate::{
    BeamCandidates, DecodeBufferSizes, DecodePolicy, HiddenState, LogitsConsumer, LogitsProcessor, NewDecodePolicy,
    SampledToken, Sampler, ScheduledSequence, bucket, sample_token,
};
pub use crate::kernels::{GROUP, rms_norm_backward, rms_norm_forward, swiglu_backward, swiglu_forward};
pub use crate::kv_cache::{BLOCK_TOKENS, Block, BlockPool, BlockShape, SequenceKvCache, n_splits, split_values};
pub use crate::random::{normal, normal_part};
pub use crate::sharding::TensorParallel;
pub use crate::transformer::{
    Attention, LayerAccelerator, LayerAcceleratorOf, LayerBackend, LayerContext, LayerPass, LayerRows, LayerWeights,
    Linear, LinearBackward, LinearGrad, Lora, LoraLinear, Magnitude, MaybeBorrowed, PackedAttention, ProjectionOut,
    QueryRows, Rows, TrainingBackend, TransformerLayer, forward_on as forward_layer,
};

use crate::Accelerators;

/// A backend for one kind of device: its kernels, transformer layers and decoding.
pub struct Backend {
    /// Opens devices and finds the device of a tensor.
    pub accelerators: &'static dyn Accelerators,
    /// Computes transformer layers on a device.
    pub layers: LayerAcceleratorOf,
    /// Creates a decode policy on the device of a decoder.
    pub new_policy: NewDecodePolicy,
}

/// Registers a backend with this crate. Only the first call in a process has an effect.
pub fn install(backend: &Backend) {
    crate::accelerator::install(backend.accelerators);
    crate::transformer::install(backend.layers);
    crate::generate::install(backend.new_policy);
}

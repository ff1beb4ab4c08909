//! What a backend for another device is made of: the layer, generic over its operations, and what it reads. Each operation of the
//! CPU backend is the reference for the same operation elsewhere.

pub use crate::adapter::LoraPair;
pub use crate::cache::{BLOCK_TOKENS, Block, BlockPool, BlockShape, SequenceCache, n_splits, split_values};
pub use crate::compute_device::only_on_cpu;
pub use crate::decoder::{AdaptedLayer, AdaptedLinear};
pub use crate::dropout::DropoutMask;
pub use crate::generate::{Choice, DecodePolicy, Draw, Hidden, Rules, Sizes, Taker, Unit, bucket, choose};
pub use crate::kernels::GROUP;
pub use crate::kernels::{gated, gated_gradients, norm_gradients, normed};
pub use crate::random::{normal, normal_part};
pub use crate::sharding::TensorParallel;
pub use crate::transformer::{
    Attention, LayerBackend, LayerContext, LayerPass, LayerRows, LayerWeights, Linear, LinearBackward, LinearGrad,
    Lora, LoraLinear, Magnitude, MaybeBorrowed, PackedAttention, ProjectionOut, QueryRows, Rows, TrainingBackend,
    TransformerLayer, forward_on as forward_layer,
};

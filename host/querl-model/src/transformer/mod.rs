//! Transformer layers: weights, forward and backward pass, on the CPU and on a GPU. Start with `layer.rs`.

mod autograd;
mod backend;
#[cfg(test)]
mod composed;
mod cpu;
mod layer;
mod linear;

pub(crate) use autograd::{CheckpointedLayer, forward, install, layer_accelerator_of};
pub use autograd::{Keep, LayerAccelerator, LayerAcceleratorOf, LayerPass, Pass, Recompute, backward, forward_on};
pub use backend::{
    Attention, LayerBackend, LayerContext, LayerRows, LinearBackward, LinearGrad, MaybeBorrowed, PackedAttention,
    ProjectionOut, QueryRows, Rows, TrainingBackend,
};
pub use layer::{LayerWeights, TransformerLayer};
pub use linear::{Linear, Lora, LoraLinear, Magnitude};

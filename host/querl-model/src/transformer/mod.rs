//! Transformer layers: weights, forward and backward pass, on the CPU and on a GPU.

mod autograd;
mod backend;
mod checkpointing;
#[cfg(test)]
mod composed;
mod cpu;
mod dispatch;
mod layer;
mod linear;
mod pass;
mod rows;

pub use autograd::{LayerPass, forward as forward_on};
pub use backend::{Attention, LayerBackend, LinearBackward, LinearGrad, MaybeBorrowed, ProjectionOut, TrainingBackend};
pub(crate) use checkpointing::CheckpointedLayer;
pub(crate) use dispatch::forward;
pub use layer::{LayerWeights, TransformerLayer};
pub use linear::{Linear, Lora, LoraLinear, Magnitude};
pub use pass::{Keep, Pass, Recompute, backward};
pub use rows::{LayerContext, LayerRows, PackedAttention, QueryRows, Rows};

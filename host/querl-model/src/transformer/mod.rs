//! Transformer layers: weights, forward and backward pass, on the CPU and on a GPU.

mod autograd;
mod backend;
#[cfg(feature = "cuda")]
mod card;
mod checkpointing;
#[cfg(test)]
mod composed;
mod cpu;
mod dispatch;
mod layer;
mod linear;
mod pass;
mod rows;

pub(crate) use autograd::LayerPass;
pub(crate) use backend::{Attention, LayerBackend, MaybeBorrowed, ProjectionOut};
pub(crate) use checkpointing::CheckpointedLayer;
pub(crate) use dispatch::forward;
pub(crate) use layer::{LayerWeights, TransformerLayer};
pub(crate) use linear::Linear;
pub use pass::{Keep, Pass, Recompute, backward};
pub(crate) use rows::{LayerContext, LayerRows, PackedAttention, QueryRows, Rows};

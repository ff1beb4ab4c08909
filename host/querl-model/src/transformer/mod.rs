//! Transformer layers: weights, forward and backward pass, on the CPU and on a GPU.

mod backend;
#[cfg(feature = "cuda")]
mod card;
mod checkpointing;
mod cpu;
mod fused;
mod fused_linear;
mod layer;
mod linear;
mod operation;
mod pass;
mod rows;

pub(crate) use checkpointing::CheckpointedLayer;
pub(crate) use layer::Layer;
pub(crate) use linear::Linear;
pub use pass::{Keep, Pass, Recompute, backward};
pub(crate) use rows::{BatchRows, QueryRows};

//! Optimizer step: gradients summed over micro-batches and ranks, clipped by their global norm; AdamW; learning-rate schedules.

mod adamw;
mod device;
mod gradients;
mod schedule;

pub use adamw::{AdamW, AdamWSettings};
pub use gradients::{BUCKET, Gradients};
pub use schedule::{constant_with_warmup, cosine_with_warmup, linear_with_warmup, lr_factor};

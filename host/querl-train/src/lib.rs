//! Supervised fine-tuning, proximal policy optimisation and classifiers.
//!
//! In: a decoder, tokenised prompts and answers, and an [`Environment`](querl_core::ports::Environment) that turns responses
//! into scored episodes. Out: adapters (or weights) in checkpoints, and metrics. This crate refuses to know plugins, HTTP,
//! retrieval and judges: rewards arrive through the port.
//!
//! Losses are pure functions from values to a loss and its gradient with respect to log-probabilities, entropies or values;
//! the decoder's graph only carries that gradient on. So each formula is tested against its reference as plain numbers.

#[cfg(feature = "cuda")]
mod card;
mod checkpoint;
pub mod classify;
mod error;
#[cfg(test)]
mod fault;
mod fit;
mod gradients;
mod health;
pub mod maths;
mod memory;
mod metrics;
mod optimizer;
mod order;
mod policy;
#[cfg(test)]
mod recording;
pub mod rl;
mod schedule;
pub mod sft;
mod slices;
mod state;
mod together;

pub use checkpoint::{BEST, LAST, STATE};
pub use error::TrainError;
pub use gradients::{BUCKET, Gradients};
pub use health::Health;
pub use metrics::{MetricSink, Metrics};
pub use optimizer::{AdamW, AdamWSettings};
pub use order::training_order;
pub use policy::{Example, Policy, passes};
pub use schedule::{constant_with_warmup, cosine_with_warmup, linear_with_warmup, lr_factor};
pub use state::{State, StateStore};

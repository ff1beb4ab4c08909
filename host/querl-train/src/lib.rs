//! Training: supervised fine-tuning, reinforcement learning (PPO, GRPO, Dr. GRPO, RLOO, REINFORCE++) and classifiers.
//!
//! In: a decoder, tokenised prompts and responses, and an [`Environment`](querl_core::ports::Environment) that scores
//! responses. Out: adapters (or weights) in checkpoints, and metrics. This crate must not depend on plugins, HTTP, retrieval
//! or judges: scores arrive through the port.
//!
//! Where to start reading: [`rl::train`] is the reinforcement-learning loop (`rl/train_loop.rs`), `rl/learner.rs` the update of
//! policy and critic, [`rl::losses`] the formulas; `fine_tune.rs` is the loop of fine-tuning and classifiers.
//!
//! Losses are pure functions from values to a loss and its gradient with respect to log-probabilities, entropies or values;
//! the decoder's graph only propagates that gradient. So each formula is tested against its reference as plain numbers.

mod checkpoint;
pub mod classify;
mod data_order;
mod data_parallel;
mod error;
mod fine_tune;
pub mod job;
mod metrics;
mod micro_batch;
mod optim;
mod policy;
pub mod rl;
pub mod sft;
mod tensor_data;
#[cfg(test)]
mod testing;

pub use checkpoint::{BEST, LAST, STATE, State, StateStore};
pub use data_order::training_order;
pub use error::TrainError;
pub use metrics::{MetricSink, Metrics};
pub use micro_batch::micro_batches;
pub use optim::{
    AdamW, AdamWSettings, BUCKET, Gradients, constant_with_warmup, cosine_with_warmup, linear_with_warmup, lr_factor,
};
pub use policy::{Example, Policy};
pub use rl::health::Health;

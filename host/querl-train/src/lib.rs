//! Training: supervised fine-tuning, reinforcement learning (PPO, GRPO, Dr. GRPO, RLOO, REINFORCE++) and classifiers.
//!
//! In: a decoder, tokenised prompts and responses, and an [`Environment`](querl_core::ports::Environment) that scores
//! responses. Out: adapters (or weights) in checkpoints, and metrics. This crate must not depend on plugins, HTTP, retrieval
//! or judges: scores arrive through the port.
//!
//! Where to start reading: [`rl::train`] is the reinforcement-learning loop (`rl/train_loop.rs`), `rl/learner.rs` the update of
//! policy and critic, [`rl::advantages`] and [`rl::losses`] the formulas, `rl/metrics.rs` every metric; `fine_tune.rs` is the loop of
//! supervised fine-tuning and of classifiers.
//!
//! Losses are pure functions from values to a loss and its gradient with respect to log-probabilities, entropies or values;
//! the decoder's graph only propagates that gradient. So each formula is tested against its reference as plain numbers.

mod batching;
mod checkpoint;
pub mod classify;
mod data_parallel;
mod error;
mod fine_tune;
mod gradients;
pub mod job;
mod optim;
mod policy;
pub mod rl;
pub mod sft;
mod tensor_data;
#[cfg(test)]
mod testing;

pub use batching::{micro_batches, training_order};
pub use checkpoint::{BEST, LAST, ROLLOUT, STATE, State, StateStore};
pub use error::TrainError;
pub use gradients::{BUCKET, Gradients};
pub use optim::{AdamW, AdamWSettings, lr_factor};
pub use policy::{Example, Policy};
pub use rl::health::{Health, ValidationProgress};

use querl_core::ports::LogMark;
use std::collections::BTreeMap;

/// Metrics of one step: value by name, with the names of verl.
pub type Metrics = BTreeMap<String, f64>;

/// Destination of training metrics, such as a file or TensorBoard.
pub trait MetricSink {
    /// Records the metrics of one step of `stage` (`sft`, `rl`).
    ///
    /// # Errors
    /// The metrics cannot be written.
    fn record(&mut self, stage: &str, step: u64, metrics: &Metrics) -> std::io::Result<()>;

    /// Syncs the recorded metrics to disk and returns the end of the log, which a checkpoint keeps.
    ///
    /// # Errors
    /// The log cannot be synced.
    fn mark(&mut self) -> std::io::Result<LogMark>;

    /// Removes all metrics recorded after [`mark`](Self::mark) returned `mark`, in this process or an earlier one. If earlier metrics were
    /// removed or changed since then, the difference is returned: the path and what differs.
    ///
    /// # Errors
    /// The log cannot be truncated.
    fn rewind(&mut self, mark: LogMark) -> std::io::Result<Option<String>>;
}

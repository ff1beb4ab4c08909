//! Reinforcement learning against an environment.
//!
//! One step: rollouts, scores, log-probabilities of policy and reference, values, advantages, several epochs of updates.
//! The policy is the SFT adapter, trained further; the reference is that adapter as it was; both share one frozen base.
//!
//! | file | what |
//! |---|---|
//! | `task.rs` | what a run needs and returns |
//! | `train_loop.rs` | the loop; `trainer_state.rs` saves and restores it |
//! | `rollout_pipeline.rs`, `rollout.rs` | generation overlapped with scoring; the batch |
//! | `advantages.rs` | log-probabilities, values, rewards and advantages of a batch, and their metrics |
//! | `learner.rs` | epochs, mini-batches and micro-batches of updates, and their metrics |
//! | `algorithm.rs` | how advantages are formed and how the loss is averaged, by algorithm |
//! | `losses/` | the formulas |
//!
//! **To add a metric**: one of an update goes to `MicroBatch::policy_metrics` (`learner.rs`), one of a batch before its updates
//! to `Experience::metrics` (`advantages.rs`), one of rollouts to `RolloutBatch::metrics` (`rollout.rs`); name it in
//! docs/training.md. Files, charts and reports take every name.

mod advantages;
mod algorithm;
mod critic;
mod critic_inputs;
mod evaluation;
pub(crate) mod health;
mod learner;
pub mod losses;
mod rollout;
mod rollout_check;
mod rollout_pipeline;
mod task;
#[cfg(test)]
mod tests;
mod train_loop;
mod trainer_state;

pub use task::{RlData, RlSummary, RlTask, kv_cache_room, sampling};
pub use train_loop::train;

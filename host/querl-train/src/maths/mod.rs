//! The formulas of policy optimisation as pure functions over f32 values.
//!
//! `(B, T)` arguments are slices of rows; a row's length is its response's, so batches need no padding. Where a
//! `response_mask` is taken, it is true where a token counts, has the shape of the values, and masked positions never enter a
//! result, whatever they hold.

mod gae;
mod kl;
mod mask;
mod policy_loss;
mod value_loss;

pub use gae::{Advantages, gae};
pub use kl::{kl_k1, kl_k2, kl_k3, token_rewards};
pub use mask::{masked_mean, masked_whiten};
pub use policy_loss::{PolicyLoss, policy_loss, sequence_policy_loss};
pub use value_loss::{ValueLoss, value_loss};

/// Rows of values, `(B, T)` with a T of its own for each row.
pub type Rows = Vec<Vec<f32>>;

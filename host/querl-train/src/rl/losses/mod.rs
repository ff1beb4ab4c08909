//! The formulas of policy optimisation as pure functions over f32 values: losses, KL, GAE, advantages, whitening.
//!
//! `(B, T)` arguments are slices of rows; a row's length is its response's, so batches need no padding. A `response_mask` is true
//! for tokens to keep and has the shape of the values; masked positions never affect a result, whatever they hold. Losses take
//! weights made from such a mask: 0 is a masked position.

mod aggregation;
mod gae;
mod group_advantages;
mod importance;
mod kl;
mod masked;
mod policy_loss;
mod value_loss;

pub use aggregation::{Aggregation, StepSize, weighted_sum};
pub use gae::{Advantages, discounted_returns, gae};
pub use group_advantages::{GroupScale, group_relative, leave_one_out, share_without_spread};
pub use importance::{ImportanceLevel, effective_sample_share, importance_weights};
pub use kl::{KlController, KlLoss, kl, kl_k1, kl_k2, kl_k3, kl_loss, kl_rows, token_rewards};
pub use masked::{RunningMoments, masked_mean, masked_whiten};
pub use policy_loss::{PolicyClip, PolicyLoss, policy_loss, sequence_policy_loss};
pub use value_loss::{ValueLoss, ValueLossSettings, value_loss};

/// `(B, T)`, where each row has its own T.
pub type Rows = Vec<Vec<f32>>;

/// Zipping rows of different lengths would skip tokens silently.
///
/// # Panics
/// One of `others` does not have the shape of `weights`.
fn assert_shapes(weights: &[Vec<f32>], others: &[&[Vec<f32>]]) {
    for rows in others {
        let is_same = rows.len() == weights.len() && rows.iter().zip(weights).all(|(a, b)| a.len() == b.len());
        assert!(is_same, "the rows of a loss differ in number or length");
    }
}

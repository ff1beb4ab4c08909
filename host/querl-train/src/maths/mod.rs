//! The formulas of policy optimisation as pure functions over f32 values.
//!
//! `(B, T)` arguments are slices of rows; a row's length is its response's, so batches need no padding. Where a
//! `response_mask` is taken, it is true where a token counts, has the shape of the values, and masked positions never enter a
//! result, whatever they hold. Losses take weights instead, made from such a mask: 0 is a masked position.

mod aggregation;
mod gae;
mod group;
mod importance;
mod kl;
mod mask;
mod moments;
mod policy_loss;
mod returns;
mod value_loss;

pub use aggregation::{Aggregation, StepSize, weighted_sum};
pub use gae::{Advantages, gae};
pub use group::{GroupScale, group_relative, leave_one_out, share_without_spread};
pub use importance::{ImportanceLevel, effective_sample_share, importance_weights};
pub use kl::{KlController, KlLoss, kl, kl_k1, kl_k2, kl_k3, kl_loss, kl_rows, token_rewards};
pub use mask::{masked_mean, masked_whiten};
pub use moments::RunningMoments;
pub use policy_loss::{PolicyClip, PolicyLoss, policy_loss, sequence_policy_loss};
pub use returns::discounted_returns;
pub use value_loss::{ValueLoss, ValueLossSettings, value_loss};

/// Rows of values, `(B, T)` with a T of its own for each row.
pub type Rows = Vec<Vec<f32>>;

/// A loss over rows that do not correspond would leave out tokens and say nothing.
///
/// # Panics
/// One of `others` has not the shape of `weights`: the caller mixed up batches.
fn assert_shapes(weights: &[Vec<f32>], others: &[&[Vec<f32>]]) {
    for rows in others {
        let is_same = rows.len() == weights.len() && rows.iter().zip(weights).all(|(a, b)| a.len() == b.len());
        assert!(is_same, "the rows of a loss differ in number or length");
    }
}

//! Dr. GRPO: GRPO without the division by the spread, and without the response's own length in the mean.

use super::{Algorithm, Estimates, Scored};
use crate::maths::{Aggregation, GroupScale, group_relative};
use querl_core::config::RlConfig;

/// Tokens are summed and divided by `max_new_tokens`.
///
/// Source: Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective"; verl
/// `norm_adv_by_std_in_grpo: false` with `seq-mean-token-sum-norm`; TRL `loss_type: dr_grpo`.
pub(super) struct DrGrpo;

impl Algorithm for DrGrpo {
    fn aggregation(&self, config: &RlConfig) -> Aggregation {
        Aggregation::SequenceSum { scale: config.max_new_tokens as f32 }
    }

    fn estimate(&self, scored: &Scored<'_>) -> Estimates {
        scored.of_responses(&group_relative(&scored.totals(), scored.groups, GroupScale::One))
    }
}

//! GRPO: the scores of one query's samples against each other, over their spread.

use super::{Algorithm, Estimates, Scored};
use crate::maths::{Aggregation, GroupScale, group_relative};
use querl_core::config::RlConfig;

/// Every response counts alike in the loss, whatever its length.
///
/// Source: Shao et al. 2024, "DeepSeekMath", section 4.1; verl `adv_estimator: grpo` with `seq-mean-token-mean`; TRL
/// `loss_type: grpo`.
pub(super) struct Grpo;

impl Algorithm for Grpo {
    fn aggregation(&self, _config: &RlConfig) -> Aggregation {
        Aggregation::SequenceMean
    }

    fn estimate(&self, scored: &Scored<'_>) -> Estimates {
        scored.of_responses(&group_relative(&scored.totals(), scored.groups, GroupScale::Deviation))
    }
}

//! RLOO: each score against the mean of the query's other samples.

use super::{Algorithm, Estimates, Scored};
use crate::maths::leave_one_out;

/// Tokens are averaged as in verl; the paper's single ratio for a response is `advantage_form = "sequence"`.
///
/// Source: Ahmadian et al. 2024, "Back to Basics"; verl `adv_estimator: rloo`.
pub(super) struct Rloo;

impl Algorithm for Rloo {
    fn estimate(&self, scored: &Scored<'_>) -> Estimates {
        scored.of_responses(&leave_one_out(&scored.totals(), scored.groups))
    }
}

//! Which checkpoint is best, and how long ago it was.

use super::evaluate::Evaluation;
use serde::{Deserialize, Serialize};

/// The best evaluation so far.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Best {
    /// 0 is the policy that training began with.
    pub(super) step: u64,
    pub(super) evaluation: Evaluation,
    pub(super) first_reward: f64,
    n_worse: usize,
}

impl Best {
    pub(super) fn new(first: Evaluation) -> Self {
        Self { step: 0, first_reward: first.reward, evaluation: first, n_worse: 0 }
    }

    /// Takes a later evaluation into account.
    pub(super) fn offer(&mut self, step: u64, evaluation: Evaluation) {
        if evaluation.beats(&self.evaluation) {
            (self.step, self.evaluation, self.n_worse) = (step, evaluation, 0);
        } else {
            self.n_worse += 1;
        }
    }

    pub(super) fn is_exhausted(&self, patience: usize) -> bool {
        patience > 0 && self.n_worse >= patience
    }

    pub(super) fn note(&self) -> String {
        format!("best val reward {:+.3} at step {}", self.evaluation.reward, self.step)
    }
}

//! What a fine-tuning has come to so far: the part of it that is not tensors.

use super::SftSummary;
use crate::Metrics;
use serde::{Deserialize, Serialize};

/// Everything that the summary and later decisions follow from.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Course {
    /// Optimizer steps taken.
    pub(super) step: u64,
    /// Answer tokens learned from, repeats counted.
    n_tokens: u64,
    best: Best,
    interval: Interval,
    /// What is noted of the newest step once it is evaluated; kept where memory did not suffice for that.
    #[serde(default)]
    pub(super) unfinished: Option<Metrics>,
}

/// Which checkpoint is best, and how many evaluations ago it was.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Best {
    step: u64,
    val_loss: Option<f64>,
    n_worse: usize,
}

/// Mean training loss between two evaluations.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Interval {
    sum: f64,
    n: usize,
    closed_mean: f64,
}

impl Course {
    /// Counts a step that was taken.
    pub(super) fn add(&mut self, step: u64, loss: f64, n_tokens: usize) {
        self.step = step;
        self.n_tokens += n_tokens as u64;
        self.interval.sum += loss;
        self.interval.n += 1;
    }

    /// Counts an evaluation. True if it is the best so far; without a validation split the newest is.
    pub(super) fn offer(&mut self, val_loss: Option<f64>) -> bool {
        self.interval =
            Interval { closed_mean: self.interval.sum / self.interval.n.max(1) as f64, ..Default::default() };
        let is_best = match (val_loss, self.best.val_loss) {
            (Some(new), Some(best)) => new < best,
            _ => true,
        };
        if is_best {
            self.best = Best { step: self.step, val_loss, n_worse: 0 };
        } else {
            self.best.n_worse += 1;
        }
        is_best
    }

    pub(super) fn is_exhausted(&self, patience: usize) -> bool {
        patience > 0 && self.best.n_worse >= patience
    }

    pub(super) fn note(&self) -> String {
        self.best.val_loss.map(|loss| format!(", best eval loss {loss:.3}")).unwrap_or_default()
    }

    pub(super) fn summary(&self) -> SftSummary {
        SftSummary {
            n_steps: self.step,
            train_loss: self.interval.closed_mean,
            best_val_loss: self.best.val_loss,
            best_step: self.best.step,
            n_tokens: self.n_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_counts_evaluations_without_improvement() {
        let mut course = Course::default();
        let mut offer = |step, loss| {
            course.add(step, loss, 1);
            (course.offer(Some(loss)), course.is_exhausted(2))
        };
        assert_eq!([offer(1, 3.0), offer(2, 2.0), offer(3, 2.0)], [(true, false), (true, false), (false, false)]);
        assert_eq!(offer(4, 2.5), (false, true));
        assert_eq!((course.summary().best_step, course.summary().best_val_loss), (2, Some(2.0)));
        assert!(!course.is_exhausted(0));
    }
}

//! The confusion matrix, and what follows from it alone.

use serde::{Deserialize, Serialize};

/// How often each class was taken for each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confusion {
    /// Rows are true classes, columns predicted ones.
    pub counts: Vec<Vec<u64>>,
}

/// What is said of one class. Where a share has nothing in its denominator it is 0, as in scikit-learn with `zero_division=0`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ClassScores {
    /// Share of the predictions of this class that are right.
    pub precision: f64,
    /// Share of the examples of this class that were found.
    pub recall: f64,
    /// Harmonic mean of the two.
    pub f1: f64,
    /// Examples of this class.
    pub support: u64,
}

impl Confusion {
    /// Counts pairs of a true and a predicted class.
    ///
    /// # Panics
    /// A class is not below `n_classes`.
    pub fn new(n_classes: usize, pairs: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let mut counts = vec![vec![0; n_classes]; n_classes];
        for (truth, predicted) in pairs {
            counts[truth][predicted] += 1;
        }
        Self { counts }
    }

    /// Examples in all.
    pub fn n(&self) -> u64 {
        self.counts.iter().flatten().sum()
    }

    /// Examples that were told right.
    pub fn n_correct(&self) -> u64 {
        self.counts.iter().enumerate().map(|(class, row)| row[class]).sum()
    }

    /// Share of right predictions; 0 without examples.
    pub fn accuracy(&self) -> f64 {
        share(self.n_correct(), self.n())
    }

    /// Scores of each class, in their order.
    ///
    /// Source: scikit-learn's `precision_recall_fscore_support` with `labels=range(n_classes)`.
    pub fn per_class(&self) -> Vec<ClassScores> {
        (0..self.counts.len())
            .map(|class| {
                let hits = self.counts[class][class];
                let support: u64 = self.counts[class].iter().sum();
                let predicted: u64 = self.counts.iter().map(|row| row[class]).sum();
                ClassScores {
                    precision: share(hits, predicted),
                    recall: share(hits, support),
                    f1: share(2 * hits, support + predicted),
                    support,
                }
            })
            .collect()
    }

    /// Mean of the F1 of the classes that occur, as true or as predicted ones, each class alike.
    ///
    /// Source: scikit-learn's `f1_score` with `average="macro"`.
    pub fn f1_macro(&self) -> f64 {
        let occurs =
            |class: &usize| self.counts[*class].iter().any(|n| *n > 0) || self.counts.iter().any(|row| row[*class] > 0);
        let scores = self.per_class();
        let classes: Vec<usize> = (0..self.counts.len()).filter(occurs).collect();
        classes.iter().map(|&class| scores[class].f1).sum::<f64>() / classes.len().max(1) as f64
    }

    /// Mean of the classes' F1, weighted by their examples.
    pub fn f1_weighted(&self) -> f64 {
        let weighted = self.per_class().iter().map(|scores| scores.f1 * scores.support as f64).sum::<f64>();
        weighted / self.n().max(1) as f64
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

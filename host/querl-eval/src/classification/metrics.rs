//! Metrics of a classifier: losses, confusion matrix, reliability, interval and permutation test of the accuracy.

use crate::bootstrap::Interval;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Index of the largest probability, which is the predicted class; the first one of a tie.
pub fn argmax(probabilities: &[f64]) -> usize {
    let better = |best: usize, (index, value): (usize, &f64)| if *value > probabilities[best] { index } else { best };
    probabilities.iter().enumerate().fold(0, better)
}

/// Softmax of a row of logits.
pub fn softmax(logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = logits.iter().map(|logit| (logit - largest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

/// Mean negative log-probability of the true class, clipped to at least `f64::EPSILON`.
///
/// Source: scikit-learn's `log_loss`.
pub(crate) fn log_loss(labels: &[usize], probabilities: &[Vec<f64>]) -> f64 {
    let loss = |(label, row): (&usize, &Vec<f64>)| {
        -(row[*label] / row.iter().sum::<f64>()).clamp(f64::EPSILON, 1.0 - f64::EPSILON).ln()
    };
    mean(labels.iter().zip(probabilities).map(loss))
}

/// Brier score: squared error of the probabilities summed over classes, as a mean over examples; 0 is best, 2 is worst. For two classes,
/// half of this value is also in use.
///
/// Source: Brier 1950, "Verification of forecasts expressed in terms of probability"; scikit-learn's `brier_score_loss` with
/// `scale_by_half=False`.
pub(crate) fn brier_score(labels: &[usize], probabilities: &[Vec<f64>]) -> f64 {
    let distance = |(label, row): (&usize, &Vec<f64>)| {
        let squares = row.iter().enumerate().map(|(class, p)| (p - f64::from(u8::from(class == *label))).powi(2));
        squares.sum::<f64>()
    };
    mean(labels.iter().zip(probabilities).map(distance))
}

pub(super) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, n) = values.fold((0.0, 0usize), |(sum, n), value| (sum + value, n + 1));
    sum / n.max(1) as f64
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Confusion {
    /// Number of examples by true class (row) and predicted class (column).
    pub(crate) counts: Vec<Vec<u64>>,
}

/// Precision, recall and F1 of one class; a ratio with denominator 0 is 0, as in scikit-learn with `zero_division=0`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct ClassScores {
    /// Share of the predictions of this class that are correct.
    pub(crate) precision: f64,
    /// Share of the examples of this class that are predicted correctly.
    pub(crate) recall: f64,
    pub(crate) f1: f64,
    pub(crate) support: u64,
}

impl Confusion {
    /// Counts (true class, predicted class) pairs.
    ///
    /// # Panics
    /// A class is `n_classes` or more.
    pub(crate) fn new(n_classes: usize, pairs: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let mut counts = vec![vec![0; n_classes]; n_classes];
        for (truth, predicted) in pairs {
            counts[truth][predicted] += 1;
        }
        Self { counts }
    }

    pub(crate) fn n(&self) -> u64 {
        self.counts.iter().flatten().sum()
    }

    pub(crate) fn n_correct(&self) -> u64 {
        self.counts.iter().enumerate().map(|(class, row)| row[class]).sum()
    }

    /// Share of correct predictions; 0 if there are none.
    pub(crate) fn accuracy(&self) -> f64 {
        share(self.n_correct(), self.n())
    }

    /// Precision, recall and F1 of each class.
    ///
    /// Source: scikit-learn's `precision_recall_fscore_support` with `labels=range(n_classes)`.
    pub(crate) fn per_class(&self) -> Vec<ClassScores> {
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

    /// Unweighted mean F1 of the classes that occur as true or predicted ones.
    ///
    /// Source: scikit-learn's `f1_score` with `average="macro"`.
    pub(crate) fn f1_macro(&self) -> f64 {
        let occurs =
            |class: &usize| self.counts[*class].iter().any(|n| *n > 0) || self.counts.iter().any(|row| row[*class] > 0);
        let scores = self.per_class();
        let classes: Vec<usize> = (0..self.counts.len()).filter(occurs).collect();
        classes.iter().map(|&class| scores[class].f1).sum::<f64>() / classes.len().max(1) as f64
    }

    /// Mean F1 over the classes, weighted by their number of examples.
    pub(crate) fn f1_weighted(&self) -> f64 {
        let weighted = self.per_class().iter().map(|scores| scores.f1 * scores.support as f64).sum::<f64>();
        weighted / self.n().max(1) as f64
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// A bin of the reliability diagram: the predictions whose confidence is in a range.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct ReliabilityBin {
    /// Lower edge of the confidence range, exclusive.
    pub(crate) low: f64,
    /// Upper edge of the confidence range, inclusive.
    pub(crate) high: f64,
    pub(crate) n: usize,
    /// Mean confidence of the predictions; 0 for an empty bin.
    pub(crate) confidence: f64,
    /// Share of the predictions that are correct; 0 for an empty bin.
    pub(crate) accuracy: f64,
}

/// Bins of a reliability diagram: `n_bins` of equal width from confidence 0 to 1.
pub(crate) fn reliability(labels: &[usize], probabilities: &[Vec<f64>], n_bins: usize) -> Vec<ReliabilityBin> {
    let edge = |index: usize| index as f64 / n_bins as f64;
    let mut sums = vec![(0usize, 0.0, 0.0); n_bins];
    for (label, row) in labels.iter().zip(probabilities) {
        let predicted = argmax(row);
        let bin = (0..n_bins).find(|&bin| row[predicted] <= edge(bin + 1)).unwrap_or(n_bins.saturating_sub(1));
        let (n, confidence, correct) = &mut sums[bin];
        *n += 1;
        *confidence += row[predicted];
        *correct += f64::from(u8::from(predicted == *label));
    }
    let bin = |(index, (n, confidence, correct)): (usize, &(usize, f64, f64))| ReliabilityBin {
        low: edge(index),
        high: edge(index + 1),
        n: *n,
        confidence: confidence / (*n).max(1) as f64,
        accuracy: correct / (*n).max(1) as f64,
    };
    sums.iter().enumerate().map(bin).collect()
}

/// Expected calibration error: mean absolute difference of confidence and accuracy over the bins, weighted by their predictions. It is
/// biased upwards with few examples.
///
/// Source: Naeini et al. 2015, "Obtaining well calibrated probabilities using Bayesian binning"; Guo et al. 2017.
pub(crate) fn expected_calibration_error(bins: &[ReliabilityBin]) -> f64 {
    let n: usize = bins.iter().map(|bin| bin.n).sum();
    let gaps = bins.iter().map(|bin| bin.n as f64 * (bin.confidence - bin.accuracy).abs());
    gaps.sum::<f64>() / n.max(1) as f64
}

/// The 97.5% quantile of the standard normal distribution.
const Z: f64 = 1.959_963_984_540_054;

/// The 95% interval of a share of independent examples; `None` without examples. Unlike the normal approximation it stays within 0 and
/// 1, and is accurate for few examples and for shares near 0 and 1.
///
/// Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference"; scipy's
/// `binomtest(k, n).proportion_ci(method="wilson")`.
pub(crate) fn wilson(n_successes: u64, n: u64) -> Option<Interval> {
    if n == 0 {
        return None;
    }
    let (mean, n) = (n_successes as f64 / n as f64, n as f64);
    let centre = (mean + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
    let half = Z / (1.0 + Z * Z / n) * (mean * (1.0 - mean) / n + Z * Z / (4.0 * n * n)).sqrt();
    // Avoids rounding errors beyond 0 and 1.
    let low = if n_successes == 0 { 0.0 } else { centre - half };
    let high = if mean == 1.0 { 1.0 } else { centre + half };
    Some(Interval { mean, low, high })
}

/// Up to this many groups the permutation test is exact.
const N_EXACT: usize = 14;

/// One-sided p-value of a permutation test that a classifier is correct on more examples than the constant prediction of `majority`, the
/// most frequent class of its training data.
///
/// Under the null hypothesis the predictions of the two are exchangeable. They are exchanged at random per group, and the p-value is the
/// share of assignments with at least the observed difference: over all assignments for few groups, else over `n_resamples` and the
/// observed one.
///
/// Source: Edgington and Onghena, "Randomization Tests"; scipy's `permutation_test` with `permutation_type="samples"`.
pub(crate) fn beats_majority(
    labels: &[usize],
    predicted: &[usize],
    groups: &[&str],
    majority: usize,
    (seed, n_resamples): (u64, usize),
) -> f64 {
    let mut by_group: BTreeMap<&str, i64> = BTreeMap::new();
    for ((label, predicted), group) in labels.iter().zip(predicted).zip(groups) {
        *by_group.entry(group).or_default() += i64::from(predicted == label) - i64::from(majority == *label);
    }
    let differences: Vec<i64> = by_group.into_values().filter(|difference| *difference != 0).collect();
    let found: i64 = differences.iter().sum();
    let reaches = |keeps: &mut dyn FnMut(usize) -> bool| {
        let sum: i64 = differences.iter().enumerate().map(|(at, d)| if keeps(at) { *d } else { -d }).sum();
        sum >= found
    };
    if differences.len() <= N_EXACT {
        let n_all = 1u64 << differences.len();
        let n_reached = (0..n_all).filter(|bits| reaches(&mut |at| (bits >> at) & 1 == 1)).count();
        return n_reached as f64 / n_all as f64;
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let n_reached = (0..n_resamples).filter(|_| reaches(&mut |_| rng.random_bool(0.5))).count();
    (n_reached + 1) as f64 / (n_resamples + 1) as f64
}

//! One temperature that makes a classifier as sure as it is right.

use super::probabilities::{log_loss, softmax};

/// Range in which a temperature is sought.
const RANGE: (f64, f64) = (0.05, 20.0);
/// Shrinkings of the range: each by 0.618, so that its logarithm is known to 1e-12.
const N_STEPS: usize = 64;

/// The temperature by which logits are best divided: the one of the least log loss. Logarithms of probabilities serve as well as
/// logits. Fit it on examples that the classifier has not learned from. It changes no prediction, only how sure it is.
///
/// The loss has one minimum over the inverse temperature, in which it is convex: golden section search finds it. Where every example
/// is right there is none, and the lower end of the range, 0.05, is returned.
///
/// Source: Guo et al. 2017, "On calibration of modern neural networks"; Kiefer 1953, "Sequential minimax search for a maximum".
pub fn fit_temperature(labels: &[usize], logits: &[Vec<f64>]) -> f64 {
    let ratio = (5f64.sqrt() - 1.0) / 2.0;
    let loss = |log_temperature: f64| log_loss(labels, &calibrated(logits, log_temperature.exp()));
    let (mut low, mut high) = (RANGE.0.ln(), RANGE.1.ln());
    let (mut left, mut right) = (high - ratio * (high - low), low + ratio * (high - low));
    let (mut at_left, mut at_right) = (loss(left), loss(right));
    for _ in 0..N_STEPS {
        if at_left <= at_right {
            (high, right, at_right) = (right, left, at_left);
            left = high - ratio * (high - low);
            at_left = loss(left);
        } else {
            (low, left, at_left) = (left, right, at_right);
            right = low + ratio * (high - low);
            at_right = loss(right);
        }
    }
    (f64::midpoint(low, high)).exp()
}

/// Probabilities of logits that are divided by a temperature.
pub fn calibrated(logits: &[Vec<f64>], temperature: f64) -> Vec<Vec<f64>> {
    let row = |row: &Vec<f64>| softmax(&row.iter().map(|logit| logit / temperature).collect::<Vec<f64>>());
    logits.iter().map(row).collect()
}

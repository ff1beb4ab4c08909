//! Whether a classifier that says 80% is right in 80% of such cases.

use super::probabilities::argmax;
use serde::{Deserialize, Serialize};

/// Predictions of a range of confidence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ReliabilityBin {
    /// Predictions with more confidence than this,
    pub low: f64,
    /// and at most this.
    pub high: f64,
    /// How many.
    pub n: usize,
    /// Their mean confidence; 0 where there are none.
    pub confidence: f64,
    /// Share of them that are right; 0 where there are none.
    pub accuracy: f64,
}

/// Predictions by confidence, in bins of equal width from 0 to 1.
pub fn reliability(labels: &[usize], probabilities: &[Vec<f64>], n_bins: usize) -> Vec<ReliabilityBin> {
    let edge = |index: usize| index as f64 / n_bins as f64;
    let mut sums = vec![(0usize, 0.0, 0.0); n_bins];
    for (label, row) in labels.iter().zip(probabilities) {
        let predicted = argmax(row);
        // A bin has its upper edge: the least one that is not below the confidence.
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

/// Mean distance of confidence from accuracy over the bins, weighted by their predictions. It is biased upwards on few examples.
///
/// Source: Naeini et al. 2015, "Obtaining well calibrated probabilities using Bayesian binning"; Guo et al. 2017.
pub fn expected_calibration_error(bins: &[ReliabilityBin]) -> f64 {
    let n: usize = bins.iter().map(|bin| bin.n).sum();
    let gaps = bins.iter().map(|bin| bin.n as f64 * (bin.confidence - bin.accuracy).abs());
    gaps.sum::<f64>() / n.max(1) as f64
}

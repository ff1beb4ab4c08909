//! Mean and spread of a stream of numbers.

use serde::{Deserialize, Serialize};

/// Mean and variance of all numbers that were seen, updated batch by batch.
///
/// Source: Chan et al. 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"; TRL 0.11
/// `RunningMoments`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RunningMoments {
    count: f64,
    mean: f64,
    /// Sum of the squared distances from the mean.
    squares: f64,
}

impl RunningMoments {
    /// Takes a batch in.
    pub fn update(&mut self, values: &[f32]) {
        if values.is_empty() {
            return;
        }
        let n = values.len() as f64;
        let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        let squares = values.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>();
        let (total, delta) = (self.count + n, mean - self.mean);
        self.squares += squares + delta * delta * self.count * n / total;
        self.mean += delta * n / total;
        self.count = total;
    }

    /// The mean of what was seen; 0 before.
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// The unbiased standard deviation of what was seen; 1 with fewer than two numbers.
    pub fn deviation(&self) -> f64 {
        if self.count < 2.0 { 1.0 } else { (self.squares / (self.count - 1.0)).sqrt() }
    }
}

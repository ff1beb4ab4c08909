//! Intervals of shares.

use serde::{Deserialize, Serialize};

/// A share with its 95% interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Proportion {
    /// The share itself.
    pub mean: f64,
    /// Lower end, 0 to 1.
    pub low: f64,
    /// Upper end, 0 to 1.
    pub high: f64,
}

/// The 97.5% quantile of the standard normal distribution.
const Z: f64 = 1.959_963_984_540_054;

/// The 95% interval of a share of independent examples; `None` without examples. It keeps within 0 and 1 and covers as it says also
/// for few examples, and for shares near the ends, where the normal approximation has no width.
///
/// Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference"; scipy's
/// `binomtest(k, n).proportion_ci(method="wilson")`.
pub fn wilson(n_successes: u64, n: u64) -> Option<Proportion> {
    if n == 0 {
        return None;
    }
    let (mean, n) = (n_successes as f64 / n as f64, n as f64);
    let centre = (mean + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
    let half = Z / (1.0 + Z * Z / n) * (mean * (1.0 - mean) / n + Z * Z / (4.0 * n * n)).sqrt();
    // At the ends rounding would leave a trace beyond them.
    let low = if n_successes == 0 { 0.0 } else { centre - half };
    let high = if mean == 1.0 { 1.0 } else { centre + half };
    Some(Proportion { mean, low, high })
}

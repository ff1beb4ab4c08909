//! Scores from 0 to 1.

/// The logistic function: 0.5 for 0, towards 1 for large numbers.
pub fn logistic(number: f64) -> f64 {
    1.0 / (1.0 + (-number).exp())
}

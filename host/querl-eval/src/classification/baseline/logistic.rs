//! Multinomial logistic regression.

use super::lbfgs::minimise;
use super::tfidf::SparseRow;
use crate::classification::probabilities::softmax;

/// Largest part of the gradient of the mean loss at which the fit is done, and steps at most.
const STOP: (f64, usize) = (1e-7, 2000);

/// A linear score for each class, and its softmax.
#[derive(Debug, Clone)]
pub struct LogisticRegression {
    /// One row a class: a weight for each feature, then the intercept.
    weights: Vec<Vec<f64>>,
}

impl LogisticRegression {
    /// The weights with the least loss: `c` times the sum of the examples' cross-entropies, and half the squared weights without the
    /// intercepts.
    ///
    /// `n_features`, `n_classes`: what `rows` and `labels` are positions of.
    ///
    /// Of two classes scikit-learn fits the difference of both weights alone. Here each has half of it, with the square of a quarter: the
    /// penalty is doubled.
    ///
    /// Source: scikit-learn's `LogisticRegression(C=c)` with `solver="lbfgs"`.
    pub fn fit(rows: &[SparseRow], labels: &[usize], (n_features, n_classes): (usize, usize), c: f64) -> Self {
        let width = n_features + 1;
        let penalty = if n_classes == 2 { 2.0 } else { 1.0 } / (c * rows.len().max(1) as f64);
        let function = |weights: &[f64], gradient: &mut [f64]| {
            let mut value = 0.0;
            for (at, (weight, gradient)) in weights.iter().zip(gradient.iter_mut()).enumerate() {
                let penalty = if at % width == n_features { 0.0 } else { penalty };
                value += 0.5 * penalty * weight * weight;
                *gradient = penalty * weight;
            }
            for (row, label) in rows.iter().zip(labels) {
                let mut errors = softmax(&scores(weights.chunks(width), row));
                value -= errors[*label].max(f64::MIN_POSITIVE).ln() / rows.len() as f64;
                errors[*label] -= 1.0;
                for (gradient, error) in gradient.chunks_mut(width).zip(errors) {
                    let error = error / rows.len() as f64;
                    row.iter().for_each(|(feature, value)| gradient[*feature] += error * value);
                    gradient[n_features] += error;
                }
            }
            value
        };
        let weights = minimise(function, vec![0.0; width * n_classes], STOP);
        Self { weights: weights.chunks(width).map(<[f64]>::to_vec).collect() }
    }

    /// Probabilities of the classes.
    pub fn probabilities(&self, row: &SparseRow) -> Vec<f64> {
        softmax(&scores(self.weights.iter().map(Vec::as_slice), row))
    }
}

fn scores<'a>(weights: impl Iterator<Item = &'a [f64]>, row: &SparseRow) -> Vec<f64> {
    let score = |weights: &[f64]| {
        let intercept = weights.last().copied().unwrap_or_default();
        intercept + row.iter().map(|(feature, value)| weights[*feature] * value).sum::<f64>()
    };
    weights.map(score).collect()
}

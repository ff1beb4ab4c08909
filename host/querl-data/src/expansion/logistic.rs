//! Logistic regression on binary features with an L1 penalty, by coordinate descent with Newton steps.
//!
//! Source: Yuan, Chang, Hsieh and Lin 2010, "A comparison of optimization methods and software for large-scale L1-regularized linear
//! classification", algorithm CDN. Unlike there, the intercept is not penalised.

use querl_core::records::logistic;

/// Binary features of rows, by feature.
pub(super) struct Features {
    pub(super) n_rows: usize,
    /// Rows that have the feature, ascending.
    pub(super) rows_of: Vec<Vec<u32>>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Weights {
    pub(super) intercept: f64,
    /// Features with a weight other than 0, ascending.
    pub(super) of_features: Vec<(usize, f64)>,
}

/// Maximum number of passes over all features, and between two of these over the features that have a weight.
const MAX_PASSES: usize = 100;
/// Armijo's constant: the share of the predicted decrease that a step must reach.
const SUFFICIENT: f64 = 0.01;
/// Halvings of a step after which it is given up.
const MAX_HALVINGS: usize = 30;
/// Added to the second derivative, which is 0 where all probabilities are 0 or 1.
const MIN_CURVATURE: f64 = 1e-12;

/// Minimises the sum of log-losses of the rows plus `penalty` (λ) times the sum of absolute weights, until in a pass no partial derivative was
/// further than `tolerance` from that of a minimum, or after [`MAX_PASSES`]. `labels` has one entry per row.
pub(super) fn fit(features: &Features, labels: &[bool], penalty: f64, tolerance: f64) -> Weights {
    let mut descent = Descent {
        labels,
        logits: vec![0.0; features.n_rows],
        probabilities: vec![0.5; features.n_rows],
        intercept: 0.0,
        weights: vec![0.0; features.rows_of.len()],
    };
    let all_rows: Vec<u32> = (0..features.n_rows as u32).collect();
    let all: Vec<usize> = (0..features.rows_of.len()).collect();
    for _ in 0..MAX_PASSES {
        if descent.pass(features, &all_rows, &all, penalty) <= tolerance {
            break;
        }
        let weighted: Vec<usize> = all.iter().copied().filter(|feature| descent.weights[*feature] != 0.0).collect();
        for _ in 0..MAX_PASSES {
            if descent.pass(features, &all_rows, &weighted, penalty) <= tolerance {
                break;
            }
        }
    }
    let weights = descent.weights.into_iter().enumerate();
    Weights { intercept: descent.intercept, of_features: weights.filter(|(_, weight)| *weight != 0.0).collect() }
}

struct Descent<'a> {
    labels: &'a [bool],
    logits: Vec<f64>,
    probabilities: Vec<f64>,
    intercept: f64,
    weights: Vec<f64>,
}

impl Descent<'_> {
    /// One step for the intercept and for each of `chosen`. Returns the largest distance of a partial derivative from that of a minimum,
    /// before its step.
    fn pass(&mut self, features: &Features, all_rows: &[u32], chosen: &[usize], penalty: f64) -> f64 {
        let (intercept, mut furthest) = self.step(all_rows, self.intercept, 0.0);
        self.intercept = intercept;
        for &feature in chosen {
            let (weight, distance) = self.step(&features.rows_of[feature], self.weights[feature], penalty);
            self.weights[feature] = weight;
            furthest = furthest.max(distance);
        }
        furthest
    }

    /// Moves the weight of the feature that `rows` have. Returns the new weight, and the distance of the partial derivative from that of a minimum.
    fn step(&mut self, rows: &[u32], weight: f64, penalty: f64) -> (f64, f64) {
        let (mut gradient, mut curvature) = (0.0, MIN_CURVATURE);
        for &row in rows {
            let probability = self.probabilities[row as usize];
            gradient += probability - f64::from(u8::from(self.labels[row as usize]));
            curvature += probability * (1.0 - probability);
        }
        let distance = match weight {
            0.0 => (gradient.abs() - penalty).max(0.0),
            _ => (gradient + penalty * weight.signum()).abs(),
        };
        if distance == 0.0 {
            return (weight, distance);
        }
        let direction = if gradient + penalty <= curvature * weight {
            -(gradient + penalty) / curvature
        } else if gradient - penalty >= curvature * weight {
            -(gradient - penalty) / curvature
        } else {
            -weight
        };
        let predicted = gradient * direction + penalty * ((weight + direction).abs() - weight.abs());
        let mut share = 1.0;
        for _ in 0..MAX_HALVINGS {
            let change = share * direction;
            let of_penalty = penalty * ((weight + change).abs() - weight.abs());
            if self.change_of_loss(rows, change) + of_penalty <= SUFFICIENT * share * predicted {
                self.add(rows, change);
                return (weight + change, distance);
            }
            share /= 2.0;
        }
        // No step decreases the loss by more than rounding.
        (weight, 0.0)
    }

    fn change_of_loss(&self, rows: &[u32], change: f64) -> f64 {
        let of_row = |row: &u32| {
            let (logit, label) = (self.logits[*row as usize], self.labels[*row as usize]);
            let linear = if label { change } else { 0.0 };
            softplus(logit + change) - softplus(logit) - linear
        };
        rows.iter().map(of_row).sum()
    }

    fn add(&mut self, rows: &[u32], change: f64) {
        for &row in rows {
            let logit = &mut self.logits[row as usize];
            *logit += change;
            self.probabilities[row as usize] = logistic(*logit);
        }
    }
}

/// log(1 + exp(x))
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Deserialize)]
    struct Golden {
        n_rows: usize,
        rows_of: Vec<Vec<u32>>,
        labels: Vec<bool>,
        fits: Vec<GoldenFit>,
    }

    #[derive(serde::Deserialize)]
    struct GoldenFit {
        c: f64,
        intercept: f64,
        weights: Vec<f64>,
    }

    /// Weights of scikit-learn (`tests/reference/logistic.py`), whose C is 1 / λ.
    #[test]
    fn weights_are_those_of_scikit_learn() {
        let text = include_str!("../../../../tests/reference/golden/logistic.json");
        let Golden { n_rows, rows_of, labels, fits } = serde_json::from_str(text).unwrap();
        let features = Features { n_rows, rows_of };
        assert!(fits.len() > 1);
        for golden in fits {
            let found = fit(&features, &labels, 1.0 / golden.c, 1e-9);
            let mut weights = vec![0.0; golden.weights.len()];
            found.of_features.iter().for_each(|(feature, weight)| weights[*feature] = *weight);
            let pairs = weights.iter().zip(&golden.weights).chain([(&found.intercept, &golden.intercept)]);
            let furthest = pairs.map(|(own, theirs)| (own - theirs).abs()).fold(0.0, f64::max);
            assert!(furthest < 1e-5, "C = {}: {furthest}", golden.c);
            let n_zero = golden.weights.iter().filter(|weight| weight.abs() < 1e-7).count();
            assert_eq!(weights.iter().filter(|weight| **weight == 0.0).count(), n_zero, "C = {}", golden.c);
        }
    }

    /// Without a penalty on the intercept, its probability is the share of true labels where no feature helps.
    #[test]
    fn without_features_the_probability_is_the_share() {
        let features = Features { n_rows: 4, rows_of: vec![vec![]] };
        let found = fit(&features, &[true, false, false, false], 1.0, 1e-9);
        assert!((logistic(found.intercept) - 0.25).abs() < 1e-6);
        assert!(found.of_features.is_empty());
    }

    #[test]
    fn labels_that_a_feature_separates_have_finite_weights() {
        let features = Features { n_rows: 4, rows_of: vec![vec![0, 1]] };
        let found = fit(&features, &[true, true, false, false], 0.1, 1e-6);
        assert!(found.intercept.is_finite() && found.of_features[0].1.is_finite(), "{found:?}");
        assert!(logistic(found.intercept) < 0.1 && logistic(found.intercept + found.of_features[0].1) > 0.9);
    }
}

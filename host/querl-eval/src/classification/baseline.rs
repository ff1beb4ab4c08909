//! Baseline text classifier: logistic regression over TF-IDF features of single characters and character pairs.
//!
//! The L-BFGS below is kept: argmin 0.11 would add three crates to the build for its 80 lines (linfa-logistic 0.8 eleven), and another
//! line search would change the digits of recorded evaluations.

use super::metrics::softmax;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Inverse regularisation strength, scikit-learn's `C`. Its default of 1 is too strong for vectors of length 1 and a few hundred
/// examples: 10 is better in a 5-fold cross-validation on `examples/style`.
const C: f64 = 10.0;

/// Logistic regression over TF-IDF features of characters and character pairs.
#[derive(Debug, Clone)]
pub struct TextBaseline {
    features: TfIdf,
    model: LogisticRegression,
}

impl TextBaseline {
    /// Fits the classifier; `labels` are class indices below `n_classes`, one per text.
    pub fn fit(texts: &[&str], labels: &[usize], n_classes: usize) -> Self {
        let features = TfIdf::fit(texts);
        let rows: Vec<_> = texts.iter().map(|text| features.transform(text)).collect();
        let model = LogisticRegression::fit(&rows, labels, (features.n_features(), n_classes), C);
        Self { features, model }
    }

    /// Probability of each class for a text.
    pub fn probabilities(&self, text: &str) -> Vec<f64> {
        self.model.probabilities(&self.features.transform(text))
    }
}

pub(crate) type SparseRow = Vec<(usize, f64)>;

/// TF-IDF (term frequency times inverse document frequency) vectors of characters and character pairs, with L2 norm 1.
///
/// Source: scikit-learn's `TfidfVectorizer(analyzer="char", ngram_range=(1, 2))`, other options at their defaults: lower case, runs of
/// white space as one space, `idf = ln((1 + n) / (1 + df)) + 1`.
#[derive(Debug, Clone)]
pub(crate) struct TfIdf {
    /// Index and inverse document frequency by term.
    terms: BTreeMap<String, (usize, f64)>,
}

impl TfIdf {
    pub(crate) fn fit(texts: &[&str]) -> Self {
        let mut n_texts: BTreeMap<String, usize> = BTreeMap::new();
        for text in texts {
            for term in terms(text).into_iter().collect::<BTreeSet<_>>() {
                *n_texts.entry(term).or_default() += 1;
            }
        }
        let idf = |df: usize| ((1.0 + texts.len() as f64) / (1.0 + df as f64)).ln() + 1.0;
        let terms = n_texts.into_iter().enumerate().map(|(index, (term, df))| (term, (index, idf(df)))).collect();
        Self { terms }
    }

    pub(crate) fn n_features(&self) -> usize {
        self.terms.len()
    }

    pub(crate) fn transform(&self, text: &str) -> SparseRow {
        let mut counts: BTreeMap<usize, f64> = BTreeMap::new();
        for (index, idf) in terms(text).iter().filter_map(|term| self.terms.get(term)) {
            *counts.entry(*index).or_default() += idf;
        }
        let length = counts.values().map(|value| value * value).sum::<f64>().sqrt();
        counts.into_iter().map(|(index, value)| (index, value / length)).collect()
    }
}

fn terms(text: &str) -> Vec<String> {
    let characters = characters(&text.to_lowercase());
    let single = characters.iter().map(char::to_string);
    single.chain(characters.windows(2).map(|pair| pair.iter().collect())).collect()
}

/// The characters of a text. Two or more whitespace characters become one space; a single one is unchanged.
fn characters(text: &str) -> Vec<char> {
    let mut found: Vec<char> = Vec::new();
    for c in text.chars() {
        match found.last_mut() {
            Some(last) if last.is_whitespace() && c.is_whitespace() => *last = ' ',
            _ => found.push(c),
        }
    }
    found
}

/// Largest component of the gradient of the mean loss at convergence, and maximum number of steps.
const STOP: (f64, usize) = (1e-7, 2000);

#[derive(Debug, Clone)]
pub(crate) struct LogisticRegression {
    /// One row per class: the weights of the features, then the intercept.
    weights: Vec<Vec<f64>>,
}

impl LogisticRegression {
    /// Fits the weights: minimises `c` times the sum of the cross-entropies plus half the squared L2 norm of the weights, intercepts
    /// excluded.
    ///
    /// For two classes scikit-learn fits only the difference of both weights. Here each of the two classes has half of the difference, so
    /// that the squared norm is half as large, and the penalty is doubled.
    ///
    /// Source: scikit-learn's `LogisticRegression(C=c)` with `solver="lbfgs"`.
    pub(crate) fn fit(rows: &[SparseRow], labels: &[usize], (n_features, n_classes): (usize, usize), c: f64) -> Self {
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

    pub(crate) fn probabilities(&self, row: &SparseRow) -> Vec<f64> {
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

/// Stored curvature pairs, scipy's default.
const MEMORY: usize = 10;
/// Armijo condition: minimum share of the expected decrease.
const SUFFICIENT: f64 = 1e-4;

/// L-BFGS with a backtracking line search. `function` writes the gradient and returns the value. Ends when no component of the gradient
/// exceeds `tolerance`, after `max_steps`, or when no step decreases the value.
///
/// Source: Nocedal and Wright, "Numerical Optimization", algorithms 7.4 and 3.1.
fn minimise(
    mut function: impl FnMut(&[f64], &mut [f64]) -> f64,
    start: Vec<f64>,
    (tolerance, max_steps): (f64, usize),
) -> Vec<f64> {
    let (mut x, mut gradient) = (start, Vec::new());
    gradient.resize(x.len(), 0.0);
    let mut value = function(&x, &mut gradient);
    let mut history: VecDeque<CurvaturePair> = VecDeque::new();
    for _ in 0..max_steps {
        if gradient.iter().all(|component| component.abs() <= tolerance) {
            break;
        }
        let direction = descent(&gradient, &history);
        let slope = dot(&direction, &gradient);
        let first = if history.is_empty() { 1.0 / dot(&gradient, &gradient).sqrt().max(1.0) } else { 1.0 };
        let Some((next, next_value, next_gradient)) =
            step(&mut function, (x.as_slice(), value), &direction, (slope, first))
        else {
            break;
        };
        let change: Vec<f64> = next.iter().zip(&x).map(|(new, old)| new - old).collect();
        let gradient_change: Vec<f64> = next_gradient.iter().zip(&gradient).map(|(new, old)| new - old).collect();
        let curvature = dot(&change, &gradient_change);
        // Pairs without positive curvature are skipped.
        if curvature > f64::EPSILON * dot(&gradient_change, &gradient_change) {
            history.push_back(CurvaturePair { change, gradient_change, curvature });
            if history.len() > MEMORY {
                history.pop_front();
            }
        }
        (x, value, gradient) = (next, next_value, next_gradient);
    }
    x
}

struct CurvaturePair {
    change: Vec<f64>,
    gradient_change: Vec<f64>,
    curvature: f64,
}

/// The L-BFGS two-loop recursion.
fn descent(gradient: &[f64], history: &VecDeque<CurvaturePair>) -> Vec<f64> {
    let mut direction: Vec<f64> = gradient.iter().map(|part| -part).collect();
    let mut shares = Vec::with_capacity(history.len());
    for CurvaturePair { change, gradient_change, curvature } in history.iter().rev() {
        let share = dot(change, &direction) / curvature;
        direction.iter_mut().zip(gradient_change).for_each(|(d, t)| *d -= share * t);
        shares.push(share);
    }
    if let Some(CurvaturePair { gradient_change, curvature, .. }) = history.back() {
        let scale = curvature / dot(gradient_change, gradient_change);
        direction.iter_mut().for_each(|d| *d *= scale);
    }
    for (CurvaturePair { change, gradient_change, curvature }, share) in history.iter().zip(shares.into_iter().rev()) {
        let back = share - dot(gradient_change, &direction) / curvature;
        direction.iter_mut().zip(change).for_each(|(d, c)| *d += back * c);
    }
    direction
}

/// Backtracking line search: halves the step until the Armijo condition holds.
fn step(
    function: &mut impl FnMut(&[f64], &mut [f64]) -> f64,
    (x, value): (&[f64], f64),
    direction: &[f64],
    (slope, first): (f64, f64),
) -> Option<(Vec<f64>, f64, Vec<f64>)> {
    let (mut length, mut gradient) = (first, vec![0.0; x.len()]);
    for _ in 0..60 {
        let next: Vec<f64> = x.iter().zip(direction).map(|(x, d)| x + length * d).collect();
        let next_value = function(&next, &mut gradient);
        if next_value <= value + SUFFICIENT * length * slope {
            return Some((next, next_value, gradient));
        }
        length /= 2.0;
    }
    None
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

//! All metrics of a classifier, with warnings if there are few examples.

use super::metrics::{
    ClassScores, Confusion, ReliabilityBin, argmax, beats_majority, brier_score, expected_calibration_error, log_loss,
    reliability, wilson,
};
use crate::EvalError;
use crate::bootstrap::{Bootstrap, Interval};
use crate::evaluation::FEW_GROUPS;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// With fewer examples of a class, one prediction changes its recall by more than 10 points.
const FEW_OF_A_CLASS: u64 = 10;
/// Width of the accuracy's interval above which two classifiers can hardly be distinguished.
const WIDE: f64 = 0.2;
const N_BINS: usize = 10;

/// Labelled examples, on which a classifier is evaluated.
#[derive(Debug, Clone, Copy)]
pub struct Examples<'a> {
    /// Class names by index.
    pub classes: &'a [String],
    /// True class of each example.
    pub labels: &'a [usize],
    /// Group of each example; bootstrap and permutation test treat a group as one unit.
    pub groups: &'a [&'a str],
    /// Number of predictions per example: the rounds of a repeated cross-validation, otherwise 1.
    pub n_repeats: usize,
    /// Index of the most frequent class of the training data.
    pub majority: usize,
}

/// Options of the bootstrap and of the permutation test.
#[derive(Debug, Clone, Copy)]
pub struct MeasureOptions {
    /// Random seed of bootstrap and permutation test.
    pub seed: u64,
    /// Number of resamples of the bootstrap and of the permutation test, at least 1.
    pub n_resamples: usize,
}

/// The metrics of a classifier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measures {
    pub(crate) n: u64,
    pub(crate) n_groups: usize,
    /// Number of predictions per example: the rounds of a repeated cross-validation, otherwise 1.
    pub n_repeats: usize,
    /// Accuracy: share of correct predictions.
    pub eval_accuracy: f64,
    /// Macro F1: unweighted mean over the classes that occur as labels or predictions.
    pub eval_f1_macro: f64,
    pub(crate) eval_f1_weighted: f64,
    pub(crate) eval_per_class_f1: BTreeMap<String, f64>,
    /// Precision, recall and F1 of each class, in the order of `classes`.
    pub(crate) per_class: Vec<ClassScores>,
    pub(crate) classes: Vec<String>,
    pub(crate) confusion: Confusion,
    /// Wilson score interval of the accuracy, which assumes independent examples.
    pub(crate) accuracy_wilson: Interval,
    /// Cluster bootstrap interval of the accuracy.
    pub(crate) accuracy_bootstrap: Interval,
    /// Cluster bootstrap interval of the macro F1.
    pub(crate) f1_macro_bootstrap: Interval,
    /// Brier score, summed over classes: 0 is best, 2 is worst.
    pub brier: f64,
    /// Mean negative log-likelihood of the true class, in nats.
    pub log_loss: f64,
    /// Expected calibration error (ECE), 0 to 1.
    pub expected_calibration_error: f64,
    pub(crate) reliability: Vec<ReliabilityBin>,
    /// The most frequent class of the training data.
    pub(crate) majority_class: String,
    /// Accuracy of a classifier that always predicts `majority_class`.
    pub(crate) majority_accuracy: f64,
    /// One-sided p-value of a permutation test that the classifier is more accurate than the majority class.
    pub(crate) majority_p_value: f64,
    /// Warnings about these metrics, such as too few examples; may be empty.
    pub(crate) warnings: Vec<String>,
}

/// Computes all metrics from the class probabilities that a classifier predicted for the examples.
///
/// # Errors
/// No examples, lists of different lengths, an unknown class, or a row that is not a distribution over the classes.
pub fn measure(
    examples: &Examples<'_>,
    probabilities: &[Vec<f64>],
    options: MeasureOptions,
) -> Result<Measures, EvalError> {
    check(examples, probabilities, options)?;
    let Examples { classes, labels, groups, n_repeats, majority } = *examples;
    let predicted: Vec<usize> = probabilities.iter().map(|row| argmax(row)).collect();
    let matrix = |indices: &mut dyn Iterator<Item = usize>| {
        Confusion::new(classes.len(), indices.map(|index| (labels[index], predicted[index])))
    };
    let confusion = matrix(&mut (0..labels.len()));
    let bootstrap = Bootstrap { seed: options.seed, n_resamples: options.n_resamples };
    let interval = |figure: fn(&Confusion) -> f64| {
        let of = |indices: &[usize]| figure(&matrix(&mut indices.iter().copied()));
        bootstrap.interval_of(groups, of).ok_or_else(|| EvalError::Classification("no examples".into()))
    };
    let repeats = n_repeats.max(1) as u64;
    let (n, n_correct) = (confusion.n() / repeats, (confusion.n_correct() + repeats / 2) / repeats);
    let per_class = confusion.per_class();
    let bins = reliability(labels, probabilities, N_BINS);
    let n_majority = labels.iter().filter(|label| **label == majority).count();
    let mut measures = Measures {
        n,
        n_groups: groups.iter().collect::<BTreeSet<_>>().len(),
        n_repeats,
        eval_accuracy: confusion.accuracy(),
        eval_f1_macro: confusion.f1_macro(),
        eval_f1_weighted: confusion.f1_weighted(),
        eval_per_class_f1: classes.iter().cloned().zip(per_class.iter().map(|scores| scores.f1)).collect(),
        per_class,
        classes: classes.to_vec(),
        accuracy_wilson: wilson(n_correct, n).ok_or_else(|| EvalError::Classification("no examples".into()))?,
        accuracy_bootstrap: interval(Confusion::accuracy)?,
        f1_macro_bootstrap: interval(Confusion::f1_macro)?,
        brier: brier_score(labels, probabilities),
        log_loss: log_loss(labels, probabilities),
        expected_calibration_error: expected_calibration_error(&bins),
        reliability: bins,
        majority_class: classes[majority].clone(),
        majority_accuracy: n_majority as f64 / labels.len() as f64,
        majority_p_value: beats_majority(labels, &predicted, groups, majority, (options.seed, options.n_resamples)),
        confusion,
        warnings: Vec::new(),
    };
    measures.warnings = warnings(&measures);
    Ok(measures)
}

fn check(examples: &Examples<'_>, probabilities: &[Vec<f64>], options: MeasureOptions) -> Result<(), EvalError> {
    let Examples { classes, labels, groups, majority, .. } = examples;
    let refuse = |message: String| Err(EvalError::Classification(message));
    if options.n_resamples == 0 {
        return Err(EvalError::NoResamples);
    }
    if labels.is_empty() {
        return refuse("no examples to evaluate; expected one at least".into());
    }
    if labels.len() != probabilities.len() || labels.len() != groups.len() {
        let (n, rows, groups) = (labels.len(), probabilities.len(), groups.len());
        return refuse(format!(
            "{n} labels, {rows} rows of probabilities and {groups} groups; expected as many of each"
        ));
    }
    if let Some(class) = labels.iter().chain([majority]).find(|class| **class >= classes.len()) {
        return refuse(format!("class {class} is none of the {} classes", classes.len()));
    }
    let is_distribution = |row: &Vec<f64>| {
        let is_share = row.iter().all(|p| (-1e-6..=1.0 + 1e-6).contains(p));
        row.len() == classes.len() && is_share && (row.iter().sum::<f64>() - 1.0).abs() < 1e-3
    };
    match probabilities.iter().position(|row| !is_distribution(row)) {
        Some(index) => {
            let (number, n) = (index + 1, classes.len());
            refuse(format!("example {number}: {:?} are not probabilities of {n} classes", probabilities[index]))
        }
        None => Ok(()),
    }
}

fn warnings(measures: &Measures) -> Vec<String> {
    let mut warnings = Vec::new();
    let (wilson, drawn) = (&measures.accuracy_wilson, &measures.accuracy_bootstrap);
    // Wilson's interval assumes independent examples; the bootstrap does not, but has no width if all predictions are correct.
    let wilson = (wilson.low, wilson.high);
    let (low, high) = if drawn.high - drawn.low > wilson.1 - wilson.0 { (drawn.low, drawn.high) } else { wilson };
    if high - low > WIDE {
        warnings.push(format!(
            "{} examples are too few to conclude from: the accuracy may as well be {:.0}% as {:.0}%",
            measures.n,
            100.0 * low,
            100.0 * high
        ));
    }
    if measures.n_groups < FEW_GROUPS && (measures.n_groups as u64) < measures.n {
        warnings.push(format!(
            "{} examples are of {} groups only, and those of a group are alike: intervals are too narrow with fewer than {FEW_GROUPS}",
            measures.n, measures.n_groups
        ));
    }
    let repeats = measures.n_repeats.max(1) as u64;
    let few = measures
        .per_class
        .iter()
        .zip(&measures.classes)
        .filter(|(scores, _)| scores.support / repeats < FEW_OF_A_CLASS);
    let few: Vec<String> = few.map(|(scores, class)| format!("{class} ({})", scores.support / repeats)).collect();
    if !few.is_empty() {
        warnings.push(format!(
            "figures of single classes say little where there are fewer than {FEW_OF_A_CLASS} examples: {}",
            few.join(", ")
        ));
    }
    if measures.majority_p_value > 0.05 {
        warnings.push(format!(
            "not shown to be better than always saying `{}` (p = {:.3})",
            measures.majority_class, measures.majority_p_value
        ));
    }
    warnings
}

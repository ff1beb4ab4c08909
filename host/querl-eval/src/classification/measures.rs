//! Every figure of a classifier at once, and what they are worth.

use super::confusion::{ClassScores, Confusion};
use super::intervals::{Proportion, wilson};
use super::permutation::beats_majority;
use super::probabilities::{argmax, brier_score, log_loss};
use super::reliability::{ReliabilityBin, expected_calibration_error, reliability};
use crate::EvalError;
use crate::bootstrap::{Bootstrap, Interval};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Below so many examples of a class, one more right or wrong moves its recall by more than 10 points.
const FEW_OF_A_CLASS: u64 = 10;
/// An interval of the accuracy wider than this separates hardly any two classifiers.
const WIDE: f64 = 0.2;
/// With fewer groups the bootstrap's intervals are too narrow themselves: see [`Interval`].
const FEW_GROUPS: usize = 20;
/// Confidence is seen in so many bins.
const N_BINS: usize = 10;

/// What a classifier was asked.
#[derive(Debug, Clone, Copy)]
pub struct Examples<'a> {
    /// Names of the classes, by their position.
    pub classes: &'a [String],
    /// The true class of each example.
    pub labels: &'a [usize],
    /// The group of each. Resamples draw groups.
    pub groups: &'a [&'a str],
    /// How often each example comes: the rounds of a repeated cross-validation, else 1.
    pub n_repeats: usize,
    /// The class that is commonest where the classifier learned.
    pub majority: usize,
}

/// How intervals and p-values are drawn.
#[derive(Debug, Clone, Copy)]
pub struct MeasureOptions {
    /// Same seed, same intervals.
    pub seed: u64,
    /// Of the bootstrap, and of the permutation test; at least 1.
    pub n_resamples: usize,
}

/// How well it did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measures {
    /// Examples, each counted once.
    pub n: u64,
    /// Groups of them.
    pub n_groups: usize,
    /// Rounds in which each was held out.
    pub n_repeats: usize,
    /// Share of right predictions.
    pub eval_accuracy: f64,
    /// Mean F1 of the classes that occur, each class alike.
    pub eval_f1_macro: f64,
    /// The same, weighted by examples.
    pub eval_f1_weighted: f64,
    /// F1 of each class, by its name.
    pub eval_per_class_f1: BTreeMap<String, f64>,
    /// Precision, recall and F1 in the order of `classes`.
    pub per_class: Vec<ClassScores>,
    /// Names of the classes.
    pub classes: Vec<String>,
    /// Rows are true classes.
    pub confusion: Confusion,
    /// Wilson's interval, as if examples were independent.
    pub accuracy_wilson: Proportion,
    /// By the bootstrap over groups.
    pub accuracy_bootstrap: Interval,
    /// By the bootstrap over groups.
    pub f1_macro_bootstrap: Interval,
    /// 0 at best, 2 at worst.
    pub brier: f64,
    /// Mean negative log-probability of the true class.
    pub log_loss: f64,
    /// Mean distance of confidence from accuracy.
    pub expected_calibration_error: f64,
    /// Confidence and accuracy by confidence.
    pub reliability: Vec<ReliabilityBin>,
    /// The class that is commonest where the classifier learned.
    pub majority_class: String,
    /// Accuracy of always saying it.
    pub majority_accuracy: f64,
    /// One-sided p-value against that.
    pub majority_p_value: f64,
    /// Why not to conclude much from these figures, in words; empty where they are enough.
    pub warnings: Vec<String>,
}

/// All figures of the probabilities that a classifier gave each example.
///
/// # Errors
/// No examples, lists of different lengths, a class that is not there, or a row that is no distribution over the classes.
pub fn measure(
    examples: &Examples<'_>,
    probabilities: &[Vec<f64>],
    options: MeasureOptions,
) -> Result<Measures, EvalError> {
    check(examples, probabilities, options)?;
    let Examples { classes, labels, groups, n_repeats, majority } = *examples;
    let predicted: Vec<usize> = probabilities.iter().map(|row| argmax(row)).collect();
    let matrix = |wanted: &mut dyn Iterator<Item = usize>| {
        Confusion::new(classes.len(), wanted.map(|index| (labels[index], predicted[index])))
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
            refuse(format!("example {number}: {:?} are no probabilities of {n} classes", probabilities[index]))
        }
        None => Ok(()),
    }
}

/// What speaks against conclusions, in words.
fn warnings(measures: &Measures) -> Vec<String> {
    let mut warnings = Vec::new();
    let (wilson, drawn) = (&measures.accuracy_wilson, &measures.accuracy_bootstrap);
    // Wilson's takes examples for independent, which those of a group are not; the bootstrap knows, but has no width where all are right.
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

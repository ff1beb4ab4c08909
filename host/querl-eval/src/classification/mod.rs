//! Evaluation of classifiers with few examples: metrics, grouped splits, temperature scaling and a baseline.
//!
//! Everything works on plain values: the class index of each example, the probabilities of the classes, and the group of the example.
//! The examples of a group are never on both sides of a split, and resamples draw groups.

mod baseline;
mod calibration;
mod folds;
mod measures;
mod metrics;
mod output;
#[cfg(test)]
mod tests;

pub use baseline::TextBaseline;
pub use calibration::{calibrated, fit_temperature};
pub use folds::{Fold, FoldSettings, folds, split_off};
pub use measures::{Examples, MeasureOptions, Measures, measure};
pub(crate) use metrics::ReliabilityBin;
pub use metrics::{argmax, softmax};
pub use output::{ClassificationReport, Mistake, classification_html, classification_text};

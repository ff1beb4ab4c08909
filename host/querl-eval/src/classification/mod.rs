//! How well a classifier tells classes apart, and how sure one can be of it on few examples.
//!
//! Everything works on plain values: the class of each example as an index, the probabilities that a classifier gave each class,
//! and the group that an example belongs to. Examples of a group are never on both sides of a split, and resamples draw groups.

mod baseline;
mod calibration;
mod confusion;
mod folds;
mod intervals;
mod measures;
mod page;
mod permutation;
mod probabilities;
mod reliability;
mod text;

pub use baseline::{LogisticRegression, TextBaseline, TfIdf};
pub use calibration::{calibrated, fit_temperature};
pub use confusion::{ClassScores, Confusion};
pub use folds::{Fold, FoldSettings, folds, split_off};
pub use intervals::{Proportion, wilson};
pub use measures::{Examples, MeasureOptions, Measures, measure};
pub use page::{ClassificationReport, Mistake, classification_html};
pub use permutation::beats_majority;
pub use probabilities::{argmax, brier_score, log_loss, softmax};
pub use reliability::{ReliabilityBin, expected_calibration_error, reliability};
pub use text::classification_text;

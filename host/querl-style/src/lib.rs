//! The style reward model: a sequence classifier of dialogues into styles. Corpus, training, distillation, calibration, evaluation, and
//! inference for rewards and plugins.
//!
//! In: labelled dialogues and a base model. Out: a folder with the classifier and its metrics, or class probabilities of dialogues. This
//! crate must not depend on the command line, plugins or the network.

mod classifier;
mod corpus;
mod distill;
mod evaluation;
mod labels;
mod settings;
mod shared_model;
mod texts;
mod train;
mod trainer;

pub use classifier::{Answers, ClassifierOptions, StyleClassifier, TOKENS_PER_PASS};
pub use distill::{DistillOptions, distill};
pub use evaluation::{EvalOptions, evaluate};
pub use settings::TrainConfig;
pub use shared_model::{SharedStyleModel, StyleReward, Undecided, turns_of, turns_of_side, unknown_class};
pub use texts::texts_of;
pub use train::{Trained, train};
pub use trainer::{Callbacks, OpenMetrics, Uninterrupted};

use anyhow::Context;

/// Error for a setting, model or file that cannot be used; the message says which and why.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(String);

fn usage(error: impl std::fmt::Display) -> anyhow::Error {
    UsageError(error.to_string()).into()
}

fn make_folder(folder: &std::path::Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("{}: cannot be made", folder.display()))
}

/// Writes a file atomically.
fn write(path: &std::path::Path, text: &str) -> anyhow::Result<()> {
    querl_core::fsx::write_atomic(path, text.as_bytes())
        .with_context(|| format!("{}: cannot be written", path.display()))
}

/// Writes indented JSON atomically.
fn write_json(path: &std::path::Path, value: &impl serde::Serialize) -> anyhow::Result<()> {
    querl_core::fsx::write_json(path, value).with_context(|| format!("{}: cannot be written", path.display()))
}

//! The style reward model: a classifier of the style of answers. Corpus, training, distillation, calibration, evaluation, and the
//! model as rewards and plugins see it.
//!
//! In: labelled dialogues and a base model. Out: a classifier's folder with its figures, or probabilities of styles. This crate
//! must not depend on a command line, on plugins and on the network.

mod class_names;
mod corpus;
mod distill;
mod error;
mod evaluate;
mod fitting;
mod folds;
mod measured;
mod model;
mod results;
mod settings;
mod shared_model;
mod style_reward;
mod teacher;
mod texts;
mod train;

pub use distill::{DistillOptions, distill};
pub use error::UsageError;
pub use evaluate::{EvalOptions, evaluate};
pub use fitting::{Callbacks, OpenMetrics};
pub use model::{Answers, ClassifierOptions, StyleClassifier, TOKENS_PER_PASS};
pub use settings::TrainConfig;
pub use shared_model::{SharedStyleModel, text_of, turns_of};
pub use style_reward::{StyleReward, Undecided, turns_of_side, unknown_class};
pub use texts::texts_of;
pub use train::{Trained, train};

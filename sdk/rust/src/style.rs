//! Style scorer plugins.

use crate::{CallFailure, Message, Rejection, Score, SettingError, Settings, StyleProbability};

/// A dialogue whose last turn, the assistant's, is to be scored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Dialogue {
    /// Unique in a run.
    pub id: String,
    /// All turns.
    pub turns: Vec<Message>,
}

/// Why there is no style distribution.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClassifyError {
    /// The run has no style model.
    #[error("the run has no style model")]
    NotConfigured,
    /// The model gave no answer.
    #[error("the style model gave no answer: {0}")]
    Failed(CallFailure),
}

/// The style model of the run.
pub trait StyleModel {
    /// The distribution over the model's classes, one entry per class, in the model's order, of the last turn of the assistant and the last of
    /// the user before it.
    ///
    /// # Errors
    /// No model, or no answer.
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, ClassifyError>;
}

/// Scores the style of the last turn of a dialogue.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a style scorer plugin",
    label = "does not implement `querl_sdk::StyleScorer`",
    note = "`export!(style_scorer: {Self})` wants `impl querl_sdk::StyleScorer for {Self}`"
)]
pub trait StyleScorer: Sized {
    /// Reads the settings: every key that the plugin knows, whatever the values of the others.
    ///
    /// # Errors
    /// A value that cannot be used.
    fn new(settings: &Settings) -> Result<Self, SettingError>;

    /// Scores one dialogue, 0 (worst) to 1 (best). In a test, `model` is any stand-in.
    ///
    /// # Errors
    /// The dialogue cannot be scored. Not a score of 0.
    fn score(&self, dialogue: &Dialogue, model: &dyn StyleModel) -> Result<Score, Rejection>;
}

//! Style scorer: the score of a response is the probability of one class of the run's style model.

use querl_sdk::{Dialogue, Rejection, Score, SettingError, Settings, StyleModel, StyleScorer};

/// The scorer with its settings. querl makes a new value for each call: store no state between
/// dialogues.
struct OneStyle {
    /// Name of the class.
    label: String,
}

impl StyleScorer for OneStyle {
    /// Reads all settings, each with its default. querl refuses a key that is not read.
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self {
            label: settings.text("label", "售前"),
        })
    }

    /// Scores the last turn of a dialogue, which is the assistant's: 0 (worst) to 1 (best). If that
    /// is not possible, return a `Rejection`: it drops the dialogue. A score of 0 would not.
    fn score(&self, dialogue: &Dialogue, model: &dyn StyleModel) -> Result<Score, Rejection> {
        // The probability of each class. The call fails if the run has no style model.
        let classes = model
            .classify(&dialogue.turns)
            .map_err(|error| Rejection::new("no_style", error.to_string()))?;
        match classes.iter().find(|class| class.label == self.label) {
            Some(class) => Ok(Score::new(class.probability)),
            None => Err(Rejection::new(
                "unknown_class",
                format!("the style model has no class `{}`", self.label),
            )),
        }
    }
}

querl_sdk::export!(style_scorer: OneStyle);

#[cfg(test)]
mod tests;

//! Scores an answer by how much its dialogue is of one style.

use querl_sdk::{Dialogue, Rejection, Score, SettingError, Settings, StyleModel, StyleScorer};

struct OneStyle {
    label: String,
}

impl StyleScorer for OneStyle {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self {
            label: settings.text("label", "售前"),
        })
    }

    fn score(&self, dialogue: &Dialogue, model: &dyn StyleModel) -> Result<Score, Rejection> {
        let classes = model
            .classify(&dialogue.turns)
            .map_err(|error| Rejection::new("no_style", error.to_string()))?;
        match classes.iter().find(|class| class.label == self.label) {
            Some(class) => Ok(Score::new(class.probability)),
            None => Err(Rejection::new(
                "unknown_label",
                format!("the style model has no class `{}`", self.label),
            )),
        }
    }
}

querl_sdk::export!(style_scorer: OneStyle);

#[cfg(test)]
mod tests;

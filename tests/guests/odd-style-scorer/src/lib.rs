//! Violates the rule of the contract that the setting `breach` names; none if it is `none`. The score is 1 minus
//! the probability of a complaint.

use querl_sdk::host::CallError;
use querl_sdk::{Dialogue, Rejection, Score, SettingError, Settings, StyleModel, StyleScorer};
use std::sync::atomic::{AtomicU32, Ordering};

/// Number of dialogues scored by this instance.
static N_SCORED: AtomicU32 = AtomicU32::new(0);

struct Guest {
    breach: String,
}

impl StyleScorer for Guest {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self { breach: settings.text("breach", "none") })
    }

    fn score(&self, dialogue: &Dialogue, model: &dyn StyleModel) -> Result<Score, Rejection> {
        let n_before = N_SCORED.fetch_add(1, Ordering::Relaxed);
        let classes = match model.classify(&dialogue.turns) {
            Ok(classes) => classes,
            Err(CallError::NotConfigured) if self.breach == "needs_a_model" => panic!("no style model"),
            Err(CallError::Failed(failure)) if self.breach == "needs_an_answer" => panic!("{failure}"),
            Err(error) => return Err(Rejection::new("no_style", error.to_string())),
        };
        let complaint = classes.iter().find(|class| class.label == "投诉").map_or(0.0, |class| class.probability);
        let answer = dialogue.turns.last().map_or(0, |turn| turn.content.chars().count());
        Ok(match self.breach.as_str() {
            "looks_at_neighbours" => Score::new((1.0 - complaint) / f64::from(n_before + 1)),
            "long_is_better" => Score::new((1.0 - complaint).max(answer as f64 / 1000.0)),
            "expects_a_question" => Score::new(1.0 - complaint).with("n_asked", dialogue.turns[1].content.len() as f64),
            _ => Score::new(1.0 - complaint).with("complaint", complaint),
        })
    }
}

querl_sdk::export!(style_scorer: Guest);

//! Style scorer: the probability of the target classes by the run's style model, minus penalties.
//!
//! ```text
//! target  = sum of weight * probability over the target classes
//! rival   = the largest probability of a class that is not a target
//! style   = target; with a margin m above 0 instead 0.5 + (target - rival) / (2 m), within 0 and 1
//! penalty = sum of weight * probability over the classes with a penalty
//! length  = n / min_chars below min_chars, 2 - n / max_chars above max_chars, else 1; n counts characters
//! total   = max(0, min(1, style) - penalty) * length
//! ```
//!
//! With a margin, the score is 1 as soon as the target leads the rival by the margin: a policy that has learned the style has no
//! incentive to exploit errors of the style model. A class with a penalty also counts as a rival, so that a penalty never raises a total.
//! The length factor prevents answers from growing, or from shrinking to a phrase. A blank answer scores 0. A run without a style model,
//! a failed call of the model and a class that the model does not have are rejections, never a score.
//!
//! Components: `target`, `rival`, `penalty`, `length`, and `class_0`, `class_1` and so on, the model's distribution in its order.

use querl_sdk::host::CallError;
use querl_sdk::{Dialogue, Rejection, Role, Score, SettingError, Settings, StyleModel, StyleProbability, StyleScorer};

const DEFAULT_TARGET: &str = "有帮助";

/// The scorer, with its settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Style {
    targets: Vec<(String, f64)>,
    penalties: Vec<(String, f64)>,
    margin: f64,
    min_chars: usize,
    max_chars: usize,
}

impl StyleScorer for Style {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        let mut targets = weighted(settings, "targets", &[DEFAULT_TARGET], 1.0)?;
        let penalties = weighted(settings, "penalties", &[], 10.0)?;
        if targets.is_empty() {
            targets.push((DEFAULT_TARGET.to_owned(), 1.0));
        }
        let style = Self {
            margin: settings.number("margin", 0.0, 0.0..=1.0)?,
            min_chars: settings.integer("min_chars", 0, 0..=100_000)? as usize,
            max_chars: settings.integer("max_chars", 0, 0..=100_000)? as usize,
            targets,
            penalties,
        };
        if let Some((class, _)) = style.targets.iter().find(|(class, _)| weight(&style.penalties, class).is_some()) {
            return Err(SettingError::new("penalties", format!("`{class}` is wanted too; expected other classes")));
        }
        if style.max_chars > 0 && style.max_chars < style.min_chars {
            return Err(SettingError::new("max_chars", "expected no less than min_chars"));
        }
        Ok(style)
    }

    fn score(&self, dialogue: &Dialogue, model: &dyn StyleModel) -> Result<Score, Rejection> {
        let Some(answer) = dialogue.turns.last().filter(|turn| turn.role == Role::Assistant) else {
            return Err(Rejection::new("no_answer", "the last turn is not the assistant's"));
        };
        let n_chars = answer.content.trim().chars().count();
        if n_chars == 0 {
            return Ok(Score::new(0.0).with("length", 0.0));
        }
        let classes = model.classify(&dialogue.turns).map_err(|error| match &error {
            CallError::NotConfigured => Rejection::new("style_model_missing", error.to_string()),
            CallError::Failed(_) => Rejection::new("style_model_failed", error.to_string()),
        })?;
        self.check(&classes)?;
        let (target, penalty) = (sum(&self.targets, &classes), sum(&self.penalties, &classes));
        // Classes with a penalty are rivals too. Otherwise a small penalty would cost a class less than it costs as a rival.
        let is_rival = |class: &&StyleProbability| weight(&self.targets, &class.label).is_none();
        let rival = classes.iter().filter(is_rival).map(|class| class.probability).fold(0.0, f64::max);
        let style = match self.margin > 0.0 {
            true => (0.5 + (target - rival) / (2.0 * self.margin)).max(0.0),
            false => target,
        };
        let length = self.length(n_chars);
        let total = (style.min(1.0) - penalty).max(0.0) * length;
        let parts = [("target", target), ("rival", rival), ("penalty", penalty), ("length", length)];
        let score = parts.into_iter().fold(Score::new(total), |score, (name, value)| score.with(name, value));
        let of_class = |score: Score, (index, class): (usize, &StyleProbability)| {
            score.with(format!("class_{index}"), class.probability)
        };
        Ok(classes.iter().enumerate().fold(score, of_class))
    }
}

impl Style {
    fn check(&self, classes: &[StyleProbability]) -> Result<(), Rejection> {
        let is_unknown = |(class, _): &&(String, f64)| classes.iter().all(|known| known.label != *class);
        match self.targets.iter().chain(&self.penalties).find(is_unknown) {
            Some((class, _)) => {
                let known: Vec<&str> = classes.iter().map(|class| class.label.as_str()).collect();
                let detail = format!("the style model has no class `{class}`; it has {}", known.join("、"));
                Err(Rejection::new("unknown_class", detail))
            }
            None => Ok(()),
        }
    }

    fn length(&self, n_chars: usize) -> f64 {
        let share = |limit: usize| n_chars as f64 / limit as f64;
        if n_chars < self.min_chars {
            share(self.min_chars)
        } else if self.max_chars > 0 && n_chars > self.max_chars {
            (2.0 - share(self.max_chars)).max(0.0)
        } else {
            1.0
        }
    }
}

fn weight(classes: &[(String, f64)], label: &str) -> Option<f64> {
    classes.iter().find(|(class, _)| class == label).map(|(_, weight)| *weight)
}

fn sum(weights: &[(String, f64)], classes: &[StyleProbability]) -> f64 {
    classes.iter().filter_map(|class| Some(weight(weights, &class.label)? * class.probability)).sum()
}

/// Reads a setting whose items are `class` or `class=weight` (default weight 1). Weights are above 0 and at most `largest`.
fn weighted(
    settings: &Settings,
    key: &str,
    default: &[&str],
    largest: f64,
) -> Result<Vec<(String, f64)>, SettingError> {
    let mut found: Vec<(String, f64)> = Vec::new();
    for item in settings.list_or(key, default)? {
        let (class, weight) = item.split_once('=').unwrap_or((&item, "1"));
        let (class, number) = (class.trim(), weight.trim().parse::<f64>().ok());
        let Some(number) = number.filter(|number| *number > 0.0 && *number <= largest && !class.is_empty()) else {
            let expected = format!("expected a class, or class=weight with a weight above 0, at most {largest}");
            return Err(SettingError::new(key, format!("{expected}, got `{item}`")));
        };
        if found.iter().any(|(known, _)| known == class) {
            return Err(SettingError::new(key, format!("`{class}` stands there twice")));
        }
        found.push((class.to_owned(), number));
    }
    Ok(found)
}

querl_sdk::export!(style_scorer: Style);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

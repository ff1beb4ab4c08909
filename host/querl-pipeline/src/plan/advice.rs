//! Advice of a plan: a finding in words, and a recommended action.

use serde::Serialize;

/// Effect of a finding on the outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// No action is needed.
    Ok,
    /// The fact is not known yet.
    Unknown,
    /// A good result is less likely.
    Weak,
    /// A good result is unlikely.
    Bad,
}

impl Level {
    fn mark(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "? ",
            Self::Weak => "! ",
            Self::Bad => "!!",
        }
    }
}

/// A finding of the plan with a recommended action.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// Subject of the finding, such as `data` or `tokenizer`.
    pub topic: &'static str,
    /// Effect of the finding on the outcome.
    pub level: Level,
    /// The finding, as a sentence.
    pub finding: String,
    /// The recommended action, as a sentence.
    pub action: String,
}

impl Advice {
    pub(super) fn new(
        topic: &'static str,
        level: Level,
        finding: impl Into<String>,
        action: impl Into<String>,
    ) -> Self {
        Self { topic, level, finding: finding.into(), action: action.into() }
    }

    /// The advice as one line for a terminal.
    pub fn line(&self) -> String {
        format!("{} {:<10} {}; {}", self.level.mark(), self.topic, self.finding, self.action)
    }
}

/// Formats a share as a percentage: `52 %`.
pub(super) fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// The quotient `part / of`; 0 if `of` is 0.
pub(super) fn share(part: usize, of: usize) -> f64 {
    if of == 0 { 0.0 } else { part as f64 / of as f64 }
}

/// Mean of the values; `None` if there are none.
pub(super) fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut n) = (0.0, 0.0);
    for value in values {
        sum += value;
        n += 1.0;
    }
    (n > 0.0).then(|| sum / n)
}

//! A fact of a plan in words: what was found, and what to do.

use serde::Serialize;

/// How a fact bears on the outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Nothing to do.
    Ok,
    /// Not known yet.
    Unknown,
    /// Makes a result less likely.
    Weak,
    /// Makes a result unlikely.
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

/// One fact and one sentence of what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// Subject: `data`, `tokenizer`.
    pub topic: &'static str,
    /// How it bears on the outcome.
    pub level: Level,
    /// What was found.
    pub finding: String,
    /// What to do.
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

    /// For a terminal.
    pub fn line(&self) -> String {
        format!("{} {:<10} {}; {}", self.level.mark(), self.topic, self.finding, self.action)
    }
}

/// `52 %`.
pub(super) fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// A share of two numbers; 0 where there is nothing to share.
pub(super) fn share(part: usize, of: usize) -> f64 {
    if of == 0 { 0.0 } else { part as f64 / of as f64 }
}

/// The mean; `None` of nothing.
pub(super) fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut n) = (0.0, 0.0);
    for value in values {
        sum += value;
        n += 1.0;
    }
    (n > 0.0).then(|| sum / n)
}

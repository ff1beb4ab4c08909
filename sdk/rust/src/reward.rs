//! Reward plugins.

use crate::{Candidate, Context, Rejection, SettingError, Settings};
use std::ops::RangeInclusive;

/// Everything that a reward may look at.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Episode {
    /// Unique in a run.
    pub id: String,
    /// What the user typed.
    pub query: String,
    /// Who asks, and what was said before.
    pub context: Context,
    /// Ids of passages known to answer the query; empty where unknown.
    pub gold_ids: Vec<String>,
    /// The policy's side.
    pub policy: Candidate,
    /// The teacher's side.
    pub baseline: Candidate,
}

/// A named part of a score, for people, metrics and reports.
#[derive(Debug, Clone, PartialEq)]
pub struct Component {
    /// 1 to 64 of `a` to `z`, `0` to `9`, `_`; unique in one score.
    pub name: String,
    /// Finite.
    pub value: f64,
}

/// The score of one episode.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// Finite, and within the range that the plugin declares.
    pub total: f64,
    /// Named parts; they need not sum to the total.
    pub components: Vec<Component>,
}

impl Score {
    /// A score without parts.
    pub fn new(total: f64) -> Self {
        Self { total, components: Vec::new() }
    }

    /// The part of this name, where there is one.
    pub fn component(&self, name: &str) -> Option<f64> {
        self.components.iter().find(|part| part.name == name).map(|part| part.value)
    }

    /// Adds a named part.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: f64) -> Self {
        self.components.push(Component { name: name.into(), value });
        self
    }
}

/// Scores what the policy wrote against what the teacher wrote.
///
/// One value is made for each call and scores the episodes of a batch one by one: a score depends on its episode and the
/// settings only, which is what the contract asks for.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a reward plugin",
    label = "does not implement `querl_sdk::Reward`",
    note = "`export!(reward: {Self})` wants `impl querl_sdk::Reward for {Self}`"
)]
pub trait Reward: Sized {
    /// Reads the settings: every key that the plugin knows, whatever the values of the others.
    ///
    /// # Errors
    /// A value that cannot be used.
    fn new(settings: &Settings) -> Result<Self, SettingError>;

    /// The range of totals under these settings.
    fn range(&self) -> RangeInclusive<f64>;

    /// Scores one episode.
    ///
    /// # Errors
    /// The episode cannot be scored, for example because a call failed on one side. Not a score of 0, which means a draw.
    fn score(&self, episode: &Episode) -> Result<Score, Rejection>;
}

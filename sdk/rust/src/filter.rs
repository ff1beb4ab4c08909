//! Filter plugins.

use crate::{Context, Hit, Rejection, SettingError, Settings};

/// A row whose rewrite and retrieval both succeeded.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sample {
    /// Id of the row, unique in the batch.
    pub id: String,
    /// What the user typed.
    pub original_query: String,
    /// The teacher's rewrite.
    pub rewritten_query: String,
    /// Who asks, and what was said before.
    pub context: Context,
    /// Hits of the rewrite, best first; empty where nothing was found.
    pub hits: Vec<Hit>,
}

/// A filter's word on one sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Goes into the dataset.
    Keep,
    /// Stays out, for this reason.
    Drop(Rejection),
}

impl Verdict {
    /// Drops with a code for counting and a sentence for a person.
    pub fn drop(code: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Drop(Rejection::new(code, detail))
    }
}

/// Keeps samples in the training data or drops them.
///
/// One value is made for each batch, which is the whole dataset, and sees its samples in order.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a filter plugin",
    label = "does not implement `querl_sdk::Filter`",
    note = "`export!(filter: {Self})` wants `impl querl_sdk::Filter for {Self}`"
)]
pub trait Filter: Sized {
    /// Reads the settings: every key that the plugin knows, whatever the values of the others.
    ///
    /// # Errors
    /// A value that cannot be used.
    fn new(settings: &Settings) -> Result<Self, SettingError>;

    /// Judges one sample. What it remembers of the samples before it may count, for example to find duplicates.
    fn check(&mut self, sample: &Sample) -> Verdict;
}

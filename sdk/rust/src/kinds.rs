//! The kinds of plugins: a trait each, with the records that it takes and returns.

use crate::{CallFailure, Candidate, Context, Hit, Message, Rejection, SettingError, Settings, StyleProbability};
use std::ops::RangeInclusive;

/// The input of a reward.
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

/// A filter's decision on one sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The sample is part of the dataset.
    Keep,
    /// The sample is left out, with a reason.
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

/// The purpose of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PromptTask {
    /// The teacher's prompt: long, with the tenant's rules.
    TeacherRewrite,
    /// The policy's prompt: short; the model learns the rules in training.
    PolicyRewrite,
    /// The judge's prompt.
    Judge,
}

/// What goes into a prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptInput {
    /// What the user typed.
    pub query: String,
    /// Who asks, and what was said before.
    pub context: Context,
    /// The rewrite to judge; `None` in the rewrite tasks.
    pub rewrite: Option<String>,
}

/// A judge's score of one rewrite.
#[derive(Debug, Clone, PartialEq)]
pub struct JudgeScore {
    /// 综合得分, 0 to 5.
    pub score: f64,
    /// Why, in words.
    pub reason: String,
}

/// A tenant's prompts, and the parsing of answers to them.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a prompt plugin",
    label = "does not implement `querl_sdk::Prompt`",
    note = "`export!(prompt: {Self})` wants `impl querl_sdk::Prompt for {Self}`"
)]
pub trait Prompt: Sized {
    /// Reads the settings: every key that the plugin knows, whatever the values of the others.
    ///
    /// # Errors
    /// A value that cannot be used.
    fn new(settings: &Settings) -> Result<Self, SettingError>;

    /// The conversation for one task; the last message is the user's.
    fn messages(&self, task: PromptTask, input: &PromptInput) -> Vec<Message>;

    /// The rewrite in a model's answer; never empty.
    ///
    /// # Errors
    /// There is none.
    fn parse_rewrite(&self, text: &str) -> Result<String, Rejection>;

    /// The judgement in a judge's answer.
    ///
    /// # Errors
    /// There is none, or its score is not within 0 to 5.
    fn parse_judgement(&self, text: &str) -> Result<JudgeScore, Rejection>;
}

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

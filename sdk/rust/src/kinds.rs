//! The kinds of plugins: a trait for each, with the records that it takes and returns.

use crate::host::CallError;
use crate::{
    Candidate, Column, ColumnValue, Context, Hit, JudgeScore, Message, Rejection, SettingError, Settings, Split,
    StyleProbability,
};
use std::ops::RangeInclusive;

/// A part of an episode or sample that the host computes and passes only if the plugin declares it, because it costs time or memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// The text that the policy generated: [`Episode::response`].
    Response,
    /// The messages that the policy answered: [`Episode::prompt`].
    Prompt,
    /// Further columns of the query's row: [`Episode::columns`], and [`Sample::columns`].
    Columns,
    /// The teacher's rewrite: [`Episode::baseline`].
    Baseline,
    /// Retrieved passages: [`Candidate::retrieval`] of the policy, and of the baseline if it is declared.
    Retrieval,
    /// The judge's score: [`Candidate::judgement`] of the policy, and of the baseline if it is declared.
    Judgement,
    /// Style distribution: [`Candidate::style`] of the policy, and of the baseline if it is declared.
    Style,
}

impl Input {
    /// All inputs, in the order of the contract.
    pub const ALL: [Self; 7] =
        [Self::Response, Self::Prompt, Self::Columns, Self::Baseline, Self::Retrieval, Self::Judgement, Self::Style];
}

/// The inputs that a plugin declares: `Inputs::NONE.requires(Input::Baseline).uses(Input::Judgement)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Inputs {
    used: u8,
    required: u8,
}

impl Inputs {
    /// No declared inputs. An episode then has ids, step, split, query, context, gold ids, and the policy's rewrite, number of tokens and
    /// finish reason.
    pub const NONE: Self = Self { used: 0, required: 0 };

    /// Adds a required input: querl refuses a run that cannot provide it.
    #[must_use]
    pub const fn requires(self, input: Input) -> Self {
        Self { used: self.used | 1 << input as u8, required: self.required | 1 << input as u8 }
    }

    /// Adds an optional input: passed if the run can provide it.
    #[must_use]
    pub const fn uses(self, input: Input) -> Self {
        Self { used: self.used | 1 << input as u8, ..self }
    }

    /// True if the input is declared.
    pub const fn contains(self, input: Input) -> bool {
        self.used & (1 << input as u8) != 0
    }

    /// True if the input is required.
    pub const fn is_required(self, input: Input) -> bool {
        self.required & (1 << input as u8) != 0
    }

    /// The union of `self` and `other`, for a component with several kinds of plugin.
    #[doc(hidden)]
    pub const fn and(self, other: Self) -> Self {
        Self { used: self.used | other.used, required: self.required | other.required }
    }
}

/// A response of the policy to one query, with its context: the input of a reward.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Episode {
    /// Id of the episode, unique in a run.
    pub id: String,
    /// Id of the group: the same for all samples of one query in one batch of rollouts, and for no others.
    pub group_id: String,
    /// Index of the response among the samples of its group, from 0.
    pub sample_index: u32,
    /// Training step of the rollout, from 0; `None` outside of training.
    pub step: Option<u64>,
    /// The data split of the query's row; `None` if it is unknown.
    pub split: Option<Split>,
    /// The query that the user typed.
    pub query: String,
    /// The user's profile, and a summary of the conversation so far.
    pub context: Context,
    /// Ids of passages known to answer the query; `None` if there are none, never empty.
    pub gold_ids: Option<Vec<String>>,
    /// Other columns of the query's row, in the order of the table; empty unless [`Input::Columns`] is declared.
    pub columns: Vec<Column>,
    /// The messages of the policy's prompt; `None` unless [`Input::Prompt`] is declared.
    pub prompt: Option<Vec<Message>>,
    /// The text that the policy generated, without special tokens, before it is parsed. May be empty; `None` unless
    /// [`Input::Response`] is declared.
    pub response: Option<String>,
    /// The policy's rewrite, with retrieval, judgement and style if declared.
    pub policy: Candidate,
    /// The teacher's rewrite of the same query; `None` unless [`Input::Baseline`] is declared and there is one.
    pub baseline: Option<Candidate>,
}

impl Episode {
    /// The text that the policy generated.
    ///
    /// # Errors
    /// The rejection `response_missing` if the episode has none.
    pub fn response(&self) -> Result<&str, Rejection> {
        self.response.as_deref().ok_or_else(|| Rejection::new("response_missing", ""))
    }

    /// The teacher's rewrite.
    ///
    /// # Errors
    /// The rejection `baseline_missing` if the episode has none.
    pub fn baseline(&self) -> Result<&Candidate, Rejection> {
        self.baseline.as_ref().ok_or_else(|| Rejection::new("baseline_missing", ""))
    }

    /// The value of a column; `None` where the row has none.
    pub fn column(&self, name: &str) -> Option<&ColumnValue> {
        self.columns.iter().find(|column| column.name == name).map(|column| &column.value)
    }
}

/// A named part of a score, for metrics and reports.
#[derive(Debug, Clone, PartialEq)]
pub struct Component {
    /// Name of the component: 1 to 64 of `a` to `z`, `0` to `9`, `_`; unique in one score.
    pub name: String,
    /// Value of the component: finite, at most 1e18 in magnitude.
    pub value: f64,
}

/// The score of one episode (rewards) or of one dialogue (style scorers).
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// The score: finite, and within the declared range (0 to 1 for style scorers).
    pub total: f64,
    /// Named components, at most 64. They need not sum to the total.
    pub components: Vec<Component>,
}

impl Score {
    /// A score without components.
    pub fn new(total: f64) -> Self {
        Self { total, components: Vec::new() }
    }

    /// The value of the component with this name; `None` if there is none.
    pub fn component(&self, name: &str) -> Option<f64> {
        self.components.iter().find(|part| part.name == name).map(|part| part.value)
    }

    /// Adds a named component.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: f64) -> Self {
        self.components.push(Component { name: name.into(), value });
        self
    }
}

/// Scores what the policy generated, one episode at a time.
///
/// The SDK makes one value per call, which scores the episodes of a batch one by one. A score may depend only on its episode, the
/// settings and the results of host functions: keep no state between episodes.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a reward plugin",
    label = "does not implement `querl_sdk::Reward`",
    note = "`export!(reward: {Self})` wants `impl querl_sdk::Reward for {Self}`"
)]
pub trait Reward: Sized {
    /// Inputs that the reward declares to read.
    const INPUTS: Inputs = Inputs::NONE;

    /// Makes the plugin from its settings. Reads every key that the plugin knows, whatever the values of the others.
    ///
    /// # Errors
    /// A value that cannot be used.
    fn new(settings: &Settings) -> Result<Self, SettingError>;

    /// Lowest and highest total under these settings.
    fn range(&self) -> RangeInclusive<f64>;

    /// Scores one episode.
    ///
    /// # Errors
    /// The episode cannot be scored, for example because retrieval failed. It is dropped; that is not a score of 0.
    fn score(&self, episode: &Episode) -> Result<Score, Rejection>;
}

/// Scores all samples of one query together, for rewards of diversity or rank.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a group reward plugin",
    label = "does not implement `querl_sdk::GroupReward`",
    note = "`export!(group_reward: {Self})` wants `impl querl_sdk::GroupReward for {Self}`"
)]
pub trait GroupReward: Sized {
    /// Inputs that the reward declares to read.
    const INPUTS: Inputs = Inputs::NONE;

    /// Makes the plugin from its settings. Reads every key that the plugin knows, whatever the values of the others.
    ///
    /// # Errors
    /// A value that cannot be used.
    fn new(settings: &Settings) -> Result<Self, SettingError>;

    /// Lowest and highest total under these settings.
    fn range(&self) -> RangeInclusive<f64>;

    /// Scores one group: one result per episode, in the order of the episodes. Results must not depend on that order. All episodes have
    /// the same `group_id`. There is at least one, and there may be fewer than the samples drawn, since episodes with a failed call are
    /// left out.
    fn score_group(&self, episodes: &[Episode]) -> Vec<Result<Score, Rejection>>;
}

/// A row of the training data whose rewrite and retrieval both succeeded: the input of a filter.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sample {
    /// Id of the row, unique in the batch.
    pub id: String,
    /// The query that the user typed.
    pub original_query: String,
    /// The teacher's rewrite.
    pub rewritten_query: String,
    /// The user's profile, and a summary of the conversation so far.
    pub context: Context,
    /// Hits of the rewrite, best first; empty where nothing was found.
    pub hits: Vec<Hit>,
    /// Other columns of the row; empty unless [`Filter::INPUTS`] declares [`Input::Columns`].
    pub columns: Vec<Column>,
}

impl Sample {
    /// The value of a column; `None` where the row has none.
    pub fn column(&self, name: &str) -> Option<&ColumnValue> {
        self.columns.iter().find(|column| column.name == name).map(|column| &column.value)
    }
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
    /// A verdict to drop the sample, with a code for counting and a sentence for people.
    pub fn drop(code: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Drop(Rejection::new(code, detail))
    }
}

/// Keeps samples in the training data or drops them.
///
/// The SDK makes one value per batch, which checks the samples in order. A batch is a complete split, or a part of it of at most 8192
/// samples or 32 MiB of text if the split is larger.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a filter plugin",
    label = "does not implement `querl_sdk::Filter`",
    note = "`export!(filter: {Self})` wants `impl querl_sdk::Filter for {Self}`"
)]
pub trait Filter: Sized {
    /// Inputs that the filter declares to read: [`Input::Columns`], or none.
    const INPUTS: Inputs = Inputs::NONE;

    /// Makes the plugin from its settings. Reads every key that the plugin knows, whatever the values of the others.
    ///
    /// # Errors
    /// A value that cannot be used.
    fn new(settings: &Settings) -> Result<Self, SettingError>;

    /// The verdict on one sample. It may depend on earlier samples of the batch, for example to find duplicates.
    fn check(&mut self, sample: &Sample) -> Verdict;
}

/// The purpose of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PromptTask {
    /// The teacher's prompt: long, with the tenant's rules.
    TeacherRewrite,
    /// The policy's prompt: short; the model learns the rules in training.
    PolicyRewrite,
    /// The judge's prompt.
    Judge,
    /// A task of a later version of the contract, by its name. Reject it with [`Rejection::unknown_task`] unless the plugin knows it.
    Other(String),
}

/// The variables of a prompt.
///
/// Implements `serde::Deserialize` in native tests only, not in a component.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "wasm32"), derive(serde::Deserialize), serde(deny_unknown_fields))]
pub struct PromptInput {
    /// The query that the user typed.
    pub query: String,
    /// The user's profile, and a summary of the conversation so far.
    #[cfg_attr(not(target_arch = "wasm32"), serde(default))]
    pub context: Context,
    /// The rewrite to judge; `None` in the rewrite tasks.
    pub rewrite: Option<String>,
}

/// A tenant's prompts, and the parsers of the responses to them.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a prompt plugin",
    label = "does not implement `querl_sdk::Prompt`",
    note = "`export!(prompt: {Self})` wants `impl querl_sdk::Prompt for {Self}`"
)]
pub trait Prompt: Sized {
    /// Makes the plugin from its settings. Reads every key that the plugin knows, whatever the values of the others.
    ///
    /// # Errors
    /// A value that cannot be used.
    fn new(settings: &Settings) -> Result<Self, SettingError>;

    /// The messages of the prompt for one task: at least one, the last from the user, a system message only at the start.
    ///
    /// # Errors
    /// The plugin does not know the task ([`Rejection::unknown_task`]), or has no prompt for this input.
    fn messages(&self, task: PromptTask, input: &PromptInput) -> Result<Vec<Message>, Rejection>;

    /// The rewrite in a model's response; never blank.
    ///
    /// # Errors
    /// The response contains no rewrite.
    fn parse_rewrite(&self, text: &str) -> Result<String, Rejection>;

    /// The score (0 to 5) and reason in a judge's response.
    ///
    /// # Errors
    /// The response contains no score, or one outside of 0 to 5. Never guess a score.
    fn parse_judgement(&self, text: &str) -> Result<JudgeScore, Rejection>;
}

/// A dialogue that ends with the assistant's turn to score.
///
/// Implements `serde::Deserialize` in native tests only, not in a component.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "wasm32"), derive(serde::Deserialize), serde(deny_unknown_fields))]
pub struct Dialogue {
    /// Id of the dialogue, unique in a run.
    pub id: String,
    /// All turns, oldest first.
    pub turns: Vec<Message>,
}

/// The style model of the run: a classifier of a response and its question.
pub trait StyleModel {
    /// The probability of each class, in the model's order, for the last turn of the assistant and the last turn of the user before it.
    ///
    /// # Errors
    /// The run has no style model, or the call failed.
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallError>;
}

/// Scores the style of the last turn of a dialogue.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a style scorer plugin",
    label = "does not implement `querl_sdk::StyleScorer`",
    note = "`export!(style_scorer: {Self})` wants `impl querl_sdk::StyleScorer for {Self}`"
)]
pub trait StyleScorer: Sized {
    /// Makes the plugin from its settings. Reads every key that the plugin knows, whatever the values of the others.
    ///
    /// # Errors
    /// A value that cannot be used.
    fn new(settings: &Settings) -> Result<Self, SettingError>;

    /// Scores one dialogue, 0 (worst) to 1 (best). In a test, `model` is any implementation of the trait.
    ///
    /// # Errors
    /// The dialogue cannot be scored. It is dropped; that is not a score of 0.
    fn score(&self, dialogue: &Dialogue, model: &dyn StyleModel) -> Result<Score, Rejection>;
}

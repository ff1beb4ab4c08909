//! The kinds of plugins: a trait each, with the records that it takes and returns.

use crate::host::CallError;
use crate::{
    Candidate, Column, ColumnValue, Context, Hit, JudgeScore, Message, Rejection, SettingError, Settings, Split,
    StyleProbability,
};
use std::ops::RangeInclusive;

/// A part of an episode that costs the host something. An episode has the parts that a plugin declares, and no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// [`Episode::response`].
    Response,
    /// [`Episode::prompt`].
    Prompt,
    /// [`Episode::columns`], and [`Sample::columns`].
    Columns,
    /// [`Episode::baseline`].
    Baseline,
    /// [`Candidate::retrieval`], of the policy and of a declared baseline.
    Retrieval,
    /// [`Candidate::judgement`], also of both.
    Judgement,
    /// [`Candidate::style`], also of both.
    Style,
}

impl Input {
    /// All, in the order of the contract.
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
    /// The query, its context, and the policy's rewrite alone.
    pub const NONE: Self = Self { used: 0, required: 0 };

    /// Adds an input without which a run is refused.
    #[must_use]
    pub const fn requires(self, input: Input) -> Self {
        Self { used: self.used | 1 << input as u8, required: self.required | 1 << input as u8 }
    }

    /// Adds an input that is read where the run has it.
    #[must_use]
    pub const fn uses(self, input: Input) -> Self {
        Self { used: self.used | 1 << input as u8, ..self }
    }

    /// Whether the input is declared.
    pub const fn contains(self, input: Input) -> bool {
        self.used & (1 << input as u8) != 0
    }

    /// Whether the input is required.
    pub const fn is_required(self, input: Input) -> bool {
        self.required & (1 << input as u8) != 0
    }

    /// The inputs of both, for a component that holds several kinds.
    #[doc(hidden)]
    pub const fn and(self, other: Self) -> Self {
        Self { used: self.used | other.used, required: self.required | other.required }
    }
}

/// The input of a reward.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Episode {
    /// Unique in a run.
    pub id: String,
    /// The same for all samples of one query in one batch of rollouts, and for no others.
    pub group_id: String,
    /// Index of the response among the samples of its group, from 0.
    pub sample_index: u32,
    /// Training step of the rollout, from 0; `None` outside of training.
    pub step: Option<u64>,
    /// The split of the query's row.
    pub split: Option<Split>,
    /// What the user typed.
    pub query: String,
    /// Who asks, and what was said before.
    pub context: Context,
    /// Ids of passages known to answer the query; not empty.
    pub gold_ids: Option<Vec<String>>,
    /// The other columns of the query's row, in the order of the table.
    pub columns: Vec<Column>,
    /// The messages that the policy answered.
    pub prompt: Option<Vec<Message>>,
    /// The text that the policy generated, without special tokens, before it is parsed. May be empty.
    pub response: Option<String>,
    /// The policy's rewrite.
    pub policy: Candidate,
    /// The teacher's rewrite of the same query.
    pub baseline: Option<Candidate>,
}

impl Episode {
    /// The text that the policy generated.
    ///
    /// # Errors
    /// `response_missing`.
    pub fn response(&self) -> Result<&str, Rejection> {
        self.response.as_deref().ok_or_else(|| Rejection::new("response_missing", ""))
    }

    /// The teacher's rewrite.
    ///
    /// # Errors
    /// `baseline_missing`.
    pub fn baseline(&self) -> Result<&Candidate, Rejection> {
        self.baseline.as_ref().ok_or_else(|| Rejection::new("baseline_missing", ""))
    }

    /// The value of a column; `None` where the row has none.
    pub fn column(&self, name: &str) -> Option<&ColumnValue> {
        self.columns.iter().find(|column| column.name == name).map(|column| &column.value)
    }
}

/// A named part of a score, for people, metrics and reports.
#[derive(Debug, Clone, PartialEq)]
pub struct Component {
    /// 1 to 64 of `a` to `z`, `0` to `9`, `_`; unique in one score.
    pub name: String,
    /// Finite, at most 1e18 in magnitude.
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

/// Scores what the policy generated, one episode at a time.
///
/// One value is made for each call and scores the episodes of a batch one by one: a score depends on its episode and the
/// settings only, which is what the contract asks for.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a reward plugin",
    label = "does not implement `querl_sdk::Reward`",
    note = "`export!(reward: {Self})` wants `impl querl_sdk::Reward for {Self}`"
)]
pub trait Reward: Sized {
    /// What it reads of an episode.
    const INPUTS: Inputs = Inputs::NONE;

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
    /// The episode cannot be scored, for example because a call failed. Not a score of 0.
    fn score(&self, episode: &Episode) -> Result<Score, Rejection>;
}

/// Scores all samples of one query together, for rewards of diversity or rank.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a group reward plugin",
    label = "does not implement `querl_sdk::GroupReward`",
    note = "`export!(group_reward: {Self})` wants `impl querl_sdk::GroupReward for {Self}`"
)]
pub trait GroupReward: Sized {
    /// What it reads of an episode.
    const INPUTS: Inputs = Inputs::NONE;

    /// Reads the settings: every key that the plugin knows, whatever the values of the others.
    ///
    /// # Errors
    /// A value that cannot be used.
    fn new(settings: &Settings) -> Result<Self, SettingError>;

    /// The range of totals under these settings.
    fn range(&self) -> RangeInclusive<f64>;

    /// One result per episode, in the order of the episodes, which does not matter for the results. All have the same `group_id`; there is at
    /// least one, and a group may have fewer episodes than samples were drawn.
    fn score_group(&self, episodes: &[Episode]) -> Vec<Result<Score, Rejection>>;
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
    /// The other columns of the row, where [`Filter::INPUTS`] has them.
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
    /// What it reads of a sample: [`Input::Columns`], or nothing.
    const INPUTS: Inputs = Inputs::NONE;

    /// Reads the settings: every key that the plugin knows, whatever the values of the others.
    ///
    /// # Errors
    /// A value that cannot be used.
    fn new(settings: &Settings) -> Result<Self, SettingError>;

    /// Judges one sample. What it remembers of the samples before it may count, for example to find duplicates.
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
    /// A task that a later contract names: to be rejected, unless the plugin knows it.
    Other(String),
}

/// What goes into a prompt.
///
/// Implements `serde::Deserialize` in native tests only, not in a component.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "wasm32"), derive(serde::Deserialize), serde(deny_unknown_fields))]
pub struct PromptInput {
    /// What the user typed.
    pub query: String,
    /// Who asks, and what was said before.
    #[cfg_attr(not(target_arch = "wasm32"), serde(default))]
    pub context: Context,
    /// The rewrite to judge; `None` in the rewrite tasks.
    pub rewrite: Option<String>,
}

/// A tenant's prompts, and the parsing of responses to them.
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
    ///
    /// # Errors
    /// The plugin does not know the task ([`Rejection::unknown_task`]), or has no prompt for this input.
    fn messages(&self, task: PromptTask, input: &PromptInput) -> Result<Vec<Message>, Rejection>;

    /// The rewrite in a model's response; never empty.
    ///
    /// # Errors
    /// There is none.
    fn parse_rewrite(&self, text: &str) -> Result<String, Rejection>;

    /// The judgement in a judge's response.
    ///
    /// # Errors
    /// There is none, or its score is not within 0 to 5.
    fn parse_judgement(&self, text: &str) -> Result<JudgeScore, Rejection>;
}

/// A dialogue whose last turn, the assistant's, is to be scored.
///
/// Implements `serde::Deserialize` in native tests only, not in a component.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "wasm32"), derive(serde::Deserialize), serde(deny_unknown_fields))]
pub struct Dialogue {
    /// Unique in a run.
    pub id: String,
    /// All turns.
    pub turns: Vec<Message>,
}

/// The style model of the run.
pub trait StyleModel {
    /// The distribution over the model's classes, one entry per class, in the model's order, of the last turn of the assistant and the last of
    /// the user before it.
    ///
    /// # Errors
    /// No model, or no answer.
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallError>;
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

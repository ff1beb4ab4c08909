//! Prompt plugins.

use crate::{Context, Message, Rejection, SettingError, Settings};

/// What a prompt is made for.
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

//! Common code of the tenants' prompt plugins: layout of prompts, parsers of responses. A tenant provides three system prompts
//! ([`Tenant`]).

mod judgement;
mod rewrite;
mod text;

pub use judgement::parse_judgement;
pub use rewrite::parse_rewrite;

use querl_sdk::{JudgeScore, Message, Prompt, PromptInput, PromptTask, Rejection, SettingError, Settings};
use std::marker::PhantomData;

/// A tenant.
pub trait Tenant {
    /// The tenant's system prompts.
    const PROMPTS: TenantPrompts;
}

/// The prompt plugin of a tenant. It has no settings.
#[derive(Debug, Clone, Copy)]
pub struct TenantPlugin<T>(PhantomData<T>);

impl<T: Tenant> Prompt for TenantPlugin<T> {
    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self(PhantomData))
    }

    fn messages(&self, task: PromptTask, input: &PromptInput) -> Result<Vec<Message>, Rejection> {
        T::PROMPTS.messages(task, input)
    }

    fn parse_rewrite(&self, text: &str) -> Result<String, Rejection> {
        parse_rewrite(text)
    }

    fn parse_judgement(&self, text: &str) -> Result<JudgeScore, Rejection> {
        parse_judgement(text)
    }
}

/// System prompts of a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TenantPrompts {
    /// The teacher's system prompt, with the tenant's rules.
    pub teacher_system: &'static str,
    /// The policy's system prompt, without the rules: the policy learns them in training.
    pub policy_system: &'static str,
    /// The judge's system prompt.
    pub judge_system: &'static str,
}

impl TenantPrompts {
    /// The messages for one task.
    ///
    /// # Errors
    /// The task is unknown.
    pub fn messages(&self, task: PromptTask, input: &PromptInput) -> Result<Vec<Message>, Rejection> {
        let query = query_lines(input);
        let (system, user) = match task {
            PromptTask::TeacherRewrite => (self.teacher_system, format!("{query}\n\n{TEACHER_REQUEST}")),
            PromptTask::PolicyRewrite => (self.policy_system, format!("{query}\n\n{POLICY_REQUEST}")),
            PromptTask::Judge => {
                let rewrite = input.rewrite.as_deref().unwrap_or_default();
                (self.judge_system, format!("{query}\n改写后的查询: {rewrite}\n\n{JUDGE_REQUEST}"))
            }
            PromptTask::Other(_) => return Err(Rejection::unknown_task(&task)),
        };
        Ok(vec![Message::system(system), Message::user(user)])
    }
}

const TEACHER_REQUEST: &str = "请改写这个查询，使其更适合知识库检索。只返回改写后的查询，不要其他内容。";
const POLICY_REQUEST: &str = "请改写。";
const JUDGE_REQUEST: &str =
    "请评估改写质量，只返回JSON，不要其他内容：{\"综合得分\": 0到5之间的数字, \"评分理由\": \"一句话说明\"}";

/// The lines 原始查询 and, if known, 用户画像 and 历史摘要.
fn query_lines(input: &PromptInput) -> String {
    let mut lines = format!("原始查询: {}", input.query);
    let context = [("用户画像", &input.context.user_profile), ("历史摘要", &input.context.history_summary)];
    for (name, value) in context.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?))) {
        lines.push_str(&format!("\n{name}: {value}"));
    }
    lines
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use querl_sdk::Context;

    const PROMPTS: TenantPrompts = TenantPrompts { teacher_system: "教", policy_system: "学", judge_system: "评" };

    fn input(profile: Option<&str>, history: Option<&str>) -> PromptInput {
        let context = Context { user_profile: profile.map(Into::into), history_summary: history.map(Into::into) };
        PromptInput { query: "孕妇能吃吗".into(), context, rewrite: Some("孕妇能否服用虾青素".into()) }
    }

    #[test]
    fn teacher_gets_the_seed_layout() {
        let messages = PROMPTS.messages(PromptTask::TeacherRewrite, &input(Some("孕妇"), Some("问过虾青素"))).unwrap();
        assert_eq!(messages[0], Message::system("教"));
        assert_eq!(
            messages[1].content,
            "原始查询: 孕妇能吃吗\n用户画像: 孕妇\n历史摘要: 问过虾青素\n\n\
             请改写这个查询，使其更适合知识库检索。只返回改写后的查询，不要其他内容。"
        );
    }

    #[test]
    fn unknown_context_leaves_no_line() {
        let messages = PROMPTS.messages(PromptTask::PolicyRewrite, &input(None, None)).unwrap();
        assert_eq!(messages[1].content, "原始查询: 孕妇能吃吗\n\n请改写。");
    }

    #[test]
    fn judge_sees_query_context_and_rewrite() {
        let content = PROMPTS.messages(PromptTask::Judge, &input(Some("孕妇"), None)).unwrap().remove(1).content;
        assert!(content.starts_with("原始查询: 孕妇能吃吗\n用户画像: 孕妇\n改写后的查询: 孕妇能否服用虾青素\n\n"));
        assert!(content.contains("综合得分") && content.contains("评分理由"));
    }
}

//! Prompts of the health-supplement tenant, and the parsers of the answers. No settings.

use tenant_common::{Tenant, TenantPlugin, TenantPrompts};

/// The tenant, with its system prompts.
#[derive(Debug, Clone, Copy)]
pub struct FiveDoctors;

impl Tenant for FiveDoctors {
    const PROMPTS: TenantPrompts = TenantPrompts {
        teacher_system: include_str!("../prompts/teacher.txt").trim_ascii_end(),
        policy_system: include_str!("../prompts/policy.txt").trim_ascii_end(),
        judge_system: include_str!("../prompts/judge.txt").trim_ascii_end(),
    };
}

querl_sdk::export!(prompt: TenantPlugin<FiveDoctors>);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use querl_sdk::{Message, PromptInput, PromptTask};

    #[test]
    fn golden_cases_hold() {
        querl_sdk::testing::golden("golden").prompt::<TenantPlugin<FiveDoctors>>();
    }

    #[test]
    fn policy_is_prompted_briefly() {
        let input = PromptInput { query: "胶原怎么吃".into(), ..PromptInput::default() };
        let messages = FiveDoctors::PROMPTS.messages(PromptTask::PolicyRewrite, &input).unwrap();
        let expected =
            [Message::system("你是保健品领域的Query改写专家。"), Message::user("原始查询: 胶原怎么吃\n\n请改写。")];
        assert_eq!(messages, expected);
    }

    #[test]
    fn teacher_is_given_the_rules() {
        let messages = FiveDoctors::PROMPTS.messages(PromptTask::TeacherRewrite, &PromptInput::default()).unwrap();
        assert!(
            messages[0].content.starts_with("你是保健品领域的专业Query改写专家。\n改写要求：\n1. 提取核心产品关键词")
        );
        assert!(messages[0].content.ends_with("5. 完整保留用户原始意图"));
    }
}

//! Prompts of the health-supplement tenant, and the parsing of answers to them. No settings.

use querl_sdk::{JudgeScore, Message, Prompt, PromptInput, PromptTask, Rejection, SettingError, Settings};
use tenant_common::{TenantPrompts, parse_judgement, parse_rewrite};

const PROMPTS: TenantPrompts = TenantPrompts {
    teacher_system: "你是保健品领域的专业Query改写专家。
改写要求：
1. 提取核心产品关键词（胶原蛋白肽、虾青素等）
2. 明确查询意图（功效、用法、禁忌、适用人群等）
3. 补充专业术语，提升检索精度
4. 保持简洁，避免冗余
5. 完整保留用户原始意图",
    policy_system: "你是保健品领域的Query改写专家。",
    judge_system: "你是保健品领域的Query改写评审专家。
请比较原始查询与改写后的查询，从以下方面评分：
1. 意图：是否完整保留用户原始意图，不增不减
2. 产品：是否写明用户所指的产品（可由历史摘要得知）
3. 检索：术语是否准确，是否便于知识库检索
4. 简洁：是否没有重复、堆砌或无关内容
综合得分为0到5之间的数字，可以有小数；5为最好，改变意图的改写不高于1。",
};

/// The tenant.
#[derive(Debug, Clone, Copy)]
pub struct FiveDoctors;

impl Prompt for FiveDoctors {
    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn messages(&self, task: PromptTask, input: &PromptInput) -> Vec<Message> {
        PROMPTS.messages(task, input)
    }

    fn parse_rewrite(&self, text: &str) -> Result<String, Rejection> {
        parse_rewrite(text)
    }

    fn parse_judgement(&self, text: &str) -> Result<JudgeScore, Rejection> {
        parse_judgement(text)
    }
}

querl_sdk::export!(prompt: FiveDoctors);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_cases_hold() {
        querl_sdk::testing::golden("golden").prompt::<FiveDoctors>();
    }

    #[test]
    fn policy_is_prompted_briefly() {
        let input = PromptInput { query: "胶原怎么吃".into(), ..PromptInput::default() };
        let messages = FiveDoctors.messages(PromptTask::PolicyRewrite, &input);
        let expected =
            [Message::system("你是保健品领域的Query改写专家。"), Message::user("原始查询: 胶原怎么吃\n\n请改写。")];
        assert_eq!(messages, expected);
    }

    #[test]
    fn teacher_is_given_the_rules() {
        let messages = FiveDoctors.messages(PromptTask::TeacherRewrite, &PromptInput::default());
        assert!(
            messages[0].content.starts_with("你是保健品领域的专业Query改写专家。\n改写要求：\n1. 提取核心产品关键词")
        );
        assert!(messages[0].content.ends_with("5. 完整保留用户原始意图"));
    }
}

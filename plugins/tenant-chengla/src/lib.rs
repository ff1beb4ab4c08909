//! Prompts of the tutoring tenant, and the parsing of answers to them. No settings.

use querl_sdk::{JudgeScore, Message, Prompt, PromptInput, PromptTask, Rejection, SettingError, Settings};
use tenant_common::{TenantPrompts, parse_judgement, parse_rewrite};

const PROMPTS: TenantPrompts = TenantPrompts {
    teacher_system: "你是教育培训领域的专业Query改写专家。
改写要求：
1. 识别课程类型和科目
2. 明确学习阶段和需求
3. 提取关键知识点
4. 保持教育领域专业性",
    policy_system: "你是教育培训领域的Query改写专家。",
    judge_system: "你是教育培训领域的Query改写评审专家。
请比较原始查询与改写后的查询，从以下方面评分：
1. 意图：是否完整保留用户原始意图，不增不减
2. 课程：是否写明课程类型、科目和学习阶段（可由历史摘要得知）
3. 检索：知识点和术语是否准确，是否便于知识库检索
4. 简洁：是否没有重复、堆砌或无关内容
综合得分为0到5之间的数字，可以有小数；5为最好，改变意图的改写不高于1。",
};

/// The tenant.
#[derive(Debug, Clone, Copy)]
pub struct Chengla;

impl Prompt for Chengla {
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

querl_sdk::export!(prompt: Chengla);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_cases_hold() {
        querl_sdk::testing::golden("golden").prompt::<Chengla>();
    }

    #[test]
    fn policy_is_prompted_briefly() {
        let input = PromptInput { query: "公考课咋报".into(), ..PromptInput::default() };
        let messages = Chengla.messages(PromptTask::PolicyRewrite, &input);
        let expected =
            [Message::system("你是教育培训领域的Query改写专家。"), Message::user("原始查询: 公考课咋报\n\n请改写。")];
        assert_eq!(messages, expected);
    }

    #[test]
    fn teacher_is_given_the_rules() {
        let messages = Chengla.messages(PromptTask::TeacherRewrite, &PromptInput::default());
        assert!(
            messages[0].content.starts_with("你是教育培训领域的专业Query改写专家。\n改写要求：\n1. 识别课程类型和科目")
        );
        assert!(messages[0].content.ends_with("4. 保持教育领域专业性"));
    }
}

//! Prompts for a model that answers questions instead of rewriting queries: querl's query is the question, its rewrite the answer.
//!
//! Teacher and policy get the same messages, because there are no tenant's rules to learn: only the reward defines the desired answer.

use querl_sdk::{JudgeScore, Message, Prompt, PromptInput, PromptTask, Rejection, SettingError, Settings};
use tenant_common::parse_judgement;

const SYSTEM: &str = "你是客服，请用一段话回答用户的问题。";
const JUDGE_SYSTEM: &str = "你是客服回答的评审专家。请从是否答其所问、是否属实、是否清楚三个方面评分。综合得分为0到5之间的数字，可以有小数；5为最好。";
const JUDGE_REQUEST: &str =
    "请评估回答，只返回JSON，不要其他内容：{\"综合得分\": 0到5之间的数字, \"评分理由\": \"一句话说明\"}";

/// The prompts, with their settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    system: String,
}

impl Prompt for Answer {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self { system: settings.text("system", SYSTEM) })
    }

    fn messages(&self, task: PromptTask, input: &PromptInput) -> Result<Vec<Message>, Rejection> {
        let question = question(input);
        match task {
            PromptTask::TeacherRewrite | PromptTask::PolicyRewrite => {
                Ok(vec![Message::system(self.system.clone()), Message::user(question)])
            }
            PromptTask::Judge => {
                let answer = input.rewrite.as_deref().unwrap_or_default();
                let asked = format!("用户问题：{question}\n回答：{answer}\n\n{JUDGE_REQUEST}");
                Ok(vec![Message::system(JUDGE_SYSTEM), Message::user(asked)])
            }
            PromptTask::Other(_) => Err(Rejection::unknown_task(&task)),
        }
    }

    fn parse_rewrite(&self, text: &str) -> Result<String, Rejection> {
        // A chat template may already have opened the `<think>` block in the prompt, so only its end is searched.
        let answer = text.rsplit_once("</think>").map_or(text, |(_, rest)| rest).trim();
        if answer.starts_with("<think>") {
            return Err(Rejection::new("unfinished_thinking", "the answer ends before its thinking does"));
        }
        match answer.is_empty() {
            true => Err(Rejection::new("empty", "there is no answer")),
            false => Ok(answer.to_owned()),
        }
    }

    fn parse_judgement(&self, text: &str) -> Result<JudgeScore, Rejection> {
        parse_judgement(text)
    }
}

/// The lines of user profile and history, if known, and the question.
fn question(input: &PromptInput) -> String {
    let context = [("用户画像", &input.context.user_profile), ("历史摘要", &input.context.history_summary)];
    let known = context.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
    let lines: String = known.map(|(name, value)| format!("{name}：{value}\n")).collect();
    lines + &input.query
}

querl_sdk::export!(prompt: Answer);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn golden_cases_hold() {
        querl_sdk::testing::golden("golden").prompt::<Answer>();
    }

    #[test]
    fn the_setting_is_the_system_prompt() {
        let answer = Answer::new(&Settings::from_pairs([("system", "诚实地回答。")])).unwrap();
        let input = PromptInput { query: "怎么洗".into(), ..PromptInput::default() };
        let expected = [Message::system("诚实地回答。"), Message::user("怎么洗")];
        assert_eq!(answer.messages(PromptTask::PolicyRewrite, &input).unwrap(), expected);
    }

    #[test]
    fn an_answer_may_have_several_lines() {
        let answer = Answer::new(&Settings::none()).unwrap();
        assert_eq!(answer.parse_rewrite(" 先浸泡。\n再手洗。 ").unwrap(), "先浸泡。\n再手洗。");
    }
}

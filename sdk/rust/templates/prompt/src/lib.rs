//! Prompts for the knowledge base of one tenant, and the parsers of the models' responses.

use querl_sdk::{
    JudgeScore, Message, Prompt, PromptInput, PromptTask, Rejection, SettingError, Settings,
};

// System prompts. `{domain}` is replaced by the setting `domain`.
const TEACHER: &str = "你为{domain}知识库改写用户的问题：补全指代，去掉口语，不添加用户没有问的内容。只输出改写后的查询。";
const POLICY: &str = "把用户的问题改写成{domain}知识库的检索查询，只输出查询。";
const JUDGE: &str = "你评审{domain}知识库的查询改写，按意图是否保留、是否便于检索打 0 到 5 分。输出一行：得分：分数。理由";

/// The prompts with their settings. querl makes a new value for each call.
struct TenantPrompt {
    domain: String,
}

impl Prompt for TenantPrompt {
    /// Reads all settings, each with its default. querl refuses a key that is not read.
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self {
            domain: settings.text("domain", "营养保健品"),
        })
    }

    /// The messages of the prompt for one task: at least one, the last from the user, a system
    /// message only at the start.
    fn messages(&self, task: PromptTask, input: &PromptInput) -> Result<Vec<Message>, Rejection> {
        let system = match task {
            PromptTask::TeacherRewrite => TEACHER,
            PromptTask::PolicyRewrite => POLICY,
            PromptTask::Judge => JUDGE,
            // A task of a later version of querl.
            PromptTask::Other(_) => return Err(Rejection::unknown_task(&task)),
        };
        let context = &input.context;
        let mut lines = Vec::new();
        let mut add = |title: &str, text: &str| lines.push(format!("{title}：{text}"));
        if let Some(profile) = &context.user_profile {
            add("用户画像", profile);
        }
        if let Some(history) = &context.history_summary {
            add("历史", history);
        }
        add("问题", &input.query);
        if let Some(rewrite) = &input.rewrite {
            add("改写", rewrite);
        }
        Ok(vec![
            Message::system(system.replace("{domain}", &self.domain)),
            Message::user(lines.join("\n")),
        ])
    }

    /// The rewrite in the response of the teacher or the policy, without the label and quotes
    /// around it. A response without a rewrite is a rejection, never an empty rewrite.
    fn parse_rewrite(&self, text: &str) -> Result<String, Rejection> {
        let text = text.trim();
        let rewrite = text
            .strip_prefix("改写后的查询：")
            .or(text.strip_prefix("改写后的查询:"))
            .unwrap_or(text);
        let rewrite = rewrite.trim_matches(|c: char| c.is_whitespace() || "\"“”「」".contains(c));
        match rewrite.is_empty() {
            true => Err(Rejection::new("no_rewrite", "the response has no rewrite")),
            false => Ok(rewrite.to_owned()),
        }
    }

    /// The score (0 to 5) and reason in a judge's response. A response without such a score is a
    /// rejection; do not guess a score.
    fn parse_judgement(&self, text: &str) -> Result<JudgeScore, Rejection> {
        judgement(text)
            .ok_or_else(|| Rejection::new("no_score", "the response has no score from 0 to 5"))
    }
}

/// Parses both forms of a judgement: `得分：4.5。理由`, which `JUDGE` requests, and the JSON object of
/// querl's rubric judge, `{"综合得分": 4.5, "评分理由": "..."}`.
fn judgement(text: &str) -> Option<JudgeScore> {
    let (_, after) = text.split_once("得分")?;
    let after = after.trim_start_matches(['"', ' ']);
    let after = after.strip_prefix('：').or(after.strip_prefix(':'))?;
    let after = after.trim_start_matches(|c: char| c.is_whitespace() || c == '"');
    let end = after
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(after.len());
    // A point after the number ends the sentence and is not a decimal point: `得分: 4.`
    let number = after[..end].trim_end_matches('.');
    let score = number
        .parse::<f64>()
        .ok()
        .filter(|score| (0.0..=5.0).contains(score))?;
    let reason = after[end..]
        .trim_start_matches(|c: char| c.is_whitespace() || "。.，,\"".contains(c));
    let reason = reason.strip_prefix("评分理由").unwrap_or(reason);
    let reason = reason.trim_matches(|c: char| c.is_whitespace() || "\":}`".contains(c));
    Some(JudgeScore {
        score,
        reason: reason.to_owned(),
    })
}

querl_sdk::export!(prompt: TenantPrompt);

#[cfg(test)]
mod tests;

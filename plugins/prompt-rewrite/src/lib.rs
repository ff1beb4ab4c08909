//! Prompts for any tenant, in English or Chinese. The tenant's domain and rules are settings, so that a new tenant needs no new plugin.

use querl_sdk::{JudgeScore, Message, Prompt, PromptInput, PromptTask, Rejection, SettingError, Settings};
use tenant_common::{parse_judgement, parse_rewrite};

/// The prompts of one tenant, with their settings.
#[derive(Debug, Clone)]
pub struct RewritePrompts {
    texts: &'static Texts,
    /// Subject of the knowledge base; may be empty.
    domain: String,
    /// The tenant's rules for the teacher; may be empty.
    rules: String,
}

/// The fixed texts of one language. `{domain}` is replaced by [`Texts::domain`].
#[derive(Debug)]
struct Texts {
    teacher: &'static str,
    policy: &'static str,
    judge: &'static str,
    query: &'static str,
    profile: &'static str,
    history: &'static str,
    rewrite: &'static str,
}

const ENGLISH: Texts = Texts {
    teacher: "You rewrite users' questions as search queries for {domain} knowledge base. Resolve references with the history, replace \
              everyday words by the terms that such texts use, add nothing that was not asked. Return the query only.",
    policy: "Rewrite the question as a search query for {domain} knowledge base.",
    judge: "You judge rewrites of users' questions for {domain} knowledge base: is the intent kept, will a search find the answer? \
            Return JSON only: {\"score\": a number from 0 to 5, \"reason\": \"one sentence\"}",
    query: "Question: ",
    profile: "Profile: ",
    history: "History: ",
    rewrite: "Rewrite: ",
};

const CHINESE: Texts = Texts {
    teacher: "你把用户的问题改写成{domain}知识库的检索查询：结合历史补全指代，把口语换成知识库的用语，不添加用户没有问的内容。只返回查询。",
    policy: "把问题改写成{domain}知识库的检索查询。",
    judge: "你评审{domain}知识库的查询改写：意图是否保留，是否便于检索。只返回JSON：{\"score\": 0到5之间的数字, \"reason\": \"一句话说明\"}",
    query: "问题：",
    profile: "用户画像：",
    history: "历史：",
    rewrite: "改写：",
};

/// First words of a domain that needs no additional `the`.
const DETERMINERS: [&str; 6] = ["a", "an", "the", "our", "my", "your"];

impl Texts {
    /// The words before `knowledge base` in English, with a determiner; the domain itself in Chinese.
    fn domain(&self, domain: &str) -> String {
        let first = domain.split_whitespace().next().unwrap_or_default();
        match domain {
            _ if self.query != ENGLISH.query => domain.to_owned(),
            "" => "a".to_owned(),
            _ if DETERMINERS.iter().any(|word| first.eq_ignore_ascii_case(word)) => domain.to_owned(),
            _ => format!("the {domain}"),
        }
    }
}

impl Prompt for RewritePrompts {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        let texts = match settings.choice("language", "en", &["en", "zh"])?.as_str() {
            "zh" => &CHINESE,
            _ => &ENGLISH,
        };
        Ok(Self { texts, domain: settings.text("domain", ""), rules: settings.text("rules", "") })
    }

    fn messages(&self, task: PromptTask, input: &PromptInput) -> Result<Vec<Message>, Rejection> {
        let texts = self.texts;
        let system = match task {
            PromptTask::TeacherRewrite => texts.teacher,
            PromptTask::PolicyRewrite => texts.policy,
            PromptTask::Judge => texts.judge,
            PromptTask::Other(_) => return Err(Rejection::unknown_task(&task)),
        };
        let mut system = system.replace("{domain}", &texts.domain(&self.domain));
        if task == PromptTask::TeacherRewrite && !self.rules.is_empty() {
            system = format!("{system}\n{}", self.rules);
        }
        let context = &input.context;
        let lines = [
            (texts.profile, context.user_profile.as_deref()),
            (texts.history, context.history_summary.as_deref()),
            (texts.query, Some(input.query.as_str())),
            (texts.rewrite, input.rewrite.as_deref()),
        ];
        let lines = lines.into_iter().filter_map(|(title, text)| Some(format!("{title}{}", text?)));
        Ok(vec![Message::system(system), Message::user(lines.collect::<Vec<_>>().join("\n"))])
    }

    fn parse_rewrite(&self, text: &str) -> Result<String, Rejection> {
        parse_rewrite(text)
    }

    /// Parses `{"score": 4, "reason": "..."}`, or else the forms of [`tenant_common::parse_judgement`].
    fn parse_judgement(&self, text: &str) -> Result<JudgeScore, Rejection> {
        let object = text.find('{').zip(text.rfind('}')).and_then(|(start, end)| text.get(start..=end));
        let object = object.and_then(|object| serde_json::from_str::<serde_json::Value>(object).ok());
        let Some(score) = object.as_ref().and_then(|object| object.get("score")?.as_f64()) else {
            return parse_judgement(text);
        };
        if !(0.0..=5.0).contains(&score) {
            return Err(Rejection::new("score_out_of_range", format!("score is {score}; expected 0 to 5")));
        }
        let reason = object.as_ref().and_then(|object| object.get("reason")?.as_str()).unwrap_or_default();
        Ok(JudgeScore { score, reason: reason.to_owned() })
    }
}

querl_sdk::export!(prompt: RewritePrompts);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn golden_cases_hold() {
        querl_sdk::testing::golden("golden").prompt::<RewritePrompts>();
    }
}

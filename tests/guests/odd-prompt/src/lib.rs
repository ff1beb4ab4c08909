//! Violates the rule of the contract that the setting `breach` names; none if it is `none`.

use querl_sdk::{JudgeScore, Message, Prompt, PromptInput, PromptTask, Rejection, SettingError, Settings};

struct Guest {
    breach: String,
}

impl Prompt for Guest {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self { breach: settings.text("breach", "none") })
    }

    fn messages(&self, task: PromptTask, input: &PromptInput) -> Result<Vec<Message>, Rejection> {
        let user = Message::user(format!("{} {}", input.query, input.rewrite.as_deref().unwrap_or_default()));
        let is_long = input.query.len() > 1000;
        Ok(match (self.breach.as_str(), task) {
            ("assistant_last", PromptTask::Judge) if is_long => vec![user, Message::assistant("好")],
            ("system_later", PromptTask::PolicyRewrite) if is_long => vec![user.clone(), Message::system("短些"), user],
            ("no_messages", PromptTask::TeacherRewrite) if input.query.is_empty() => Vec::new(),
            (_, task @ PromptTask::Other(_)) if self.breach != "any_task" => {
                return Err(Rejection::unknown_task(&task));
            }
            _ => vec![Message::system("你是改写专家。"), user],
        })
    }

    fn parse_rewrite(&self, text: &str) -> Result<String, Rejection> {
        match text.trim() {
            "" if self.breach != "blank_rewrite" => Err(Rejection::new("empty_rewrite", "")),
            rewrite => Ok(rewrite.to_owned()),
        }
    }

    fn parse_judgement(&self, text: &str) -> Result<JudgeScore, Rejection> {
        let score = text.trim().parse::<f64>().map_err(|_| Rejection::new("no_score", ""))?;
        if self.breach != "any_score" && !(0.0..=5.0).contains(&score) {
            return Err(Rejection::new("score_out_of_range", ""));
        }
        Ok(JudgeScore { score, reason: String::new() })
    }
}

querl_sdk::export!(prompt: Guest);

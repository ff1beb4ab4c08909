//! Golden cases as they are written.

use super::expected::{JudgementExpected, MessagesExpected, RewriteExpected, ScoreExpected, VerdictExpected};
use super::{Body, Case};
use crate::testing::build::{no_style_model, style_model};
use crate::testing::form::{DialogueForm, EpisodeForm, MessageForm, PromptInputForm, SampleForm, StyleForm};
use crate::{Message, PromptInput, PromptTask, Settings, StyleProbability};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The keys of a line that were not read yet.
struct Fields(Map<String, Value>);

impl Fields {
    fn take<T: DeserializeOwned>(&mut self, key: &str) -> Result<T, String> {
        self.optional(key)?.ok_or_else(|| format!("`{key}` is missing"))
    }

    fn optional<T: DeserializeOwned>(&mut self, key: &str) -> Result<Option<T>, String> {
        let Some(value) = self.0.remove(key) else { return Ok(None) };
        serde_json::from_value(value).map(Some).map_err(|error| format!("`{key}`: {error}"))
    }
}

/// # Errors
/// The line is no case: expected and got.
pub(super) fn case(line: &str, origin: &str) -> Result<Case, String> {
    let written = serde_json::from_str(line).map_err(|error| format!("not a JSON object: {error}"))?;
    let mut fields = Fields(written);
    let name: String = fields.take("name")?;
    let settings = fields.optional::<BTreeMap<String, Value>>("settings")?.unwrap_or_default();
    let settings = Settings::from_pairs(settings.into_iter().map(|(key, value)| (key, setting(value))));
    let body = body(&mut fields, &name)?;
    match fields.0.keys().next() {
        Some(key) => Err(format!("unknown key `{key}`")),
        None => Ok(Case { origin: origin.into(), name, settings, body }),
    }
}

/// As the host renders it: numbers as they read back, texts as they are, lists as JSON.
fn setting(value: Value) -> String {
    match value {
        Value::String(text) => text,
        Value::Number(number) => match number.as_i64() {
            Some(integer) => integer.to_string(),
            None => number.as_f64().map_or_else(|| number.to_string(), |number| number.to_string()),
        },
        other => other.to_string(),
    }
}

fn body(fields: &mut Fields, name: &str) -> Result<Body, String> {
    let has = |key: &str| fields.0.contains_key(key);
    match () {
        () if has("episode") => {
            let episode = fields.take::<EpisodeForm>("episode")?.named(name);
            Ok(Body::Reward(Box::new(episode), fields.take::<ScoreExpected>("expect")?.checked()?))
        }
        () if has("samples") => filter_body(fields),
        () if has("task") => messages_body(fields),
        () if has("parse_rewrite") => rewrite_body(fields),
        () if has("parse_judgement") => judgement_body(fields),
        () if has("dialogue") => {
            let dialogue = fields.take::<DialogueForm>("dialogue")?.named(name);
            let classes = fields.optional::<Option<Vec<StyleForm>>>("style_model")?.flatten();
            let class = |class: StyleProbability| (class.label, class.probability);
            let said = |classes: Vec<StyleForm>| style_model(classes.into_iter().map(|form| class(form.into())));
            let model = classes.map_or_else(no_style_model, said);
            Ok(Body::Style(dialogue, model, fields.take::<ScoreExpected>("expect")?.checked()?))
        }
        () => {
            Err("expected one of `episode`, `samples`, `task`, `parse_rewrite`, `parse_judgement` and `dialogue`"
                .into())
        }
    }
}

fn filter_body(fields: &mut Fields) -> Result<Body, String> {
    let samples: Vec<SampleForm> = fields.take("samples")?;
    let samples: Vec<_> =
        samples.into_iter().zip(1..).map(|(form, number): (_, usize)| form.named(&number.to_string())).collect();
    let expected: Vec<VerdictExpected> = fields.take("expect")?;
    match expected.len() == samples.len() {
        true => Ok(Body::Filter(samples, expected)),
        false => Err(format!("`expect` has {} verdicts for {} samples", expected.len(), samples.len())),
    }
}

fn messages_body(fields: &mut Fields) -> Result<Body, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Task {
        TeacherRewrite,
        PolicyRewrite,
        Judge,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Expected {
        contains: Option<Vec<String>>,
        messages: Option<Vec<MessageForm>>,
    }
    let task = match fields.take("task")? {
        Task::TeacherRewrite => PromptTask::TeacherRewrite,
        Task::PolicyRewrite => PromptTask::PolicyRewrite,
        Task::Judge => PromptTask::Judge,
    };
    let input = PromptInput::from(fields.take::<PromptInputForm>("input")?);
    let expected = match fields.take("expect")? {
        Expected { contains: Some(texts), messages: None } if !texts.is_empty() => MessagesExpected::Contains(texts),
        Expected { contains: None, messages: Some(messages) } => {
            MessagesExpected::Messages(messages.into_iter().map(Message::from).collect())
        }
        _ => return Err("`expect`: expected either `contains`, with one text or more, or `messages`".into()),
    };
    Ok(Body::Messages(task, input, expected))
}

fn rewrite_body(fields: &mut Fields) -> Result<Body, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Expected {
        rewrite: Option<String>,
        rejected: Option<String>,
    }
    let text = fields.take("parse_rewrite")?;
    match fields.take("expect")? {
        Expected { rewrite: Some(rewrite), rejected: None } => {
            Ok(Body::ParseRewrite(text, RewriteExpected::Rewrite(rewrite)))
        }
        Expected { rewrite: None, rejected: Some(code) } => {
            Ok(Body::ParseRewrite(text, RewriteExpected::Rejected(code)))
        }
        _ => Err("`expect`: expected either `rewrite` or `rejected`".into()),
    }
}

fn judgement_body(fields: &mut Fields) -> Result<Body, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Expected {
        score: Option<f64>,
        reason: Option<String>,
        rejected: Option<String>,
    }
    let text = fields.take("parse_judgement")?;
    let expected = match fields.take("expect")? {
        Expected { score: Some(score), reason, rejected: None } => JudgementExpected::Judgement(score, reason),
        Expected { score: None, reason: None, rejected: Some(code) } => JudgementExpected::Rejected(code),
        _ => return Err("`expect`: expected either `score`, with or without `reason`, or `rejected`".into()),
    };
    Ok(Body::ParseJudgement(text, expected))
}

//! Golden cases as they are written.

use super::{
    GoldenBody, GoldenCase, GoldenError, JudgementExpected, MessagesExpected, RewriteExpected, ScoreExpected,
    VerdictExpected,
};
use querl_core::episodes;
use querl_core::ports::PromptTask;
use querl_core::records::{Context, Dialogue, Hit, Message, Sample, StyleProbability};
use querl_plugin::PluginSettings;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

const TOLERANCE: f64 = 1e-9;

/// The cases of one file, which messages call `origin`, in the order of its lines; blank lines are passed over. A line
/// that cannot be used does not hide the others.
pub fn parse(text: &str, origin: &str) -> Vec<Result<GoldenCase, GoldenError>> {
    let lines = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
    let read = lines.map(|(line, number)| {
        let origin = format!("{origin}:{number}");
        case(line, &origin).map_err(|message| GoldenError { origin, message })
    });
    read.collect()
}

fn case(line: &str, origin: &str) -> Result<GoldenCase, String> {
    let written: Map<String, Value> =
        serde_json::from_str(line).map_err(|error| format!("not a JSON object: {error}"))?;
    let mut fields = Fields { written };
    let name: String = fields.take("name")?;
    if name.trim().is_empty() {
        return Err("`name` is blank; expected what the case shows".into());
    }
    let settings: PluginSettings = fields.optional("settings")?.unwrap_or_default();
    let body = body(&mut fields, &name)?;
    match fields.written.keys().next() {
        Some(key) => Err(format!("unknown key `{key}`")),
        None => Ok(GoldenCase { origin: origin.into(), name, settings, body }),
    }
}

fn body(fields: &mut Fields, name: &str) -> Result<GoldenBody, String> {
    let has = |key: &str| fields.written.contains_key(key);
    match () {
        () if has("episode") => reward(fields, name),
        () if has("samples") => filter(fields),
        () if has("task") => messages(fields),
        () if has("parse_rewrite") => parse_rewrite(fields),
        () if has("parse_judgement") => parse_judgement(fields),
        () if has("dialogue") => style(fields, name),
        () => {
            Err("expected one of `episode`, `samples`, `task`, `parse_rewrite`, `parse_judgement` and `dialogue`"
                .into())
        }
    }
}

/// The keys of a case that were not read yet.
struct Fields {
    written: Map<String, Value>,
}

impl Fields {
    fn take<T: DeserializeOwned>(&mut self, key: &str) -> Result<T, String> {
        self.optional(key)?.ok_or_else(|| format!("`{key}` is missing"))
    }

    fn optional<T: DeserializeOwned>(&mut self, key: &str) -> Result<Option<T>, String> {
        let Some(value) = self.written.remove(key) else { return Ok(None) };
        serde_json::from_value(value).map(Some).map_err(|error| format!("`{key}`: {error}"))
    }
}

fn reward(fields: &mut Fields, name: &str) -> Result<GoldenBody, String> {
    let mut written: Value = fields.take("episode")?;
    fill_id(&mut written, name);
    // As a line of a record, so that its checks hold for golden cases too.
    let line = json!({"format": 2, "episode": written}).to_string();
    let episode = episodes::parse(line.as_bytes(), 1)?.ok_or("`episode` is blank")?.episode;
    known_keys(&written, &json!(episode), "episode")?;
    Ok(GoldenBody::Reward { episode: Box::new(episode), expect: score(fields)? })
}

fn filter(fields: &mut Fields) -> Result<GoldenBody, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Written {
        id: Option<String>,
        original_query: String,
        rewritten_query: String,
        #[serde(default)]
        context: Context,
        #[serde(default)]
        hits: Vec<Hit>,
    }
    let written: Value = fields.take("samples")?;
    let samples: Vec<Written> =
        serde_json::from_value(written.clone()).map_err(|error| format!("`samples`: {error}"))?;
    let sample = |(sample, number): (Written, usize)| Sample {
        id: sample.id.unwrap_or_else(|| number.to_string()),
        original_query: sample.original_query,
        rewritten_query: sample.rewritten_query,
        context: sample.context,
        hits: ranked(sample.hits),
    };
    let samples: Vec<_> = samples.into_iter().zip(1..).map(sample).collect();
    known_keys(&written, &json!(samples), "samples")?;
    let expect = verdicts(fields)?;
    match expect.len() == samples.len() {
        true => Ok(GoldenBody::Filter { samples, expect }),
        false => Err(format!("`expect` has {} verdicts for {} samples", expect.len(), samples.len())),
    }
}

fn verdicts(fields: &mut Fields) -> Result<Vec<VerdictExpected>, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Written {
        Keep,
        Drop(String),
    }
    let verdict = |verdict| match verdict {
        Written::Keep => VerdictExpected::Keep,
        Written::Drop(code) => VerdictExpected::Drop(code),
    };
    Ok(fields.take::<Vec<Written>>("expect")?.into_iter().map(verdict).collect())
}

fn messages(fields: &mut Fields) -> Result<GoldenBody, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Task {
        TeacherRewrite,
        PolicyRewrite,
        Judge,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Input {
        query: String,
        #[serde(default)]
        context: Context,
        rewrite: Option<String>,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Expect {
        contains: Option<Vec<String>>,
        messages: Option<Vec<Message>>,
    }
    let task = match fields.take("task")? {
        Task::TeacherRewrite => PromptTask::TeacherRewrite,
        Task::PolicyRewrite => PromptTask::PolicyRewrite,
        Task::Judge => PromptTask::Judge,
    };
    let Input { query, context, rewrite } = fields.take("input")?;
    if rewrite.is_some() != (task == PromptTask::Judge) {
        return Err("`input.rewrite` is there for the task `judge` and for no other".into());
    }
    let expect = match fields.take("expect")? {
        Expect { contains: Some(texts), messages: None } if !texts.is_empty() => MessagesExpected::Contains(texts),
        Expect { contains: None, messages: Some(messages) } => MessagesExpected::Messages(messages),
        _ => return Err("`expect`: expected either `contains`, with one text or more, or `messages`".into()),
    };
    Ok(GoldenBody::Messages { task, query, context, rewrite, expect })
}

fn parse_rewrite(fields: &mut Fields) -> Result<GoldenBody, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Expect {
        rewrite: Option<String>,
        rejected: Option<String>,
    }
    let text = fields.take("parse_rewrite")?;
    let expect = match fields.take("expect")? {
        Expect { rewrite: Some(rewrite), rejected: None } => RewriteExpected::Rewrite(rewrite),
        Expect { rewrite: None, rejected: Some(code) } => RewriteExpected::Rejected(code),
        _ => return Err("`expect`: expected either `rewrite` or `rejected`".into()),
    };
    Ok(GoldenBody::ParseRewrite { text, expect })
}

fn parse_judgement(fields: &mut Fields) -> Result<GoldenBody, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Expect {
        score: Option<f64>,
        reason: Option<String>,
        rejected: Option<String>,
    }
    let text = fields.take("parse_judgement")?;
    let expect = match fields.take("expect")? {
        Expect { score: Some(score), reason, rejected: None } => JudgementExpected::Judgement { score, reason },
        Expect { score: None, reason: None, rejected: Some(code) } => JudgementExpected::Rejected(code),
        _ => return Err("`expect`: expected either `score`, with or without `reason`, or `rejected`".into()),
    };
    Ok(GoldenBody::ParseJudgement { text, expect })
}

fn style(fields: &mut Fields, name: &str) -> Result<GoldenBody, String> {
    let mut written: Value = fields.take("dialogue")?;
    fill_id(&mut written, name);
    let dialogue: Dialogue = serde_json::from_value(written.clone()).map_err(|error| format!("`dialogue`: {error}"))?;
    known_keys(&written, &json!(dialogue), "dialogue")?;
    if let Some(turn) =
        dialogue.turns.iter().find(|turn| !["system", "user", "assistant"].contains(&turn.role.as_str()))
    {
        return Err(format!("a `role` is `{}`; expected `system`, `user` or `assistant`", turn.role));
    }
    if dialogue.turns.last().is_none_or(|turn| turn.role != "assistant") {
        return Err("the last turn of `dialogue` is not the assistant's".into());
    }
    let style_model: Option<Vec<StyleProbability>> = fields.optional("style_model")?.flatten();
    let sum: f64 = style_model.iter().flatten().map(|class| class.probability).sum();
    if style_model.is_some() && !(-1e-6..=1e-6).contains(&(sum - 1.0)) {
        return Err(format!("`style_model` sums to {sum}; expected 1"));
    }
    Ok(GoldenBody::Style { dialogue, style_model, expect: score(fields)? })
}

fn score(fields: &mut Fields) -> Result<ScoreExpected, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Expect {
        total: Option<f64>,
        tolerance: Option<f64>,
        components: Option<BTreeMap<String, f64>>,
        rejected: Option<String>,
    }
    match fields.take("expect")? {
        Expect { total: Some(total), tolerance, components, rejected: None } => {
            let tolerance = tolerance.unwrap_or(TOLERANCE);
            match tolerance >= 0.0 {
                true => Ok(ScoreExpected::Score { total, tolerance, components: components.unwrap_or_default() }),
                false => Err(format!("`tolerance` is {tolerance}; expected 0 or more")),
            }
        }
        Expect { total: None, tolerance: None, components: None, rejected: Some(code) } => {
            Ok(ScoreExpected::Rejected(code))
        }
        _ => {
            Err("`expect`: expected either `total`, with or without `tolerance` and `components`, or `rejected`".into())
        }
    }
}

/// An author need not think of ids.
fn fill_id(written: &mut Value, id: &str) {
    if let Value::Object(fields) = written {
        fields.entry("id").or_insert_with(|| id.into());
    }
}

/// Ranks that are left out are counted from 1.
fn ranked(mut hits: Vec<Hit>) -> Vec<Hit> {
    for (hit, rank) in hits.iter_mut().zip(1..).filter(|(hit, _)| hit.rank == 0) {
        hit.rank = rank;
    }
    hits
}

/// Every key of `written` is one that `read`, the same value read and written again, has in the same place: some
/// records pass over keys that they do not know.
fn known_keys(written: &Value, read: &Value, place: &str) -> Result<(), String> {
    match (written, read) {
        (Value::Object(written), Value::Object(read)) => {
            for (key, value) in written {
                let known = read.get(key).ok_or_else(|| format!("unknown key `{key}` in `{place}`"))?;
                known_keys(value, known, &format!("{place}.{key}"))?;
            }
            Ok(())
        }
        (Value::Array(written), Value::Array(read)) => written
            .iter()
            .zip(read)
            .zip(1..)
            .try_for_each(|((written, read), number)| known_keys(written, read, &format!("{place} {number}"))),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

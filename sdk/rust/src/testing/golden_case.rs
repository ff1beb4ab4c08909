//! The format of golden cases: one JSON object per line of `golden/*.jsonl`. Both the test kit of this crate and `querl plugin test` read
//! cases with this module, each with its own types for the records in a case.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

const TOLERANCE: f64 = 1e-9;

/// The record types of a program that runs golden cases, and their conversions from JSON. Missing ids and messages of failures are filled in
/// before the conversion.
pub trait GoldenTypes {
    /// Type of a plugin's settings.
    type Settings;
    /// Type of an episode, which a reward scores.
    type Episode;
    /// Type of a sample, which a filter checks.
    type Sample;
    /// Type of the input of a prompt.
    type Input;
    /// Type of a dialogue, which a style scorer scores.
    type Dialogue;
    /// Type of a recorded call of a host function.
    type Call;

    /// Reads the settings of a case.
    ///
    /// # Errors
    /// A value has a type that settings do not have.
    fn settings(value: Map<String, Value>) -> Result<Self::Settings, String>;
    /// Reads an episode.
    ///
    /// # Errors
    /// Not an episode: expected and got.
    fn episode(value: Value) -> Result<Self::Episode, String>;
    /// Reads a list of samples.
    ///
    /// # Errors
    /// Not a list of samples: expected and got.
    fn samples(value: Value) -> Result<Vec<Self::Sample>, String>;
    /// Reads the input of a prompt.
    ///
    /// # Errors
    /// Not a prompt's input: expected and got.
    fn input(value: Value) -> Result<Self::Input, String>;
    /// Reads a dialogue.
    ///
    /// # Errors
    /// Not a dialogue: expected and got.
    fn dialogue(value: Value) -> Result<Self::Dialogue, String>;
    /// Reads a call in the form of `calls` in recorded episodes.
    ///
    /// # Errors
    /// Not a call: expected and got.
    fn call(value: Value) -> Result<Self::Call, String>;
}

/// One golden case: an input of a plugin and the expected result.
pub struct GoldenCase<T: GoldenTypes> {
    /// Name of the case: the behaviour that it tests.
    pub name: String,
    /// Settings that the plugin is configured with.
    pub settings: T::Settings,
    /// Recorded results of host functions. Any other call fails as not recorded.
    pub calls: Vec<T::Call>,
    /// Input and expected result.
    pub body: GoldenBody<T>,
}

/// Input and expected result of a golden case.
pub enum GoldenBody<T: GoldenTypes> {
    /// An episode for a reward, and its score.
    Reward(Box<T::Episode>, ExpectedScore),
    /// A group of episodes for a group reward, and the score of each.
    Group(Vec<T::Episode>, Vec<ExpectedScore>),
    /// A batch of samples for a filter, and the verdict on each.
    Filter(Vec<T::Sample>, Vec<ExpectedVerdict>),
    /// A task and input for a prompt, and the messages.
    Messages(GoldenTask, T::Input, ExpectedMessages),
    /// A model's response for a prompt's parser, and the rewrite in it.
    ParseRewrite(String, ExpectedRewrite),
    /// A judge's response for a prompt's parser, and the judgement in it.
    ParseJudgement(String, ExpectedJudgement),
    /// A dialogue for a style scorer, the output of the style model (`None`: the run has no style model), and the score.
    Style(T::Dialogue, Option<Vec<ExpectedClass>>, ExpectedScore),
}

/// The task of a prompt case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GoldenTask {
    /// `teacher_rewrite` in JSON.
    TeacherRewrite,
    /// `policy_rewrite` in JSON.
    PolicyRewrite,
    /// `judge` in JSON.
    Judge,
}

/// One class of the output of the style model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpectedClass {
    /// Name of the class.
    pub label: String,
    /// Probability, 0 to 1; those of all classes sum to 1.
    pub probability: f64,
}

/// The expected result of a reward or style scorer: a score or a rejection.
#[derive(Debug, Clone, PartialEq)]
pub enum ExpectedScore {
    /// Total and components, each within the tolerance; components of the actual score that are not named are not compared.
    Score {
        /// Expected total.
        total: f64,
        /// Largest accepted absolute difference.
        tolerance: f64,
        /// Expected value of each component by name.
        components: BTreeMap<String, f64>,
    },
    /// A rejection with this code is expected.
    Rejected(String),
}

/// The expected verdict of a filter on one sample.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpectedVerdict {
    /// The sample is expected to be kept.
    Keep,
    /// The sample is expected to be dropped with this code.
    Drop(String),
}

/// The expected messages of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpectedMessages {
    /// Each of these texts is expected in the content of a message.
    Contains(Vec<String>),
    /// These messages are expected, each with role and content.
    Messages(Vec<(String, String)>),
}

/// The expected result of parsing a model's response: a rewrite or a rejection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpectedRewrite {
    /// This rewrite is expected.
    Rewrite(String),
    /// A rejection with this code is expected.
    Rejected(String),
}

/// The expected result of parsing a judge's response: a judgement or a rejection.
#[derive(Debug, Clone, PartialEq)]
pub enum ExpectedJudgement {
    /// This score is expected, and this reason unless it is `None`.
    Judgement(f64, Option<String>),
    /// A rejection with this code is expected.
    Rejected(String),
}

/// The actual score of a plugin: the total, and a function from a component's name to its value.
pub type ActualScore<'a> = (f64, &'a dyn Fn(&str) -> Option<f64>);

/// Result of a comparison with the expected result. The error describes the expected result.
pub type Comparison = Result<(), String>;

fn compare(holds: bool, expected: impl FnOnce() -> String) -> Comparison {
    if holds { Ok(()) } else { Err(expected()) }
}

fn rejected_with(code: &str) -> String {
    format!("rejected with `{code}`")
}

impl ExpectedScore {
    /// Compares with a total and a function from a component's name to its value, or with the code of a rejection.
    ///
    /// # Errors
    /// They differ: the expectation in words.
    pub fn compare(&self, actual: Result<ActualScore<'_>, &str>) -> Comparison {
        let holds = match (self, actual) {
            (Self::Rejected(expected), Err(code)) => expected == code,
            (Self::Score { total, tolerance, components }, Ok((actual, component))) => {
                let is_close = |value: f64, expected: f64| (value - expected).abs() <= *tolerance;
                is_close(actual, *total)
                    && components.iter().all(|(name, value)| component(name).is_some_and(|got| is_close(got, *value)))
            }
            _ => false,
        };
        compare(holds, || match self {
            Self::Rejected(code) => rejected_with(code),
            Self::Score { total, tolerance, components } if components.is_empty() => {
                format!("total {total} within {tolerance:e}")
            }
            Self::Score { total, tolerance, components } => {
                format!("total {total} and components {} within {tolerance:e}", serde_json::json!(components))
            }
        })
    }
}

impl ExpectedVerdict {
    /// Compares with the code of a drop, or with `None` for a sample that is kept.
    ///
    /// # Errors
    /// They differ: the expectation in words.
    pub fn compare(&self, dropped_with: Option<&str>) -> Comparison {
        match self {
            Self::Keep => compare(dropped_with.is_none(), || "kept".into()),
            Self::Drop(code) => compare(dropped_with == Some(code), || format!("dropped with `{code}`")),
        }
    }
}

impl ExpectedMessages {
    /// Compares with role and content of each message.
    ///
    /// # Errors
    /// They differ: the expectation in words.
    pub fn compare(&self, actual: &[(&str, &str)]) -> Comparison {
        match self {
            Self::Messages(expected) => {
                let expected = expected.iter().map(|(role, content)| (role.as_str(), content.as_str()));
                compare(expected.clone().eq(actual.iter().copied()), || {
                    let message = |(role, content)| serde_json::json!({"role": role, "content": content});
                    Value::from_iter(expected.map(message)).to_string()
                })
            }
            Self::Contains(texts) => texts.iter().try_for_each(|text| {
                compare(actual.iter().any(|(_, content)| content.contains(text)), || format!("`{text}` in a message"))
            }),
        }
    }
}

impl ExpectedRewrite {
    /// Compares with a rewrite, or with the code of a rejection.
    ///
    /// # Errors
    /// They differ: the expectation in words.
    pub fn compare(&self, actual: Result<&str, &str>) -> Comparison {
        match self {
            Self::Rewrite(expected) => compare(actual == Ok(expected), || format!("`{expected}`")),
            Self::Rejected(code) => compare(actual == Err(code), || rejected_with(code)),
        }
    }
}

impl ExpectedJudgement {
    /// Compares with score and reason, or with the code of a rejection.
    ///
    /// # Errors
    /// They differ: the expectation in words.
    pub fn compare(&self, actual: Result<(f64, &str), &str>) -> Comparison {
        match self {
            Self::Judgement(score, None) => {
                compare(actual.is_ok_and(|(actual, _)| actual == *score), || format!("score {score}"))
            }
            Self::Judgement(score, Some(reason)) => {
                compare(actual == Ok((*score, reason)), || format!("score {score}, reason `{reason}`"))
            }
            Self::Rejected(code) => compare(actual.is_err_and(|actual| actual == code), || rejected_with(code)),
        }
    }
}

/// Parses the cases of one file: each with its origin (`FILE:LINE`), in the order of lines. Blank lines are skipped; an invalid
/// line does not hide the others.
pub fn parse<T: GoldenTypes>(text: &str, file: &str) -> Vec<(String, Result<GoldenCase<T>, String>)> {
    let lines = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
    lines.map(|(line, number)| (format!("{file}:{number}"), parse_case(line))).collect()
}

/// The keys of a line and their values.
struct Fields {
    unread: Map<String, Value>,
    /// Keys that the parser has read or tried to read.
    known: Vec<&'static str>,
}

impl Fields {
    fn take<V: DeserializeOwned>(&mut self, key: &'static str) -> Result<V, String> {
        self.optional(key)?.ok_or_else(|| format!("`{key}` is missing"))
    }

    fn optional<V: DeserializeOwned>(&mut self, key: &'static str) -> Result<Option<V>, String> {
        self.known.push(key);
        let Some(value) = self.unread.remove(key) else { return Ok(None) };
        serde_json::from_value(value).map(Some).map_err(|error| format!("`{key}`: {error}"))
    }
}

fn parse_case<T: GoldenTypes>(line: &str) -> Result<GoldenCase<T>, String> {
    let unread = serde_json::from_str(line).map_err(|error| format!("not a JSON object: {error}"))?;
    let mut fields = Fields { unread, known: Vec::new() };
    let name: String = fields.take("name")?;
    if name.trim().is_empty() {
        return Err("`name` is blank; expected what the case shows".into());
    }
    let settings = T::settings(fields.optional("settings")?.unwrap_or_default())?;
    let body = body(&mut fields, &name)?;
    let calls = match body {
        GoldenBody::Reward(..) | GoldenBody::Group(..) | GoldenBody::Filter(..) => calls::<T>(&mut fields)?,
        _ => Vec::new(),
    };
    match fields.unread.keys().next() {
        Some(key) => Err(format!("unknown key `{key}`, expected one of `{}`", fields.known.join("`, `"))),
        None => Ok(GoldenCase { name, settings, calls, body }),
    }
}

fn calls<T: GoldenTypes>(fields: &mut Fields) -> Result<Vec<T::Call>, String> {
    let calls: Vec<Value> = fields.optional("calls")?.unwrap_or_default();
    let call = |(mut call, number): (Value, usize)| {
        if let Some(failed) = call.pointer_mut("/response/Err/failed") {
            complete_failure(failed, &format!("calls {number}.response.Err.failed"))?;
        }
        T::call(call).map_err(|error| format!("`calls` {number}: {error}"))
    };
    calls.into_iter().zip(1..).map(call).collect()
}

fn body<T: GoldenTypes>(fields: &mut Fields, name: &str) -> Result<GoldenBody<T>, String> {
    let has = |key: &str| fields.unread.contains_key(key);
    match () {
        () if has("episode") => {
            let episode = episode::<T>(fields.take("episode")?, name, "episode")?;
            Ok(GoldenBody::Reward(Box::new(episode), score(fields)?))
        }
        () if has("episodes") => group(fields, name),
        () if has("samples") => filter(fields),
        () if has("task") => messages(fields),
        () if has("parse_rewrite") => parse_rewrite(fields),
        () if has("parse_judgement") => parse_judgement(fields),
        () if has("dialogue") => {
            let dialogue = T::dialogue(with_id(fields.take("dialogue")?, name))?;
            let classes: Option<Vec<ExpectedClass>> = fields.optional("style_model")?.flatten();
            let sum: f64 = classes.iter().flatten().map(|class| class.probability).sum();
            if classes.is_some() && !(-1e-6..=1e-6).contains(&(sum - 1.0)) {
                return Err(format!("`style_model` sums to {sum}; expected 1"));
            }
            Ok(GoldenBody::Style(dialogue, classes, score(fields)?))
        }
        () => {
            let of_bodies = ["calls", "expect", "input", "style_model"];
            let unknown = fields.unread.keys().find(|key| !of_bodies.contains(&key.as_str()));
            let unknown = unknown.map(|key| format!("unknown key `{key}`, ")).unwrap_or_default();
            let bodies = "`episode`, `episodes`, `samples`, `task`, `parse_rewrite`, `parse_judgement` and `dialogue`";
            Err(format!("{unknown}expected one of {bodies}"))
        }
    }
}

/// The record with `id` as its id if it has none, or null.
fn with_id(mut value: Value, id: &str) -> Value {
    if let Value::Object(fields) = &mut value
        && fields.get("id").is_none_or(Value::is_null)
    {
        fields.insert("id".into(), id.into());
    }
    value
}

fn episode<T: GoldenTypes>(value: Value, id: &str, path: &str) -> Result<T::Episode, String> {
    let mut value = with_id(value, id);
    for (side, key, result) in [
        ("policy", "retrieval", "hits"),
        ("policy", "judgement", "scored"),
        ("baseline", "retrieval", "hits"),
        ("baseline", "judgement", "scored"),
    ] {
        if let Some(value) = value.get_mut(side).and_then(|side| side.get_mut(key)) {
            complete_result(value, result, &format!("{path}.{side}.{key}"))?;
        }
    }
    T::episode(value)
}

/// Kinds of failures of external calls.
const FAILURES: [&str; 10] = [
    "timeout",
    "unreachable",
    "unauthorized",
    "rejected",
    "rate_limited",
    "server_error",
    "invalid_response",
    "not_recorded",
    "down",
    "over_budget",
];

/// Checks the form of a result of an external call, because errors of serde do not name its place, and fills in the message of a failure.
/// The key `result` has the result of a success.
fn complete_result(value: &mut Value, result: &str, path: &str) -> Result<(), String> {
    let key = value.as_object().filter(|fields| fields.len() == 1).and_then(|fields| fields.keys().next());
    match key.map(String::as_str) {
        Some("failed") => complete_failure(&mut value["failed"], &format!("{path}.failed")),
        Some(key) if key == result => Ok(()),
        None if value.is_null() || *value == "not_sampled" && result == "scored" => Ok(()),
        _ => Err(format!("`{path}` is {value}; expected an object with `{result}` or with `failed`")),
    }
}

fn complete_failure(failure: &mut Value, path: &str) -> Result<(), String> {
    let Some(fields) = failure.as_object() else {
        return Err(format!("`{path}` is {failure}; expected an object"));
    };
    if let Some(key) = fields.keys().find(|key| !["kind", "message"].contains(&key.as_str())) {
        return Err(format!("unknown key `{key}` in `{path}`, expected one of `kind`, `message`"));
    }
    let kind = &failure["kind"];
    if !kind.as_str().is_some_and(|kind| FAILURES.contains(&kind)) {
        return Err(format!("`{path}.kind` is {kind}; expected one of `{}`", FAILURES.join("`, `")));
    }
    match &failure["message"] {
        Value::Null => failure["message"] = "".into(),
        Value::String(_) => {}
        message => return Err(format!("`{path}.message` is {message}; expected a text")),
    }
    Ok(())
}

fn group<T: GoldenTypes>(fields: &mut Fields, name: &str) -> Result<GoldenBody<T>, String> {
    let episodes: Vec<Value> = fields.take("episodes")?;
    let numbered = episodes.into_iter().enumerate().map(|(index, mut episode)| {
        if let Value::Object(fields) = &mut episode {
            fields.entry("sample_index").or_insert_with(|| index.into());
            fields.entry("group_id").or_insert_with(|| name.into());
        }
        self::episode::<T>(episode, &format!("{name}/{index}"), &format!("episodes {}", index + 1))
    });
    let episodes: Vec<T::Episode> = numbered.collect::<Result<_, _>>()?;
    let expected: Vec<ExpectForm> = fields.take("expect")?;
    if expected.len() != episodes.len() || episodes.is_empty() {
        return Err(format!("`expect` has {} scores for {} episodes", expected.len(), episodes.len()));
    }
    Ok(GoldenBody::Group(episodes, expected.into_iter().map(ExpectedScore::try_from).collect::<Result<_, _>>()?))
}

fn filter<T: GoldenTypes>(fields: &mut Fields) -> Result<GoldenBody<T>, String> {
    let samples: Vec<Value> = fields.take("samples")?;
    let samples = samples.into_iter().zip(1..).map(|(sample, n): (_, usize)| with_id(sample, &n.to_string()));
    let samples = T::samples(samples.collect())?;
    let expected: Vec<ExpectedVerdict> = fields.take("expect")?;
    match expected.len() == samples.len() {
        true => Ok(GoldenBody::Filter(samples, expected)),
        false => Err(format!("`expect` has {} verdicts for {} samples", expected.len(), samples.len())),
    }
}

fn messages<T: GoldenTypes>(fields: &mut Fields) -> Result<GoldenBody<T>, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Role {
        System,
        User,
        Assistant,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Message {
        role: Role,
        content: String,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Expect {
        contains: Option<Vec<String>>,
        messages: Option<Vec<Message>>,
    }
    let message = |Message { role, content }| {
        let role = match role {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        };
        (role.to_owned(), content)
    };
    let task = fields.take("task")?;
    let input: Value = fields.take("input")?;
    let has_rewrite = input.get("rewrite").is_some_and(|rewrite| !rewrite.is_null());
    let input = T::input(input)?;
    if has_rewrite != (task == GoldenTask::Judge) {
        return Err("`input.rewrite` is there for the task `judge` and for no other".into());
    }
    let expected = match fields.take("expect")? {
        Expect { contains: Some(texts), messages: None } if !texts.is_empty() => ExpectedMessages::Contains(texts),
        Expect { contains: None, messages: Some(messages) } => {
            ExpectedMessages::Messages(messages.into_iter().map(message).collect())
        }
        _ => return Err("`expect`: expected either `contains`, with one text or more, or `messages`".into()),
    };
    Ok(GoldenBody::Messages(task, input, expected))
}

fn parse_rewrite<T: GoldenTypes>(fields: &mut Fields) -> Result<GoldenBody<T>, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Expect {
        rewrite: Option<String>,
        rejected: Option<String>,
    }
    let text = fields.take("parse_rewrite")?;
    let expected = match fields.take("expect")? {
        Expect { rewrite: Some(rewrite), rejected: None } => ExpectedRewrite::Rewrite(rewrite),
        Expect { rewrite: None, rejected: Some(code) } => ExpectedRewrite::Rejected(code),
        _ => return Err("`expect`: expected either `rewrite` or `rejected`".into()),
    };
    Ok(GoldenBody::ParseRewrite(text, expected))
}

fn parse_judgement<T: GoldenTypes>(fields: &mut Fields) -> Result<GoldenBody<T>, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Expect {
        score: Option<f64>,
        reason: Option<String>,
        rejected: Option<String>,
    }
    let text = fields.take("parse_judgement")?;
    let expected = match fields.take("expect")? {
        Expect { score: Some(score), reason, rejected: None } => ExpectedJudgement::Judgement(score, reason),
        Expect { score: None, reason: None, rejected: Some(code) } => ExpectedJudgement::Rejected(code),
        _ => return Err("`expect`: expected either `score`, with or without `reason`, or `rejected`".into()),
    };
    Ok(GoldenBody::ParseJudgement(text, expected))
}

fn score(fields: &mut Fields) -> Result<ExpectedScore, String> {
    ExpectedScore::try_from(fields.take::<ExpectForm>("expect")?)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpectForm {
    total: Option<f64>,
    tolerance: Option<f64>,
    components: Option<BTreeMap<String, f64>>,
    rejected: Option<String>,
}

impl TryFrom<ExpectForm> for ExpectedScore {
    type Error = String;

    fn try_from(form: ExpectForm) -> Result<Self, String> {
        match form {
            ExpectForm { total: Some(total), tolerance, components, rejected: None } => {
                let tolerance = tolerance.unwrap_or(TOLERANCE);
                match tolerance >= 0.0 {
                    true => Ok(Self::Score { total, tolerance, components: components.unwrap_or_default() }),
                    false => Err(format!("`tolerance` is {tolerance}; expected 0 or more")),
                }
            }
            ExpectForm { total: None, tolerance: None, components: None, rejected: Some(code) } => {
                Ok(Self::Rejected(code))
            }
            _ => {
                Err("`expect`: expected either `total`, with or without `tolerance` and `components`, or `rejected`"
                    .into())
            }
        }
    }
}

//! The JSON forms of the contract's values, in golden cases and in recorded episodes.

use super::check;
use crate::host::CallError;
use crate::{
    CallFailure, Candidate, Column, ColumnValue, Context, Episode, FailureKind, FinishReason, Hit, JudgeScore, Message,
    Sample, Scalar, Split, StyleProbability,
};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::path::Path;

/// The current format of recorded episodes, which runs write, and the previous one.
const FORMAT: u32 = 3;
const FORMAT_2: u32 = 2;

/// Reads recorded episodes, for example a run's `episodes.jsonl`, or lines written by hand.
///
/// Each line is `{"format": 3, "episode": {"query": …, "policy": {…}}}`; other keys of a line are ignored. In lines of format 2, empty
/// texts and 0 tokens are read as unknown, and a missing retrieval as no hits. A relative path starts at the plugin's folder.
///
/// # Panics
/// The file cannot be read, or a line is not an episode.
#[track_caller]
pub fn read_episodes(path: impl AsRef<Path>) -> Vec<Episode> {
    let path = path.as_ref();
    let text =
        std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: cannot be read: {error}", path.display()));
    let lines = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
    lines
        .map(|(line, number)| {
            recorded(line, number).unwrap_or_else(|message| panic!("{}:{number}: {message}", path.display()))
        })
        .collect()
}

fn recorded(line: &str, number: usize) -> Result<Episode, String> {
    #[derive(Deserialize)]
    struct Line {
        format: u32,
        #[serde(default)]
        step: u64,
        episode: EpisodeForm,
    }
    let not_one = |error| format!("not an episode: {error}");
    let Line { format, step, episode: form } = serde_json::from_str(line).map_err(not_one)?;
    let mut episode = form.named(&format!("line-{number}"));
    match format {
        FORMAT => {}
        FORMAT_2 => of_format_2(&mut episode, step),
        _ => return Err(format!("`format` is {format}; this kit reads {FORMAT_2} and {FORMAT}")),
    }
    check::episode(&episode).map(|()| episode)
}

/// Converts an episode of format 2, which has empty texts and 0 for unknown values, and no `retrieval` if nothing was found.
fn of_format_2(episode: &mut Episode, step: u64) {
    let known = |text: &mut Option<String>| *text = text.take().filter(|text| !text.is_empty());
    known(&mut episode.context.user_profile);
    known(&mut episode.context.history_summary);
    episode.gold_ids = episode.gold_ids.take().filter(|ids| !ids.is_empty());
    if episode.id.starts_with("step-") || episode.id.starts_with("val-") {
        episode.step = Some(step);
    }
    for candidate in std::iter::once(&mut episode.policy).chain(&mut episode.baseline) {
        candidate.n_tokens = candidate.n_tokens.filter(|n_tokens| *n_tokens > 0);
        for hit in candidate.retrieval.get_or_insert_with(|| Ok(Vec::new())).iter_mut().flatten() {
            known(&mut hit.id);
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EpisodeForm {
    id: Option<String>,
    group_id: Option<String>,
    sample_index: Option<u32>,
    step: Option<u64>,
    split: Option<String>,
    query: String,
    #[serde(default)]
    context: Context,
    gold_ids: Option<Vec<String>>,
    #[serde(default)]
    columns: ColumnsForm,
    prompt: Option<Vec<Message>>,
    response: Option<String>,
    policy: CandidateForm,
    baseline: Option<CandidateForm>,
}

impl EpisodeForm {
    /// Converts the form to an episode. `id` is the default id. If `group_id` or `sample_index` is missing, it comes from an id
    /// `GROUP/INDEX`.
    pub(crate) fn named(self, id: &str) -> Episode {
        let id = self.id.filter(|id| !id.is_empty()).unwrap_or_else(|| id.to_owned());
        let (group, index) = match id.rsplit_once('/') {
            Some((group, index)) => match index.parse() {
                Ok(index) => (group.to_owned(), index),
                Err(_) => (id.clone(), 0),
            },
            None => (id.clone(), 0),
        };
        Episode {
            group_id: self.group_id.unwrap_or(group),
            sample_index: self.sample_index.unwrap_or(index),
            id,
            step: self.step,
            split: self.split.map(|split| match &*split {
                "train" => Split::Train,
                "validation" => Split::Validation,
                "test" => Split::Test,
                _ => Split::Other(split),
            }),
            query: self.query,
            context: self.context,
            gold_ids: self.gold_ids,
            columns: self.columns.0,
            prompt: self.prompt,
            response: self.response,
            policy: self.policy.into(),
            baseline: self.baseline.map(Candidate::from),
        }
    }
}

/// Columns: a JSON object from name to value, in the order of its keys.
#[derive(Default)]
struct ColumnsForm(Vec<Column>);

#[derive(Deserialize)]
#[serde(untagged)]
enum ValueForm {
    Flag(bool),
    Number(f64),
    Text(String),
    Items(Vec<ValueForm>),
}

impl<'de> Deserialize<'de> for ColumnsForm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Columns;
        impl<'de> Visitor<'de> for Columns {
            type Value = ColumnsForm;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object from a column's name to its value")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ColumnsForm, A::Error> {
                let scalar = |form| match form {
                    ValueForm::Flag(flag) => Ok(Scalar::Flag(flag)),
                    ValueForm::Number(number) => Ok(Scalar::Number(number)),
                    ValueForm::Text(text) => Ok(Scalar::Text(text)),
                    ValueForm::Items(_) => {
                        Err(serde::de::Error::custom("a list in a list; expected texts, numbers, flags"))
                    }
                };
                let mut columns = Vec::new();
                while let Some((name, form)) = map.next_entry::<String, ValueForm>()? {
                    let value = match form {
                        ValueForm::Flag(flag) => ColumnValue::Flag(flag),
                        ValueForm::Number(number) => ColumnValue::Number(number),
                        ValueForm::Text(text) => ColumnValue::Text(text),
                        ValueForm::Items(items) => {
                            ColumnValue::Items(items.into_iter().map(scalar).collect::<Result<_, A::Error>>()?)
                        }
                    };
                    columns.push(Column { name, value });
                }
                Ok(ColumnsForm(columns))
            }
        }
        deserializer.deserialize_map(Columns)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SampleForm {
    id: String,
    original_query: String,
    rewritten_query: String,
    #[serde(default)]
    context: Context,
    #[serde(default)]
    hits: Vec<Hit>,
    #[serde(default)]
    columns: ColumnsForm,
}

impl From<SampleForm> for Sample {
    fn from(form: SampleForm) -> Self {
        Self {
            id: form.id,
            original_query: form.original_query,
            rewritten_query: form.rewritten_query,
            context: form.context,
            hits: ranked(form.hits),
            columns: form.columns.0,
        }
    }
}

/// A recorded call of a host function: an entry of `calls` in recorded episodes.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostCallForm {
    /// Name of the plugin that made the call.
    #[serde(rename = "plugin")]
    _plugin: Option<String>,
    pub(super) request: HostRequestForm,
    pub(super) response: Result<HostResponseForm, CallErrorForm>,
}

#[derive(Clone, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HostRequestForm {
    CountTokens(String),
    SplitTokens(String),
    SegmentWords(String),
    Embed(Vec<String>),
    AskJudge(Vec<Message>),
    ClassifyStyle(Vec<Message>),
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HostResponseForm {
    Count(u32),
    Texts(Vec<String>),
    Vectors(Vec<Vec<f32>>),
    Text(String),
    Style(Vec<StyleProbability>),
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum CallErrorForm {
    NotConfigured,
    Failed(FailureForm),
}

impl From<&CallErrorForm> for CallError {
    fn from(form: &CallErrorForm) -> Self {
        match form {
            CallErrorForm::NotConfigured => Self::NotConfigured,
            CallErrorForm::Failed(failure) => Self::Failed(failure.clone().into()),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CandidateForm {
    rewrite: Option<String>,
    retrieval: Option<RetrievalForm>,
    judgement: Option<JudgementForm>,
    style: Option<Vec<StyleProbability>>,
    n_tokens: Option<u32>,
    finish_reason: Option<String>,
    /// Only in format 2.
    truncated: Option<bool>,
}

impl From<CandidateForm> for Candidate {
    fn from(form: CandidateForm) -> Self {
        let n_tokens = form.n_tokens;
        let of_format_2 = match form.truncated {
            Some(true) => Some(FinishReason::Length),
            Some(false) if n_tokens.is_some_and(|n_tokens| n_tokens > 0) => Some(FinishReason::Stop),
            _ => None,
        };
        Self {
            // A blank rewrite in a file stands for no rewrite.
            rewrite: form.rewrite.filter(|rewrite| !rewrite.trim().is_empty()),
            retrieval: form.retrieval.map(|retrieval| match retrieval {
                RetrievalForm::Hits(hits) => Ok(ranked(hits)),
                RetrievalForm::Failed(failure) => Err(failure.into()),
            }),
            judgement: form.judgement.and_then(|judgement| match judgement {
                JudgementForm::Scored { score, reason } => Some(Ok(JudgeScore { score, reason })),
                JudgementForm::NotSampled => None,
                JudgementForm::Failed(failure) => Some(Err(failure.into())),
            }),
            style: form.style,
            n_tokens,
            finish_reason: form.finish_reason.map(finish_reason).or(of_format_2),
        }
    }
}

fn finish_reason(name: String) -> FinishReason {
    match &*name {
        "stop" => FinishReason::Stop,
        "length" => FinishReason::Length,
        _ => FinishReason::Other(name),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum RetrievalForm {
    Hits(Vec<Hit>),
    Failed(FailureForm),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum JudgementForm {
    Scored {
        score: f64,
        #[serde(default)]
        reason: String,
    },
    /// Only in format 2.
    NotSampled,
    Failed(FailureForm),
}

/// Fills in missing ranks: the position in the list, from 1.
fn ranked(mut hits: Vec<Hit>) -> Vec<Hit> {
    for (hit, rank) in hits.iter_mut().zip(1..).filter(|(hit, _)| hit.rank == 0) {
        hit.rank = rank;
    }
    hits
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FailureForm {
    kind: String,
    message: String,
}

impl From<FailureForm> for CallFailure {
    fn from(form: FailureForm) -> Self {
        let kind = match &*form.kind {
            "timeout" => FailureKind::Timeout,
            "unreachable" => FailureKind::Unreachable,
            "unauthorized" => FailureKind::Unauthorized,
            "rejected" => FailureKind::Rejected,
            "rate_limited" => FailureKind::RateLimited,
            "server_error" => FailureKind::ServerError,
            "invalid_response" => FailureKind::InvalidResponse,
            "not_recorded" => FailureKind::NotRecorded,
            _ => FailureKind::Other(form.kind),
        };
        Self { kind, message: form.message }
    }
}

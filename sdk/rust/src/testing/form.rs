//! The values of the contract as they are written in JSON: in golden cases and in the episodes that a run records.

use super::check;
use crate::{
    CallFailure, Candidate, Context, Dialogue, Episode, FailureKind, Hit, Judgement, Message, PromptInput, Role,
    Sample, StyleProbability,
};
use serde::{Deserialize, Deserializer};
use std::path::Path;

/// The format of recorded episodes that this kit reads.
const FORMAT: u32 = 2;

/// Reads recorded episodes, for example a run's `episodes.jsonl`, or lines written by hand.
///
/// Each line is `{"format": 2, "episode": {"query": …, "policy": {…}, "baseline": {…}}}`; what else a run writes into a line is
/// passed over. A relative path starts at the plugin's folder.
///
/// # Panics
/// The file cannot be read, or a line is no episode.
#[track_caller]
pub fn read_episodes(path: impl AsRef<Path>) -> Vec<Episode> {
    #[derive(Deserialize)]
    struct Line {
        format: u32,
        episode: EpisodeForm,
    }
    let path = path.as_ref();
    let text =
        std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: cannot be read: {error}", path.display()));
    let lines = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
    let read = |line: &str, number: usize| -> Result<Episode, String> {
        let line: Line = serde_json::from_str(line).map_err(|error| format!("not an episode: {error}"))?;
        if line.format != FORMAT {
            return Err(format!("`format` is {}; this kit reads {FORMAT}", line.format));
        }
        let episode = line.episode.named(&number.to_string());
        check::episode(&episode).map(|()| episode)
    };
    lines
        .map(|(line, number)| {
            read(line, number).unwrap_or_else(|message| panic!("{}:{number}: {message}", path.display()))
        })
        .collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EpisodeForm {
    id: Option<String>,
    query: String,
    #[serde(default)]
    context: ContextForm,
    #[serde(default)]
    gold_ids: Vec<String>,
    policy: CandidateForm,
    baseline: CandidateForm,
}

impl EpisodeForm {
    /// `id` holds where none was written.
    pub(super) fn named(self, id: &str) -> Episode {
        Episode {
            id: self.id.unwrap_or_else(|| id.to_owned()),
            query: self.query,
            context: self.context.into(),
            gold_ids: self.gold_ids,
            policy: self.policy.into(),
            baseline: self.baseline.into(),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SampleForm {
    id: Option<String>,
    original_query: String,
    rewritten_query: String,
    #[serde(default)]
    context: ContextForm,
    #[serde(default)]
    hits: Vec<HitForm>,
}

impl SampleForm {
    pub(super) fn named(self, id: &str) -> Sample {
        Sample {
            id: self.id.unwrap_or_else(|| id.to_owned()),
            original_query: self.original_query,
            rewritten_query: self.rewritten_query,
            context: self.context.into(),
            hits: ranked(self.hits),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PromptInputForm {
    query: String,
    #[serde(default)]
    context: ContextForm,
    rewrite: Option<String>,
}

impl From<PromptInputForm> for PromptInput {
    fn from(form: PromptInputForm) -> Self {
        Self { query: form.query, context: form.context.into(), rewrite: form.rewrite }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DialogueForm {
    id: Option<String>,
    turns: Vec<MessageForm>,
}

impl DialogueForm {
    pub(super) fn named(self, id: &str) -> Dialogue {
        let turns = self.turns.into_iter().map(Message::from).collect();
        Dialogue { id: self.id.unwrap_or_else(|| id.to_owned()), turns }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MessageForm {
    role: RoleForm,
    content: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum RoleForm {
    System,
    User,
    Assistant,
}

impl From<MessageForm> for Message {
    fn from(form: MessageForm) -> Self {
        let role = match form.role {
            RoleForm::System => Role::System,
            RoleForm::User => Role::User,
            RoleForm::Assistant => Role::Assistant,
        };
        Self { role, content: form.content }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StyleForm {
    label: String,
    probability: f64,
}

impl From<StyleForm> for StyleProbability {
    fn from(form: StyleForm) -> Self {
        Self { label: form.label, probability: form.probability }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ContextForm {
    user_profile: String,
    history_summary: String,
}

impl From<ContextForm> for Context {
    fn from(form: ContextForm) -> Self {
        Self { user_profile: form.user_profile, history_summary: form.history_summary }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CandidateForm {
    rewrite: String,
    retrieval: Option<RetrievalForm>,
    judgement: Option<JudgementForm>,
    style: Option<Vec<StyleForm>>,
    #[serde(default)]
    n_tokens: u32,
    #[serde(default)]
    truncated: bool,
}

impl From<CandidateForm> for Candidate {
    fn from(form: CandidateForm) -> Self {
        Self {
            rewrite: form.rewrite,
            retrieval: match form.retrieval {
                None => Ok(Vec::new()),
                Some(RetrievalForm::Hits(hits)) => Ok(ranked(hits)),
                Some(RetrievalForm::Failed(failure)) => Err(failure.into()),
            },
            judgement: match form.judgement {
                None | Some(JudgementForm::NotSampled) => Judgement::NotSampled,
                Some(JudgementForm::Scored { score, reason }) => Judgement::Scored { score, reason },
                Some(JudgementForm::Failed(failure)) => Judgement::Failed(failure.into()),
            },
            style: form.style.map(|classes| classes.into_iter().map(StyleProbability::from).collect()),
            n_tokens: form.n_tokens,
            truncated: form.truncated,
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum RetrievalForm {
    Hits(Vec<HitForm>),
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
    NotSampled,
    Failed(FailureForm),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HitForm {
    #[serde(default)]
    id: String,
    #[serde(default)]
    text: String,
    reranker_score: f64,
    retrieval_score: Option<f64>,
    #[serde(default)]
    rank: u32,
}

/// Ranks that are left out are counted from 1.
fn ranked(hits: Vec<HitForm>) -> Vec<Hit> {
    let hit = |(form, rank): (HitForm, u32)| Hit {
        id: form.id,
        text: form.text,
        reranker_score: form.reranker_score,
        retrieval_score: form.retrieval_score,
        rank: if form.rank == 0 { rank } else { form.rank },
    };
    hits.into_iter().zip(1..).map(hit).collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FailureForm {
    #[serde(deserialize_with = "failure_kind")]
    kind: FailureKind,
    message: String,
}

impl From<FailureForm> for CallFailure {
    fn from(form: FailureForm) -> Self {
        Self { kind: form.kind, message: form.message }
    }
}

fn failure_kind<'de, D: Deserializer<'de>>(deserializer: D) -> Result<FailureKind, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case", remote = "FailureKind")]
    enum Form {
        Timeout,
        Unreachable,
        Unauthorized,
        Rejected,
        RateLimited,
        ServerError,
        InvalidResponse,
        NotRecorded,
    }
    Form::deserialize(deserializer)
}

//! Conversion between records of querl-core and types of contract 0.2. Arguments are borrowed.

use super::bindings::{CallError, filters, info, prompts, types};
use crate::contract::conversions;
use crate::description::{RawDeclaration, RawDescription, RawSetting};
use querl_core::ports::{InputUse, PromptInput, PromptTask, RewardRange};
use querl_core::records::{
    CallFailure, CandidateRef, ColumnValue, Context, EpisodeRef, FailureKind, FinishReason, Hit, HostCallError,
    Judgement, Message, Rejection, Sample, Scalar, Split, StyleProbability, Verdict,
};

conversions!(prompts::Task<'static>);

/// `None` for an empty text, which stands for an unknown value in records.
pub(super) fn known(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

/// The lists of an episode in the types of the contract; [`EpisodeColumns`] and the argument of the call borrow them.
pub(super) struct EpisodeLists<'a> {
    gold_ids: Option<Vec<&'a str>>,
    columns: ColumnItems<'a>,
    prompt: Option<Vec<types::MessageParam<'a>>>,
    policy: CandidateLists<'a>,
    baseline: Option<CandidateLists<'a>>,
}

/// The values of columns that are lists; an empty list for each other.
struct ColumnItems<'a>(Vec<Vec<types::Scalar<'a>>>);

struct CandidateLists<'a> {
    hits: Option<Vec<types::Hit<'a>>>,
    style: Option<Vec<types::StyleProbabilityParam<'a>>>,
}

impl<'a> EpisodeLists<'a> {
    pub(super) fn new(episode: &EpisodeRef<'a>) -> Self {
        let gold_ids = Some(episode.gold_ids).filter(|ids| !ids.is_empty());
        Self {
            gold_ids: gold_ids.map(|ids| ids.iter().map(String::as_str).collect()),
            columns: ColumnItems::new(episode.columns),
            prompt: episode.prompt.map(messages),
            policy: CandidateLists::new(&episode.policy),
            baseline: episode.baseline.as_ref().map(CandidateLists::new),
        }
    }

    pub(super) fn columns(&'a self, episode: &EpisodeRef<'a>) -> Vec<types::Column<'a>> {
        self.columns.columns(episode.columns)
    }
}

impl<'a> ColumnItems<'a> {
    fn new(columns: &'a [(String, ColumnValue)]) -> Self {
        let scalar = |item: &'a Scalar| match item {
            Scalar::Text(text) => types::Scalar::Text(text),
            Scalar::Number(number) => types::Scalar::Number(*number),
            Scalar::Flag(flag) => types::Scalar::Flag(*flag),
        };
        let items = |(_, value): &'a (String, ColumnValue)| match value {
            ColumnValue::Items(items) => items.iter().map(scalar).collect(),
            _ => Vec::new(),
        };
        Self(columns.iter().map(items).collect())
    }

    fn columns(&'a self, columns: &'a [(String, ColumnValue)]) -> Vec<types::Column<'a>> {
        let column = |((name, value), items): (&'a (String, ColumnValue), &'a Vec<types::Scalar<'a>>)| types::Column {
            name,
            value: match value {
                ColumnValue::Text(text) => types::ColumnValue::Text(text),
                ColumnValue::Number(number) => types::ColumnValue::Number(*number),
                ColumnValue::Flag(flag) => types::ColumnValue::Flag(*flag),
                ColumnValue::Items(_) => types::ColumnValue::Items(items),
            },
        };
        columns.iter().zip(&self.0).map(column).collect()
    }
}

impl<'a> CandidateLists<'a> {
    fn new(candidate: &CandidateRef<'a>) -> Self {
        Self { hits: candidate.retrieval.and_then(Result::ok).map(hits), style: candidate.style.map(classes) }
    }
}

pub(super) fn episode<'a>(
    episode: &EpisodeRef<'a>,
    lists: &'a EpisodeLists<'a>,
    columns: &'a [types::Column<'a>],
) -> types::Episode<'a> {
    types::Episode {
        id: episode.id,
        group_id: episode.group_id,
        sample_index: episode.sample_index,
        step: episode.step,
        split: episode.split.map(|split| match split {
            Split::Train => types::Split::Train,
            Split::Val => types::Split::Validation,
            Split::Test => types::Split::Test,
        }),
        query: episode.query,
        context: context(episode.context),
        gold_ids: lists.gold_ids.as_deref(),
        columns,
        prompt: lists.prompt.as_deref(),
        response: episode.response,
        policy: candidate(&episode.policy, &lists.policy),
        baseline: episode.baseline.as_ref().zip(lists.baseline.as_ref()).map(|(one, lists)| candidate(one, lists)),
    }
}

/// The lists of a sample in the types of the contract; no columns if the plugin does not declare to read them.
pub(super) struct SampleLists<'a> {
    hits: Vec<types::Hit<'a>>,
    columns: ColumnItems<'a>,
}

impl<'a> SampleLists<'a> {
    pub(super) fn new(sample: &'a Sample, columns: InputUse) -> Self {
        let columns = if columns != InputUse::Unused { &sample.columns.0[..] } else { &[] };
        Self { hits: hits(&sample.hits), columns: ColumnItems::new(columns) }
    }

    pub(super) fn columns(&'a self, sample: &'a Sample) -> Vec<types::Column<'a>> {
        self.columns.columns(&sample.columns.0)
    }
}

pub(super) fn sample<'a>(
    sample: &'a Sample,
    lists: &'a SampleLists<'a>,
    columns: &'a [types::Column<'a>],
) -> filters::Sample<'a> {
    filters::Sample {
        id: &sample.id,
        original_query: &sample.original_query,
        rewritten_query: &sample.rewritten_query,
        context: context(&sample.context),
        hits: &lists.hits,
        columns,
    }
}

fn hit(hit: &Hit) -> types::Hit<'_> {
    types::Hit {
        id: known(&hit.id),
        text: &hit.text,
        reranker_score: hit.reranker_score,
        retrieval_score: hit.retrieval_score,
        rank: hit.rank,
    }
}

fn context(context: &Context) -> types::Context<'_> {
    types::Context { user_profile: known(&context.user_profile), history_summary: known(&context.history_summary) }
}

fn candidate<'a>(candidate: &CandidateRef<'a>, lists: &'a CandidateLists<'a>) -> types::Candidate<'a> {
    let found = lists.hits.as_deref().unwrap_or_default();
    types::Candidate {
        rewrite: known(candidate.rewrite),
        retrieval: candidate.retrieval.map(|retrieval| match retrieval {
            Ok(_) => types::Retrieval::Hits(found),
            Err(failure) => types::Retrieval::Failed(call_failure(failure)),
        }),
        judgement: match candidate.judgement {
            Judgement::NotSampled => None,
            Judgement::Scored { score, reason } => {
                Some(types::Judgement::Scored(types::JudgeScoreParam { score: *score, reason }))
            }
            Judgement::Failed(failure) => Some(types::Judgement::Failed(call_failure(failure))),
        },
        style: lists.style.as_deref(),
        n_tokens: Some(candidate.n_tokens).filter(|n_tokens| *n_tokens > 0),
        finish_reason: candidate.finish_reason.map(|reason| match reason {
            FinishReason::Stop => types::FinishReason::Stop,
            FinishReason::Length => types::FinishReason::Length,
            FinishReason::Other(name) => types::FinishReason::Other(name),
        }),
    }
}

fn failure_kind(kind: FailureKind) -> types::FailureKindParam<'static> {
    match kind {
        FailureKind::Timeout => types::FailureKindParam::Timeout,
        FailureKind::Unreachable => types::FailureKindParam::Unreachable,
        FailureKind::Unauthorized => types::FailureKindParam::Unauthorized,
        FailureKind::Rejected => types::FailureKindParam::Rejected,
        FailureKind::RateLimited => types::FailureKindParam::RateLimited,
        FailureKind::ServerError => types::FailureKindParam::ServerError,
        FailureKind::InvalidResponse => types::FailureKindParam::InvalidResponse,
        FailureKind::NotRecorded => types::FailureKindParam::NotRecorded,
        FailureKind::Down | FailureKind::OverBudget => types::FailureKindParam::Other(other_failure(kind)),
    }
}

fn failure_kind_result(kind: FailureKind) -> types::FailureKindResult {
    match failure_kind(kind) {
        types::FailureKindParam::Timeout => types::FailureKindResult::Timeout,
        types::FailureKindParam::Unreachable => types::FailureKindResult::Unreachable,
        types::FailureKindParam::Unauthorized => types::FailureKindResult::Unauthorized,
        types::FailureKindParam::Rejected => types::FailureKindResult::Rejected,
        types::FailureKindParam::RateLimited => types::FailureKindResult::RateLimited,
        types::FailureKindParam::ServerError => types::FailureKindResult::ServerError,
        types::FailureKindParam::InvalidResponse => types::FailureKindResult::InvalidResponse,
        types::FailureKindParam::NotRecorded => types::FailureKindResult::NotRecorded,
        types::FailureKindParam::Other(name) => types::FailureKindResult::Other(name.to_owned()),
    }
}

/// The name in JSON of a kind of failure for which the contract has no case of its own.
pub(super) fn other_failure(kind: FailureKind) -> &'static str {
    if kind == FailureKind::Down { "down" } else { "over_budget" }
}

pub(super) fn description(described: info::Description) -> RawDescription {
    let kind = |kind| match kind {
        info::Kind::Prompt => "prompt".into(),
        info::Kind::Filter => "filter".into(),
        info::Kind::Reward => "reward".into(),
        info::Kind::GroupReward => "group-reward".into(),
        info::Kind::StyleScorer => "style-scorer".into(),
        info::Kind::Other(name) => name,
    };
    let setting = |setting: info::Setting| RawSetting {
        key: setting.key,
        value_type: match setting.value_type {
            info::SettingType::Text => "text".into(),
            info::SettingType::Number => "number".into(),
            info::SettingType::Integer => "integer".into(),
            info::SettingType::Flag => "flag".into(),
            info::SettingType::Texts => "texts".into(),
            info::SettingType::Other(name) => name,
        },
        default: setting.default,
        minimum: setting.minimum,
        maximum: setting.maximum,
        choices: setting.choices,
        doc: setting.doc,
    };
    let input = |used: info::InputUse| {
        let name = match used.input {
            info::Input::Response => "response".into(),
            info::Input::Prompt => "prompt".into(),
            info::Input::Columns => "columns".into(),
            info::Input::Baseline => "baseline".into(),
            info::Input::Retrieval => "retrieval".into(),
            info::Input::Judgement => "judgement".into(),
            info::Input::Style => "style".into(),
            info::Input::Other(name) => name,
        };
        (name, used.required)
    };
    RawDescription {
        name: described.name,
        version: described.version,
        declared: Some(RawDeclaration {
            kinds: described.kinds.into_iter().map(kind).collect(),
            settings: described.settings.into_iter().map(setting).collect(),
            range: described.range.map(|range| RewardRange { min: range.min, max: range.max }),
            inputs: described.inputs.into_iter().map(input).collect(),
        }),
    }
}

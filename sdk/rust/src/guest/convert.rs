//! Conversion between the types of the bindings and those of the SDK. Moves values, without copies of texts.

use super::{filters_wit, info_wit, prompts_wit, style_wit, wit};
use crate::{
    __Setting as Setting, __SettingType as SettingType, CallFailure, Candidate, Column, ColumnValue, Context, Dialogue,
    Episode, FailureKind, FinishReason, Hit, Input, JudgeScore, Message, PromptInput, PromptTask, Rejection, Role,
    Sample, Scalar, Score, Split, StyleProbability, Verdict,
};
use std::ops::RangeInclusive;

pub(super) fn setting(setting: Setting) -> info_wit::Setting {
    let Setting { key, value_type, default, minimum, maximum, choices, doc } = setting;
    let value_type = match value_type {
        SettingType::Text => info_wit::SettingType::Text,
        SettingType::Number => info_wit::SettingType::Number,
        SettingType::Integer => info_wit::SettingType::Integer,
        SettingType::Flag => info_wit::SettingType::Flag,
        SettingType::Texts => info_wit::SettingType::Texts,
    };
    info_wit::Setting { key, value_type, default, minimum, maximum, choices, doc }
}

pub(super) fn input(input: Input, required: bool) -> info_wit::InputUse {
    let input = match input {
        Input::Response => info_wit::Input::Response,
        Input::Prompt => info_wit::Input::Prompt,
        Input::Columns => info_wit::Input::Columns,
        Input::Baseline => info_wit::Input::Baseline,
        Input::Retrieval => info_wit::Input::Retrieval,
        Input::Judgement => info_wit::Input::Judgement,
        Input::Style => info_wit::Input::Style,
    };
    info_wit::InputUse { input, required }
}

pub(super) fn bounds(range: RangeInclusive<f64>) -> wit::Bounds {
    let (min, max) = range.into_inner();
    wit::Bounds { min, max }
}

pub(super) fn result(result: Result<Score, Rejection>) -> Result<wit::Score, wit::Rejection> {
    result.map(score).map_err(rejection)
}

pub(super) fn rejection(rejection: Rejection) -> wit::Rejection {
    wit::Rejection { code: rejection.code, detail: rejection.detail }
}

pub(super) fn message_out(message: Message) -> wit::Message {
    let role = match message.role {
        Role::System => wit::Role::System,
        Role::User => wit::Role::User,
        Role::Assistant => wit::Role::Assistant,
    };
    wit::Message { role, content: message.content }
}

#[inline(never)]
pub(super) fn message_in(message: wit::Message) -> Message {
    let role = match message.role {
        wit::Role::System => Role::System,
        wit::Role::User => Role::User,
        wit::Role::Assistant => Role::Assistant,
    };
    Message { role, content: message.content }
}

pub(super) fn task(task: prompts_wit::Task) -> PromptTask {
    match task {
        prompts_wit::Task::TeacherRewrite => PromptTask::TeacherRewrite,
        prompts_wit::Task::PolicyRewrite => PromptTask::PolicyRewrite,
        prompts_wit::Task::Judge => PromptTask::Judge,
        prompts_wit::Task::Other(name) => PromptTask::Other(name),
    }
}

pub(super) fn prompt_input(input: prompts_wit::Input) -> PromptInput {
    PromptInput { query: input.query, context: context(input.context), rewrite: input.rewrite }
}

pub(super) fn sample(sample: filters_wit::Sample) -> Sample {
    Sample {
        id: sample.id,
        original_query: sample.original_query,
        rewritten_query: sample.rewritten_query,
        context: context(sample.context),
        hits: sample.hits.into_iter().map(hit).collect(),
        columns: sample.columns.into_iter().map(column).collect(),
    }
}

pub(super) fn verdict(verdict: Verdict) -> filters_wit::Verdict {
    match verdict {
        Verdict::Keep => filters_wit::Verdict::Keep,
        Verdict::Drop(reason) => filters_wit::Verdict::Drop(rejection(reason)),
    }
}

pub(super) fn episode(episode: wit::Episode) -> Episode {
    Episode {
        id: episode.id,
        group_id: episode.group_id,
        sample_index: episode.sample_index,
        step: episode.step,
        split: episode.split.map(|split| match split {
            wit::Split::Train => Split::Train,
            wit::Split::Validation => Split::Validation,
            wit::Split::Test => Split::Test,
            wit::Split::Other(name) => Split::Other(name),
        }),
        query: episode.query,
        context: context(episode.context),
        gold_ids: episode.gold_ids,
        columns: episode.columns.into_iter().map(column).collect(),
        prompt: episode.prompt.map(|messages| messages.into_iter().map(message_in).collect()),
        response: episode.response,
        policy: candidate(episode.policy),
        baseline: episode.baseline.map(candidate),
    }
}

#[inline(never)]
fn column(column: wit::Column) -> Column {
    let value = match column.value {
        wit::ColumnValue::Text(text) => ColumnValue::Text(text),
        wit::ColumnValue::Number(number) => ColumnValue::Number(number),
        wit::ColumnValue::Flag(flag) => ColumnValue::Flag(flag),
        wit::ColumnValue::Items(items) => ColumnValue::Items(items.into_iter().map(scalar).collect()),
    };
    Column { name: column.name, value }
}

fn scalar(scalar: wit::Scalar) -> Scalar {
    match scalar {
        wit::Scalar::Text(text) => Scalar::Text(text),
        wit::Scalar::Number(number) => Scalar::Number(number),
        wit::Scalar::Flag(flag) => Scalar::Flag(flag),
    }
}

fn score(score: Score) -> wit::Score {
    let components = score.components.into_iter();
    wit::Score {
        total: score.total,
        components: components.map(|part| wit::Component { name: part.name, value: part.value }).collect(),
    }
}

pub(super) fn dialogue(dialogue: style_wit::Dialogue) -> Dialogue {
    Dialogue { id: dialogue.id, turns: dialogue.turns.into_iter().map(message_in).collect() }
}

pub(super) fn style_probability(class: wit::StyleProbability) -> StyleProbability {
    StyleProbability { label: class.label, probability: class.probability }
}

#[inline(never)]
pub(super) fn call_failure(failure: wit::CallFailure) -> CallFailure {
    let kind = match failure.kind {
        wit::FailureKind::Timeout => FailureKind::Timeout,
        wit::FailureKind::Unreachable => FailureKind::Unreachable,
        wit::FailureKind::Unauthorized => FailureKind::Unauthorized,
        wit::FailureKind::Rejected => FailureKind::Rejected,
        wit::FailureKind::RateLimited => FailureKind::RateLimited,
        wit::FailureKind::ServerError => FailureKind::ServerError,
        wit::FailureKind::InvalidResponse => FailureKind::InvalidResponse,
        wit::FailureKind::NotRecorded => FailureKind::NotRecorded,
        wit::FailureKind::Other(name) => FailureKind::Other(name),
    };
    CallFailure { kind, message: failure.message }
}

fn context(context: wit::Context) -> Context {
    Context { user_profile: context.user_profile, history_summary: context.history_summary }
}

fn hit(hit: wit::Hit) -> Hit {
    Hit {
        id: hit.id,
        text: hit.text,
        reranker_score: hit.reranker_score,
        retrieval_score: hit.retrieval_score,
        rank: hit.rank,
    }
}

#[inline(never)]
fn candidate(candidate: wit::Candidate) -> Candidate {
    Candidate {
        rewrite: candidate.rewrite,
        retrieval: candidate.retrieval.map(|retrieval| match retrieval {
            wit::Retrieval::Hits(hits) => Ok(hits.into_iter().map(hit).collect()),
            wit::Retrieval::Failed(failure) => Err(call_failure(failure)),
        }),
        judgement: candidate.judgement.map(|judgement| match judgement {
            wit::Judgement::Scored(judged) => Ok(JudgeScore { score: judged.score, reason: judged.reason }),
            wit::Judgement::Failed(failure) => Err(call_failure(failure)),
        }),
        style: candidate.style.map(|classes| classes.into_iter().map(style_probability).collect()),
        n_tokens: candidate.n_tokens,
        finish_reason: candidate.finish_reason.map(|reason| match reason {
            wit::FinishReason::Stop => FinishReason::Stop,
            wit::FinishReason::Length => FinishReason::Length,
            wit::FinishReason::Other(name) => FinishReason::Other(name),
        }),
    }
}

//! Arguments in the JSON form of the contract (docs/spec/encoding.md).

use crate::bindings::querl::plugin::types::{
    CallFailure, Candidate, Column, ColumnValue, Context, Episode, FailureKind, FinishReason, Hit, Judgement, Message,
    Retrieval, Role, Scalar, Split, StyleProbability,
};
use serde_json::{Map, Value, json};

/// An object without its null fields.
fn object<const N: usize>(fields: [(&str, Option<Value>); N]) -> Value {
    let fields = fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    Value::Object(fields.collect::<Map<_, _>>())
}

fn some<T: Clone + Into<Value>>(value: &Option<T>) -> Option<Value> {
    value.clone().map(Into::into)
}

pub(crate) fn episode(episode: &Episode) -> Value {
    object([
        ("id", Some(json!(episode.id))),
        ("group_id", Some(json!(episode.group_id))),
        ("sample_index", Some(json!(episode.sample_index))),
        ("step", some(&episode.step)),
        ("split", episode.split.as_ref().map(split)),
        ("query", Some(json!(episode.query))),
        ("context", context(&episode.context)),
        ("gold_ids", some(&episode.gold_ids)),
        ("columns", columns(&episode.columns)),
        ("prompt", episode.prompt.as_ref().map(|messages| messages.iter().map(message).collect())),
        ("response", some(&episode.response)),
        ("policy", Some(candidate(&episode.policy))),
        ("baseline", episode.baseline.as_ref().map(candidate)),
    ])
}

fn split(split: &Split) -> Value {
    match split {
        Split::Train => json!("train"),
        Split::Validation => json!("validation"),
        Split::Test => json!("test"),
        Split::Other(name) => json!(name),
    }
}

/// `None` for an empty context.
fn context(context: &Context) -> Option<Value> {
    let fields =
        object([("user_profile", some(&context.user_profile)), ("history_summary", some(&context.history_summary))]);
    (fields != json!({})).then_some(fields)
}

fn candidate(candidate: &Candidate) -> Value {
    let retrieval = |retrieval: &Retrieval| match retrieval {
        Retrieval::Hits(hits) => json!({"hits": hits.iter().map(hit).collect::<Vec<_>>()}),
        Retrieval::Failed(call) => json!({"failed": failure(call)}),
    };
    let judgement = |judgement: &Judgement| match judgement {
        Judgement::Scored(judged) => json!({"scored": {"score": judged.score, "reason": judged.reason}}),
        Judgement::Failed(call) => json!({"failed": failure(call)}),
    };
    let reason = |reason: &FinishReason| match reason {
        FinishReason::Stop => json!("stop"),
        FinishReason::Length => json!("length"),
        FinishReason::Other(name) => json!(name),
    };
    object([
        ("rewrite", some(&candidate.rewrite)),
        ("retrieval", candidate.retrieval.as_ref().map(retrieval)),
        ("judgement", candidate.judgement.as_ref().map(judgement)),
        ("style", candidate.style.as_ref().map(|classes| style(classes))),
        ("n_tokens", some(&candidate.n_tokens)),
        ("finish_reason", candidate.finish_reason.as_ref().map(reason)),
    ])
}

fn hit(hit: &Hit) -> Value {
    object([
        ("id", some(&hit.id)),
        ("text", Some(json!(hit.text))),
        ("reranker_score", Some(json!(hit.reranker_score))),
        ("retrieval_score", some(&hit.retrieval_score)),
        ("rank", Some(json!(hit.rank))),
    ])
}

pub(crate) fn failure(failure: &CallFailure) -> Value {
    let kind = match &failure.kind {
        FailureKind::Timeout => "timeout",
        FailureKind::Unreachable => "unreachable",
        FailureKind::Unauthorized => "unauthorized",
        FailureKind::Rejected => "rejected",
        FailureKind::RateLimited => "rate_limited",
        FailureKind::ServerError => "server_error",
        FailureKind::InvalidResponse => "invalid_response",
        FailureKind::NotRecorded => "not_recorded",
        FailureKind::Other(name) => name,
    };
    json!({"kind": kind, "message": failure.message})
}

pub(crate) fn style(classes: &[StyleProbability]) -> Value {
    classes.iter().map(|class| json!({"label": class.label, "probability": class.probability})).collect()
}

pub(crate) fn message(message: &Message) -> Value {
    let role = match message.role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
    };
    json!({"role": role, "content": message.content})
}

fn columns(columns: &[Column]) -> Option<Value> {
    let scalar = |scalar: &Scalar| match scalar {
        Scalar::Text(text) => json!(text),
        Scalar::Number(number) => json!(number),
        Scalar::Flag(flag) => json!(flag),
    };
    let value = |value: &ColumnValue| match value {
        ColumnValue::Text(text) => json!(text),
        ColumnValue::Number(number) => json!(number),
        ColumnValue::Flag(flag) => json!(flag),
        ColumnValue::Items(items) => items.iter().map(scalar).collect(),
    };
    let fields: Map<_, _> = columns.iter().map(|column| (column.name.clone(), value(&column.value))).collect();
    (!fields.is_empty()).then_some(Value::Object(fields))
}

#[cfg(not(any(feature = "functions", feature = "group")))]
mod tenant {
    use super::*;
    use crate::bindings::exports::querl::plugin::filters::Sample;
    use crate::bindings::exports::querl::plugin::prompts::{Input, Task};

    pub(crate) fn sample(sample: &Sample) -> Value {
        object([
            ("id", Some(json!(sample.id))),
            ("original_query", Some(json!(sample.original_query))),
            ("rewritten_query", Some(json!(sample.rewritten_query))),
            ("context", context(&sample.context)),
            ("hits", Some(sample.hits.iter().map(hit).collect())),
            ("columns", columns(&sample.columns)),
        ])
    }

    pub(crate) fn task(task: &Task) -> Value {
        match task {
            Task::TeacherRewrite => json!("teacher_rewrite"),
            Task::PolicyRewrite => json!("policy_rewrite"),
            Task::Judge => json!("judge"),
            Task::Other(name) => json!(name),
        }
    }

    pub(crate) fn prompt_input(input: &Input) -> Value {
        object([
            ("query", Some(json!(input.query))),
            ("context", context(&input.context)),
            ("rewrite", some(&input.rewrite)),
        ])
    }
}

#[cfg(not(any(feature = "functions", feature = "group")))]
pub(crate) use tenant::{prompt_input, sample, task};

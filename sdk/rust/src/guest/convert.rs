//! Binding types to the authors' types and back. Moves, copies no text.

use super::{filters_wit, prompts_wit, rewards_wit, style_wit, wit};
use crate::{
    CallFailure, Candidate, Context, Dialogue, Episode, FailureKind, Hit, Judgement, Message, PromptInput, PromptTask,
    Rejection, Role, Sample, Score, StyleProbability, Verdict,
};

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
    }
}

pub(super) fn verdict(verdict: Verdict) -> filters_wit::Verdict {
    match verdict {
        Verdict::Keep => filters_wit::Verdict::Keep,
        Verdict::Drop(reason) => filters_wit::Verdict::Drop(rejection(reason)),
    }
}

pub(super) fn episode(episode: rewards_wit::Episode) -> Episode {
    Episode {
        id: episode.id,
        query: episode.query,
        context: context(episode.context),
        gold_ids: episode.gold_ids,
        policy: candidate(episode.policy),
        baseline: candidate(episode.baseline),
    }
}

pub(super) fn score(score: Score) -> rewards_wit::Score {
    let components = score.components.into_iter();
    rewards_wit::Score {
        total: score.total,
        components: components.map(|part| rewards_wit::Component { name: part.name, value: part.value }).collect(),
    }
}

pub(super) fn style_score(score: Score) -> style_wit::StyleScore {
    let components = score.components.into_iter();
    style_wit::StyleScore {
        total: score.total,
        components: components.map(|part| style_wit::Component { name: part.name, value: part.value }).collect(),
    }
}

pub(super) fn dialogue(dialogue: style_wit::Dialogue) -> Dialogue {
    Dialogue { id: dialogue.id, turns: dialogue.turns.into_iter().map(message_in).collect() }
}

pub(super) fn style_probability(class: wit::StyleProbability) -> StyleProbability {
    StyleProbability { label: class.label, probability: class.probability }
}

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

fn candidate(candidate: wit::Candidate) -> Candidate {
    Candidate {
        rewrite: candidate.rewrite,
        retrieval: match candidate.retrieval {
            wit::Retrieval::Hits(hits) => Ok(hits.into_iter().map(hit).collect()),
            wit::Retrieval::Failed(failure) => Err(call_failure(failure)),
        },
        judgement: match candidate.judgement {
            wit::Judgement::Scored(judged) => Judgement::Scored { score: judged.score, reason: judged.reason },
            wit::Judgement::NotSampled => Judgement::NotSampled,
            wit::Judgement::Failed(failure) => Judgement::Failed(call_failure(failure)),
        },
        style: candidate.style.map(|classes| classes.into_iter().map(style_probability).collect()),
        n_tokens: candidate.n_tokens,
        truncated: candidate.truncated,
    }
}

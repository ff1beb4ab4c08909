//! Conversion between records of querl-core and types of the contract. Arguments are borrowed.

use crate::bindings::{filters, prompts, rewards, style_model, types};
use querl_core::ports::{PromptInput, PromptTask};
use querl_core::records::{
    CallFailure, Candidate, Context, Dialogue, Episode, FailureKind, Hit, Judgement, Message, Rejection, Sample,
    StyleProbability,
};

/// The lists inside an episode, which the argument borrows.
pub(crate) struct EpisodeLists<'a> {
    gold_ids: Vec<&'a str>,
    policy: CandidateLists<'a>,
    baseline: CandidateLists<'a>,
}

struct CandidateLists<'a> {
    hits: Vec<types::Hit<'a>>,
    style: Option<Vec<types::StyleProbabilityParam<'a>>>,
}

impl<'a> EpisodeLists<'a> {
    pub(crate) fn new(episode: &'a Episode) -> Self {
        Self {
            gold_ids: episode.gold_ids.iter().map(String::as_str).collect(),
            policy: CandidateLists::new(&episode.policy),
            baseline: CandidateLists::new(&episode.baseline),
        }
    }
}

impl<'a> CandidateLists<'a> {
    fn new(candidate: &'a Candidate) -> Self {
        let class = |class: &'a StyleProbability| types::StyleProbabilityParam {
            label: &class.label,
            probability: class.probability,
        };
        Self {
            hits: hits(candidate.retrieval.as_deref().unwrap_or_default()),
            style: candidate.style.as_ref().map(|classes| classes.iter().map(class).collect()),
        }
    }
}

pub(crate) fn episode<'a>(episode: &'a Episode, lists: &'a EpisodeLists<'a>) -> rewards::Episode<'a> {
    rewards::Episode {
        id: &episode.id,
        query: &episode.query,
        context: context(&episode.context),
        gold_ids: &lists.gold_ids,
        policy: candidate(&episode.policy, &lists.policy),
        baseline: candidate(&episode.baseline, &lists.baseline),
    }
}

pub(crate) fn sample<'a>(sample: &'a Sample, hits: &'a [types::Hit<'a>]) -> filters::Sample<'a> {
    filters::Sample {
        id: &sample.id,
        original_query: &sample.original_query,
        rewritten_query: &sample.rewritten_query,
        context: context(&sample.context),
        hits,
    }
}

pub(crate) fn hits(hits: &[Hit]) -> Vec<types::Hit<'_>> {
    hits.iter().map(hit).collect()
}

fn hit(hit: &Hit) -> types::Hit<'_> {
    types::Hit {
        id: &hit.id,
        text: &hit.text,
        reranker_score: hit.reranker_score,
        retrieval_score: hit.retrieval_score,
        rank: hit.rank,
    }
}

pub(crate) fn prompt_input<'a>(input: &'a PromptInput<'a>) -> prompts::Input<'a> {
    prompts::Input { query: input.query, context: context(input.context), rewrite: input.rewrite }
}

pub(crate) fn task(task: PromptTask) -> prompts::Task {
    match task {
        PromptTask::TeacherRewrite => prompts::Task::TeacherRewrite,
        PromptTask::PolicyRewrite => prompts::Task::PolicyRewrite,
        PromptTask::Judge => prompts::Task::Judge,
    }
}

pub(crate) fn message(message: types::MessageResult) -> Message {
    let role = match message.role {
        types::Role::System => "system",
        types::Role::User => "user",
        types::Role::Assistant => "assistant",
    };
    Message { role: role.to_owned(), content: message.content }
}

pub(crate) fn turns(dialogue: &Dialogue) -> Result<Vec<types::MessageParam<'_>>, Rejection> {
    let rejected = |detail: String| Rejection { code: "invalid_dialogue".into(), detail };
    if dialogue.turns.last().is_none_or(|last| last.role != "assistant") {
        return Err(rejected("the last turn is not the assistant's".into()));
    }
    let numbered = dialogue.turns.iter().zip(1..);
    let turn = numbered.map(|(Message { role: name, content }, number)| {
        let unknown = || rejected(format!("turn {number} is from `{name}`; expected system, user or assistant"));
        role(name).map(|role| types::MessageParam { role, content }).ok_or_else(unknown)
    });
    turn.collect()
}

fn role(name: &str) -> Option<types::Role> {
    match name {
        "system" => Some(types::Role::System),
        "user" => Some(types::Role::User),
        "assistant" => Some(types::Role::Assistant),
        _ => None,
    }
}

/// The style model's result as the result of `style-model.classify`.
pub(crate) fn classified(
    message: Result<Vec<StyleProbability>, CallFailure>,
) -> Result<Vec<style_model::StyleProbability>, style_model::ClassifyError> {
    let class =
        |class: StyleProbability| types::StyleProbabilityResult { label: class.label, probability: class.probability };
    match message {
        Ok(classes) => Ok(classes.into_iter().map(class).collect()),
        Err(failure) => Err(style_model::ClassifyError::Failed(types::CallFailureResult {
            kind: failure_kind(failure.kind),
            message: failure.message,
        })),
    }
}

pub(crate) fn rejection(rejection: types::Rejection) -> Result<Rejection, String> {
    if crate::text::is_code(&rejection.code) {
        return Ok(Rejection { code: rejection.code, detail: rejection.detail });
    }
    let code = crate::text::printable(&rejection.code, 100);
    Err(format!("rejected with the code `{code}`; expected 1 to 64 of a to z, 0 to 9 and _"))
}

fn context(context: &Context) -> types::Context<'_> {
    types::Context { user_profile: &context.user_profile, history_summary: &context.history_summary }
}

fn candidate<'a>(candidate: &'a Candidate, lists: &'a CandidateLists<'a>) -> types::Candidate<'a> {
    types::Candidate {
        rewrite: &candidate.rewrite,
        retrieval: match &candidate.retrieval {
            Ok(_) => types::Retrieval::Hits(&lists.hits),
            Err(failure) => types::Retrieval::Failed(call_failure(failure)),
        },
        judgement: match &candidate.judgement {
            Judgement::Scored { score, reason } => {
                types::Judgement::Scored(types::JudgeScoreParam { score: *score, reason })
            }
            Judgement::NotSampled => types::Judgement::NotSampled,
            Judgement::Failed(failure) => types::Judgement::Failed(call_failure(failure)),
        },
        style: lists.style.as_deref(),
        n_tokens: candidate.n_tokens,
        truncated: candidate.truncated,
    }
}

fn call_failure(failure: &CallFailure) -> types::CallFailureParam<'_> {
    types::CallFailureParam { kind: failure_kind(failure.kind), message: &failure.message }
}

fn failure_kind(kind: FailureKind) -> types::FailureKind {
    match kind {
        FailureKind::Timeout => types::FailureKind::Timeout,
        // `Down` and `OverBudget` end a stage before a plugin sees them.
        FailureKind::Unreachable | FailureKind::Down | FailureKind::OverBudget => types::FailureKind::Unreachable,
        FailureKind::Unauthorized => types::FailureKind::Unauthorized,
        FailureKind::Rejected => types::FailureKind::Rejected,
        FailureKind::RateLimited => types::FailureKind::RateLimited,
        FailureKind::ServerError => types::FailureKind::ServerError,
        FailureKind::InvalidResponse => types::FailureKind::InvalidResponse,
        FailureKind::NotRecorded => types::FailureKind::NotRecorded,
    }
}

//! Conversion between records of querl-core and types of contract 0.1. Arguments are borrowed.

use super::bindings::{CallError, filters, prompts, rewards, types};
use crate::contract::conversions;
use querl_core::ports::{PromptInput, PromptTask};
use querl_core::records::{
    CallFailure, CandidateRef, Context, EpisodeRef, FailureKind, FinishReason, Hit, HostCallError, Judgement, Message,
    Rejection, Sample, StyleProbability, Verdict,
};

conversions!(prompts::Task);

/// The lists of an episode in the types of the contract; the argument of the call borrows them.
pub(super) struct EpisodeLists<'a> {
    gold_ids: Vec<&'a str>,
    policy: CandidateLists<'a>,
    baseline: CandidateLists<'a>,
}

#[derive(Default)]
struct CandidateLists<'a> {
    hits: Vec<types::Hit<'a>>,
    style: Option<Vec<types::StyleProbabilityParam<'a>>>,
}

impl<'a> EpisodeLists<'a> {
    pub(super) fn new(episode: &EpisodeRef<'a>) -> Self {
        Self {
            gold_ids: episode.gold_ids.iter().map(String::as_str).collect(),
            policy: CandidateLists::new(&episode.policy),
            baseline: episode.baseline.as_ref().map(CandidateLists::new).unwrap_or_default(),
        }
    }
}

impl<'a> CandidateLists<'a> {
    fn new(candidate: &CandidateRef<'a>) -> Self {
        let found = candidate.retrieval.and_then(Result::ok);
        Self { hits: hits(found.unwrap_or_default()), style: candidate.style.map(classes) }
    }
}

/// An episode, with the teacher's rewrite as its baseline, in the types of the contract.
pub(super) fn episode<'a>(
    episode: &EpisodeRef<'a>,
    baseline: &CandidateRef<'a>,
    lists: &'a EpisodeLists<'a>,
) -> rewards::Episode<'a> {
    rewards::Episode {
        id: episode.id,
        query: episode.query,
        context: context(episode.context),
        gold_ids: &lists.gold_ids,
        policy: candidate(&episode.policy, &lists.policy),
        baseline: candidate(baseline, &lists.baseline),
    }
}

pub(super) fn sample<'a>(sample: &'a Sample, hits: &'a [types::Hit<'a>]) -> filters::Sample<'a> {
    filters::Sample {
        id: &sample.id,
        original_query: &sample.original_query,
        rewritten_query: &sample.rewritten_query,
        context: context(&sample.context),
        hits,
    }
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

fn context(context: &Context) -> types::Context<'_> {
    types::Context { user_profile: &context.user_profile, history_summary: &context.history_summary }
}

/// In contract 0.1, a rewrite without retrieval is one without hits.
fn candidate<'a>(candidate: &CandidateRef<'a>, lists: &'a CandidateLists<'a>) -> types::Candidate<'a> {
    types::Candidate {
        rewrite: candidate.rewrite,
        retrieval: match candidate.retrieval {
            Some(Err(failure)) => types::Retrieval::Failed(call_failure(failure)),
            _ => types::Retrieval::Hits(&lists.hits),
        },
        judgement: match candidate.judgement {
            Judgement::Scored { score, reason } => {
                types::Judgement::Scored(types::JudgeScoreParam { score: *score, reason })
            }
            Judgement::NotSampled => types::Judgement::NotSampled,
            Judgement::Failed(failure) => types::Judgement::Failed(call_failure(failure)),
        },
        style: lists.style.as_deref(),
        n_tokens: candidate.n_tokens,
        truncated: candidate.finish_reason == Some(&FinishReason::Length),
    }
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

fn failure_kind_result(kind: FailureKind) -> types::FailureKind {
    failure_kind(kind)
}

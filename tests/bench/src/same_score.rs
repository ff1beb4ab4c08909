//! An environment that gives every response the same score, without computation.

use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, ScoredResponses};
use querl_core::records::{Candidate, Episode, EpisodeRecord, FinishReason, Reward};

pub(crate) struct SameScore;

impl Environment for SameScore {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        Ok(responses.iter().map(|response| record(step, response)).collect::<Vec<_>>().into())
    }
}

fn record(step: u64, response: &PolicyResponse) -> EpisodeRecord {
    let PolicyResponse { text, n_tokens, truncated, .. } = response.clone();
    let finish_reason = Some(if truncated { FinishReason::Length } else { FinishReason::Stop });
    let candidate = Candidate { n_tokens, finish_reason, ..Candidate::found_nothing(text) };
    let id = format!("{step}/{}/{}", response.row_index, response.sample_index);
    let episode = Episode { id, policy: candidate.clone(), baseline: Some(candidate), ..Episode::default() };
    let outcome = Ok(Reward { total: 0.5, components: Vec::new() });
    EpisodeRecord { format: EpisodeRecord::FORMAT, step, episode, calls: Vec::new(), outcome }
}

//! The same score for every response, at once.

use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, ScoredResponses};
use querl_core::records::{Candidate, Context, Episode, EpisodeRecord, Reward};

pub(crate) struct SameScore;

impl Environment for SameScore {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        Ok(responses.iter().map(|response| record(step, response)).collect::<Vec<_>>().into())
    }
}

fn record(step: u64, response: &PolicyResponse) -> EpisodeRecord {
    let PolicyResponse { text, n_tokens, truncated, .. } = response.clone();
    let candidate = Candidate { n_tokens, truncated, ..Candidate::found_nothing(text) };
    let episode = Episode {
        id: format!("{step}/{}/{}", response.row_index, response.sample_index),
        query: String::new(),
        context: Context::default(),
        gold_ids: Vec::new(),
        policy: candidate.clone(),
        baseline: candidate,
    };
    let outcome = Ok(Reward { total: 0.5, components: Vec::new() });
    EpisodeRecord { format: EpisodeRecord::FORMAT, step, episode, outcome }
}

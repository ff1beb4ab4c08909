//! What tests keep of a training: its metrics, and episodes that hold an answer and what it was worth.

use querl_core::ports::PolicyResponse;
use querl_core::records::{Candidate, Context, Episode, EpisodeRecord, Rejection, Reward};
use querl_train::{MetricSink, Metrics};

/// Keeps metrics, with their steps.
#[derive(Debug, Default)]
pub(crate) struct Recorder(pub(crate) Vec<(u64, Metrics)>);

impl MetricSink for Recorder {
    fn record(&mut self, _stage: &str, step: u64, metrics: &Metrics) -> std::io::Result<()> {
        self.0.push((step, metrics.clone()));
        Ok(())
    }

    fn mark(&mut self) -> std::io::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn rewind(&mut self, mark: u64) -> std::io::Result<()> {
        self.0.truncate(mark as usize);
        Ok(())
    }
}

/// An episode of an answer that is its own baseline and found nothing.
pub(crate) fn episode(
    id: String,
    step: u64,
    response: &PolicyResponse,
    outcome: Result<Reward, Rejection>,
) -> EpisodeRecord {
    let PolicyResponse { text, n_tokens, truncated, .. } = response.clone();
    let candidate = Candidate { n_tokens, truncated, ..Candidate::found_nothing(text) };
    let episode = Episode {
        id,
        query: String::new(),
        context: Context::default(),
        gold_ids: Vec::new(),
        policy: candidate.clone(),
        baseline: candidate,
    };
    EpisodeRecord { format: EpisodeRecord::FORMAT, step, episode, outcome }
}

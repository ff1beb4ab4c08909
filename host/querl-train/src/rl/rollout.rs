//! Rollouts: sampled responses with log-probabilities and the environment's scores.

use super::RlTask;
use crate::policy::Example;
use crate::{Metrics, TrainError};
use querl_core::ports::{CallTimings, PluginActivity};
use querl_core::records::{EpisodeRecord, Rejection};
use querl_model::Generated;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A row to respond to, and the number of its first sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Query {
    pub(super) row: usize,
    pub(super) first_sample: usize,
}

/// The queries for some rows. A row that comes twice (where an epoch ends within the batch) gets further samples.
pub(super) fn queries(rows: &[usize], n_samples: usize) -> Vec<Query> {
    let mut seen: BTreeMap<usize, usize> = BTreeMap::new();
    let query = |&row: &usize| {
        let first_sample = *seen.entry(row).and_modify(|n| *n += n_samples).or_insert(0);
        Query { row, first_sample }
    };
    rows.iter().map(query).collect()
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct ScoredResponse {
    token_ids: Vec<u32>,
    logprobs: Vec<f32>,
    behaviour_logprobs: Vec<f32>,
    truncated: bool,
    pub(super) record: EpisodeRecord,
}

impl ScoredResponse {
    pub(super) fn new(response: Generated, record: EpisodeRecord) -> Self {
        let Generated { token_ids, logprobs, behaviour_logprobs, truncated, .. } = response;
        Self { token_ids, logprobs, behaviour_logprobs, truncated, record }
    }
}

/// Wall-clock time of a batch's rollouts, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Timings {
    pub(super) generate_s: f64,
    /// In the environment; `calls` has its parts.
    pub(super) score_s: f64,
    pub(super) calls: CallTimings,
    /// From the start of generation to the last score: less than the sum, since both overlap.
    pub(super) rollout_s: f64,
}

impl Timings {
    pub(super) fn add(&mut self, other: &Self) {
        self.generate_s += other.generate_s;
        self.score_s += other.score_s;
        self.calls += other.calls;
        self.rollout_s += other.rollout_s;
    }
}

/// A batch of rollouts in progress; a checkpoint keeps it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct PartialBatch {
    /// The step its episodes are recorded under.
    pub(super) step: u64,
    /// Steps of updates of the policy that generates it.
    pub(super) version: u64,
    pub(super) queries: Vec<Query>,
    /// In the order of the queries, `n_samples` for each.
    #[serde(rename = "answers")]
    pub(super) responses: Vec<ScoredResponse>,
    /// Unscored responses to the queries that follow, as far as they are generated.
    #[serde(default)]
    pub(super) generated: Vec<Vec<Generated>>,
    /// Metrics of [`check_rollout`](super::rollout_check::check_rollout), where it ran while the policy was available.
    pub(super) check: Metrics,
    pub(super) timings: Timings,
    #[serde(default)]
    pub(super) plugins: BTreeMap<String, PluginActivity>,
}

impl PartialBatch {
    pub(super) fn new(step: u64, version: u64, queries: Vec<Query>) -> Self {
        Self {
            step,
            version,
            queries,
            responses: Vec::new(),
            generated: Vec::new(),
            check: Metrics::new(),
            timings: Timings::default(),
            plugins: BTreeMap::new(),
        }
    }

    pub(super) fn is_complete(&self, n_samples: usize) -> bool {
        self.responses.len() == self.queries.len() * n_samples
    }
}

pub(super) struct Rollout {
    pub(super) example: Example,
    /// Of the response's tokens at the sampling temperature, as the engine computed them, before top-k and top-p.
    pub(super) logprobs: Vec<f32>,
    /// Of the filtered distribution that they were sampled from.
    pub(super) behaviour_logprobs: Vec<f32>,
    pub(super) truncated: bool,
    /// Row of the query; samples of one row form a group.
    pub(super) group: usize,
    pub(super) score: f32,
    pub(super) record: EpisodeRecord,
}

pub(super) struct RolloutBatch {
    pub(super) rollouts: Vec<Rollout>,
    pub(super) n_episodes: usize,
    /// Episodes without a score, by code.
    pub(super) dropped: BTreeMap<String, u64>,
    pub(super) check: Metrics,
    pub(super) timings: Timings,
    pub(super) plugins: BTreeMap<String, PluginActivity>,
}

impl RolloutBatch {
    /// From a complete `partial`.
    pub(super) fn new(task: &RlTask<'_>, partial: PartialBatch) -> Result<Self, TrainError> {
        let records = || partial.responses.iter().map(|response| &response.record);
        check_drops(task, partial.step, records())?;
        let (n_episodes, dropped) = (partial.responses.len(), drops(records()));
        let rollouts = learnable(task, &partial);
        let PartialBatch { check, timings, plugins, .. } = partial;
        Ok(Self { rollouts, n_episodes, dropped, check, timings, plugins })
    }

    pub(super) fn n_tokens(&self) -> usize {
        let of_one = |rollout: &Rollout| rollout.example.prompt.len() + rollout.example.response.len();
        self.rollouts.iter().map(of_one).sum()
    }
}

/// The responses that have a score, in order.
pub(super) fn learnable(task: &RlTask<'_>, partial: &PartialBatch) -> Vec<Rollout> {
    let rows = partial.queries.iter().flat_map(|query| std::iter::repeat_n(query.row, task.config.n_samples));
    let rollout = |(row, response): (usize, &ScoredResponse)| {
        Some(Rollout {
            example: Example { prompt: task.train.prompts[row].clone(), response: response.token_ids.clone() },
            logprobs: response.logprobs.clone(),
            behaviour_logprobs: response.behaviour_logprobs.clone(),
            truncated: response.truncated,
            group: row,
            score: response.record.outcome.as_ref().ok()?.total as f32,
            record: response.record.clone(),
        })
    };
    rows.zip(&partial.responses).filter_map(rollout).collect()
}

pub(super) fn check_drops<'a>(
    task: &RlTask<'_>,
    step: u64,
    records: impl ExactSizeIterator<Item = &'a EpisodeRecord>,
) -> Result<(), TrainError> {
    let n_episodes = records.len();
    let reasons = drops(records);
    let n_dropped = reasons.values().sum::<u64>() as usize;
    let max_drop_rate = task.config.max_drop_rate;
    if n_dropped < n_episodes && n_dropped as f64 <= max_drop_rate * n_episodes as f64 {
        return Ok(());
    }
    let reason = reasons.into_iter().max_by_key(|(_, n)| *n).map(|(code, _)| code).unwrap_or_default();
    Err(TrainError::DropRate { step, n_dropped, n_episodes, max_drop_rate, reason })
}

/// Numbers of episodes without a score, by code.
fn drops<'a>(records: impl Iterator<Item = &'a EpisodeRecord>) -> BTreeMap<String, u64> {
    let mut codes = BTreeMap::new();
    for Rejection { code, .. } in records.filter_map(|record| record.outcome.as_ref().err()) {
        *codes.entry(code.clone()).or_default() += 1;
    }
    codes
}

#[cfg(test)]
mod tests {
    use super::{Query, queries};

    #[test]
    fn a_row_that_comes_twice_gets_further_samples() {
        let query = |row, first_sample| Query { row, first_sample };
        assert_eq!(queries(&[7, 3, 7], 2), [query(7, 0), query(3, 0), query(7, 2)]);
    }
}

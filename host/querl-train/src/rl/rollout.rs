//! Rollouts: sampled responses with log-probabilities and the environment's scores.

use super::RlTask;
use super::advantages::{groups_without_spread, overlong_penalty};
use crate::batching::DataOrder;
use crate::policy::Example;
use crate::{Metrics, TrainError};
use querl_core::config::RlConfig;
use querl_core::ports::{CallTimings, PluginActivity};
use querl_core::records::{EpisodeRecord, Rejection};
use querl_core::text::printable;
use querl_model::Generated;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum length of a rejection's detail in an error message.
const MAX_DETAIL_BYTES: usize = 400;

/// A dataset row to sample responses for, and the index of the row's first sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Query {
    pub(super) row: usize,
    pub(super) first_sample: usize,
}

/// The queries for `rows`, with `n_samples` samples each. If a row occurs twice (an epoch ends within the batch) or is among the `earlier`
/// queries of the batch, the sample indices are continued.
pub(super) fn queries<'a>(rows: &[usize], n_samples: usize, earlier: impl Iterator<Item = &'a Query>) -> Vec<Query> {
    let mut seen: BTreeMap<usize, usize> = BTreeMap::new();
    for Query { row, first_sample } in earlier {
        let last = seen.entry(*row).or_default();
        *last = (*last).max(*first_sample);
    }
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
    /// Time spent in the environment; `calls` has the time of its parts.
    pub(super) score_s: f64,
    pub(super) calls: CallTimings,
    /// Time from the start of generation to the last score. Less than the sum of both, because generation and scoring overlap.
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

/// Queries of a batch that other queries replaced because all of their samples had the same score (`rl.dynamic_sampling`).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct ResampledQueries {
    /// Number of rounds in which queries were replaced.
    pub(super) n_rounds: usize,
    pub(super) queries: Vec<Query>,
    n_episodes: usize,
    /// Episodes without a score, by code.
    dropped: BTreeMap<String, u64>,
}

/// A batch of rollouts in progress; part of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct PartialBatch {
    /// Step number under which the episodes of this batch are recorded.
    pub(super) step: u64,
    /// Version of the policy that generates this batch: the number of steps that it was updated in.
    pub(super) version: u64,
    pub(super) queries: Vec<Query>,
    /// Scored responses in the order of the queries, `n_samples` for each query.
    #[serde(rename = "answers")]
    pub(super) responses: Vec<ScoredResponse>,
    /// Generated but unscored responses to the queries after those of `responses`; the last may be unfinished.
    #[serde(default)]
    pub(super) generated: Vec<Vec<Generated>>,
    #[serde(default)]
    pub(super) resampled: ResampledQueries,
    /// Metrics of [`check_rollout`](super::rollout_check::check_rollout) if it ran in the train loop (`rl.off_by_one`); otherwise empty.
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
            resampled: ResampledQueries::default(),
            check: Metrics::new(),
            timings: Timings::default(),
            plugins: BTreeMap::new(),
        }
    }

    pub(super) fn is_complete(&self, n_samples: usize) -> bool {
        self.responses.len() == self.queries.len() * n_samples
    }

    /// Number of episodes, including those of replaced queries.
    fn n_episodes(&self) -> usize {
        self.responses.len() + self.resampled.n_episodes
    }

    /// Numbers of episodes without a score, by code, including those of replaced queries.
    fn dropped(&self) -> BTreeMap<String, u64> {
        let mut dropped = drops(self.responses.iter().map(|response| &response.record));
        add_drops(&mut dropped, &self.resampled.dropped);
        dropped
    }

    /// Checks the share of episodes without a score, over all episodes so far, against `rl.max_drop_rate`.
    ///
    /// # Errors
    /// [`TrainError::DropRate`] if the share is above the limit.
    pub(super) fn check_drops(&self, task: &RlTask<'_>) -> Result<(), TrainError> {
        let (n_episodes, reasons) = (self.n_episodes(), self.dropped());
        let n_dropped = reasons.values().sum::<u64>() as usize;
        let max_drop_rate = task.config.max_drop_rate;
        if n_dropped < n_episodes && n_dropped as f64 <= max_drop_rate * n_episodes as f64 {
            return Ok(());
        }
        let reason = reasons.into_iter().max_by_key(|(_, n)| *n).map(|(code, _)| code).unwrap_or_default();
        let rejections = self.responses.iter().rev().filter_map(|response| response.record.outcome.as_ref().err());
        let detail = rejections.filter(|rejection| rejection.code == reason).map(|rejection| rejection.detail.as_str());
        let last = match detail.map(|detail| printable(detail, MAX_DETAIL_BYTES)).find(|detail| !detail.is_empty()) {
            Some(detail) => format!("; the last: {detail}"),
            None => String::new(),
        };
        Err(TrainError::DropRate { step: self.step, n_dropped, n_episodes, max_drop_rate, reason, last })
    }

    /// With `rl.dynamic_sampling`, replaces those queries of a complete batch whose samples all have the same score by the next queries in
    /// `order`, at most `rl.max_resampled_batches` times. Returns whether the batch now lacks responses.
    ///
    /// A checkpoint may contain the batch before or after this call: the replacing queries are a function of scores and `order`.
    ///
    /// Source: Yu et al. 2025, "DAPO", section 3.2. As in ms-swift, queries that remain after the last round stay in the batch.
    pub(super) fn resample(&mut self, task: &RlTask<'_>, order: &mut DataOrder) -> bool {
        let (config, n_samples) = (task.config, task.config.n_samples);
        if !config.dynamic_sampling || self.resampled.n_rounds >= config.max_resampled_batches {
            return false;
        }
        let rollouts = learnable(task, self);
        let scores: Vec<f32> =
            rollouts.iter().map(|rollout| clipped(config, rollout.penalised_score(config))).collect();
        let groups: Vec<usize> = rollouts.iter().map(|rollout| rollout.group).collect();
        let anchor = config.anchor_baseline.map(|anchor| clipped(config, anchor as f32));
        let replaced = groups_without_spread(&scores, &groups, anchor);
        if replaced.is_empty() {
            return false;
        }
        let n_before = self.resampled.queries.len();
        let mut responses = std::mem::take(&mut self.responses).into_iter();
        for query in std::mem::take(&mut self.queries) {
            let of_query: Vec<ScoredResponse> = responses.by_ref().take(n_samples).collect();
            if replaced.contains(&query.row) {
                self.resampled.n_episodes += of_query.len();
                add_drops(&mut self.resampled.dropped, &drops(of_query.iter().map(|response| &response.record)));
                self.resampled.queries.push(query);
            } else {
                self.responses.extend(of_query);
                self.queries.push(query);
            }
        }
        let rows = order.take(self.resampled.queries.len() - n_before);
        let further = queries(&rows, n_samples, self.queries.iter().chain(&self.resampled.queries));
        self.queries.extend(further);
        self.resampled.n_rounds += 1;
        true
    }
}

pub(super) struct Rollout {
    pub(super) example: Example,
    /// Log-probabilities of the response's tokens as the engine computed them, at the sampling temperature, before top-k and top-p.
    pub(super) logprobs: Vec<f32>,
    /// Log-probabilities of the response's tokens under the distribution that they were sampled from, after top-k and top-p.
    pub(super) behaviour_logprobs: Vec<f32>,
    pub(super) truncated: bool,
    /// Group id: the row of the query, whose samples form a group.
    pub(super) group: usize,
    pub(super) score: f32,
    pub(super) record: EpisodeRecord,
}

impl Rollout {
    /// The environment's score minus the penalties for truncated and for overlong responses.
    ///
    /// Source: TRL's `missing_eos_penalty`; [`overlong_penalty`].
    pub(super) fn penalised_score(&self, config: &RlConfig) -> f32 {
        let missing_eos = if self.truncated { config.missing_eos_penalty as f32 } else { 0.0 };
        self.score - missing_eos - self.overlong_penalty(config) as f32
    }

    pub(super) fn overlong_penalty(&self, config: &RlConfig) -> f64 {
        let RlConfig { max_new_tokens, overlong_buffer_len, overlong_penalty_factor, .. } = *config;
        overlong_penalty(self.example.response.len(), max_new_tokens, overlong_buffer_len, overlong_penalty_factor)
    }
}

pub(super) struct RolloutBatch {
    pub(super) rollouts: Vec<Rollout>,
    pub(super) n_queries: usize,
    /// Queries that were replaced by dynamic sampling; `None` if `rl.dynamic_sampling` is off.
    pub(super) resampled: Option<ResampledQueries>,
    /// Number of episodes, including those of replaced queries and those without a score.
    pub(super) n_episodes: usize,
    /// Episodes without a score, by code.
    pub(super) dropped: BTreeMap<String, u64>,
    pub(super) check: Metrics,
    pub(super) timings: Timings,
    pub(super) plugins: BTreeMap<String, PluginActivity>,
}

impl RolloutBatch {
    /// The batch of a complete `partial`, without the responses that have no score.
    pub(super) fn new(task: &RlTask<'_>, partial: PartialBatch) -> Result<Self, TrainError> {
        partial.check_drops(task)?;
        let (n_episodes, dropped) = (partial.n_episodes(), partial.dropped());
        let rollouts = learnable(task, &partial);
        let PartialBatch { queries, resampled, check, timings, plugins, .. } = partial;
        let resampled = task.config.dynamic_sampling.then_some(resampled);
        Ok(Self { rollouts, n_queries: queries.len(), resampled, n_episodes, dropped, check, timings, plugins })
    }

    pub(super) fn n_tokens(&self) -> usize {
        let of_one = |rollout: &Rollout| rollout.example.prompt.len() + rollout.example.response.len();
        self.rollouts.iter().map(of_one).sum()
    }
}

/// The rollouts of `partial` that have a score, in order.
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

/// A score clipped to `rl.reward_clip`, as in the loss. With `rl.normalize_rewards` a score is scaled before it is clipped, by a factor
/// that is not known yet.
fn clipped(config: &RlConfig, score: f32) -> f32 {
    let limit = config.reward_clip as f32;
    if limit > 0.0 && !config.normalize_rewards { score.clamp(-limit, limit) } else { score }
}

/// Numbers of episodes without a score, by code.
fn drops<'a>(records: impl Iterator<Item = &'a EpisodeRecord>) -> BTreeMap<String, u64> {
    let mut codes = BTreeMap::new();
    for Rejection { code, .. } in records.filter_map(|record| record.outcome.as_ref().err()) {
        *codes.entry(code.clone()).or_default() += 1;
    }
    codes
}

pub(super) fn add_drops(sums: &mut BTreeMap<String, u64>, drops: &BTreeMap<String, u64>) {
    for (code, n) in drops {
        *sums.entry(code.clone()).or_default() += n;
    }
}

#[cfg(test)]
mod tests {
    use super::{Query, queries};
    use std::iter::empty;

    #[test]
    fn a_row_that_comes_twice_gets_further_samples() {
        let query = |row, first_sample| Query { row, first_sample };
        assert_eq!(queries(&[7, 3, 7], 2, empty()), [query(7, 0), query(3, 0), query(7, 2)]);
        let earlier = [query(7, 2), query(3, 0), query(7, 0)];
        assert_eq!(queries(&[3, 7, 5, 7], 2, earlier.iter()), [query(3, 2), query(7, 4), query(5, 0), query(7, 6)]);
    }
}

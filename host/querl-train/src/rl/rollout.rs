//! Rollouts: answers of the policy, scored by the environment.

use super::{RlData, RlTask};
use crate::metrics::summary;
use crate::policy::Example;
use crate::{Metrics, TrainError};
use querl_core::config::RlConfig;
use querl_core::ports::PolicyResponse;
use querl_core::records::{EpisodeRecord, Rejection, Reward, retrieval_quality, win};
use querl_model::{Decoding, Generated, GenerationRequest, SamplingSettings, generate};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// One scored answer.
pub(super) struct Rollout {
    pub(super) example: Example,
    /// Of the response's tokens at the sampling temperature, as the engine computed them, before any filter.
    pub(super) logprobs: Vec<f32>,
    /// Of the filtered distribution that they were drawn from.
    pub(super) behaviour_logprobs: Vec<f32>,
    /// Cut off at the longest length.
    pub(super) truncated: bool,
    /// Row of the query: samples of one row are a group.
    pub(super) group: usize,
    /// The environment's total.
    pub(super) score: f32,
    pub(super) record: EpisodeRecord,
}

/// The scored answers of one step.
pub(super) struct Batch {
    pub(super) rollouts: Vec<Rollout>,
    pub(super) n_episodes: usize,
    /// Episodes without a score, by code.
    pub(super) dropped: BTreeMap<String, u64>,
    pub(super) generate_s: f64,
    pub(super) score_s: f64,
}

/// Rolls out `n_samples` answers to each of the given rows and has them scored.
pub(super) fn collect(task: &RlTask<'_>, step: u64, rows: &[usize]) -> Result<Batch, TrainError> {
    let config = task.config;
    let decoding = Decoding::Sample;
    let targets = targets(rows, config.n_samples);
    let started = Instant::now();
    let answers = answers(task, &task.train, &targets, decoding, step)?;
    let generate_s = started.elapsed().as_secs_f64();
    let records = task.train.environment.score(step, &responses(task, &targets, &answers)?)?;
    let score_s = started.elapsed().as_secs_f64() - generate_s;
    check_drops(task, step, &records)?;
    let (n_episodes, dropped) = (records.len(), drops(&records));
    let mut rollouts = Vec::with_capacity(n_episodes);
    for (((row, _), answer), record) in targets.into_iter().zip(answers).zip(records) {
        let Ok(reward) = &record.outcome else { continue };
        rollouts.push(Rollout {
            example: Example { prompt: task.train.prompts[row].clone(), response: answer.token_ids },
            behaviour_logprobs: answer.behaviour_logprobs,
            logprobs: answer.logprobs,
            truncated: answer.truncated,
            group: row,
            score: reward.total as f32,
            record,
        });
    }
    Ok(Batch { rollouts, n_episodes, dropped, generate_s, score_s })
}

/// `(row, sample)` pairs, each once: a row that a batch holds twice (an epoch ended in it) gets further samples.
fn targets(rows: &[usize], n_samples: usize) -> Vec<(usize, usize)> {
    let mut seen: BTreeMap<usize, usize> = BTreeMap::new();
    let of_row = |&row: &usize| {
        let first = *seen.entry(row).and_modify(|n| *n += n_samples).or_insert(0);
        (first..first + n_samples).map(move |sample| (row, sample))
    };
    rows.iter().flat_map(of_row).collect()
}

/// Stops a run that loses more episodes than it may.
pub(super) fn check_drops(task: &RlTask<'_>, step: u64, records: &[EpisodeRecord]) -> Result<(), TrainError> {
    let reasons = drops(records);
    let (n_episodes, n_dropped) = (records.len(), reasons.values().sum::<u64>() as usize);
    let max_drop_rate = task.config.max_drop_rate;
    if n_dropped < n_episodes && n_dropped as f64 <= max_drop_rate * n_episodes as f64 {
        return Ok(());
    }
    let reason = reasons.into_iter().max_by_key(|(_, n)| *n).map(|(code, _)| code).unwrap_or_default();
    Err(TrainError::DropRate { step, n_dropped, n_episodes, max_drop_rate, reason })
}

/// How many episodes have no score, by code.
fn drops(records: &[EpisodeRecord]) -> BTreeMap<String, u64> {
    let mut codes = BTreeMap::new();
    for Rejection { code, .. } in records.iter().filter_map(|record| record.outcome.as_ref().err()) {
        *codes.entry(code.clone()).or_default() += 1;
    }
    codes
}

/// Answers of the current policy to the given (row, sample) pairs.
pub(super) fn answers(
    task: &RlTask<'_>,
    data: &RlData<'_>,
    targets: &[(usize, usize)],
    decoding: Decoding,
    step: u64,
) -> Result<Vec<Generated>, TrainError> {
    let request = |&(row, sample): &(usize, usize)| GenerationRequest {
        prompt: &data.prompts[row],
        seed: mix(&[task.seed, step, row as u64, sample as u64]),
        n: 1,
    };
    let requests: Vec<GenerationRequest<'_>> = targets.iter().map(request).collect();
    let sampling = sampling(task.config);
    Ok(generate(task.decoder, Some(task.policy), &requests, decoding, &sampling, task.tokenizer)?)
}

/// What a rollout is drawn with.
fn sampling(config: &RlConfig) -> SamplingSettings {
    SamplingSettings {
        temperature: config.temperature,
        top_p: config.top_p,
        top_k: config.top_k,
        repetition_penalty: config.repetition_penalty,
        no_repeat_ngram_size: config.no_repeat_ngram_size,
        min_new_tokens: config.min_new_tokens,
        max_new_tokens: config.max_new_tokens,
        stop_strings: config.stop_strings.clone(),
    }
}

/// What the environment is told of the answers.
pub(super) fn responses(
    task: &RlTask<'_>,
    targets: &[(usize, usize)],
    answers: &[Generated],
) -> Result<Vec<PolicyResponse>, TrainError> {
    let response = |(&(row_index, sample_index), answer): (&(usize, usize), &Generated)| {
        Ok(PolicyResponse {
            row_index,
            sample_index,
            text: task.tokenizer.decode(&answer.token_ids)?,
            n_tokens: answer.token_ids.len() as u32,
            truncated: answer.truncated,
        })
    };
    targets.iter().zip(answers).map(response).collect()
}

/// One seed out of several numbers (the finaliser of SplitMix64, applied in turn).
fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9e37_79b9_7f4a_7c15, |state, part| {
        let mut z = (state ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

impl Batch {
    pub(super) fn n_tokens(&self) -> usize {
        self.rollouts.iter().map(|rollout| rollout.example.response.len()).sum()
    }

    pub(super) fn metrics(&self) -> Metrics {
        let lengths: Vec<f64> = self.rollouts.iter().map(|rollout| rollout.example.response.len() as f64).collect();
        let scores: Vec<f64> = self.rollouts.iter().map(|rollout| f64::from(rollout.score)).collect();
        let n = self.rollouts.len().max(1) as f64;
        let mut metrics = summary("critic/score", &scores);
        metrics.extend(summary("response_length", &lengths));
        let truncated = self.rollouts.iter().filter(|rollout| rollout.truncated).count();
        metrics.insert("response_length/clip_ratio".into(), truncated as f64 / n);
        let distinct: BTreeSet<&[u32]> =
            self.rollouts.iter().map(|rollout| rollout.example.response.as_slice()).collect();
        metrics.insert("response/distinct_ratio".into(), distinct.len() as f64 / n);
        let n_dropped = self.dropped.values().sum::<u64>();
        metrics.insert("drop_rate".into(), n_dropped as f64 / self.n_episodes.max(1) as f64);
        metrics.extend(self.dropped.iter().map(|(code, n)| (format!("dropped/{code}"), *n as f64)));
        metrics.extend(episode_metrics(self.rollouts.iter().map(|rollout| &rollout.record)));
        metrics
    }
}

/// Means over scored episodes: reward and its components, wins against the teacher, top-1 scores of both.
pub(super) fn episode_metrics<'a>(records: impl Iterator<Item = &'a EpisodeRecord>) -> Metrics {
    let mut sums: BTreeMap<String, (f64, usize)> = BTreeMap::new();
    let mut add = |name: String, value: f64| {
        let (sum, n) = sums.entry(name).or_default();
        (*sum, *n) = (*sum + value, *n + 1);
    };
    for record in records {
        let Ok(Reward { total, components }) = &record.outcome else { continue };
        add("avg_reward".into(), *total);
        components.iter().for_each(|part| add(format!("reward/{}", part.name), part.value));
        let episode = &record.episode;
        if let (Ok(policy), Ok(baseline)) = (&episode.policy.retrieval, &episode.baseline.retrieval) {
            add("win_rate".into(), win(policy, baseline));
            add("avg_top1".into(), policy.first().map_or(0.0, |hit| hit.reranker_score));
            add("avg_top1_teacher".into(), baseline.first().map_or(0.0, |hit| hit.reranker_score));
            add("avg_quality".into(), retrieval_quality(policy));
        }
    }
    sums.into_iter().map(|(name, (sum, n))| (name, sum / n as f64)).collect()
}

#[cfg(test)]
mod tests {
    use super::targets;

    #[test]
    fn a_row_that_comes_twice_is_sampled_anew() {
        assert_eq!(targets(&[7, 3, 7], 2), [(7, 0), (7, 1), (3, 0), (3, 1), (7, 2), (7, 3)]);
    }
}

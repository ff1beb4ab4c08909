//! The metrics of reinforcement learning: their names and how they are computed.
//!
//! **To add a metric** of PPO or another algorithm: insert it in one of the functions below, and describe its name in
//! docs/files.md and docs/zh-CN/files.md (`metrics.jsonl`; the test `every_documented_metric_is_recorded_...` of `host/querl/tests/calls.rs`
//! compares them with three runs). The functions that run in each micro-batch return shares of the optimizer step, which are summed
//! over micro-batches and ranks: they can compute a mean, but no maximum. A new statistic of the loss is a field of
//! [`PolicyLoss`] or [`ValueLoss`] (`losses.rs`) first.
//! `metrics.jsonl`, TensorBoard and the report's table "Other training metrics" take every name. A chart of the report is an entry of `CHARTS`
//! in `host/querl-eval/src/report/curves.rs`, a curve of `querl watch` one of `CURVES` in `host/querl/src/commands/watch/view.rs`.
//!
//! Inserted elsewhere: gradient norms (`actor/grad_norm`, `critic/grad_norm`) in `learner.rs`; the durations of the phases of a batch
//! (some of `timing_s/...`) in `experience.rs` and `learner.rs`; `calls/...` and `cache/...` in `querl-pipeline/src/stages/spending.rs`.
//!
//! | function | computed | names |
//! |---|---|---|
//! | [`policy_metrics`] | in each micro-batch of an update | `actor/pg_loss`, `actor/pg_clipfrac`, `actor/ppo_kl`, `actor/entropy`, ... |
//! | [`value_metrics`] | in each micro-batch of an update | `critic/vf_loss`, `critic/vf_clipfrac` |
//! | [`UpdateMetrics::means`] | after the updates of a batch | `actor/lr`, `actor/n_updates`, and the means of the names above |
//! | [`batch_metrics`] | once per batch, before its updates | `actor/ref_kl`, `critic/rewards`, `critic/advantages`, `critic/values`, ... |
//! | [`rollout_metrics`] | once per batch of rollouts | `critic/score`, `response_length`, `drop_rate`, ... |
//! | [`episode_metrics`] | per batch and per evaluation (there as `val/...`) | `avg_reward`, `reward/COMPONENT`, `win_rate`, ... |
//! | [`plugin_metrics`] | once per batch of rollouts | `plugin/NAME/time_s`, `plugin/NAME/corr/COMPONENT`, ... |
//! | [`rollout_check_metrics`] | on a sample of each batch | `rollout_probs_diff`, `rollout_probs_diff_max` |
//! | [`mismatch_metrics`] | once per batch of a rollout server | `rollout_corr/kl`, `rollout_corr/k3_kl` |
//! | [`step_metrics`] | at the end of a step | `timing_s/step`, `perf/...` |
//!
//! Names are those of verl and TRL where they have the metric.

use super::advantages::{all_true, mean_group_deviation, share_without_spread};
use super::experience::{Experience, ValueExperience};
use super::losses::{
    KlLoss, PolicyLoss, Rows, StepSize, ValueLoss, effective_sample_share, kl_k1, kl_k3, kl_rows, masked_mean,
};
use super::rollout::{ResampledQueries, Rollout, RolloutBatch, Timings};
use crate::Metrics;
use querl_core::config::{AdvantageForm, KlPlacement, RlAlgorithm, RlConfig};
use querl_core::edits::EXPAND;
use querl_core::ports::{CallTimings, PluginActivity, RewardResults};
use querl_core::records::{Candidate, EpisodeRecord, Hit, Reward, reciprocal_rank, retrieval_quality, win};
use std::collections::{BTreeMap, BTreeSet};

/// A micro-batch's share of the policy's metrics of an optimizer step of `size`: summed over micro-batches and ranks, averaged over steps.
pub(super) fn policy_metrics(
    form: AdvantageForm,
    size: StepSize,
    loss: &PolicyLoss,
    kl_loss: Option<&KlLoss>,
    entropies: &Rows,
) -> Metrics {
    let n_tokens = size.n_tokens as f64;
    let n_ratios = match form {
        AdvantageForm::Token => n_tokens,
        AdvantageForm::Sequence => size.n_responses as f64,
    };
    let entropy: f64 = entropies.iter().flatten().map(|entropy| f64::from(*entropy)).sum();
    let mut metrics = Metrics::from([
        ("actor/pg_loss".to_owned(), f64::from(loss.pg_loss)),
        ("actor/pg_clipfrac".to_owned(), loss.n_clipped as f64 / n_ratios),
        ("actor/pg_clipfrac_lower".to_owned(), loss.n_clipped_lower as f64 / n_ratios),
        // Per token for token and sequence advantages, so that they are comparable.
        ("actor/ppo_kl".to_owned(), loss.kl_sum / n_tokens),
        ("actor/ppo_kl_k3".to_owned(), loss.kl_k3_sum / n_tokens),
        ("actor/entropy".to_owned(), entropy / n_tokens),
    ]);
    metrics.extend(kl_loss.map(|kl| ("actor/kl_loss".to_owned(), f64::from(kl.kl_loss))));
    metrics
}

/// A micro-batch's share of the critic's metrics of an optimizer step with `n_values` positions in the value loss.
pub(super) fn value_metrics(n_values: usize, loss: &ValueLoss) -> Metrics {
    Metrics::from([
        ("critic/vf_loss".to_owned(), f64::from(loss.vf_loss)),
        ("critic/vf_clipfrac".to_owned(), loss.n_clipped as f64 / n_values.max(1) as f64),
    ])
}

pub(super) fn add_metrics(sums: &mut Metrics, metrics: Metrics) {
    metrics.into_iter().for_each(|(name, value)| *sums.entry(name).or_default() += value);
}

#[derive(Default)]
pub(super) struct UpdateMetrics {
    pub(super) policy: StepSums,
    pub(super) critic: StepSums,
    pub(super) actor_s: f64,
    pub(super) critic_s: f64,
    pub(super) actor_lr: f64,
    /// Learning rate of the critic; `None` without a critic.
    pub(super) critic_lr: Option<f64>,
    /// Indices in the batch of the responses of the first optimizer step.
    pub(super) first_mini_batch: Vec<usize>,
}

#[derive(Default)]
pub(super) struct StepSums {
    n_steps: usize,
    sums: Metrics,
    /// Metrics of the first optimizer step.
    pub(super) first: Metrics,
}

impl StepSums {
    pub(super) fn add_step(&mut self, metrics: Metrics) {
        if self.n_steps == 0 {
            self.first.clone_from(&metrics);
        }
        self.n_steps += 1;
        add_metrics(&mut self.sums, metrics);
    }

    fn means(&self) -> impl Iterator<Item = (String, f64)> {
        self.sums.iter().map(|(name, sum)| (name.clone(), sum / self.n_steps.max(1) as f64))
    }
}

impl UpdateMetrics {
    /// Means over the optimizer steps, with learning rates and timings.
    pub(super) fn means(&self) -> Metrics {
        let mut metrics: Metrics = self.policy.means().chain(self.critic.means()).collect();
        metrics.insert("actor/n_updates".into(), self.policy.n_steps as f64);
        metrics.insert("actor/lr".into(), self.actor_lr);
        metrics.extend(self.critic_lr.map(|lr| ("critic/lr".to_owned(), lr)));
        metrics.insert("timing_s/update_actor".into(), self.actor_s);
        metrics.insert("timing_s/update_critic".into(), self.critic_s);
        metrics
    }
}

pub(super) fn batch_metrics(experience: &Experience<'_>, config: &RlConfig) -> Metrics {
    let mut metrics: Metrics = experience.timings.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    metrics.extend(kl_metrics(experience, config));
    let rewards: Vec<f32> = experience.token_rewards.iter().map(|row| row.iter().sum()).collect();
    let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|x| f64::from(*x)).collect() };
    metrics.extend(summary("critic/rewards", &wide(&rewards)));
    metrics.extend(summary("critic/advantages", &wide(&experience.advantages.concat())));
    if config.algorithm.needs_groups() {
        // Without KL, whose spread says nothing about the scores: as `rl.dynamic_sampling` compares them.
        let share = share_without_spread(&experience.scores, &experience.groups, experience.anchor);
        metrics.insert("frac_reward_zero_std".into(), f64::from(share));
    }
    if config.n_samples >= 2 {
        let scores: Vec<f32> = experience.rollouts.iter().map(|rollout| rollout.score).collect();
        metrics.insert("reward_std".into(), mean_group_deviation(&scores, &experience.groups));
    }
    if config.algorithm == RlAlgorithm::Raft {
        let is_best = |row: &&Vec<f32>| row.first().is_some_and(|best| *best > 0.0);
        let n_best = experience.advantages.iter().filter(is_best).count();
        let n_groups = experience.groups.iter().collect::<BTreeSet<_>>().len();
        metrics.insert("raft/selected_ratio".into(), n_best as f64 / n_groups.max(1) as f64);
    }
    if config.overlong_buffer_len > 0 {
        let penalties: Vec<f64> = experience.rollouts.iter().map(|rollout| rollout.overlong_penalty(config)).collect();
        let n = penalties.len().max(1) as f64;
        metrics.insert("overlong_reward".into(), 0.0 - penalties.iter().sum::<f64>() / n);
        metrics.insert("overlong".into(), penalties.iter().filter(|penalty| **penalty > 0.0).count() as f64 / n);
    }
    if let Some(critic) = &experience.critic {
        metrics.extend(summary("critic/returns", &wide(&critic.returns.concat())));
        metrics.extend(summary("critic/values", &wide(&critic.values.concat())));
        metrics.insert("critic/vf_explained_var".into(), explained_variance(critic));
    }
    if let Some(weights) = &experience.importance_weights {
        metrics.extend(importance_metrics(weights, config.importance_cap));
    }
    metrics
}

fn kl_metrics(experience: &Experience<'_>, config: &RlConfig) -> Metrics {
    let (old, reference) = (&experience.old_logprobs, &experience.ref_logprobs);
    let mask = all_true(old);
    let mean = |estimate: fn(f32, f32) -> f32| -> f64 {
        let row = |(old, reference): (&Vec<f32>, &Vec<f32>)| {
            old.iter().zip(reference).map(|(old, reference)| estimate(*old, *reference)).collect()
        };
        let rows: Rows = old.iter().zip(reference).map(row).collect();
        f64::from(masked_mean(&rows, &mask))
    };
    let k1 = mean(kl_k1);
    let n_tokens: usize = old.iter().map(Vec::len).sum();
    let mut metrics = Metrics::from([
        ("actor/ref_kl".to_owned(), k1),
        ("actor/ref_kl_k3".to_owned(), mean(kl_k3)),
        ("objective/kl".to_owned(), k1 * n_tokens as f64 / experience.rollouts.len().max(1) as f64),
    ]);
    match config.kl_placement {
        KlPlacement::Reward => {
            let kl = kl_rows(config.kl_estimator, old, reference);
            metrics.insert("actor/reward_kl_penalty".into(), f64::from(masked_mean(&kl, &mask)));
            metrics.insert("actor/reward_kl_penalty_coeff".into(), experience.kl_coef);
        }
        KlPlacement::Loss => drop(metrics.insert("actor/kl_coef".into(), experience.kl_coef)),
    }
    metrics
}

/// `1 - var(returns - values) / var(returns)` over the positions in the value loss.
///
/// Source: verl `compute_data_metrics`, `critic/vf_explained_var`.
fn explained_variance(critic: &ValueExperience) -> f64 {
    let kept = |rows: &Rows| -> Vec<f64> {
        let rows = rows.iter().zip(&critic.mask);
        rows.flat_map(|(row, mask)| row.iter().zip(mask).filter(|(_, keep)| **keep).map(|(x, _)| f64::from(*x)))
            .collect()
    };
    let variance = |values: &[f64]| -> f64 {
        let n = values.len().max(1) as f64;
        let mean = values.iter().sum::<f64>() / n;
        values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n
    };
    let (returns, values) = (kept(&critic.returns), kept(&critic.values));
    let errors: Vec<f64> = returns.iter().zip(&values).map(|(target, value)| target - value).collect();
    let spread = variance(&returns);
    if spread > 0.0 { 1.0 - variance(&errors) / spread } else { 0.0 }
}

/// verl's metrics of importance weights. The weights are capped already; `ratio_fraction_high` is the share at the cap.
fn importance_metrics(weights: &Rows, cap: f64) -> Metrics {
    let mask = all_true(weights);
    let flat = weights.concat();
    let n_capped = flat.iter().filter(|weight| f64::from(**weight) >= cap).count();
    let max = flat.iter().copied().fold(0.0, f32::max);
    Metrics::from([
        ("rollout_corr/rollout_is_mean".into(), f64::from(masked_mean(weights, &mask))),
        ("rollout_corr/rollout_is_max".into(), f64::from(max)),
        ("rollout_corr/rollout_is_ratio_fraction_high".into(), n_capped as f64 / flat.len().max(1) as f64),
        ("rollout_corr/rollout_is_eff_sample_size".into(), f64::from(effective_sample_share(weights, &mask))),
    ])
}

/// Metrics of a batch's scores, lengths, drops, episodes and time.
pub(super) fn rollout_metrics(batch: &RolloutBatch) -> Metrics {
    let rollouts = &batch.rollouts;
    let lengths: Vec<f64> = rollouts.iter().map(|rollout| rollout.example.response.len() as f64).collect();
    let scores: Vec<f64> = rollouts.iter().map(|rollout| f64::from(rollout.score)).collect();
    let n = rollouts.len().max(1) as f64;
    let truncated = rollouts.iter().filter(|rollout| rollout.truncated).count();
    let n_dropped = batch.dropped.values().sum::<u64>();
    let mut metrics = summary("critic/score", &scores);
    metrics.extend(summary("response_length", &lengths));
    metrics.insert("response_length/clip_ratio".into(), truncated as f64 / n);
    metrics.extend(distinct_metrics(rollouts));
    metrics.insert("drop_rate".into(), n_dropped as f64 / batch.n_episodes.max(1) as f64);
    metrics.extend(batch.dropped.iter().map(|(code, n)| (format!("dropped/{code}"), *n as f64)));
    metrics.extend(episode_metrics(rollouts.iter().map(|rollout| &rollout.record)));
    metrics.extend(batch.check.clone());
    metrics.extend(batch.resampled.iter().flat_map(|resampled| resampling_metrics(resampled, batch.n_queries)));
    metrics.extend(plugin_metrics(&batch.plugins));
    let Timings { generate_s, score_s, rollout_s, calls: CallTimings { retrieve_s, judge_s, plugin_s } } =
        batch.timings;
    metrics.extend([
        ("timing_s/gen".to_owned(), generate_s),
        ("timing_s/reward".to_owned(), score_s),
        ("timing_s/retrieve".to_owned(), retrieve_s),
        ("timing_s/judge".to_owned(), judge_s),
        ("timing_s/plugin".to_owned(), plugin_s),
        ("timing_s/rollout".to_owned(), rollout_s),
    ]);
    metrics
}

/// Distinct responses as a share of all responses; distinct rewrites of a query as a mean over queries; and distinct responses of the batch
/// divided by its number of queries. In the last metric the edits `=` and `&` are distinct responses of each query, because a policy of
/// edits may correctly answer most queries with one of them.
fn distinct_metrics(rollouts: &[Rollout]) -> Metrics {
    let of_batch: BTreeSet<&[u32]> = rollouts.iter().map(|rollout| rollout.example.response.as_slice()).collect();
    let of_each: BTreeSet<(usize, &str)> =
        rollouts.iter().map(|rollout| (rollout.group, rollout.record.episode.policy.rewrite.as_str())).collect();
    let is_edit_of_its_query = |rollout: &Rollout| {
        let episode = &rollout.record.episode;
        let rewrite = episode.policy.rewrite.as_str();
        // Of a policy that writes whole rewrites, `&` is the rewrite.
        let is_expansion = rewrite != EXPAND && episode.response.as_deref().map(str::trim) == Some(EXPAND);
        rewrite == episode.query || is_expansion
    };
    let across: BTreeSet<(Option<usize>, &[u32])> = rollouts
        .iter()
        .map(|rollout| (is_edit_of_its_query(rollout).then_some(rollout.group), rollout.example.response.as_slice()))
        .collect();
    let queries: BTreeSet<usize> = rollouts.iter().map(|rollout| rollout.group).collect();
    let n_queries = queries.len().max(1) as f64;
    Metrics::from([
        ("response/distinct_ratio".into(), of_batch.len() as f64 / rollouts.len().max(1) as f64),
        ("response/distinct_per_query".into(), of_each.len() as f64 / n_queries),
        ("response/distinct_across_queries".into(), across.len() as f64 / n_queries),
    ])
}

/// Number of rounds of generation, and the share of sampled queries that were replaced because all of their samples had the same score.
///
/// Source: verl `recipe/dapo`, `train/num_gen_batches`; `ReplayBuffer`, `filter_groups/evicted_samples`, here as a share.
fn resampling_metrics(resampled: &ResampledQueries, n_queries: usize) -> Metrics {
    let n_replaced = resampled.queries.len();
    let share = n_replaced as f64 / (n_queries + n_replaced).max(1) as f64;
    Metrics::from([
        ("train/num_gen_batches".into(), 1.0 + resampled.n_rounds as f64),
        ("filter_groups/evicted_ratio".into(), share),
    ])
}

/// Means over scored episodes: reward and its components, wins against the teacher, top-1 scores of both, and `avg_mrr` over those with
/// gold passages.
pub(super) fn episode_metrics<'a>(records: impl Iterator<Item = &'a EpisodeRecord>) -> Metrics {
    let mut sums: BTreeMap<String, (f64, usize)> = BTreeMap::new();
    let mut add = |name: String, value: f64| {
        let (sum, n) = sums.entry(name).or_default();
        (*sum, *n) = (*sum + value, *n + 1);
    };
    for record in records {
        let Ok(Reward { total, components }) = &record.outcome else { continue };
        add("avg_reward".into(), *total);
        components.iter().for_each(|component| add(format!("reward/{}", component.name), component.value));
        let episode = &record.episode;
        let top1 = |hits: &[Hit]| hits.first().map_or(0.0, |hit| hit.reranker_score);
        if let Some(policy) = episode.policy.found() {
            add("avg_top1".into(), top1(policy));
            add("avg_quality".into(), retrieval_quality(policy));
            if let Some(rank) = reciprocal_rank(policy, &episode.gold_ids) {
                add("avg_mrr".into(), rank);
            }
            if let Some(baseline) = episode.baseline.as_ref().and_then(Candidate::found) {
                add("win_rate".into(), win(policy, baseline));
                add("avg_top1_teacher".into(), top1(baseline));
            }
        }
    }
    sums.into_iter().map(|(name, (sum, n))| (name, sum / n as f64)).collect()
}

/// Metrics of each plugin: time, fuel, and of rewards the rejections, the share of the declared range between the smallest and the largest
/// total, and the correlation of each component with the total.
fn plugin_metrics(plugins: &BTreeMap<String, PluginActivity>) -> Metrics {
    let mut metrics = Metrics::new();
    for (plugin, PluginActivity { time_s, fuel, results }) in plugins {
        let mut add = |name: &str, value: f64| metrics.insert(format!("plugin/{plugin}/{name}"), value);
        add("time_s", *time_s);
        add("fuel", *fuel as f64);
        let Some(RewardResults { range_width, n_rejected, totals, components }) = results else { continue };
        add("rejected", *n_rejected as f64);
        if !totals.is_empty() {
            let max = totals.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let min = totals.iter().copied().fold(f64::INFINITY, f64::min);
            add("range_used", (max - min) / range_width);
        }
        for (component, values) in components {
            if let Some(value) = correlation(values) {
                add(&format!("corr/{component}"), value);
            }
        }
    }
    metrics
}

/// Pearson correlation; `None` if one variable is constant up to rounding.
fn correlation(pairs: &[(f64, f64)]) -> Option<f64> {
    let n = pairs.len() as f64;
    let mean = |value: fn(&(f64, f64)) -> f64| pairs.iter().map(value).sum::<f64>() / n;
    let (mean_x, mean_y) = (mean(|pair| pair.0), mean(|pair| pair.1));
    let sum = |value: fn(f64, f64) -> f64| pairs.iter().map(|(x, y)| value(x - mean_x, y - mean_y)).sum::<f64>();
    let (xx, yy, xy) = (sum(|x, _| x * x), sum(|_, y| y * y), sum(|x, y| x * y));
    let is_constant = |squares: f64, mean: f64| squares <= n * (1e-12 * mean.abs().max(1e-12)).powi(2);
    (!is_constant(xx, mean_x) && !is_constant(yy, mean_y)).then(|| (xy / (xx * yy).sqrt()).clamp(-1.0, 1.0))
}

/// Name of the mean validation reward, recorded at every evaluation; its components are named `val/reward/COMPONENT`.
pub const EVALUATION_REWARD: &str = "val/reward";

/// Names of the evaluation metrics that a run with retrieval records in addition to [`EVALUATION_REWARD`].
pub const EVALUATION_RETRIEVAL: [&str; 4] = ["val/win_rate", "val/avg_top1", "val/avg_top1_teacher", "val/avg_quality"];

/// Renames the [`episode_metrics`] of an evaluation to `val/reward`, `val/win_rate` and so on, and adds its timings.
pub(super) fn evaluation_metrics(episodes: &Metrics, timings: &Timings) -> Metrics {
    let name = |name: &String| format!("val/{}", if name == "avg_reward" { "reward" } else { name });
    let mut metrics: Metrics = episodes.iter().map(|(key, value)| (name(key), *value)).collect();
    metrics.insert("timing_s/testing".into(), timings.rollout_s);
    metrics
}

/// Metrics of the check of rollouts: mean and maximum difference of a token's log-probability between rollout and training pass.
pub(super) fn rollout_check_metrics(mean: f64, max: f64) -> Metrics {
    Metrics::from([("rollout_probs_diff".into(), mean), ("rollout_probs_diff_max".into(), max)])
}

/// Metrics of the KL from a rollout server's distribution to that of the training pass, in nats per token.
pub(super) fn mismatch_metrics(k1: f64, k3: f64) -> Metrics {
    Metrics::from([("rollout_corr/kl".into(), k1), ("rollout_corr/k3_kl".into(), k3)])
}

/// Time, throughput and memory of a step. `n_tokens`: tokens of prompts and responses; `save_s`: seconds for a checkpoint since the
/// previous step.
pub(super) fn step_metrics(seconds: f64, n_tokens: usize, save_s: Option<f64>) -> Metrics {
    let mut metrics = memory_metrics();
    metrics.extend(save_s.map(|save_s| ("timing_s/save_checkpoint".to_owned(), save_s)));
    metrics.extend([
        ("timing_s/step".to_owned(), seconds),
        ("perf/time_per_step".to_owned(), seconds),
        ("perf/total_num_tokens".to_owned(), n_tokens as f64),
        ("perf/throughput".to_owned(), n_tokens as f64 / seconds),
    ]);
    metrics
}

fn summary(name: &str, values: &[f64]) -> Metrics {
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let min = values.iter().copied().fold(f64::INFINITY, f64::min);
    Metrics::from([(format!("{name}/mean"), mean), (format!("{name}/max"), max), (format!("{name}/min"), min)])
}

/// `perf/cpu_memory_used_gb` and `perf/max_cpu_memory_used_gb`: resident memory of this process in GiB, now and its peak.
/// Linux only; empty elsewhere.
fn memory_metrics() -> Metrics {
    std::fs::read_to_string("/proc/self/status").map(|status| parse_status(&status)).unwrap_or_default()
}

fn parse_status(status: &str) -> Metrics {
    let names = [("VmRSS:", "perf/cpu_memory_used_gb"), ("VmHWM:", "perf/max_cpu_memory_used_gb")];
    let kibibytes = |key: &str| -> Option<f64> {
        let rest = status.lines().find_map(|line| line.strip_prefix(key))?;
        rest.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    names.iter().filter_map(|(key, name)| Some(((*name).to_owned(), kibibytes(key)? / f64::from(1 << 20)))).collect()
}

#[cfg(test)]
mod tests {
    /// `numpy.corrcoef([0, 1, 0.5], [-0.5, 0.5, 0.25])[0, 1]` is 0.9607689228305226.
    #[test]
    fn plugin_metrics_are_those_of_all_parts_of_a_batch() {
        let part = |totals: &[f64], values: &[f64]| {
            let values: Vec<(f64, f64)> = values.iter().copied().zip(totals.iter().copied()).collect();
            let constant = values.iter().map(|(_, total)| (0.1, *total)).collect();
            let components = BTreeMap::from([("win".to_owned(), values), ("bias".to_owned(), constant)]);
            let results = RewardResults { range_width: 2.0, n_rejected: 1, totals: totals.to_vec(), components };
            PluginActivity { time_s: 0.25, fuel: 100, results: Some(results) }
        };
        let mut reward = part(&[-0.5], &[0.0]);
        reward += part(&[0.5, 0.25], &[1.0, 0.5]);
        let prompts = PluginActivity { time_s: 1.0, fuel: 5, results: None };
        let metrics = plugin_metrics(&BTreeMap::from([("r".to_owned(), reward), ("p".to_owned(), prompts)]));
        let expected = [
            ("plugin/p/fuel", 5.0),
            ("plugin/p/time_s", 1.0),
            ("plugin/r/corr/win", 0.960_768_922_830_522_6),
            ("plugin/r/fuel", 200.0),
            ("plugin/r/range_used", 0.5),
            ("plugin/r/rejected", 2.0),
            ("plugin/r/time_s", 0.5),
        ];
        assert_eq!(metrics.keys().map(String::as_str).collect::<Vec<_>>(), expected.map(|(name, _)| name));
        for (name, value) in expected {
            assert!((metrics[name] - value).abs() < 1e-12, "{name}: {}", metrics[name]);
        }
    }

    #[test]
    fn a_constant_has_no_correlation() {
        assert_eq!(correlation(&[(0.1, 1.0), (0.1, 2.0), (0.1, 3.0)]), None);
        assert_eq!(correlation(&[(1.0, 2.0)]), None);
        assert_eq!(correlation(&[(1.0, 3.0), (2.0, 1.0)]), Some(-1.0));
    }

    use super::*;
    use crate::Example;
    use querl_core::records::{Episode, RewardComponent};

    #[test]
    fn evaluations_have_the_listed_metrics_and_components() {
        let candidate = Candidate::found_nothing("a".into());
        let episode = Episode { policy: candidate.clone(), baseline: Some(candidate), ..Episode::default() };
        let components = vec![RewardComponent { name: "win".into(), value: 1.0 }];
        let outcome = Ok(Reward { total: 0.5, components });
        let record = EpisodeRecord { format: EpisodeRecord::FORMAT, step: 0, episode, calls: Vec::new(), outcome };
        let metrics = evaluation_metrics(&episode_metrics([&record].into_iter()), &Timings::default());
        let names = metrics.keys().map(String::as_str).filter(|name| name.starts_with("val/"));
        let expected = EVALUATION_RETRIEVAL.into_iter().chain([EVALUATION_REWARD, "val/reward/win"]);
        assert_eq!(names.collect::<BTreeSet<_>>(), expected.collect::<BTreeSet<_>>());
        let mut with_gold = record;
        with_gold.episode.gold_ids = vec!["g".into()];
        assert_eq!(episode_metrics([&with_gold].into_iter()).get("avg_mrr"), Some(&0.0));
    }

    /// Regression: a policy that kept each query by the response `=`, or expanded each by `&`, was reported as one that gives all queries
    /// one response.
    #[test]
    fn responses_are_distinct_per_query_and_an_edit_is_no_repetition() {
        let rollout = |group: usize, response: u32, rewrite: &str| {
            let policy = Candidate::found_nothing(rewrite.into());
            let text = ["=", "&\n", "+ x"][response as usize].to_owned();
            let query = format!("q{group}");
            let episode = Episode { query, policy, response: Some(text), ..Episode::default() };
            let outcome = Ok(Reward { total: 0.0, components: Vec::new() });
            Rollout {
                example: Example { prompt: vec![1], response: vec![response] },
                logprobs: Vec::new(),
                behaviour_logprobs: Vec::new(),
                truncated: false,
                group,
                score: 0.0,
                record: EpisodeRecord { format: EpisodeRecord::FORMAT, step: 0, episode, calls: Vec::new(), outcome },
            }
        };
        let of = |rollouts: &[Rollout]| {
            let metrics = distinct_metrics(rollouts);
            ["ratio", "per_query", "across_queries"].map(|name| metrics[&format!("response/distinct_{name}")])
        };
        let kept = [rollout(0, 0, "q0"), rollout(0, 0, "q0"), rollout(1, 0, "q1"), rollout(1, 2, "q1 x")];
        assert_eq!(of(&kept), [0.5, 1.5, 1.5]);
        let expanded = [rollout(0, 1, "q0 y"), rollout(0, 1, "q0 y"), rollout(1, 1, "q1 z"), rollout(1, 1, "q1 z")];
        assert_eq!(of(&expanded), [0.25, 1.0, 1.0]);
        // A text that is added to each query.
        let same = [rollout(0, 2, "q0 x"), rollout(0, 2, "q0 x"), rollout(1, 2, "q1 x"), rollout(1, 2, "q1 x")];
        assert_eq!(of(&same), [0.25, 1.0, 0.5]);
        // `&` as a whole rewrite.
        let whole = [rollout(0, 1, "&"), rollout(0, 1, "&"), rollout(1, 1, "&"), rollout(1, 1, "&")];
        assert_eq!(of(&whole), [0.25, 1.0, 0.5]);
        // Two edits with one rewrite: the expansion is the query.
        let unchanged = [rollout(0, 0, "q0"), rollout(0, 1, "q0"), rollout(1, 0, "q1"), rollout(1, 1, "q1")];
        assert_eq!(of(&unchanged), [0.5, 1.0, 2.0]);
    }

    #[test]
    fn resident_memory_and_its_peak_are_in_gibibytes() {
        let metrics = parse_status("Name:\tquerl\nVmHWM:\t 3145728 kB\nVmRSS:\t 1572864 kB\nThreads:\t3\n");
        assert_eq!(metrics["perf/cpu_memory_used_gb"], 1.5);
        assert_eq!(metrics["perf/max_cpu_memory_used_gb"], 3.0);
        assert!(parse_status("Name:\tquerl\n").is_empty());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_uses_memory() {
        let metrics = memory_metrics();
        assert!(metrics["perf/cpu_memory_used_gb"] > 0.0);
        assert!(metrics["perf/max_cpu_memory_used_gb"] >= metrics["perf/cpu_memory_used_gb"]);
    }
}

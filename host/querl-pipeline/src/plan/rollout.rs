//! A trial rollout: a few queries with several samples each, scored by the environment of training. Groups without reward variance have no
//! gradient in group-relative algorithms.

use super::advice::{Advice, Level, mean, percent, share};
use super::comparison::standard_deviation;
use super::loss::spread;
use crate::environment::{Baselines, Judging, RowColumns, ScoreRequest};
use crate::ledger::{Ledger, StageName, rows_of};
use crate::run::Run;
use crate::training::Base;
use anyhow::Context;
use querl_core::config::RlConfig;
use querl_core::ports::PolicyResponse;
use querl_core::records::{DatasetRow, Split};
use querl_model::{
    Decoder, Decoding, Engine, EngineSettings, GenerationRequest, LoraAdapter, SamplingSettings, TextTokenizer, Weights,
};
use querl_train::rl;
use serde::Serialize;
use std::collections::HashSet;

/// Number of queries of the trial rollout.
pub(super) const N_QUERIES: usize = 8;
/// Maximum number of samples per query of the trial rollout.
const MAX_SAMPLES: usize = 8;
/// Number of samples per query where RL takes one, which has no variance.
const SAMPLES_IN_PLACE_OF_ONE: usize = 4;
/// Name of the policy if fine-tuning is not finished.
const BASE: &str = "base";
/// Tolerance for equal totals.
const EQUAL: f64 = 1e-6;
/// Shares of groups without variance.
const WEAK_SHARE: f64 = 0.5;
const BAD_SHARE: f64 = 0.9;
/// Minimum number of characters, without spaces, of a text that counts as repetitive.
const MIN_REPETITIVE: usize = 6;

/// Rewards and counts of one query's samples.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SampledGroup {
    /// Total rewards of the scored samples.
    pub totals: Vec<f64>,
    /// Number of distinct rewrites, without repetitive ones.
    pub n_distinct: usize,
    /// Number of samples whose rewrite repeats one character or a short text: see [`is_repetitive`].
    pub n_repetitive: usize,
    /// Number of samples that could not be scored.
    pub n_dropped: usize,
    /// Number of samples without a rewrite or with an empty one.
    pub n_empty: usize,
    /// Number of samples that reached `rl.max_new_tokens`.
    pub n_truncated: usize,
}

/// Result of the trial rollout.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutFacts {
    /// Sampled policy: `sft`, or `base` if fine-tuning is not finished.
    pub policy: &'static str,
    /// Number of queries.
    pub n_groups: usize,
    /// Number of samples of all queries.
    pub n_samples: usize,
    /// Mean reward of the scored samples; `None` if no sample was scored.
    pub mean_reward: Option<f64>,
    /// Mean standard deviation of the rewards within a group; `None` if no group has two scored samples.
    pub deviation_within_groups: Option<f64>,
    /// Share of groups whose rewards are all equal, of the groups with at least two scored samples.
    pub zero_variance_share: f64,
    /// Number of distinct rewrites, without repetitive ones, divided by the number of samples.
    pub distinct_share: f64,
    /// Share of samples whose rewrite repeats one character or a short text.
    pub repetitive_share: f64,
    /// Share of samples that could not be scored.
    pub dropped_share: f64,
    /// Share of samples without a rewrite.
    pub empty_share: f64,
    /// Share of samples that reached the token limit.
    pub truncated_share: f64,
    /// Whether the RL algorithm compares the samples of a query.
    #[serde(skip)]
    pub(super) needs_groups: bool,
}

impl RolloutFacts {
    pub(super) fn of(policy: &'static str, groups: &[SampledGroup], config: &RlConfig) -> Self {
        let n_samples = groups.len() * n_samples(config);
        let sum = |of: fn(&SampledGroup) -> usize| groups.iter().map(of).sum::<usize>();
        let deviations: Vec<f64> = groups.iter().filter_map(|group| standard_deviation(&group.totals)).collect();
        let n_equal = deviations.iter().filter(|deviation| **deviation < EQUAL).count();
        Self {
            policy,
            n_groups: groups.len(),
            n_samples,
            mean_reward: mean(groups.iter().flat_map(|group| group.totals.iter().copied())),
            deviation_within_groups: mean(deviations.iter().copied()),
            zero_variance_share: share(n_equal, deviations.len()),
            distinct_share: share(sum(|group| group.n_distinct), n_samples),
            repetitive_share: share(sum(|group| group.n_repetitive), n_samples),
            dropped_share: share(sum(|group| group.n_dropped), n_samples),
            empty_share: share(sum(|group| group.n_empty), n_samples),
            truncated_share: share(sum(|group| group.n_truncated), n_samples),
            needs_groups: config.algorithm.needs_groups(),
        }
    }

    /// The result of the trial rollout as advice in words.
    pub fn advice(&self) -> Advice {
        let (Some(reward), Some(deviation)) = (self.mean_reward, self.deviation_within_groups) else {
            let finding = format!("none of {} samples was scored", self.n_samples);
            return Advice::new(
                "rollout",
                Level::Bad,
                finding,
                "check the services: `querl rag check CONFIG`, and judge.kind",
            );
        };
        let finding = format!(
            "{} queries with {} samples each of the policy `{}`: mean reward {reward:.3}, standard deviation within the samples of a query {deviation:.3}, {} of queries with equal rewards; {} of rewrites distinct, {} repetitive, {} of responses without a rewrite, {} truncated",
            self.n_groups,
            self.n_samples / self.n_groups.max(1),
            self.policy,
            percent(self.zero_variance_share),
            percent(self.distinct_share),
            percent(self.repetitive_share),
            percent(self.empty_share),
            percent(self.truncated_share)
        );
        let (level, action) = if self.repetitive_share > WEAK_SHARE {
            (
                Level::Bad,
                "most responses repeat one character or a short text: train SFT first or longer, or take a base that is trained further",
            )
        } else if self.truncated_share > WEAK_SHARE {
            (Level::Bad, "most responses do not end: train SFT first or longer, or raise rl.max_new_tokens")
        } else if self.empty_share > WEAK_SHARE {
            (Level::Bad, "most responses hold no rewrite: train SFT first or longer, or change the policy's prompt")
        } else if self.zero_variance_share >= BAD_SHARE {
            (
                Level::Bad,
                match self.needs_groups {
                    true => {
                        "rewards do not distinguish samples: add a graded reward, raise rl.temperature, or use PPO with a critic"
                    }
                    false => "rewards do not distinguish samples: add a graded reward, or raise rl.temperature",
                },
            )
        } else if self.zero_variance_share >= WEAK_SHARE {
            (
                Level::Weak,
                match self.needs_groups {
                    true => {
                        "raise rl.n_samples or rl.temperature: a query with equal rewards teaches GRPO and RLOO nothing"
                    }
                    false => {
                        "raise rl.temperature, or add a graded reward: many queries have equal rewards for all samples"
                    }
                },
            )
        } else if self.dropped_share > WEAK_SHARE {
            (
                Level::Weak,
                "many samples cannot be scored: check retrieval and judge (`querl rag check CONFIG`, judge.kind)",
            )
        } else {
            (Level::Ok, "nothing to do: samples of a query get different rewards")
        };
        Advice::new("rollout", level, finding, action)
    }

    /// As [`Self::advice`], but refers to the advice on the base model if the base produces noise, since samples of noise say little about
    /// rewards and prompts.
    pub(super) fn advice_after(&self, base_model: Option<&Advice>) -> Advice {
        let own = self.advice();
        let is_noise = base_model.is_some_and(|base_model| base_model.level == Level::Bad);
        // If the SFT policy works, no advice is needed; failing services are not caused by the base model.
        let fail = self.mean_reward.is_none() || self.dropped_share > WEAK_SHARE;
        if !is_noise || fail || (own.level == Level::Ok && self.policy != BASE) {
            return own;
        }
        let action = "see the line `base model` first: a base that does not know the language writes such responses";
        Advice::new("rollout", own.level.max(Level::Unknown), own.finding, action)
    }
}

/// Generates and scores the samples, on the CPU. Nothing of the run is written but the spend of external calls.
///
/// # Errors
/// The policy cannot be loaded, the environment cannot be opened, or a service is down.
pub(super) fn trial_rollout(run: &Run, train: &[DatasetRow]) -> anyhow::Result<RolloutFacts> {
    let rows: Vec<DatasetRow> = spread(train, N_QUERIES, |_| true).into_iter().cloned().collect();
    let (policy, responses) = sample(run, &rows)?;
    let groups = score(run, &rows, &responses)?;
    Ok(RolloutFacts::of(policy, &groups, &run.config.rl))
}

/// Number of samples per query: that of RL up to [`MAX_SAMPLES`], or [`SAMPLES_IN_PLACE_OF_ONE`].
fn n_samples(config: &RlConfig) -> usize {
    if config.n_samples < 2 { SAMPLES_IN_PLACE_OF_ONE } else { config.n_samples.min(MAX_SAMPLES) }
}

/// Generates responses to each row.
fn sample(run: &Run, rows: &[DatasetRow]) -> anyhow::Result<(&'static str, Vec<Vec<PolicyResponse>>)> {
    let config = &run.config;
    let ledger = Ledger::open(&run.dir.stages())?;
    let is_trained = ledger.finished(StageName::Sft).is_some();
    let base = match is_trained {
        true => Base::of(config, &run.dir, StageName::Sft)?,
        false => Base { model: config.model.path.clone(), adapter: None },
    };
    let decoder = Decoder::load_as(&base.model, Weights::Frozen, config.model.dtype)
        .with_context(|| format!("{}: the policy", base.model.display()))?;
    let tokenizer = TextTokenizer::for_policy(&base.model_config(config))?;
    let adapter = base.adapter.as_deref().map(|path| -> anyhow::Result<LoraAdapter> {
        Ok(LoraAdapter::load(path, decoder.config())?.for_decoder(&decoder)?)
    });
    let adapter = adapter.transpose()?;
    let prompts = rows.iter().map(|row| tokenizer.encode_prompt(row.prompt())).collect::<Result<Vec<Vec<u32>>, _>>()?;
    let n = n_samples(&config.rl);
    let requests: Vec<GenerationRequest<'_>> = prompts
        .iter()
        .enumerate()
        .map(|(index, prompt)| GenerationRequest { prompt, seed: config.seed.wrapping_add(index as u64), n })
        .collect();
    let sampling: SamplingSettings = rl::sampling(&config.rl);
    let mut engine = Engine::new(&decoder, EngineSettings::default())?;
    engine.set_policy(adapter.as_ref(), 0)?;
    let generated = engine.generate(&requests, Decoding::Sample, &sampling, &tokenizer)?;
    let mut responses = Vec::with_capacity(rows.len());
    for (row_index, samples) in generated.into_iter().enumerate() {
        let mut of_row = Vec::with_capacity(samples.len());
        for (sample_index, sample) in samples.into_iter().enumerate() {
            let text = tokenizer.decode(&sample.token_ids)?;
            of_row.push(PolicyResponse {
                row_index,
                sample_index,
                text: sampling.before_stop(&text).to_owned(),
                n_tokens: sample.token_ids.len() as u32,
                truncated: sample.truncated,
            });
        }
        responses.push(of_row);
    }
    Ok((if is_trained { "sft" } else { BASE }, responses))
}

/// Scores all responses as one batch, as in training, because rewards may compare the samples of a group.
fn score(run: &Run, rows: &[DatasetRow], responses: &[Vec<PolicyResponse>]) -> anyhow::Result<Vec<SampledGroup>> {
    run.plugins.check_style()?;
    let scorer = run.reward_scorer()?;
    let columns = RowColumns::read(scorer.rewards(), &run.config.data, rows)?;
    let baselines = Baselines::new(rows_of(&run.dir.validated())?, run.config.retrieval.kind);
    let judging = Judging::of(&run.config.judge);
    let mut requests = Vec::new();
    for response in responses.iter().flatten() {
        let row = &rows[response.row_index];
        let query = &row.metadata.query;
        let group_id = format!("plan/{}", query.id);
        let id = format!("{group_id}/{}", response.sample_index);
        requests.push(ScoreRequest {
            judged: judging.samples(&id),
            id,
            group_id,
            sample_index: response.sample_index as u32,
            step: None,
            split: Split::Train,
            query,
            columns: columns.of(query),
            prompt: Some(row.prompt()),
            policy: scorer.parse(query, response)?,
            baseline: baselines.of(&query.id),
        });
    }
    let scored = scorer.score(&requests)?.scored;
    let mut scored = scored.into_iter();
    let group = |samples: &Vec<PolicyResponse>| {
        let episodes: Vec<_> = scored.by_ref().take(samples.len()).collect();
        let rewrites = || episodes.iter().map(|one| one.episode.policy.rewrite.trim());
        let totals: Vec<f64> =
            episodes.iter().filter_map(|one| one.outcome.as_ref().ok()).map(|reward| reward.total).collect();
        SampledGroup {
            n_distinct: rewrites().filter(|rewrite| !is_repetitive(rewrite)).collect::<HashSet<&str>>().len(),
            n_repetitive: rewrites().filter(|rewrite| is_repetitive(rewrite)).count(),
            n_dropped: samples.len() - totals.len(),
            n_empty: rewrites().filter(|rewrite| rewrite.is_empty()).count(),
            n_truncated: samples.iter().filter(|sample| sample.truncated).count(),
            totals,
        }
    };
    Ok(responses.iter().map(group).collect())
}

/// True if 75 % of characters equal the character one period before, for some period of at most a third of the text: `鱼鱼鱼鱼鱼鱼`, `a b a b a
/// b`. Spaces do not count.
fn is_repetitive(text: &str) -> bool {
    let characters: Vec<char> = text.chars().filter(|character| !character.is_whitespace()).collect();
    let repeats = |period: usize| {
        let pairs = characters.iter().zip(&characters[period..]);
        4 * pairs.filter(|(one, other)| one == other).count() >= 3 * (characters.len() - period)
    };
    characters.len() >= MIN_REPETITIVE && (1..=characters.len() / 3).any(repeats)
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::config::RlAlgorithm;

    const N_SAMPLES: usize = 4;

    /// Regression: 4 samples were always taken, and more samples advised where 8 were set.
    #[test]
    fn queries_are_sampled_as_often_as_in_rl_within_limits() {
        let of = |n| n_samples(&RlConfig { n_samples: n, ..RlConfig::default() });
        assert_eq!([of(1), of(4), of(8), of(64)], [4, 4, 8, 8]);
    }

    fn group(totals: &[f64]) -> SampledGroup {
        let (n_distinct, n_dropped) = (totals.len().max(1), N_SAMPLES - totals.len());
        SampledGroup { totals: totals.to_vec(), n_distinct, n_repetitive: 0, n_dropped, n_empty: 0, n_truncated: 0 }
    }

    fn facts(groups: &[SampledGroup]) -> RolloutFacts {
        let config = RlConfig { algorithm: RlAlgorithm::Grpo, n_samples: N_SAMPLES, ..RlConfig::default() };
        RolloutFacts::of("sft", groups, &config)
    }

    /// Deviations 0 and sqrt(1/3): of 0, 0, 1 and 1 the mean is 0.5, the sum of squares 1, over 3.
    #[test]
    fn variance_is_that_within_groups() {
        let facts = facts(&[group(&[0.5; 4]), group(&[0.0, 0.0, 1.0, 1.0])]);
        assert_eq!((facts.zero_variance_share, facts.mean_reward), (0.5, Some(0.5)));
        assert!((facts.deviation_within_groups.unwrap() - (1.0_f64 / 3.0).sqrt() / 2.0).abs() < 1e-12);
        assert_eq!(facts.advice().level, Level::Weak, "half of the groups, as docs/training.md says");
    }

    #[test]
    fn what_gives_no_signal_is_reported_with_its_cause() {
        let of = |group: SampledGroup| facts(&[group]).advice();
        assert!(of(group(&[])).finding.contains("none of 4 samples was scored"));
        let equal = of(group(&[1.0; 4]));
        assert!(equal.level == Level::Bad && equal.action.contains("do not distinguish samples"), "{equal:?}");
        let endless = of(SampledGroup { n_truncated: 4, ..group(&[0.1, 0.2, 0.3, 0.4]) });
        assert!(endless.action.starts_with("most responses do not end"), "{endless:?}");
        let empty = of(SampledGroup { n_empty: 3, ..group(&[0.1, 0.2, 0.3, 0.4]) });
        assert!(empty.action.starts_with("most responses hold no rewrite"), "{empty:?}");
        let noise = of(SampledGroup { n_repetitive: 3, n_truncated: 4, ..group(&[0.1, 0.2, 0.3, 0.4]) });
        assert!(noise.action.starts_with("most responses repeat one character"), "{noise:?}");
        let half = [group(&[1.0; 4]), group(&[1.0; 4]), group(&[0.0, 1.0])];
        let advice = facts(&half).advice();
        assert!(advice.level == Level::Weak && advice.action.contains("rl.n_samples"), "{advice:?}");
        // Symptom: PPO with one sample per query got the advice for GRPO.
        let advice = RolloutFacts::of("sft", &half, &RlConfig::default()).advice();
        assert!(advice.level == Level::Weak && advice.action.starts_with("raise rl.temperature"), "{advice:?}");
        assert!(!RolloutFacts { needs_groups: false, ..facts(&[group(&[1.0; 4])]) }.advice().action.contains("PPO"));
    }

    /// Regression: texts of one repeated character, each of another length, counted as distinct.
    #[test]
    fn a_text_that_repeats_itself_is_repetitive() {
        let repetitive = ["鱼鱼鱼鱼鱼鱼", "鱼油鱼鱼鱼鱼鱼鱼鱼鱼鱼鱼", "食用 食用 食用 食", "of the of the of the"];
        assert!(repetitive.into_iter().all(is_repetitive));
        let others = [
            "",
            "=",
            "鱼油鱼油",
            "胶原蛋白肽饮 食用方法 每日食用量",
            "how to clean the filter of AquaLine 60",
            "哈哈哈",
        ];
        assert!(!others.into_iter().any(is_repetitive));
    }

    /// Regression: for a base model with random weights the advice was another prompt or more SFT.
    #[test]
    fn on_a_base_that_is_noise_the_rollout_refers_to_the_base() {
        let base = |level| Advice::new("base model", level, "", "");
        let (noise, weak) = (base(Level::Bad), base(Level::Weak));
        let (equal, good) = (facts(&[group(&[1.0; 4])]), facts(&[group(&[0.0, 0.0, 1.0, 1.0])]));
        let referred = equal.advice_after(Some(&noise));
        assert!(referred.level == Level::Bad, "{referred:?}");
        assert!(referred.action.starts_with("see the line `base model`"), "{referred:?}");
        assert_eq!(good.advice_after(Some(&noise)), good.advice(), "SFT made a policy of it that works");
        let untrained = RolloutFacts { policy: BASE, ..good };
        assert_eq!(untrained.advice_after(Some(&noise)).level, Level::Unknown);
        assert_eq!(untrained.advice_after(Some(&weak)), untrained.advice());
        assert_eq!(equal.advice_after(None), equal.advice());
        let unscored = facts(&[group(&[])]);
        assert_eq!(unscored.advice_after(Some(&noise)), unscored.advice(), "a service failed");
    }
}

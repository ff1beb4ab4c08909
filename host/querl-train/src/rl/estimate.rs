//! What is computed once per batch: log-probabilities, values, advantages and returns.

use super::RlTask;
use super::algorithm::{Estimates, Scored, ValueTargets, all_true};
use super::learner::Learner;
use super::passes::in_passes;
use super::rollout::Rollout;
use crate::TrainError;
use crate::maths::{ImportanceLevel, Rows, importance_weights, kl_rows, token_rewards};
use crate::policy::{Example, Policy, rows_of};
use crate::together::gathered;
use candle_core::{Device, Tensor};
use querl_core::config::{AdvantageForm, KlPlacement, RlConfig};
use querl_model::LoraAdapter;
use std::collections::BTreeMap;
use std::time::Instant;

/// A batch with everything that stays fixed during its updates.
pub(super) struct Experience<'a> {
    pub(super) rollouts: &'a [Rollout],
    /// Of the policy before its updates, at the sampling temperature, before any filter.
    pub(super) old_logprobs: Rows,
    pub(super) ref_logprobs: Rows,
    /// Weight of each token, where it was drawn from another distribution than `old_logprobs` tell of.
    pub(super) importance: Option<Rows>,
    pub(super) token_rewards: Rows,
    /// Query of each response.
    pub(super) groups: Vec<usize>,
    pub(super) advantages: Rows,
    /// Coefficient of the divergence during this batch.
    pub(super) kl_coef: f64,
    pub(super) critic: Option<ValueExperience>,
    pub(super) timings: BTreeMap<&'static str, f64>,
}

/// What the critic's updates start from.
pub(super) struct ValueExperience {
    pub(super) values: Rows,
    pub(super) returns: Rows,
    /// Which positions the critic learns at.
    pub(super) mask: Vec<Vec<bool>>,
    /// `(T, 2H)` per response, for a head on the reference.
    pub(super) inputs: Option<Vec<Tensor>>,
}

/// The critic's values of a whole batch, and what they were computed from where that is kept.
struct Values {
    rows: Rows,
    /// `(T, 2H)` per response.
    inputs: Option<Vec<Tensor>>,
}

impl Values {
    /// With what the critic learns.
    fn with(self, ValueTargets { returns, mask }: ValueTargets) -> ValueExperience {
        ValueExperience { values: self.rows, returns, mask, inputs: self.inputs }
    }
}

/// Seconds of one thing after another.
struct Laps {
    clock: Instant,
    seconds: BTreeMap<&'static str, f64>,
}

impl Laps {
    fn start() -> Self {
        Self { clock: Instant::now(), seconds: BTreeMap::new() }
    }

    fn end(&mut self, name: &'static str) {
        let started = std::mem::replace(&mut self.clock, Instant::now());
        self.seconds.insert(name, started.elapsed().as_secs_f64());
    }
}

/// Log-probabilities of a whole batch, and the hidden states that they came from where they are wanted.
struct Forward {
    logprobs: Rows,
    hidden: Option<Tensor>, // (N, H)
}

impl Learner {
    /// Log-probabilities of policy and reference, values and advantages of a batch, without gradients.
    pub(super) fn estimate<'a>(
        &mut self,
        task: &RlTask<'_>,
        rollouts: &'a [Rollout],
        step: u64,
    ) -> Result<Experience<'a>, TrainError> {
        let config = task.config;
        let mut laps = Laps::start();
        // 1. Log-probabilities. The rollout's are the policy's, unless it has learned since.
        let old_logprobs = match config.off_by_one {
            true => forward(task, Some(task.policy), rollouts, false)?.logprobs,
            false => rollouts.iter().map(|rollout| rollout.logprobs.clone()).collect(),
        };
        laps.end("timing_s/old_log_prob");
        let reads_reference = self.critic.as_ref().is_some_and(|critic| critic.reads_reference());
        let reference = forward(task, task.reference, rollouts, reads_reference)?;
        laps.end("timing_s/ref");
        // 2. Values.
        let values = self.values(task, rollouts, reference.hidden.as_ref())?;
        laps.end("timing_s/values");
        // 3. Rewards: scores, and the divergence where it counts in the reward.
        let kl = kl_rows(config.kl_estimator, &old_logprobs, &reference.logprobs);
        let (token_rewards, kl_coef) = self.rewards(config, rollouts, &kl);
        // 4. Advantages.
        let groups: Vec<usize> = rollouts.iter().map(|rollout| rollout.group).collect();
        let of_critic = values.as_ref().map(|values| &values.rows);
        let estimates =
            self.advantages(&Scored { rewards: &token_rewards, groups: &groups, values: of_critic, config }, step)?;
        let importance = importance(config, &old_logprobs, rollouts);
        laps.end("timing_s/adv");
        Ok(Experience {
            rollouts,
            old_logprobs,
            ref_logprobs: reference.logprobs,
            importance,
            token_rewards,
            groups,
            advantages: estimates.advantages,
            kl_coef,
            critic: values.zip(estimates.targets).map(|(values, targets)| values.with(targets)),
            timings: laps.seconds,
        })
    }

    /// `(B, T)`: scores, less the divergence where that counts in the reward; and the coefficient of the divergence during this
    /// batch, which the divergence found then changes.
    fn rewards(&mut self, config: &RlConfig, rollouts: &[Rollout], kl: &Rows) -> (Rows, f64) {
        let scores = self.scores(config, rollouts);
        let kl_coef = self.kl.kl_coef();
        let in_reward = if config.kl_placement == KlPlacement::Reward { kl_coef } else { 0.0 };
        let of_responses = kl.iter().map(|row| row.iter().map(|x| f64::from(*x)).sum::<f64>());
        self.kl.update(of_responses.sum::<f64>() / kl.len().max(1) as f64, kl.len());
        (token_rewards(&scores, kl, in_reward as f32), kl_coef)
    }

    /// The algorithm's estimates, clipped where the configuration says so.
    ///
    /// # Errors
    /// One is not finite.
    fn advantages(&self, scored: &Scored<'_>, step: u64) -> Result<Estimates, TrainError> {
        let mut estimates = self.algorithm.estimate(scored);
        clip(&mut estimates.advantages, scored.config.advantage_clip);
        match estimates.advantages.iter().flatten().all(|advantage| advantage.is_finite()) {
            true => Ok(estimates),
            false => Err(TrainError::NotFinite { stage: "rl", step, what: "an advantage" }),
        }
    }

    /// The critic's values, and what they were computed from where that is kept.
    fn values(
        &mut self,
        task: &RlTask<'_>,
        rollouts: &[Rollout],
        ref_hidden: Option<&Tensor>,
    ) -> Result<Option<Values>, TrainError> {
        let Some(critic) = &mut self.critic else { return Ok(None) };
        let examples: Vec<&Example> = rollouts.iter().map(|rollout| &rollout.example).collect();
        if let Some(inputs) = critic.inputs(ref_hidden, &examples)? {
            let rows = rows_of(&critic.estimate(task.decoder, &examples, Some(&inputs))?, &examples);
            return Ok(Some(Values { rows, inputs: Some(split_rows(&inputs, &examples)?) }));
        }
        let critic = &*critic;
        let rows = gathered(&task.mesh.data, &examples, |mine| {
            in_passes(mine, task.tokens_per_pass, |part| Ok(rows_of(&critic.estimate(task.decoder, part, None)?, part)))
        })?;
        Ok(Some(Values { rows, inputs: None }))
    }

    /// The environment's scores less the penalty of cut-off responses, over their running deviation and clipped where the
    /// configuration says so.
    ///
    /// Source: TRL 0.11 `PPOTrainer.step`, `use_score_scaling` and `score_clip`; the penalty is TRL's `missing_eos_penalty`.
    fn scores(&mut self, config: &RlConfig, rollouts: &[Rollout]) -> Vec<f32> {
        let penalty = |rollout: &Rollout| if rollout.truncated { config.missing_eos_penalty as f32 } else { 0.0 };
        let mut scores: Vec<f32> = rollouts.iter().map(|rollout| rollout.score - penalty(rollout)).collect();
        if config.normalize_rewards {
            self.score_moments.update(&scores);
            // Scores that are all the same have no scale to be put on.
            let scale = Some(self.score_moments.deviation()).filter(|deviation| *deviation > 1e-6).unwrap_or(1.0);
            scores.iter_mut().for_each(|score| *score /= scale as f32);
        }
        if config.reward_clip > 0.0 {
            let limit = config.reward_clip as f32;
            scores.iter_mut().for_each(|score| *score = score.clamp(-limit, limit));
        }
        scores
    }
}

/// Passes over all responses, without gradient.
fn forward(
    task: &RlTask<'_>,
    adapter: Option<&LoraAdapter>,
    rollouts: &[Rollout],
    keeps_hidden: bool,
) -> Result<Forward, TrainError> {
    let view = adapter.map(LoraAdapter::without_gradient);
    let policy = Policy { decoder: task.decoder, adapter: view.as_ref() };
    let examples: Vec<&Example> = rollouts.iter().map(|rollout| &rollout.example).collect();
    let of_part = |part: &[&Example]| {
        let pass = policy.response_pass(part, task.config.temperature)?;
        let column: Vec<f32> = pass.logprobs.narrow(1, 0, 1)?.flatten_all()?.to_vec1()?;
        let hidden: Vec<Option<Tensor>> = match keeps_hidden {
            // On the CPU, where the critic's head reads them, and every rank can.
            true => split_rows(&pass.hidden.detach().to_device(&Device::Cpu)?, part)?.into_iter().map(Some).collect(),
            false => vec![None; part.len()],
        };
        Ok(rows_of(&column, part).into_iter().zip(hidden).collect())
    };
    let found = gathered(&task.mesh.data, &examples, |mine| in_passes(mine, task.tokens_per_pass, of_part))?;
    let (logprobs, hidden): (Rows, Vec<Option<Tensor>>) = found.into_iter().unzip();
    let hidden: Option<Vec<Tensor>> = hidden.into_iter().collect();
    Ok(Forward { logprobs, hidden: hidden.map(|hidden| Tensor::cat(&hidden, 0)).transpose()? })
}

fn split_rows(rows: &Tensor, examples: &[&Example]) -> Result<Vec<Tensor>, TrainError> {
    let mut start = 0;
    let part = |example: &&Example| {
        let part = rows.narrow(0, start, example.response.len());
        start += example.response.len();
        Ok(part?)
    };
    examples.iter().map(part).collect()
}

fn clip(advantages: &mut Rows, limit: f64) {
    if limit > 0.0 {
        let limit = limit as f32;
        advantages.iter_mut().flatten().for_each(|advantage| *advantage = advantage.clamp(-limit, limit));
    }
}

/// Weights of tokens that a filtered or an earlier distribution drew; `None` where all would be 1.
fn importance(config: &RlConfig, old_logprobs: &Rows, rollouts: &[Rollout]) -> Option<Rows> {
    let is_exact = |rollout: &Rollout| rollout.behaviour_logprobs == rollout.logprobs;
    if !config.off_by_one && rollouts.iter().all(is_exact) {
        return None;
    }
    let behaviour: Rows = rollouts.iter().map(|rollout| rollout.behaviour_logprobs.clone()).collect();
    let level = match config.advantage_form {
        AdvantageForm::Token => ImportanceLevel::Token,
        AdvantageForm::Sequence => ImportanceLevel::Sequence,
    };
    Some(importance_weights(old_logprobs, &behaviour, &all_true(old_logprobs), config.importance_cap as f32, level))
}

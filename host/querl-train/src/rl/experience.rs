//! What is computed once per batch before its updates: log-probabilities of policy and reference, values, rewards, advantages and
//! returns.

use super::RlTask;
use super::advantages::{
    AdvantageEstimate, RunningMoments, ScoredBatch, ValueTargets, all_true, estimate_advantages, token_rewards,
};
use super::critic::Critic;
use super::losses::{ImportanceLevel, KlController, Rows, importance_weights, kl_rows};
use super::rollout::Rollout;
use crate::TrainError;
use crate::batching::map_micro_batches;
use crate::data_parallel::map_over_ranks;
use crate::policy::{Example, Policy, TrainingPass, rows_of};
use candle_core::{Device, Tensor};
use querl_core::config::{AdvantageForm, KlPlacement, RlConfig};
use querl_model::LoraAdapter;
use std::collections::BTreeMap;
use std::time::Instant;

/// A batch of rollouts with the values that stay fixed during its updates.
pub(super) struct Experience<'a> {
    pub(super) rollouts: &'a [Rollout],
    /// Log-probabilities of the policy before the updates of this batch, at the sampling temperature, before top-k and top-p.
    pub(super) old_logprobs: Rows,
    pub(super) ref_logprobs: Rows,
    /// Importance weight of each token; `None` if responses were sampled from the distribution of `old_logprobs`.
    pub(super) importance_weights: Option<Rows>,
    /// Scores with penalties, scaled and clipped, without KL.
    pub(super) scores: Vec<f32>,
    pub(super) token_rewards: Rows,
    /// Group id of each response: the row of its query.
    pub(super) groups: Vec<usize>,
    /// Anchor reward of each group (`rl.anchor_baseline`), in the scale of `token_rewards`; `None` if off.
    pub(super) anchor: Option<f32>,
    pub(super) advantages: Rows,
    /// KL coefficient in effect for this batch.
    pub(super) kl_coef: f64,
    pub(super) critic: Option<ValueExperience>,
    pub(super) timings: BTreeMap<&'static str, f64>,
}

/// Values, returns and inputs of a batch for the critic's updates.
pub(super) struct ValueExperience {
    pub(super) values: Rows,
    pub(super) returns: Rows,
    /// Mask of the tokens that count in the value loss.
    pub(super) mask: Vec<Vec<bool>>,
    /// Inputs of a value head on the reference's hidden states, `(T, 2H)` per response; `None` for a head on an adapter.
    pub(super) inputs: Option<Vec<Tensor>>,
}

/// KL coefficient and score normalisation, which convert scores to rewards and are adapted after each batch.
pub(super) struct RewardShaping {
    pub(super) kl: KlController,
    /// Running moments of all scores so far (`rl.normalize_rewards`).
    pub(super) score_moments: RunningMoments,
}

impl<'a> Experience<'a> {
    /// Runs policy, reference and critic on a batch, without gradients, and forms rewards and advantages.
    pub(super) fn compute(
        task: &RlTask<'_>,
        critic: Option<&mut Critic>,
        shaping: &mut RewardShaping,
        rollouts: &'a [Rollout],
        step: u64,
    ) -> Result<Self, TrainError> {
        let config = task.config;
        let mut timer = PhaseTimer::start();
        // 1. Log-probabilities. The rollout's are used, unless the policy was updated in the meantime or a server generated them.
        let old_logprobs = match config.off_by_one || task.rollouts.is_some() {
            true => forward(task, Some(task.policy), rollouts, false, step)?.logprobs,
            false => rollouts.iter().map(|rollout| rollout.logprobs.clone()).collect(),
        };
        timer.end_phase("timing_s/old_log_prob");
        let reads_reference = critic.as_ref().is_some_and(|critic| critic.reads_reference());
        let reference = forward(task, task.reference, rollouts, reads_reference, step)?;
        timer.end_phase("timing_s/ref");
        // 2. Values.
        let values =
            critic.map(|critic| critic_values(task, critic, rollouts, reference.hidden.as_ref(), step)).transpose()?;
        timer.end_phase("timing_s/values");
        // 3. Rewards: scores, minus KL if it is part of the reward.
        let kl = kl_rows(config.kl_estimator, &old_logprobs, &reference.logprobs);
        let scores = shaping.scores(config, rollouts);
        let (token_rewards, kl_coef) = shaping.rewards(config, &scores, &kl);
        let anchor = config.anchor_baseline.map(|anchor| shaping.scaled(config, anchor as f32));
        // 4. Advantages and returns.
        let groups: Vec<usize> = rollouts.iter().map(|rollout| rollout.group).collect();
        let values_only = values.as_ref().map(|(values, _)| values);
        let batch = ScoredBatch { rewards: &token_rewards, groups: &groups, anchor, values: values_only, config };
        let AdvantageEstimate { mut advantages, targets } = estimate_advantages(&batch);
        clip(&mut advantages, config.advantage_clip);
        if !advantages.iter().flatten().all(|advantage| advantage.is_finite()) {
            return Err(TrainError::NotFinite { stage: "rl", step, what: "an advantage" });
        }
        let importance_weights = importance_of(task, &old_logprobs, rollouts);
        timer.end_phase("timing_s/adv");
        let critic = values.zip(targets).map(|((values, inputs), ValueTargets { returns, mask })| ValueExperience {
            values,
            returns,
            mask,
            inputs,
        });
        Ok(Self {
            rollouts,
            old_logprobs,
            ref_logprobs: reference.logprobs,
            importance_weights,
            scores,
            token_rewards,
            groups,
            anchor,
            advantages,
            kl_coef,
            critic,
            timings: timer.seconds,
        })
    }
}

impl RewardShaping {
    /// Rewards per token, `(B, T)`: scores, minus KL if it is part of the reward; and the KL coefficient of this batch, which is then
    /// adapted to the batch's KL.
    fn rewards(&mut self, config: &RlConfig, scores: &[f32], kl: &Rows) -> (Rows, f64) {
        let kl_coef = self.kl.kl_coef();
        let coef_in_reward = if config.kl_placement == KlPlacement::Reward { kl_coef } else { 0.0 };
        let kl_sums = kl.iter().map(|row| row.iter().map(|x| f64::from(*x)).sum::<f64>());
        self.kl.update(kl_sums.sum::<f64>() / kl.len().max(1) as f64, kl.len());
        (token_rewards(scores, kl, coef_in_reward as f32), kl_coef)
    }

    /// The environment's scores minus penalties, divided by their running standard deviation and clipped where configured.
    fn scores(&mut self, config: &RlConfig, rollouts: &[Rollout]) -> Vec<f32> {
        let scores: Vec<f32> = rollouts.iter().map(|rollout| rollout.penalised_score(config)).collect();
        if config.normalize_rewards {
            self.score_moments.update(&scores);
        }
        scores.into_iter().map(|score| self.scaled(config, score)).collect()
    }

    /// A score divided by the running standard deviation so far and clipped where configured.
    ///
    /// Source: TRL 0.11 `PPOTrainer.step`, `use_score_scaling` and `score_clip`.
    fn scaled(&self, config: &RlConfig, mut score: f32) -> f32 {
        if config.normalize_rewards {
            // Equal scores have a deviation of 0 and are not scaled.
            let scale = Some(self.score_moments.deviation()).filter(|deviation| *deviation > 1e-6).unwrap_or(1.0);
            score /= scale as f32;
        }
        if config.reward_clip > 0.0 {
            let limit = config.reward_clip as f32;
            score = score.clamp(-limit, limit);
        }
        score
    }
}

struct PhaseTimer {
    phase_started: Instant,
    seconds: BTreeMap<&'static str, f64>,
}

impl PhaseTimer {
    fn start() -> Self {
        Self { phase_started: Instant::now(), seconds: BTreeMap::new() }
    }

    fn end_phase(&mut self, name: &'static str) {
        let started = std::mem::replace(&mut self.phase_started, Instant::now());
        self.seconds.insert(name, started.elapsed().as_secs_f64());
    }
}

struct ForwardOutput {
    logprobs: Rows,
    hidden: Option<Tensor>, // (N, H)
}

/// Log-probabilities of all responses under `adapter`, without gradient.
fn forward(
    task: &RlTask<'_>,
    adapter: Option<&LoraAdapter>,
    rollouts: &[Rollout],
    returns_hidden: bool,
    step: u64,
) -> Result<ForwardOutput, TrainError> {
    let frozen = adapter.map(LoraAdapter::without_gradient);
    let policy = Policy { decoder: task.decoder, adapter: frozen.as_ref() };
    let examples: Vec<&Example> = rollouts.iter().map(|rollout| &rollout.example).collect();
    let micro_batch = |examples: &[&Example]| {
        task.check_stop(step)?;
        let output = policy.response_logprobs(examples, task.config.temperature, TrainingPass::default())?;
        let hidden: Vec<Option<Tensor>> = match returns_hidden {
            // On the CPU, where the critic's head needs them and all ranks can read them.
            true => {
                let hidden = output.hidden.detach().to_device(&Device::Cpu)?;
                split_rows(&hidden, examples)?.into_iter().map(Some).collect()
            }
            false => vec![None; examples.len()],
        };
        Ok(output.rows(examples)?.into_iter().zip(hidden).collect())
    };
    let outputs =
        map_over_ranks(&task.mesh.data, &examples, |mine| map_micro_batches(mine, task.tokens_per_pass, micro_batch))?;
    let (logprobs, hidden): (Rows, Vec<Option<Tensor>>) = outputs.into_iter().unzip();
    let hidden: Option<Vec<Tensor>> = hidden.into_iter().collect();
    Ok(ForwardOutput { logprobs, hidden: hidden.map(|hidden| Tensor::cat(&hidden, 0)).transpose()? })
}

/// The critic's values `(B, T)`, and the head's inputs `(T, 2H)` per response if the critic needs them for its updates.
fn critic_values(
    task: &RlTask<'_>,
    critic: &mut Critic,
    rollouts: &[Rollout],
    ref_hidden: Option<&Tensor>,
    step: u64,
) -> Result<(Rows, Option<Vec<Tensor>>), TrainError> {
    let examples: Vec<&Example> = rollouts.iter().map(|rollout| &rollout.example).collect();
    if let Some(inputs) = critic.inputs(ref_hidden, &examples)? {
        let values = rows_of(&critic.values_without_gradient(task.decoder, &examples, Some(&inputs))?, &examples);
        return Ok((values, Some(split_rows(&inputs, &examples)?)));
    }
    let critic = &*critic;
    let values = map_over_ranks(&task.mesh.data, &examples, |mine| {
        map_micro_batches(mine, task.tokens_per_pass, |examples| {
            task.check_stop(step)?;
            Ok(rows_of(&critic.values_without_gradient(task.decoder, examples, None)?, examples))
        })
    })?;
    Ok((values, None))
}

/// `(N, H)` as one tensor per response.
fn split_rows(rows: &Tensor, examples: &[&Example]) -> Result<Vec<Tensor>, TrainError> {
    let mut start = 0;
    let rows_of_example = |example: &&Example| {
        let rows = rows.narrow(0, start, example.response.len());
        start += example.response.len();
        Ok(rows?)
    };
    examples.iter().map(rows_of_example).collect()
}

fn clip(advantages: &mut Rows, limit: f64) {
    if limit > 0.0 {
        let limit = limit as f32;
        advantages.iter_mut().flatten().for_each(|advantage| *advantage = advantage.clamp(-limit, limit));
    }
}

/// Importance weights of tokens that were sampled from a filtered distribution, by an earlier policy or by a server; `None` if all would be
/// 1.
fn importance_of(task: &RlTask<'_>, old_logprobs: &Rows, rollouts: &[Rollout]) -> Option<Rows> {
    let config = task.config;
    let is_exact = |rollout: &Rollout| rollout.behaviour_logprobs == rollout.logprobs;
    if !config.off_by_one && task.rollouts.is_none() && rollouts.iter().all(is_exact) {
        return None;
    }
    let behaviour: Rows = rollouts.iter().map(|rollout| rollout.behaviour_logprobs.clone()).collect();
    let level = match config.advantage_form {
        AdvantageForm::Token => ImportanceLevel::Token,
        AdvantageForm::Sequence => ImportanceLevel::Sequence,
    };
    Some(importance_weights(old_logprobs, &behaviour, &all_true(old_logprobs), config.importance_cap as f32, level))
}

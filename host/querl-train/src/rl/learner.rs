//! The side of the training that learns: from a scored batch to a better policy and critic.

use super::RlTask;
use super::algorithm::{self, Algorithm};
use super::critic::Critic;
use super::rollout::Batch;
use super::rollout_check::check_rollout;
use crate::maths::{KlController, RunningMoments};
use crate::{AdamW, AdamWSettings, Metrics, State, TrainError};
use candle_core::Var;
use querl_core::config::RlConfig;
use querl_model::{LoraAdapter, Mesh};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// What learning carries from batch to batch, besides the policy's own weights.
pub(super) struct Learner {
    pub(super) algorithm: &'static dyn Algorithm,
    /// `None` for algorithms that need no values.
    pub(super) critic: Option<Critic>,
    pub(super) optimizer: AdamW,
    pub(super) kl: KlController,
    /// Of all scores so far, where they are normalised.
    pub(super) score_moments: RunningMoments,
}

impl Learner {
    /// A learner that has seen no batch.
    ///
    /// # Errors
    /// The critic's adapter does not fit the model.
    pub(super) fn new(task: &RlTask<'_>) -> Result<Self, TrainError> {
        let RlConfig { kl_coef, kl_target, kl_horizon, weight_decay, .. } = *task.config;
        let algorithm = algorithm::named(task.config.algorithm);
        Ok(Self {
            algorithm,
            critic: algorithm.has_critic().then(|| Critic::new(task)).transpose()?,
            optimizer: AdamW::new(AdamWSettings { weight_decay, ..Default::default() }),
            kl: KlController::new(kl_coef, kl_target, kl_horizon),
            score_moments: RunningMoments::default(),
        })
    }

    /// Estimates, advantages and epochs of updates on one batch. Returns what there is to watch, with timings.
    ///
    /// A batch that the policy of the step before generated (`rl.off_by_one`) is not compared with the training pass here:
    /// whoever generates it has that policy, and calls [`check_rollout`].
    ///
    /// # Errors
    /// Rollout and training differ, a loss or gradient is not finite, or the model reports an error.
    pub(super) fn learn(&mut self, task: &RlTask<'_>, batch: &Batch, step: u64) -> Result<Metrics, TrainError> {
        let mut metrics = Metrics::new();
        if !task.config.off_by_one {
            let started = Instant::now();
            metrics.extend(check_rollout(task, task.policy, &batch.rollouts, step)?);
            metrics.insert("timing_s/rollout_check".into(), started.elapsed().as_secs_f64());
        }
        let experience = self.estimate(task, &batch.rollouts, step)?;
        metrics.extend(experience.metrics(task.config));
        metrics.extend(self.update(task, &experience, step)?);
        Ok(metrics)
    }

    /// Everything that is trained: the policy's weights and the critic's, of other names.
    pub(super) fn trained(&self, policy: &LoraAdapter) -> BTreeMap<String, Var> {
        let named = |prefix: &'static str, vars: &BTreeMap<String, Var>| {
            vars.iter().map(|(name, var)| (format!("{prefix}.{name}"), var.clone())).collect::<Vec<_>>()
        };
        let of_critic = self.critic.as_ref().map(|critic| named("critic", critic.vars()));
        named("policy", policy.vars()).into_iter().chain(of_critic.into_iter().flatten()).collect()
    }

    /// Keeps the policy's moments, the critic, the coefficient of the divergence and the moments of the scores. The policy's
    /// weights are not the learner's.
    ///
    /// # Errors
    /// A number cannot be kept.
    pub(super) fn save(&self, state: &mut State) -> Result<(), TrainError> {
        self.optimizer.save("policy_optimizer", state)?;
        state.put("kl_controller", &self.kl)?;
        state.put("score_moments", &self.score_moments)?;
        self.critic.as_ref().map_or(Ok(()), |critic| critic.save_state(state))
    }

    /// Goes on from what [`Learner::save`] kept.
    ///
    /// # Errors
    /// It is not there, not whole, or of another training.
    pub(super) fn restore(&mut self, task: &RlTask<'_>, state: &State) -> Result<(), TrainError> {
        self.optimizer.restore("policy_optimizer", state, task.policy.vars())?;
        self.kl = state.get("kl_controller")?;
        self.score_moments = state.get("score_moments")?;
        self.critic.as_mut().map_or(Ok(()), |critic| critic.restore_state(state))
    }

    /// Writes the critic, where there is one, as a folder of its own.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(super) fn save_critic(&self, mesh: &Mesh, directory: &Path, base: &Path) -> Result<(), TrainError> {
        self.critic.as_ref().map_or(Ok(()), |critic| critic.save(mesh, directory, base))
    }
}

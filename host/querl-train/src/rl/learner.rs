//! The side of the training that learns: from a scored batch to a better policy and critic.

use super::RlTask;
use super::algorithm::{self, Algorithm};
use super::critic::Critic;
use super::rollout::Batch;
use super::rollout_check::check_rollout;
use crate::maths::{KlController, RunningMoments};
use crate::{AdamW, AdamWSettings, Metrics, TrainError};
use querl_core::config::RlConfig;
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
        let experience = self.estimate(task, batch, step)?;
        metrics.extend(experience.metrics(task.config));
        metrics.extend(self.update(task, &experience, step)?);
        Ok(metrics)
    }

    /// Writes the critic, where there is one, as a folder of its own.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(super) fn save_critic(&self, directory: &Path, base: &Path) -> Result<(), TrainError> {
        self.critic.as_ref().map_or(Ok(()), |critic| critic.save(directory, base))
    }
}

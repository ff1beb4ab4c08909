//! The side of the training that learns: from a scored batch to a better policy and critic.

use super::RlTask;
use super::critic::Critic;
use super::rollout::Batch;
use super::{estimate, update};
use crate::{AdamW, AdamWSettings, Metrics, TrainError};
use std::path::Path;
use std::time::Instant;

/// What learning carries from batch to batch, besides the policy's own weights.
pub(super) struct Learner {
    critic: Critic,
    optimizer: AdamW,
}

impl Learner {
    /// A learner that has seen no batch.
    pub(super) fn new(task: &RlTask<'_>) -> Result<Self, TrainError> {
        Ok(Self { critic: Critic::new(task)?, optimizer: AdamW::new(AdamWSettings::default()) })
    }

    /// Estimates, advantages and epochs of updates on one batch. Returns what there is to watch, with timings.
    ///
    /// # Errors
    /// A loss or gradient is not finite, or the model reports an error.
    pub(super) fn learn(&mut self, task: &RlTask<'_>, batch: &Batch, step: u64) -> Result<Metrics, TrainError> {
        let started = Instant::now();
        let experience = estimate::estimate(task, &self.critic, batch)?;
        let updated = Instant::now();
        let mut metrics = experience.metrics();
        metrics.extend(update::update(task, &mut self.critic, &mut self.optimizer, &experience, step)?);
        metrics.insert("timing_s/values_and_ref".into(), (updated - started).as_secs_f64());
        metrics.insert("timing_s/update".into(), updated.elapsed().as_secs_f64());
        Ok(metrics)
    }

    /// Writes the critic as a folder of its own.
    pub(super) fn save_critic(&self, directory: &Path, base: &Path) -> Result<(), TrainError> {
        self.critic.save(directory, base)
    }
}

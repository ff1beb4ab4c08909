//! Supervised fine-tuning: cross-entropy on the tokens of the answer alone.

mod loss;
#[cfg(test)]
mod tests;

pub use crate::fit::SftSummary;

use crate::checkpoint::save_policy;
use crate::fit::{FitTask, Objective, StepLoss};
use crate::policy::{Example, Policy};
use crate::{MetricSink, TrainError, fit};
use candle_core::Var;
use querl_core::config::SftConfig;
use querl_core::ports::Progress;
use querl_model::Mesh;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// What a fine-tuning works on.
pub struct SftTask<'a> {
    /// What is trained: an adapter on a frozen base, or a base whose weights are trained.
    pub policy: Policy<'a>,
    /// The base's directory, named in the checkpoints.
    pub base_path: &'a Path,
    /// What is learned.
    pub train: &'a [Example],
    /// What decides which checkpoint is best; may be empty: then the last one is.
    pub val: &'a [Example],
    /// Hyperparameters.
    pub config: &'a SftConfig,
    /// Most tokens of one forward and backward pass; the result does not depend on it, beside rounding.
    pub tokens_per_pass: usize,
    /// Keep the inputs of layers alone and compute the rest again in the backward pass.
    pub gradient_checkpointing: bool,
    /// Seeds the order of the data and the dropout.
    pub seed: u64,
    /// Who else trains on the same rows: every rank comes here with the same task, but for where its model stands. The first
    /// alone writes files, and what the others are given to record and to show with is best deaf.
    pub mesh: &'a Mesh,
    /// Stands for everything that the result depends on: a training that was stopped goes on from its newest checkpoint if that
    /// has the same one. `None`: no checkpoints to go on from are kept.
    pub fingerprint: Option<&'a str>,
    /// Where `best`, `last` and `state` are written.
    pub output_dir: &'a Path,
    /// Shows how far it is.
    pub progress: &'a dyn Progress,
    /// Set to stop at the next step.
    pub stop: &'a AtomicBool,
}

/// Trains, keeps the best and the last checkpoint, and says what came of it. Goes on where an earlier call with the same
/// fingerprint was stopped; the result is then that of a training that never was.
///
/// # Errors
/// No training rows, a row longer than `max_length` or without an answer, a loss that is not finite, a file that cannot be written, the user
/// said stop, or the device has no memory left: what was reached is in a checkpoint then.
pub fn train(task: &SftTask<'_>, sink: &mut dyn MetricSink) -> Result<SftSummary, TrainError> {
    check(task)?;
    let fitting = FitTask {
        objective: task,
        config: task.config,
        seed: task.seed,
        mesh: task.mesh,
        fingerprint: task.fingerprint,
        output_dir: task.output_dir,
        progress: task.progress,
        stop: task.stop,
    };
    fit::run(&fitting, sink)
}

impl Objective for SftTask<'_> {
    fn stage(&self) -> &'static str {
        "sft"
    }

    fn n_rows(&self) -> usize {
        self.train.len()
    }

    fn n_tokens(&self, rows: &[usize]) -> usize {
        rows.iter().map(|&index| self.train[index].len()).sum()
    }

    fn vars(&self) -> &BTreeMap<String, Var> {
        self.policy.vars()
    }

    fn learn(&self, rows: &[usize], step: u64) -> Result<StepLoss, TrainError> {
        let rows: Vec<&Example> = rows.iter().map(|&index| &self.train[index]).collect();
        loss::learn(self, &rows, step)
    }

    fn has_val(&self) -> bool {
        !self.val.is_empty()
    }

    fn evaluate(&self, step: u64) -> Result<f64, TrainError> {
        loss::evaluate(self, step)
    }

    fn save(&self, directory: &Path) -> Result<(), TrainError> {
        save_policy(self.mesh, self.policy, directory, self.base_path)
    }
}

fn check(task: &SftTask<'_>) -> Result<(), TrainError> {
    if task.train.is_empty() {
        return Err(TrainError::Data("the training split is empty; loosen the filters or add rows".into()));
    }
    for (split, rows) in [("training", task.train), ("validation", task.val)] {
        if let Some(index) = rows.iter().position(|row| row.response.is_empty()) {
            let row = format!("row {} of the {split} split", index + 1);
            let message =
                format!("{row} has an empty response, of which nothing is learned; remove it or give it an answer");
            return Err(TrainError::Data(message));
        }
    }
    let limit = task.config.max_length;
    let longest = task.train.iter().chain(task.val).enumerate().max_by_key(|(_, row)| row.len());
    match longest {
        Some((index, row)) if row.len() > limit => Err(TrainError::Data(format!(
            "row {} has {} tokens; sft.max_length is {limit}: shorten the row or raise the limit",
            index + 1,
            row.len()
        ))),
        _ => Ok(()),
    }
}

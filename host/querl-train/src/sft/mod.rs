//! Supervised fine-tuning: cross-entropy on response tokens alone. The loop is [`fine_tune`](crate::fine_tune).

#[cfg(test)]
mod tests;

pub use crate::fine_tune::SftSummary;

use crate::batching::micro_batches;
use crate::checkpoint::save_policy;
use crate::data_parallel::{check_stop, rank_share};
use crate::fine_tune::{FineTuneTask, Objective, StepLoss, dropout};
use crate::policy::{Example, Policy, TrainingPass, recompute_mode};
use crate::{Gradients, MetricSink, TrainError, fine_tune};
use candle_core::{Tensor, Var};
use querl_core::config::SftConfig;
use querl_core::ports::Progress;
use querl_model::{LoraAdapter, Mesh, Ranks, backward};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// One rank's view of a fine-tuning: its model, data and settings.
pub struct SftTask<'a> {
    /// An adapter on a frozen base, or a base whose weights are trained.
    pub policy: Policy<'a>,
    /// Folder of the base, whose name is stored in adapter checkpoints.
    pub base_path: &'a Path,
    /// The training split.
    pub train: &'a [Example],
    /// The validation split, which decides which checkpoint is best; may be empty: then the last one is.
    pub val: &'a [Example],
    /// Hyperparameters.
    pub config: &'a SftConfig,
    /// Most tokens of one forward and backward pass; results depend on it only by rounding.
    pub tokens_per_pass: usize,
    /// Gradient checkpointing: layers save only their inputs and compute activations again in the backward pass.
    pub gradient_checkpointing: bool,
    /// Seeds the order of the data and the dropout.
    pub seed: u64,
    /// The ranks that train together on the same rows. Each calls [`train`] with the same task, its model on its own device. The
    /// first rank alone writes files; the others should get no-op sinks.
    pub mesh: &'a Mesh,
    /// Digest of everything that the result depends on: a run resumes from its newest checkpoint if that has the same
    /// fingerprint. `None`: no checkpoints to resume from are written.
    pub fingerprint: Option<&'a str>,
    /// Folder in which `best`, `last` and `state` are written.
    pub output_dir: &'a Path,
    /// Where progress is shown.
    pub progress: &'a dyn Progress,
    /// Stop flag, read before each pass, and with several ranks after each step.
    pub stop: &'a AtomicBool,
}

/// Runs supervised fine-tuning, keeps the best and the last checkpoint, and returns a summary. Resumes an earlier call with the same
/// fingerprint; the result is then the same as without the interruption.
///
/// # Errors
/// No training rows, a row longer than `max_length` or without a response, a loss that is not finite, a file that cannot be
/// written, the stop flag was set, or the device ran out of memory: what was reached is in a checkpoint then.
pub fn train(task: &SftTask<'_>, sink: &mut dyn MetricSink) -> Result<SftSummary, TrainError> {
    check(task)?;
    let fine_tuning = FineTuneTask {
        objective: task,
        config: task.config,
        seed: task.seed,
        mesh: task.mesh,
        fingerprint: task.fingerprint,
        output_dir: task.output_dir,
        progress: task.progress,
        stop: task.stop,
    };
    fine_tune::run(&fine_tuning, sink)
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

    fn loss_and_gradients(&self, rows: &[usize], step: u64) -> Result<StepLoss, TrainError> {
        let rows: Vec<&Example> = rows.iter().map(|&index| &self.train[index]).collect();
        loss_and_gradients(self, &rows, step)
    }

    fn has_val(&self) -> bool {
        !self.val.is_empty()
    }

    fn evaluate(&self, step: u64) -> Result<f64, TrainError> {
        evaluate(self, step)
    }

    fn save(&self, directory: &Path) -> Result<(), TrainError> {
        save_policy(self.mesh, self.policy, directory, self.base_path)
    }
}

fn check(task: &SftTask<'_>) -> Result<(), TrainError> {
    if task.train.is_empty() {
        let message = "no row of the training split has a response to learn from; loosen the filters, or add rows with one \
                       (data.dataset: a completion)";
        return Err(TrainError::Data(message.into()));
    }
    for (split, rows) in [("training", task.train), ("validation", task.val)] {
        if let Some(index) = rows.iter().position(|row| row.response.is_empty()) {
            let row = format!("row {} of the {split} split", index + 1);
            let message = format!("{row} has an empty response; remove it or give it a response to learn from");
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

/// Loss and gradients of one optimizer step; each rank computes its share of the rows. Micro-batches are weighted by their number of
/// tokens, so that the sum does not depend on their division.
fn loss_and_gradients(task: &SftTask<'_>, rows: &[&Example], step: u64) -> Result<StepLoss, TrainError> {
    #[cfg(test)]
    crate::testing::out_of_memory_at(step, "pass")?;
    let (ranks, n_tokens) = (&task.mesh.data, n_response_tokens(rows));
    let mine: Vec<&Example> = rank_share(rows, ranks).into_iter().map(|index| rows[index]).collect();
    let recompute = recompute_mode(task.gradient_checkpointing);
    let dropout = task.policy.adapter.and_then(|_| dropout(task.config.lora_dropout, task.seed, step, ranks));
    let training = TrainingPass { dropout, recompute: Some(&recompute) };
    let (mut gradients, mut losses) = (Gradients::default(), Vec::new());
    for indices in micro_batches(&mine, task.tokens_per_pass) {
        check_stop(&task.mesh.all, task.stop, task.stage(), step - 1)?;
        let rows: Vec<&Example> = indices.into_iter().map(|index| mine[index]).collect();
        let loss = (negative_logprob(task.policy, &rows, training)? / n_tokens as f64)?;
        gradients.add(&backward(&loss, Some(&recompute))?, task.policy.vars())?;
        losses.push(loss.detach());
    }
    let loss = sum_over_ranks(ranks, sum_of_scalars(&losses)?)?;
    gradients.sum_over(task.mesh, task.policy.vars())?;
    Ok(StepLoss { loss, n_tokens, gradients })
}

/// Sums the losses. Called after all micro-batches were launched, so that the CPU waits for the GPU only once.
fn sum_of_scalars(scalars: &[Tensor]) -> Result<f64, TrainError> {
    let mut sum = 0.0;
    for scalar in scalars {
        sum += f64::from(scalar.to_scalar::<f32>()?);
    }
    Ok(sum)
}

fn sum_over_ranks(ranks: &Ranks, mine: f64) -> Result<f64, TrainError> {
    Ok(ranks.all_gather(mine)?.iter().map(|of_rank| **of_rank).sum())
}

fn n_response_tokens(rows: &[&Example]) -> usize {
    rows.iter().map(|row| row.response.len()).sum()
}

/// Mean loss per response token on the validation split, without dropout.
fn evaluate(task: &SftTask<'_>, step: u64) -> Result<f64, TrainError> {
    #[cfg(test)]
    crate::testing::out_of_memory_at(step, "evaluation")?;
    let (decoder, frozen) =
        (task.policy.decoder.without_gradient(), task.policy.adapter.map(LoraAdapter::without_gradient));
    let policy = Policy { decoder: &decoder, adapter: frozen.as_ref() };
    let (ranks, rows): (_, Vec<&Example>) = (&task.mesh.data, task.val.iter().collect());
    let mine: Vec<&Example> = rank_share(&rows, ranks).into_iter().map(|index| rows[index]).collect();
    let mut sums = Vec::new();
    for indices in micro_batches(&mine, task.tokens_per_pass) {
        check_stop(&task.mesh.all, task.stop, task.stage(), step)?;
        let rows: Vec<&Example> = indices.into_iter().map(|index| mine[index]).collect();
        sums.push(negative_logprob(policy, &rows, TrainingPass::default())?.detach());
    }
    Ok(sum_over_ranks(ranks, sum_of_scalars(&sums)?)? / n_response_tokens(&rows).max(1) as f64)
}

/// Negative log-probability of the responses, summed over tokens.
fn negative_logprob(policy: Policy<'_>, rows: &[&Example], training: TrainingPass<'_>) -> Result<Tensor, TrainError> {
    Ok(policy.response_logprobs(rows, 1.0, training)?.logprobs.narrow(1, 0, 1)?.sum_all()?.neg()?)
}

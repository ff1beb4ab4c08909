//! Supervised fine-tuning: cross-entropy on the tokens of the answer alone.

mod course;
mod loss;
mod plan;
#[cfg(test)]
mod tests;

use crate::checkpoint::{BEST, LAST, STATE, save_policy};
use crate::order::Order;
use crate::policy::{Example, Policy};
use crate::together::{check_same, newest};
use crate::{AdamW, AdamWSettings, MetricSink, Metrics, State, StateStore, TrainError};
use course::Course;
use loss::StepLoss;
use plan::Plan;
use querl_core::config::SftConfig;
use querl_core::ports::Progress;
use querl_model::Mesh;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

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

/// What came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SftSummary {
    /// Optimizer steps taken.
    pub n_steps: u64,
    /// Mean training loss of the last evaluation interval.
    pub train_loss: f64,
    /// Loss on the validation split at the best checkpoint; `None` without such a split.
    pub best_val_loss: Option<f64>,
    /// Step of the best checkpoint.
    pub best_step: u64,
    /// Answer tokens learned from, repeats counted.
    pub n_tokens: u64,
}

/// Trains, keeps the best and the last checkpoint, and says what came of it. Goes on where an earlier call with the same
/// fingerprint was stopped; the result is then that of a training that never was.
///
/// # Errors
/// No training rows, a row longer than `max_length` or without an answer, a loss that is not finite, a file that cannot be written, the user
/// said stop, or the device has no memory left: what was reached is in a checkpoint then.
pub fn train(task: &SftTask<'_>, sink: &mut dyn MetricSink) -> Result<SftSummary, TrainError> {
    check(task)?;
    let plan = Plan::new(task.config, task.train.len());
    let mut fit = Fit::begin(task, sink)?;
    // Memory may have been lacking between the last step and the newest adapter.
    if fit.course.step > 0 && fit.course.unfinished.is_none() && fit.is_done(&plan) {
        save_policy(task.mesh, task.policy, &task.output_dir.join(LAST), task.base_path)?;
    }

    while fit.course.unfinished.is_some() || !fit.is_done(&plan) {
        // A step whose evaluation lacked memory is there already.
        if fit.course.unfinished.is_none() {
            fit.take_step(task, &plan, sink)?;
        }
        fit.finish_step(task, &plan, sink)?;
    }
    match fit.course.step {
        0 => Err(TrainError::Data("sft: no optimizer step to take; look at sft.epochs and sft.max_steps".into())),
        _ => Ok(fit.course.summary()),
    }
}

/// What changes from step to step, beside the policy itself.
struct Fit {
    course: Course,
    order: Order,
    optimizer: AdamW,
    patience: usize,
    store: Option<StateStore>,
}

impl Fit {
    /// From the newest checkpoint of this training, or from the beginning.
    fn begin(task: &SftTask<'_>, sink: &mut dyn MetricSink) -> Result<Self, TrainError> {
        let config = task.config;
        let settings = AdamWSettings { weight_decay: config.weight_decay, ..Default::default() };
        let directory = task.output_dir.join(STATE);
        let print = task.fingerprint.filter(|_| task.mesh.all.is_first());
        let store = print.map(|print| StateStore::open(&directory, config.save_total_limit, print));
        let found = newest(&task.mesh.all, store.as_ref(), task.progress)?;
        let mut fit = Self {
            course: Course::default(),
            order: Order::new(task.train.len(), task.seed),
            optimizer: AdamW::new(settings),
            patience: config.early_stopping_patience,
            store,
        };
        let mut mark = 0;
        if let Some((step, state)) = &*found {
            let state = &state.part(&task.mesh.tensor)?;
            fit.course = state.get("course")?;
            fit.order.seek(state.get("order")?);
            fit.optimizer.restore("optimizer", state, task.policy.vars())?;
            state.restore_vars("policy", task.policy.vars())?;
            mark = state.get("metrics")?;
            task.progress.line(&format!("going on from step {step}"));
        }
        // What a killed process noted of steps that are taken again is noted again.
        sink.rewind(mark).map_err(|source| io(task, source))?;
        Ok(fit)
    }

    /// Learns from the next rows.
    fn take_step(&mut self, task: &SftTask<'_>, plan: &Plan, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let (config, started) = (task.config, Instant::now());
        let step = self.course.step + 1;
        let position = self.order.position();
        // 1. The next rows, in an order of their own for each epoch; the last step of an epoch takes what is left.
        let indices = self.order.take_within_epoch(plan.rows_per_step);
        let rows: Vec<&Example> = indices.iter().map(|&index| &task.train[index]).collect();
        // 2. Loss and gradients, clipped by their global norm, and one optimizer step at the scheduled rate.
        let learning_rate = plan.learning_rate(config, step);
        let learned = self.learn(task, &rows, step, learning_rate);
        let (loss, grad_norm, n_tokens) =
            learned.map_err(|error| self.without_memory(task, sink, (step, position), error))?;
        self.course.add(step, loss, n_tokens);
        let seconds = started.elapsed().as_secs_f64();
        let n_all: usize = rows.iter().map(|row| row.len()).sum();
        self.course.unfinished = Some(Metrics::from([
            ("loss".into(), loss),
            ("grad_norm".into(), grad_norm),
            ("learning_rate".into(), learning_rate),
            ("epoch".into(), step as f64 / plan.steps_per_epoch as f64),
            ("timing_s/step".into(), seconds),
            ("perf/throughput".into(), n_all as f64 / seconds),
        ]));
        Ok(())
    }

    /// Loss, norm of the gradient and tokens of a step. Where it fails for want of memory nothing has changed: the optimizer asks for
    /// all of its memory before it touches a weight.
    fn learn(
        &mut self,
        task: &SftTask<'_>,
        rows: &[&Example],
        step: u64,
        learning_rate: f64,
    ) -> Result<(f64, f64, usize), TrainError> {
        let StepLoss { loss, n_tokens, mut gradients } = loss::learn(task, rows, step)?;
        check_finite(step, "the loss", loss)?;
        #[cfg(test)]
        crate::fault::at(step, "clip")?;
        let grad_norm = gradients.clip(task.config.max_grad_norm)?;
        check_finite(step, "the gradient", grad_norm)?;
        self.optimizer.step(task.policy.vars(), &gradients, learning_rate)?;
        Ok((loss, grad_norm, n_tokens))
    }

    /// What follows on a step that was taken.
    fn finish_step(&mut self, task: &SftTask<'_>, plan: &Plan, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let step = self.course.step;
        // 3. Evaluation, and the checkpoint if it is the best so far.
        let val_loss = match plan.evaluates(step) && !task.val.is_empty() {
            true => {
                let position = self.order.position();
                let found = loss::evaluate(task, step);
                Some(found.map_err(|error| self.without_memory(task, sink, (step, position), error))?)
            }
            false => None,
        };
        val_loss.map_or(Ok(()), |loss| check_finite(step, "the validation loss", loss))?;
        let mut metrics = self.course.unfinished.take().unwrap_or_default();
        metrics.extend(val_loss.map(|loss| ("eval_loss".to_owned(), loss)));
        if plan.evaluates(step) && self.course.offer(val_loss) {
            save_policy(task.mesh, task.policy, &task.output_dir.join(BEST), task.base_path)?;
        }
        sink.record("sft", step, &metrics).map_err(|source| io(task, source))?;
        let loss = metrics.get("loss").copied().unwrap_or_default();
        task.progress.update(step, plan.n_steps, &format!("loss {loss:.3}{}", self.course.note()));
        // 4. What is needed to go on from here; at the end, and where the user says stop, the newest adapter too.
        let position = self.order.position();
        let is_stopped =
            self.agree(task, plan).map_err(|error| self.without_memory(task, sink, (step, position), error))?;
        let ends = is_stopped || self.is_done(plan);
        if ends {
            save_policy(task.mesh, task.policy, &task.output_dir.join(LAST), task.base_path)?;
        }
        if ends || plan.saves(step) {
            self.save(task, sink)?;
        }
        match is_stopped && !self.is_done(plan) {
            true => Err(TrainError::Interrupted { stage: "sft", step }),
            false => Ok(()),
        }
    }

    /// Whether somebody said stop: all ranks do, or none. What they trained is compared before it is kept.
    fn agree(&self, task: &SftTask<'_>, plan: &Plan) -> Result<bool, TrainError> {
        let step = self.course.step;
        let is_stopped = task.mesh.all.any(task.stop.load(Ordering::Relaxed))?;
        if is_stopped || self.is_done(plan) || plan.saves(step) {
            check_same(task.mesh, "sft", step, task.policy.vars())?;
        }
        Ok(is_stopped)
    }

    fn is_done(&self, plan: &Plan) -> bool {
        plan.is_last(self.course.step) || self.course.is_exhausted(self.patience)
    }

    /// Keeps what was done until now, where it was memory that the step or its evaluation lacked; `position` is the order's before it.
    fn without_memory(
        &mut self,
        task: &SftTask<'_>,
        sink: &mut dyn MetricSink,
        (step, position): (u64, u64),
        error: TrainError,
    ) -> TrainError {
        // What another rank lacks the first hears of, and keeps what there is.
        if !error.is_out_of_memory() || !task.mesh.all.is_first() {
            return error;
        }
        self.order.seek(position);
        let reached = self.course.step;
        // Before the first step there is nothing to keep, and of two errors the first is told.
        // Parts of a model cannot be put together any more: the checkpoint before is what there is.
        let can_save = reached > 0 && self.store.is_some() && !task.mesh.is_split();
        let is_saved = can_save && self.save(task, sink).is_ok();
        let (saved, message) = (is_saved.then_some(reached), error.to_string());
        TrainError::OutOfMemory { stage: "sft", step, saved, message }
    }

    /// Writes a checkpoint; the ranks of the first copy of the model come here together.
    fn save(&self, task: &SftTask<'_>, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        if task.fingerprint.is_none() || !task.mesh.data.is_first() {
            return Ok(());
        }
        let mut state = State::default();
        state.put("course", &self.course)?;
        state.put("order", &self.order.position())?;
        state.put("metrics", &sink.mark().map_err(|source| io(task, source))?)?;
        self.optimizer.save("optimizer", &mut state)?;
        state.put_vars("policy", task.policy.vars());
        let state = state.whole(&task.mesh.tensor)?;
        self.store.as_ref().map_or(Ok(()), |store| store.write(self.course.step, &state))
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

fn io(task: &SftTask<'_>, source: std::io::Error) -> TrainError {
    TrainError::Io { path: task.output_dir.to_owned(), source }
}

fn check_finite(step: u64, what: &'static str, value: f64) -> Result<(), TrainError> {
    if value.is_finite() { Ok(()) } else { Err(TrainError::NotFinite { stage: "sft", step, what }) }
}

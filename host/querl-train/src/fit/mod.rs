//! A fine-tuning's steps, whatever it learns: the order of the rows, the optimizer, evaluations, checkpoints, a stop and what goes on
//! after it.

mod course;
mod plan;

use crate::checkpoint::{BEST, LAST, STATE};
use crate::order::Order;
use crate::together::{check_same, newest};
use crate::{AdamW, AdamWSettings, Gradients, MetricSink, Metrics, State, StateStore, TrainError};
use candle_core::Var;
use course::Course;
use plan::Plan;
use querl_core::config::SftConfig;
use querl_core::ports::Progress;
use querl_model::{Dropout, Mesh};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// What is learned, and from what.
pub(crate) trait Objective {
    /// As errors and metrics call it.
    fn stage(&self) -> &'static str;

    /// Rows to learn from.
    fn n_rows(&self) -> usize;

    /// Tokens of some rows.
    fn n_tokens(&self, rows: &[usize]) -> usize;

    /// What is trained.
    fn vars(&self) -> &BTreeMap<String, Var>;

    /// Loss and gradients of one optimizer step on these rows.
    fn learn(&self, rows: &[usize], step: u64) -> Result<StepLoss, TrainError>;

    /// Whether there are rows to evaluate on.
    fn has_val(&self) -> bool;

    /// Loss on them, after a step.
    fn evaluate(&self, step: u64) -> Result<f64, TrainError>;

    /// Writes what was learned to a folder.
    fn save(&self, directory: &Path) -> Result<(), TrainError>;
}

/// What one optimizer step's passes found.
pub(crate) struct StepLoss {
    /// Mean of what is learned from.
    pub(crate) loss: f64,
    /// Tokens learned from.
    pub(crate) n_tokens: usize,
    pub(crate) gradients: Gradients,
}

/// How an objective is fitted. What is alike in every stage stands in [`SftConfig`].
pub(crate) struct FitTask<'a> {
    pub(crate) objective: &'a dyn Objective,
    pub(crate) config: &'a SftConfig,
    pub(crate) seed: u64,
    pub(crate) mesh: &'a Mesh,
    pub(crate) fingerprint: Option<&'a str>,
    pub(crate) output_dir: &'a Path,
    pub(crate) progress: &'a dyn Progress,
    pub(crate) stop: &'a AtomicBool,
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

/// Takes all steps, from the newest checkpoint of the same fingerprint or from the beginning.
///
/// # Errors
/// A loss that is not finite, a file that cannot be written, the user said stop, or the device has no memory left.
pub(crate) fn run(task: &FitTask<'_>, sink: &mut dyn MetricSink) -> Result<SftSummary, TrainError> {
    let plan = Plan::new(task.config, task.objective.n_rows());
    let mut fit = Fit::begin(task, sink)?;
    // Memory may have been lacking between the last step and the newest of what was learned.
    if fit.course.step > 0 && fit.course.unfinished.is_none() && fit.is_done(&plan) {
        task.objective.save(&task.output_dir.join(LAST))?;
    }

    while fit.course.unfinished.is_some() || !fit.is_done(&plan) {
        // A step whose evaluation lacked memory is there already.
        if fit.course.unfinished.is_none() {
            fit.take_step(task, &plan, sink)?;
        }
        fit.finish_step(task, &plan, sink)?;
    }
    let stage = task.objective.stage();
    match fit.course.step {
        0 => Err(TrainError::Data(format!(
            "{stage}: no optimizer step to take; look at {stage}.epochs and {stage}.max_steps"
        ))),
        _ => Ok(fit.course.summary()),
    }
}

/// Another mask for each step and rank; it follows from the two alone, so that a training that goes on needs to know nothing of
/// it. `None` where nothing is dropped.
pub(crate) fn dropout(p: f64, seed: u64, step: u64, ranks: &querl_model::Ranks) -> Option<Dropout> {
    let of_step = step.wrapping_mul(0x9e37_79b9_7f4a_7c15); // spreads the step over all bits
    let of_rank = (ranks.rank() as u64).wrapping_mul(0xd1b5_4a32_d192_ed03);
    (p > 0.0).then_some(Dropout { p, seed: seed ^ of_step ^ of_rank })
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
    fn begin(task: &FitTask<'_>, sink: &mut dyn MetricSink) -> Result<Self, TrainError> {
        let config = task.config;
        let settings = AdamWSettings { weight_decay: config.weight_decay, ..Default::default() };
        let directory = task.output_dir.join(STATE);
        let print = task.fingerprint.filter(|_| task.mesh.all.is_first());
        let store = print.map(|print| StateStore::open(&directory, config.save_total_limit, print));
        let found = newest(&task.mesh.all, store.as_ref(), task.progress)?;
        let mut fit = Self {
            course: Course::default(),
            order: Order::new(task.objective.n_rows(), task.seed),
            optimizer: AdamW::new(settings),
            patience: config.early_stopping_patience,
            store,
        };
        let mut mark = 0;
        if let Some((step, state)) = &*found {
            let state = &state.part(&task.mesh.tensor)?;
            fit.course = state.get("course")?;
            fit.order.seek(state.get("order")?);
            fit.optimizer.restore("optimizer", state, task.objective.vars())?;
            state.restore_vars("policy", task.objective.vars())?;
            mark = state.get("metrics")?;
            task.progress.line(&format!("going on from step {step}"));
        }
        // What a killed process noted of steps that are taken again is noted again.
        sink.rewind(mark).map_err(|source| io(task, source))?;
        Ok(fit)
    }

    /// Learns from the next rows.
    fn take_step(&mut self, task: &FitTask<'_>, plan: &Plan, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let (config, started) = (task.config, Instant::now());
        let step = self.course.step + 1;
        let position = self.order.position();
        // 1. The next rows, in an order of their own for each epoch; the last step of an epoch takes what is left.
        let indices = self.order.take_within_epoch(plan.rows_per_step);
        // 2. Loss and gradients, clipped by their global norm, and one optimizer step at the scheduled rate.
        let learning_rate = plan.learning_rate(config, step);
        let learned = self.learn(task, &indices, step, learning_rate);
        let (loss, grad_norm, n_tokens) =
            learned.map_err(|error| self.without_memory(task, sink, (step, position), error))?;
        self.course.add(step, loss, n_tokens);
        let seconds = started.elapsed().as_secs_f64();
        let n_all = task.objective.n_tokens(&indices);
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
        task: &FitTask<'_>,
        rows: &[usize],
        step: u64,
        learning_rate: f64,
    ) -> Result<(f64, f64, usize), TrainError> {
        let StepLoss { loss, n_tokens, mut gradients } = task.objective.learn(rows, step)?;
        check_finite(task, step, "the loss", loss)?;
        #[cfg(test)]
        crate::fault::at(step, "clip")?;
        let grad_norm = gradients.clip(task.config.max_grad_norm)?;
        check_finite(task, step, "the gradient", grad_norm)?;
        self.optimizer.step(task.objective.vars(), &gradients, learning_rate)?;
        Ok((loss, grad_norm, n_tokens))
    }

    /// What follows on a step that was taken.
    fn finish_step(&mut self, task: &FitTask<'_>, plan: &Plan, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let step = self.course.step;
        // 3. Evaluation, and the checkpoint if it is the best so far.
        let val_loss = match plan.evaluates(step) && task.objective.has_val() {
            true => {
                let position = self.order.position();
                let found = task.objective.evaluate(step);
                Some(found.map_err(|error| self.without_memory(task, sink, (step, position), error))?)
            }
            false => None,
        };
        val_loss.map_or(Ok(()), |loss| check_finite(task, step, "the validation loss", loss))?;
        let mut metrics = self.course.unfinished.take().unwrap_or_default();
        metrics.extend(val_loss.map(|loss| ("eval_loss".to_owned(), loss)));
        // Without a validation split each is the best so far: only the last one is ever read.
        if plan.evaluates(step) && self.course.offer(val_loss) && (val_loss.is_some() || plan.is_last(step)) {
            task.objective.save(&task.output_dir.join(BEST))?;
        }
        sink.record(task.objective.stage(), step, &metrics).map_err(|source| io(task, source))?;
        let loss = metrics.get("loss").copied().unwrap_or_default();
        task.progress.update(step, plan.n_steps, &format!("loss {loss:.3}{}", self.course.note()));
        // 4. What is needed to go on from here; at the end, and where the user says stop, the newest adapter too.
        let position = self.order.position();
        let is_stopped =
            self.agree(task, plan).map_err(|error| self.without_memory(task, sink, (step, position), error))?;
        let ends = is_stopped || self.is_done(plan);
        if ends {
            task.objective.save(&task.output_dir.join(LAST))?;
        }
        if ends || plan.saves(step) {
            self.save(task, sink)?;
        }
        match is_stopped && !self.is_done(plan) {
            true => Err(TrainError::Interrupted { stage: task.objective.stage(), step }),
            false => Ok(()),
        }
    }

    /// Whether somebody said stop: all ranks do, or none. What they trained is compared before it is kept.
    fn agree(&self, task: &FitTask<'_>, plan: &Plan) -> Result<bool, TrainError> {
        let step = self.course.step;
        let is_stopped = task.mesh.all.any(task.stop.load(Ordering::Relaxed))?;
        if is_stopped || self.is_done(plan) || plan.saves(step) {
            check_same(task.mesh, task.objective.stage(), step, task.objective.vars())?;
        }
        Ok(is_stopped)
    }

    fn is_done(&self, plan: &Plan) -> bool {
        plan.is_last(self.course.step) || self.course.is_exhausted(self.patience)
    }

    /// Keeps what was done until now, where it was memory that the step or its evaluation lacked; `position` is the order's before it.
    fn without_memory(
        &mut self,
        task: &FitTask<'_>,
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
        TrainError::OutOfMemory { stage: task.objective.stage(), step, saved, message }
    }

    /// Writes a checkpoint; the ranks of the first copy of the model come here together.
    fn save(&self, task: &FitTask<'_>, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        if task.fingerprint.is_none() || !task.mesh.data.is_first() {
            return Ok(());
        }
        let mut state = State::default();
        state.put("course", &self.course)?;
        state.put("order", &self.order.position())?;
        state.put("metrics", &sink.mark().map_err(|source| io(task, source))?)?;
        self.optimizer.save("optimizer", &mut state)?;
        state.put_vars("policy", task.objective.vars());
        let state = state.whole(&task.mesh.tensor)?;
        self.store.as_ref().map_or(Ok(()), |store| store.write(self.course.step, &state))
    }
}

fn io(task: &FitTask<'_>, source: std::io::Error) -> TrainError {
    TrainError::Io { path: task.output_dir.to_owned(), source }
}

fn check_finite(task: &FitTask<'_>, step: u64, what: &'static str, value: f64) -> Result<(), TrainError> {
    if value.is_finite() { Ok(()) } else { Err(TrainError::NotFinite { stage: task.objective.stage(), step, what }) }
}

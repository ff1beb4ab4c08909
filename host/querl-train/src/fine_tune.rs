//! The loop of fine-tuning, shared by [`sft`](crate::sft) and [`classify`](crate::classify): order of the rows, optimizer,
//! evaluation, checkpoints, stop and resume. What is learned is an [`Objective`], which reads the stop flag before each pass (`check_stop` of
//! `data_parallel.rs`). Read [`run`], then [`Trainer::take_step`] and [`Trainer::finish_step`].

use crate::batching::DataOrder;
use crate::checkpoint::{BEST, LAST, STATE, SaveTimer};
use crate::data_parallel::{check_equal_weights, newest_checkpoint, warn_of_metrics};
use crate::{AdamW, AdamWSettings, Gradients, MetricSink, Metrics, State, StateStore, TrainError, lr_factor};
use candle_core::Var;
use querl_core::config::SftConfig;
use querl_core::ports::{LogMark, Progress};
use querl_model::{Dropout, Mesh, Ranks};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A loss over rows of data, and the variables that are trained.
pub(crate) trait Objective {
    /// Name of the stage in errors and metrics.
    fn stage(&self) -> &'static str;

    fn n_rows(&self) -> usize;

    fn n_tokens(&self, rows: &[usize]) -> usize;

    fn vars(&self) -> &BTreeMap<String, Var>;

    fn loss_and_gradients(&self, rows: &[usize], step: u64) -> Result<StepLoss, TrainError>;

    fn has_val(&self) -> bool;

    fn evaluate(&self, step: u64) -> Result<f64, TrainError>;

    fn save(&self, directory: &Path) -> Result<(), TrainError>;
}

pub(crate) struct StepLoss {
    pub(crate) loss: f64,
    pub(crate) n_tokens: usize,
    /// Gradients summed over micro-batches and ranks.
    pub(crate) gradients: Gradients,
}

pub(crate) struct FineTuneTask<'a> {
    pub(crate) objective: &'a dyn Objective,
    pub(crate) config: &'a SftConfig,
    pub(crate) seed: u64,
    pub(crate) mesh: &'a Mesh,
    pub(crate) fingerprint: Option<&'a str>,
    pub(crate) output_dir: &'a Path,
    pub(crate) progress: &'a dyn Progress,
    pub(crate) stop: &'a AtomicBool,
}

/// Result of a fine-tuning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SftSummary {
    /// Optimizer steps taken.
    pub n_steps: u64,
    /// Mean training loss of the last evaluation interval.
    pub train_loss: f64,
    /// Loss on the validation split at the best checkpoint; `None` without a validation split.
    pub best_val_loss: Option<f64>,
    /// Step of the best checkpoint.
    pub best_step: u64,
    /// Trained response tokens, counted again in every epoch.
    pub n_tokens: u64,
}

/// Runs the fine-tuning loop from the newest checkpoint with the same fingerprint, or from the beginning.
pub(crate) fn run(task: &FineTuneTask<'_>, sink: &mut dyn MetricSink) -> Result<SftSummary, TrainError> {
    let mut trainer = Trainer::new(task, sink)?;
    let Schedule { rows_per_step, n_steps, .. } = trainer.schedule;
    let n_trainable: usize = task.objective.vars().values().map(|var| var.elem_count()).sum();
    let of_rank = if task.mesh.is_split() { " of each rank" } else { "" };
    task.progress.line(&format!(
        "{} rows, {n_steps} steps of {rows_per_step} rows, {n_trainable} trainable parameters{of_rank}",
        task.objective.n_rows()
    ));
    // The process may have been killed after the last checkpoint and before `last` was written.
    if trainer.state.step > 0 && trainer.state.unrecorded.is_none() && trainer.is_done() {
        task.objective.save(&task.output_dir.join(LAST))?;
    }
    while trainer.state.unrecorded.is_some() || !trainer.is_done() {
        // After a stop or out-of-memory error in the evaluation of a step, the step itself is complete.
        if trainer.state.unrecorded.is_none() {
            trainer.take_step(sink)?;
        }
        trainer.finish_step(sink)?;
    }
    let stage = task.objective.stage();
    match trainer.state.step {
        0 => Err(TrainError::Data(format!(
            "{stage}: no optimizer step to take; look at {stage}.epochs and {stage}.max_steps"
        ))),
        _ => Ok(trainer.state.summary()),
    }
}

/// Dropout with a mask that depends only on seed, step and rank, so that a resumed run needs no random state. `None` for `p` = 0.
pub(crate) fn dropout(p: f64, seed: u64, step: u64, ranks: &Ranks) -> Option<Dropout> {
    let of_step = step.wrapping_mul(0x9e37_79b9_7f4a_7c15); // distributes the step over all bits
    let of_rank = (ranks.rank() as u64).wrapping_mul(0xd1b5_4a32_d192_ed03);
    (p > 0.0).then_some(Dropout { p, seed: seed ^ of_step ^ of_rank })
}

struct Trainer<'a> {
    task: &'a FineTuneTask<'a>,
    schedule: Schedule,
    state: TrainerState,
    order: DataOrder,
    optimizer: AdamW,
    store: Option<StateStore>,
    timer: SaveTimer,
}

impl<'a> Trainer<'a> {
    fn new(task: &'a FineTuneTask<'a>, sink: &mut dyn MetricSink) -> Result<Self, TrainError> {
        let config = task.config;
        let settings = AdamWSettings { weight_decay: config.weight_decay, ..Default::default() };
        let directory = task.output_dir.join(STATE);
        let fingerprint = task.fingerprint.filter(|_| task.mesh.all.is_first());
        let store = fingerprint.map(|fingerprint| StateStore::open(&directory, config.save_total_limit, fingerprint));
        let newest = newest_checkpoint(&task.mesh.all, store.as_ref(), task.progress, &|_| Ok(None))?;
        let mut trainer = Self {
            task,
            schedule: Schedule::new(config, task.objective.n_rows()),
            state: TrainerState::default(),
            order: DataOrder::new(task.objective.n_rows(), task.seed),
            optimizer: AdamW::new(settings),
            store,
            timer: SaveTimer::start(config.save_interval_s),
        };
        let mut mark = LogMark::default();
        if let Some((step, state)) = &*newest {
            let state = &state.shard(&task.mesh.tensor)?;
            trainer.state = state.get("course")?;
            trainer.order.seek(state.get("order")?);
            trainer.optimizer.restore("optimizer", state, task.objective.vars())?;
            state.restore_vars("policy", task.objective.vars())?;
            mark = state.get("metrics")?;
            task.progress.line(&format!("resuming from step {step}"));
        }
        // Metrics of repeated steps are recorded again.
        if let Some(difference) = sink.rewind(mark).map_err(|source| trainer.io(source))? {
            warn_of_metrics(&difference, task.progress);
        }
        Ok(trainer)
    }

    fn take_step(&mut self, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let (task, schedule, started) = (self.task, self.schedule, Instant::now());
        let step = self.state.step + 1;
        let position = self.order.position();
        // 1. The next rows, shuffled by epoch; the last step of an epoch has the remaining rows.
        let rows = self.order.take_within_epoch(schedule.rows_per_step);
        // 2. Loss and gradients, clipped by their global norm, and one optimizer step at the scheduled rate.
        let learning_rate = schedule.learning_rate(task.config, step);
        let learned = self.update(&rows, step, learning_rate);
        let (loss, grad_norm, n_tokens) =
            learned.map_err(|error| self.save_unfinished(sink, (step, position), error))?;
        self.state.add_step(step, loss, n_tokens);
        let seconds = started.elapsed().as_secs_f64();
        let n_all = task.objective.n_tokens(&rows);
        self.state.unrecorded = Some(Metrics::from([
            ("loss".into(), loss),
            ("grad_norm".into(), grad_norm),
            ("learning_rate".into(), learning_rate),
            ("epoch".into(), step as f64 / schedule.steps_per_epoch as f64),
            ("timing_s/step".into(), seconds),
            ("perf/throughput".into(), n_all as f64 / seconds),
        ]));
        Ok(())
    }

    /// Runs an optimizer step; returns loss, gradient norm and number of tokens. If it is stopped or runs out of memory, no weight has
    /// changed: the optimizer allocates all of its memory first.
    fn update(&mut self, rows: &[usize], step: u64, learning_rate: f64) -> Result<(f64, f64, usize), TrainError> {
        let task = self.task;
        let StepLoss { loss, n_tokens, mut gradients } = task.objective.loss_and_gradients(rows, step)?;
        self.check_finite(step, "the loss", loss)?;
        #[cfg(test)]
        crate::testing::out_of_memory_at(step, "clip")?;
        let grad_norm = gradients.clip(task.config.max_grad_norm)?;
        self.check_finite(step, "the gradient", grad_norm)?;
        self.optimizer.step(task.objective.vars(), &gradients, learning_rate)?;
        Ok((loss, grad_norm, n_tokens))
    }

    fn finish_step(&mut self, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let (task, schedule, step) = (self.task, self.schedule, self.state.step);
        // 3. Evaluation; the best checkpoint is written to `best`.
        let val_loss = match schedule.evaluates(step) && task.objective.has_val() {
            true => {
                let position = self.order.position();
                let loss = task.objective.evaluate(step);
                Some(loss.map_err(|error| self.save_unfinished(sink, (step, position), error))?)
            }
            false => None,
        };
        val_loss.map_or(Ok(()), |loss| self.check_finite(step, "the validation loss", loss))?;
        let mut metrics = self.state.unrecorded.take().unwrap_or_default();
        metrics.extend(val_loss.map(|loss| ("eval_loss".to_owned(), loss)));
        // Without a validation split every evaluation counts as the best; only the last one is written.
        if schedule.evaluates(step)
            && self.state.add_evaluation(val_loss)
            && (val_loss.is_some() || schedule.is_last(step))
        {
            task.objective.save(&task.output_dir.join(BEST))?;
        }
        sink.record(task.objective.stage(), step, &metrics).map_err(|source| self.io(source))?;
        let loss = metrics.get("loss").copied().unwrap_or_default();
        task.progress.update(step, schedule.n_steps, &format!("loss {loss:.3}{}", self.state.note()));
        // 4. A checkpoint to resume from; at the end and after a stop also `last`.
        let position = self.order.position();
        let (is_stopped, is_due) =
            self.agree_on_save().map_err(|error| self.save_unfinished(sink, (step, position), error))?;
        if is_stopped || self.is_done() {
            task.objective.save(&task.output_dir.join(LAST))?;
        }
        if is_due {
            self.save(sink)?;
            self.timer.restart();
        }
        match is_stopped && !self.is_done() {
            true => Err(TrainError::Interrupted { stage: task.objective.stage(), step }),
            false => Ok(()),
        }
    }

    /// Whether the stop flag is set on any rank, and whether a checkpoint is due. Before a checkpoint, compares the weights of all ranks.
    fn agree_on_save(&self) -> Result<(bool, bool), TrainError> {
        let (task, step) = (self.task, self.state.step);
        let is_stopped = task.mesh.all.any(task.stop.load(Ordering::Relaxed))?;
        let is_timed = task.fingerprint.is_some() && self.timer.is_due(&task.mesh.all)?;
        let is_due = is_stopped || self.is_done() || self.schedule.saves(step) || is_timed;
        if is_due {
            check_equal_weights(task.mesh, task.objective.stage(), step, task.objective.vars())?;
        }
        Ok((is_stopped, is_due))
    }

    fn is_done(&self) -> bool {
        self.schedule.is_last(self.state.step) || self.state.is_exhausted(self.task.config.early_stopping_patience)
    }

    /// Saves the state if `error` is a stop or out-of-memory error within a step or its evaluation. `position`: position of the data order
    /// before the step. An out-of-memory error of another rank reaches the first rank, which saves.
    fn save_unfinished(
        &mut self,
        sink: &mut dyn MetricSink,
        (step, position): (u64, u64),
        error: TrainError,
    ) -> TrainError {
        let task = self.task;
        if matches!(error, TrainError::Interrupted { .. }) {
            self.order.seek(position);
            let saved = task.objective.save(&task.output_dir.join(LAST)).and_then(|()| self.save(sink));
            return saved.err().unwrap_or(error);
        }
        if !error.is_out_of_memory() || !task.mesh.all.is_first() {
            return error;
        }
        self.order.seek(position);
        let taken = self.state.step;
        // Before the first step there is nothing to save. Shards of a tensor-parallel model cannot be gathered after a failure: the
        // previous checkpoint remains. An error in saving is not reported, because `error` is the cause.
        let can_save = taken > 0 && self.store.is_some() && !task.mesh.is_split();
        let is_saved = can_save && self.save(sink).is_ok();
        let (saved, message) = (is_saved.then_some(taken), error.to_string());
        TrainError::OutOfMemory { stage: task.objective.stage(), step, saved, message }
    }

    /// Writes a checkpoint; the ranks of the first model copy call this together.
    fn save(&self, sink: &mut dyn MetricSink) -> Result<(), TrainError> {
        let task = self.task;
        if task.fingerprint.is_none() || !task.mesh.data.is_first() {
            return Ok(());
        }
        let mut state = State::default();
        state.put("course", &self.state)?;
        state.put("order", &self.order.position())?;
        state.put("metrics", &sink.mark().map_err(|source| self.io(source))?)?;
        self.optimizer.save("optimizer", &mut state)?;
        state.put_vars("policy", task.objective.vars());
        let state = state.gather_shards(&task.mesh.tensor)?;
        self.store.as_ref().map_or(Ok(()), |store| store.write(self.state.step, &state))
    }

    fn io(&self, source: std::io::Error) -> TrainError {
        TrainError::Io { path: self.task.output_dir.to_owned(), source }
    }

    fn check_finite(&self, step: u64, what: &'static str, value: f64) -> Result<(), TrainError> {
        let stage = self.task.objective.stage();
        if value.is_finite() { Ok(()) } else { Err(TrainError::NotFinite { stage, step, what }) }
    }
}

/// Content of a checkpoint in addition to tensors, the data position and the length of the metrics log.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct TrainerState {
    step: u64,
    n_tokens: u64,
    best: BestEvaluation,
    interval: LossInterval,
    /// Metrics of the newest step until its evaluation succeeds. Saved if the evaluation was stopped or ran out of memory.
    #[serde(default, rename = "unfinished")]
    unrecorded: Option<Metrics>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct BestEvaluation {
    step: u64,
    val_loss: Option<f64>,
    /// Number of evaluations since the best one.
    n_worse: usize,
}

/// Training loss between two evaluations.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct LossInterval {
    sum: f64,
    n: usize,
    /// Mean of the previous interval.
    #[serde(rename = "closed_mean")]
    last_mean: f64,
}

impl TrainerState {
    fn add_step(&mut self, step: u64, loss: f64, n_tokens: usize) {
        self.step = step;
        self.n_tokens += n_tokens as u64;
        self.interval.sum += loss;
        self.interval.n += 1;
    }

    /// Returns true for the best evaluation so far; without a validation split, for every evaluation.
    fn add_evaluation(&mut self, val_loss: Option<f64>) -> bool {
        let last_mean = self.interval.sum / self.interval.n.max(1) as f64;
        self.interval = LossInterval { last_mean, ..Default::default() };
        let is_best = match (val_loss, self.best.val_loss) {
            (Some(new), Some(best)) => new < best,
            _ => true,
        };
        if is_best {
            self.best = BestEvaluation { step: self.step, val_loss, n_worse: 0 };
        } else {
            self.best.n_worse += 1;
        }
        is_best
    }

    fn is_exhausted(&self, patience: usize) -> bool {
        patience > 0 && self.best.n_worse >= patience
    }

    fn note(&self) -> String {
        self.best.val_loss.map(|loss| format!(", best eval loss {loss:.3}")).unwrap_or_default()
    }

    fn summary(&self) -> SftSummary {
        SftSummary {
            n_steps: self.step,
            train_loss: self.interval.last_mean,
            best_val_loss: self.best.val_loss,
            best_step: self.best.step,
            n_tokens: self.n_tokens,
        }
    }
}

/// Number of steps, learning rates, and the steps that evaluate and save. Steps count from 1.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Schedule {
    /// Rows per optimizer step; the last step of an epoch has the remaining rows.
    rows_per_step: usize,
    steps_per_epoch: u64,
    n_steps: u64,
    n_warmup: u64,
    eval_steps: u64,
    save_steps: u64,
}

impl Schedule {
    fn new(config: &SftConfig, n_rows: usize) -> Self {
        let rows_per_step = config.batch_size * config.gradient_accumulation_steps;
        let steps_per_epoch = n_rows.div_ceil(rows_per_step) as u64;
        let planned = steps_per_epoch * config.epochs as u64;
        let n_steps = if config.max_steps > 0 { planned.min(config.max_steps as u64) } else { planned };
        // At least one step at the full rate, however short the run.
        let n_warmup = ((config.warmup_ratio * n_steps as f64).ceil() as u64).min(n_steps.saturating_sub(1));
        let or_epoch = |n: usize| if n > 0 { n as u64 } else { steps_per_epoch };
        let (eval_steps, save_steps) = (or_epoch(config.eval_steps), or_epoch(config.save_steps));
        Self { rows_per_step, steps_per_epoch, n_steps, n_warmup, eval_steps, save_steps }
    }

    fn learning_rate(&self, config: &SftConfig, step: u64) -> f64 {
        config.learning_rate * lr_factor(config.lr_scheduler, step - 1, self.n_warmup, self.n_steps)
    }

    fn is_last(&self, step: u64) -> bool {
        step >= self.n_steps
    }

    fn evaluates(&self, step: u64) -> bool {
        self.is_last(step) || step.is_multiple_of(self.eval_steps)
    }

    fn saves(&self, step: u64) -> bool {
        step.is_multiple_of(self.save_steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_counts_evaluations_without_improvement() {
        let mut state = TrainerState::default();
        let mut evaluate = |step, loss| {
            state.add_step(step, loss, 1);
            (state.add_evaluation(Some(loss)), state.is_exhausted(2))
        };
        let found = [evaluate(1, 3.0), evaluate(2, 2.0), evaluate(3, 2.0)];
        assert_eq!(found, [(true, false), (true, false), (false, false)]);
        assert_eq!(evaluate(4, 2.5), (false, true));
        assert_eq!((state.summary().best_step, state.summary().best_val_loss), (2, Some(2.0)));
        assert!(!state.is_exhausted(0));
    }

    #[test]
    fn zero_means_once_an_epoch_and_the_last_step_evaluates() {
        let config = SftConfig { epochs: 2, eval_steps: 0, save_steps: 0, max_steps: 5, ..SftConfig::default() };
        let schedule = Schedule::new(&config, 40); // 16 rows per step: 3 steps per epoch
        assert_eq!((schedule.steps_per_epoch, schedule.n_steps), (3, 5));
        let at = |is: fn(&Schedule, u64) -> bool| (1..=5).filter(|step| is(&schedule, *step)).collect::<Vec<_>>();
        assert_eq!((at(Schedule::evaluates), at(Schedule::saves)), (vec![3, 5], vec![3]));
    }

    #[test]
    fn a_run_of_one_step_learns() {
        let config = SftConfig { max_steps: 1, warmup_ratio: 1.0, learning_rate: 0.5, ..SftConfig::default() };
        assert_eq!(Schedule::new(&config, 40).learning_rate(&config, 1), 0.5);
    }
}

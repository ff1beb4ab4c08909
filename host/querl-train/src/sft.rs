//! Supervised fine-tuning: cross-entropy on the tokens of the answer alone.

use crate::checkpoint::{BEST, LAST, save_policy};
use crate::order::Order;
use crate::policy::{Example, Policy};
use crate::{AdamW, AdamWSettings, Gradients, MetricSink, Metrics, TrainError, cosine_with_warmup};
use querl_core::config::SftConfig;
use querl_core::ports::Progress;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

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
    /// Seeds the order of the data.
    pub seed: u64,
    /// Where `best` and `last` are written.
    pub output_dir: &'a Path,
    /// Shows how far it is.
    pub progress: &'a dyn Progress,
    /// Set to stop at the next step.
    pub stop: &'a AtomicBool,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
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

/// Trains, keeps the best and the last checkpoint, and says what came of it.
///
/// # Errors
/// No training rows, a row longer than `max_length`, a loss that is not finite, or a file that cannot be written.
pub fn train(task: &SftTask<'_>, sink: &mut dyn MetricSink) -> Result<SftSummary, TrainError> {
    check(task)?;
    let config = task.config;
    let per_step = config.batch_size * config.gradient_accumulation_steps;
    let steps_per_epoch = task.train.len().div_ceil(per_step) as u64;
    let planned = steps_per_epoch * config.epochs as u64;
    let n_steps = if config.max_steps > 0 { planned.min(config.max_steps as u64) } else { planned };
    // At least one step at full rate, however short the run.
    let n_warmup = ((config.warmup_ratio * n_steps as f64).ceil() as u64).min(n_steps.saturating_sub(1));
    let eval_steps = if config.eval_steps > 0 { config.eval_steps as u64 } else { steps_per_epoch };
    let mut optimizer = AdamW::new(AdamWSettings { weight_decay: config.weight_decay, ..Default::default() });
    let mut order = Order::new(task.train.len(), task.seed);
    let mut state = BestSoFar::default();
    let mut interval = Interval::default();

    for step in 1..=n_steps {
        // 1. The next rows, in an order of their own for each epoch; the last step of an epoch takes what is left.
        let indices = order.take_within_epoch(per_step);
        let rows: Vec<&Example> = indices.iter().map(|&index| &task.train[index]).collect();
        // 2. Gradients over micro-batches, each weighted by its tokens: the sum does not depend on the split.
        let n_tokens: usize = rows.iter().map(|row| row.response.len()).sum();
        let (mut gradients, mut loss) = (Gradients::default(), 0.0);
        for micro_batch in rows.chunks(config.batch_size) {
            let summed = negative_logprob(task.policy, micro_batch)?;
            let share = (summed / n_tokens as f64)?;
            loss += f64::from(share.to_scalar::<f32>()?);
            gradients.add(&share.backward()?, task.policy.vars())?;
        }
        if !loss.is_finite() {
            return Err(TrainError::NotFinite { stage: "sft", step, what: "the loss" });
        }
        // 3. One optimizer step at the scheduled rate.
        let grad_norm = gradients.clip(config.max_grad_norm)?;
        if !grad_norm.is_finite() {
            return Err(TrainError::NotFinite { stage: "sft", step, what: "the gradient" });
        }
        let learning_rate = config.learning_rate * cosine_with_warmup(step - 1, n_warmup, n_steps);
        optimizer.step(task.policy.vars(), &gradients, learning_rate)?;
        interval.add(loss, n_tokens);
        let mut metrics = Metrics::from([
            ("loss".into(), loss),
            ("grad_norm".into(), grad_norm),
            ("learning_rate".into(), learning_rate),
            ("epoch".into(), step as f64 / steps_per_epoch as f64),
        ]);
        // 4. Evaluation, and the checkpoint if it is the best so far.
        let is_last = step == n_steps;
        if is_last || step % eval_steps == 0 {
            let val_loss = if task.val.is_empty() { None } else { Some(evaluate(task)?) };
            metrics.extend(val_loss.map(|loss| ("eval_loss".to_owned(), loss)));
            if state.offer(step, val_loss) {
                save_policy(task.policy, &task.output_dir.join(BEST), task.base_path)?;
            }
            interval.close();
        }
        sink.record("sft", step, &metrics).map_err(|source| io(task, source))?;
        task.progress.update(step, n_steps, &format!("loss {loss:.3}{}", state.note()));
        if task.stop.load(Ordering::Relaxed) {
            save_policy(task.policy, &task.output_dir.join(LAST), task.base_path)?;
            return Err(TrainError::Interrupted { stage: "sft", step });
        }
        if is_last || state.is_exhausted(config.early_stopping_patience) {
            save_policy(task.policy, &task.output_dir.join(LAST), task.base_path)?;
            return Ok(state.summary(step, interval));
        }
    }
    Err(TrainError::Data("sft: no optimizer step to take; look at sft.epochs and sft.max_steps".into()))
}

fn check(task: &SftTask<'_>) -> Result<(), TrainError> {
    if task.train.is_empty() {
        return Err(TrainError::Data("the training split is empty; loosen the filters or add rows".into()));
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

/// Negative log-probability of the answers, summed over tokens.
fn negative_logprob(policy: Policy<'_>, rows: &[&Example]) -> Result<candle_core::Tensor, TrainError> {
    Ok(policy.response_pass(rows, 1.0)?.logprobs.narrow(1, 0, 1)?.sum_all()?.neg()?)
}

/// Mean loss per answer token on the validation split.
fn evaluate(task: &SftTask<'_>) -> Result<f64, TrainError> {
    let view = task.policy.adapter.map(querl_model::LoraAdapter::without_gradient);
    let policy = Policy { decoder: task.policy.decoder, adapter: view.as_ref() };
    let rows: Vec<&Example> = task.val.iter().collect();
    let (mut sum, mut n_tokens) = (0.0, 0);
    for batch in rows.chunks(EVAL_BATCH) {
        sum += f64::from(negative_logprob(policy, batch)?.detach().to_scalar::<f32>()?);
        n_tokens += batch.iter().map(|row| row.response.len()).sum::<usize>();
    }
    Ok(sum / n_tokens.max(1) as f64)
}

/// Rows of one evaluation pass: memory is small without a graph.
const EVAL_BATCH: usize = 32;

/// Which checkpoint is best, and how long ago it was.
#[derive(Default)]
struct BestSoFar {
    step: u64,
    val_loss: Option<f64>,
    n_worse: usize,
}

impl BestSoFar {
    /// True if this evaluation is the best so far. Without a validation split the newest is.
    fn offer(&mut self, step: u64, val_loss: Option<f64>) -> bool {
        let is_best = match (val_loss, self.val_loss) {
            (Some(new), Some(best)) => new < best,
            _ => true,
        };
        if is_best {
            (self.step, self.val_loss, self.n_worse) = (step, val_loss, 0);
        } else {
            self.n_worse += 1;
        }
        is_best
    }

    fn is_exhausted(&self, patience: usize) -> bool {
        patience > 0 && self.n_worse >= patience
    }

    fn note(&self) -> String {
        self.val_loss.map(|loss| format!(", best eval loss {loss:.3}")).unwrap_or_default()
    }

    fn summary(&self, n_steps: u64, interval: Interval) -> SftSummary {
        SftSummary {
            n_steps,
            train_loss: interval.closed_mean,
            best_val_loss: self.val_loss,
            best_step: self.step,
            n_tokens: interval.n_tokens,
        }
    }
}

/// Mean training loss between two evaluations.
#[derive(Default)]
struct Interval {
    sum: f64,
    n: usize,
    closed_mean: f64,
    n_tokens: u64,
}

impl Interval {
    fn add(&mut self, loss: f64, n_tokens: usize) {
        self.sum += loss;
        self.n += 1;
        self.n_tokens += n_tokens as u64;
    }

    fn close(&mut self) {
        self.closed_mean = self.sum / self.n.max(1) as f64;
        (self.sum, self.n) = (0.0, 0);
    }
}

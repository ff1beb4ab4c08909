//! Generation with a trained model.

use super::{Base, best};
use crate::failure::ending;
use crate::interrupt;
use crate::run::Run;
use anyhow::Context;
use querl_core::ports::{PolicyResponse, Progress, Reporter};
use querl_core::records::DatasetRow;
use querl_train::job::{CallbackError, Callbacks, FailureKind, GenerateJob, GeneratedResponse, JobError, NoMetrics};
use std::path::Path;
use std::sync::Mutex;

/// One response of a model and its latency.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The response.
    pub response: PolicyResponse,
    /// Wall-clock time, in milliseconds; `None` where other ranks used the same CPU meanwhile.
    pub latency_ms: Option<f64>,
}

/// Receives responses.
pub type Each<'a> = dyn FnMut(Vec<Generation>) -> anyhow::Result<()> + Send + 'a;

/// A model that generates without sampling.
pub trait Generator: Sync {
    /// One response per row, in order, `n_at_once` per call of `each`.
    ///
    /// # Errors
    /// The model cannot compute, the stop flag was set, or an error of `each`.
    fn generate(&self, rows: &[DatasetRow], n_at_once: usize, each: &mut Each<'_>) -> anyhow::Result<()>;
}

/// The model in the folder of the training stage `name`. It is loaded once for all rows.
pub fn generator<'a>(run: &'a Run, name: &'static str, stage_folder: &Path) -> Box<dyn Generator + 'a> {
    let base = Base::of(run, &best(stage_folder));
    Box::new(TrainedModel { run, base, name })
}

/// Shows lines; the caller shows progress.
pub(super) struct Lines<'a>(pub(super) &'a dyn Reporter);

impl Progress for Lines<'_> {
    fn update(&self, _: u64, _: u64, _: &str) {}

    fn line(&self, text: &str) {
        self.0.message(text);
    }
}

struct TrainedModel<'a> {
    run: &'a Run,
    base: Base,
    name: &'static str,
}

impl Generator for TrainedModel<'_> {
    fn generate(&self, rows: &[DatasetRow], n_at_once: usize, each: &mut Each<'_>) -> anyhow::Result<()> {
        let config = &self.run.config;
        let job = GenerateJob {
            model: self.base.model_config(config),
            adapter: self.base.adapter.clone(),
            prompts: rows.iter().map(|row| row.prompt().to_vec()).collect(),
            n_beams: config.eval.n_beams,
            limits: config.rl.clone(),
            batch_size: n_at_once,
        };
        let mut n_generated = 0;
        let mut take = |responses: Vec<GeneratedResponse>| {
            let generations: Vec<Generation> =
                responses.into_iter().enumerate().map(|(index, one)| generation(n_generated + index, one)).collect();
            n_generated += generations.len();
            each(generations)
        };
        generate(self.run, &format!("system {}", self.name), &job, &mut take)
    }
}

/// Runs a generation and passes its responses to `take` as they come. `by` names the model in messages.
///
/// # Errors
/// The model cannot compute, the stop flag was set, or an error of `take`.
pub fn generate(
    run: &Run,
    by: &str,
    job: &GenerateJob,
    take: &mut (dyn FnMut(Vec<GeneratedResponse>) -> anyhow::Result<()> + Send),
) -> anyhow::Result<()> {
    let (metrics, mut taking) = (Mutex::new(NoMetrics), None);
    let lines = Lines(run.reporter.as_ref());
    let callbacks = Callbacks { progress: &lines, metrics: &metrics, stop: interrupt::flag() };
    let mut on_responses = |responses| {
        take(responses).map_err(|error| {
            let message = error.to_string();
            taking.get_or_insert(error);
            CallbackError(message)
        })
    };
    let result = run.executor.run_generate(job, run.config.threads, &mut on_responses, &callbacks);
    match result {
        Ok(()) => Ok(()),
        Err(JobError::Callback(error)) => Err(taking.unwrap_or_else(|| error.into())),
        Err(error) => {
            let is_stop = matches!(&error, JobError::Failed(failure) if failure.kind == FailureKind::Interrupted);
            let error = Err(ending(error));
            if is_stop { error } else { error.with_context(|| by.to_owned()) }
        }
    }
}

fn generation(row_index: usize, response: GeneratedResponse) -> Generation {
    let GeneratedResponse { text, n_tokens, truncated, latency_ms } = response;
    Generation { response: PolicyResponse { row_index, sample_index: 0, text, n_tokens, truncated }, latency_ms }
}

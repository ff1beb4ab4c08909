//! A stage, as a job sees it.

use crate::metrics_log::MetricsLog;
use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, Progress, ScoredResponses};
use querl_core::records::Split;
use querl_device::{Answered, Host, Refused};
use querl_train::Metrics;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard};

/// What takes answers, some at once.
pub(super) type Take<'a> = dyn FnMut(Vec<Answered>) -> anyhow::Result<()> + Send + 'a;

/// What a stage lends to a job. A stage without some of it runs no job that asks for that.
pub(super) struct StageHost<'a> {
    progress: &'a dyn Progress,
    metrics: Option<Mutex<MetricsLog>>,
    /// Of the training and of the validation split.
    environments: Option<[&'a dyn Environment; 2]>,
    answers: Option<Mutex<&'a mut Take<'a>>>,
    refusal: Mutex<Option<anyhow::Error>>,
}

impl<'a> StageHost<'a> {
    pub(super) fn new(progress: &'a dyn Progress) -> Self {
        Self { progress, metrics: None, environments: None, answers: None, refusal: Mutex::new(None) }
    }

    pub(super) fn with_metrics(self, metrics: MetricsLog) -> Self {
        Self { metrics: Some(Mutex::new(metrics)), ..self }
    }

    pub(super) fn with_environments(self, train: &'a dyn Environment, val: &'a dyn Environment) -> Self {
        Self { environments: Some([train, val]), ..self }
    }

    pub(super) fn with_answers(self, take: &'a mut Take<'a>) -> Self {
        Self { answers: Some(Mutex::new(take)), ..self }
    }

    /// Why no more answers were taken.
    pub(super) fn into_refusal(self) -> Option<anyhow::Error> {
        self.refusal.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn metrics(&self) -> io::Result<MutexGuard<'_, MetricsLog>> {
        let log = self.metrics.as_ref().ok_or_else(|| io::Error::other("this job has no figures to keep"))?;
        Ok(log.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    fn environment(&self, split: Split) -> Result<&dyn Environment, EnvironmentError> {
        match (self.environments, split) {
            (Some([train, _]), Split::Train) => Ok(train),
            (Some([_, val]), Split::Val) => Ok(val),
            _ => Err(EnvironmentError::Record(format!("this job has nothing to score of the {} split", split.name()))),
        }
    }
}

impl Progress for StageHost<'_> {
    fn update(&self, n_done: u64, n_total: u64, note: &str) {
        self.progress.update(n_done, n_total, note);
    }

    fn line(&self, text: &str) {
        self.progress.line(text);
    }
}

impl Host for StageHost<'_> {
    fn stop(&self) -> &AtomicBool {
        crate::interrupt::flag()
    }

    fn record(&self, _stage: &str, step: u64, metrics: &Metrics) -> io::Result<()> {
        self.metrics()?.append(step, metrics)
    }

    fn mark_metrics(&self) -> io::Result<u64> {
        self.metrics()?.mark()
    }

    fn rewind_metrics(&self, mark: u64) -> io::Result<()> {
        self.metrics()?.rewind(mark)
    }

    fn score(
        &self,
        split: Split,
        step: u64,
        responses: &[PolicyResponse],
    ) -> Result<ScoredResponses, EnvironmentError> {
        self.environment(split)?.score(step, responses)
    }

    fn mark_episodes(&self, split: Split) -> Result<u64, EnvironmentError> {
        self.environment(split)?.mark()
    }

    fn rewind_episodes(&self, split: Split, mark: u64) -> Result<(), EnvironmentError> {
        self.environment(split)?.rewind(mark)
    }

    fn take(&self, answers: Vec<Answered>) -> Result<(), Refused> {
        let Some(take) = &self.answers else { return Err(Refused("this job has nobody to answer to".into())) };
        let mut take = take.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        take(answers).map_err(|error| {
            let words = error.to_string();
            self.refusal.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(error);
            Refused(words)
        })
    }
}

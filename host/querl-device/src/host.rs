//! What whoever asks for a job gives it: ears for what is said, and answers.

use crate::{Answered, Refused};
use querl_core::ports::{Environment, EnvironmentError, PolicyResponse, Progress, ScoredResponses};
use querl_core::records::Split;
use querl_train::{MetricSink, Metrics};
use std::io;
use std::sync::atomic::AtomicBool;

/// The other side of a job. Called from several threads of the one that does it, at most one call of a kind at once.
pub trait Host: Progress {
    /// Set once the job shall stop at its next safe point; never taken back.
    fn stop(&self) -> &AtomicBool;

    /// Keeps the figures of one step.
    ///
    /// # Errors
    /// As [`MetricSink::record`].
    fn record(&self, stage: &str, step: u64, metrics: &Metrics) -> io::Result<()>;

    /// As [`MetricSink::mark`].
    ///
    /// # Errors
    /// As there.
    fn mark_metrics(&self) -> io::Result<u64>;

    /// As [`MetricSink::rewind`].
    ///
    /// # Errors
    /// As there.
    fn rewind_metrics(&self, mark: u64) -> io::Result<()>;

    /// As [`Environment::score`], for the rows of one split.
    ///
    /// # Errors
    /// As there.
    fn score(&self, split: Split, step: u64, responses: &[PolicyResponse])
    -> Result<ScoredResponses, EnvironmentError>;

    /// As [`Environment::mark`].
    ///
    /// # Errors
    /// As there.
    fn mark_episodes(&self, split: Split) -> Result<u64, EnvironmentError>;

    /// As [`Environment::rewind`].
    ///
    /// # Errors
    /// As there.
    fn rewind_episodes(&self, split: Split, mark: u64) -> Result<(), EnvironmentError>;

    /// Takes the next answers of a generation, in the order of its prompts.
    ///
    /// # Errors
    /// The host wants no more.
    fn take(&self, answers: Vec<Answered>) -> Result<(), Refused>;
}

/// A host as trainers see their log.
pub(crate) struct Figures<'a>(pub(crate) &'a dyn Host);

impl MetricSink for Figures<'_> {
    fn record(&mut self, stage: &str, step: u64, metrics: &Metrics) -> io::Result<()> {
        self.0.record(stage, step, metrics)
    }

    fn mark(&mut self) -> io::Result<u64> {
        self.0.mark_metrics()
    }

    fn rewind(&mut self, mark: u64) -> io::Result<()> {
        self.0.rewind_metrics(mark)
    }
}

/// A host as trainers see their world.
pub(crate) struct World<'a> {
    pub(crate) host: &'a dyn Host,
    pub(crate) split: Split,
}

impl Environment for World<'_> {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        self.host.score(self.split, step, responses)
    }

    fn mark(&self) -> Result<u64, EnvironmentError> {
        self.host.mark_episodes(self.split)
    }

    fn rewind(&self, mark: u64) -> Result<(), EnvironmentError> {
        self.host.rewind_episodes(self.split, mark)
    }
}

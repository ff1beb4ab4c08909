//! The model that a training stage left, answering.

use super::host::{StageHost, Take};
use super::{Base, best, job};
use crate::failure::ending;
use crate::run::Run;
use anyhow::Context;
use querl_core::ports::{PolicyResponse, Progress, Reporter};
use querl_core::records::DatasetRow;
use querl_device::{Answered, Ending, Generating, JobError, Work};
use std::path::{Path, PathBuf};

/// One answer of a model and the time it took.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The answer.
    pub response: PolicyResponse,
    /// Wall-clock time to write it, in milliseconds; `None` where that is no time that a user would wait.
    pub latency_ms: Option<f64>,
}

/// What takes the answers.
pub type Each<'a> = dyn FnMut(Vec<Generation>) -> anyhow::Result<()> + Send + 'a;

/// A model that answers as well as it can: it draws nothing.
pub trait Generator: Sync {
    /// One answer per row, in order, handed to `each` so many at once.
    ///
    /// # Errors
    /// The model cannot compute, the user said stop, or `each` has had enough.
    fn generate(&self, rows: &[DatasetRow], n_at_once: usize, each: &mut Each<'_>) -> anyhow::Result<()>;
}

/// The model that the training stage `name` left in its folder. It is loaded once for all rows that it answers.
pub fn generator<'a>(run: &'a Run, name: &'static str, stage_folder: &Path) -> Box<dyn Generator + 'a> {
    let base = Base::of(run, &best(stage_folder));
    Box::new(Answering { run, base, name })
}

/// What a job says stays on screen; how far it has come shows whoever takes the answers.
pub(super) struct Lines<'a>(pub(super) &'a dyn Reporter);

impl Progress for Lines<'_> {
    fn update(&self, _: u64, _: u64, _: &str) {}

    fn line(&self, text: &str) {
        self.0.message(text);
    }
}

struct Answering<'a> {
    run: &'a Run,
    base: Base,
    name: &'static str,
}

impl Generator for Answering<'_> {
    fn generate(&self, rows: &[DatasetRow], n_at_once: usize, each: &mut Each<'_>) -> anyhow::Result<()> {
        let config = &self.run.config;
        let work = Generating {
            adapter: self.base.adapter.clone(),
            prompts: rows.iter().map(|row| row.prompt().to_vec()).collect(),
            n_beams: config.eval.n_beams,
            limits: config.rl.clone(),
            n_at_once,
        };
        let mut n_answered = 0;
        let mut take = |answers: Vec<Answered>| {
            let generations =
                answers.into_iter().enumerate().map(|(index, answer)| generation(n_answered + index, answer));
            let generations: Vec<Generation> = generations.collect();
            n_answered += generations.len();
            each(generations)
        };
        let by = format!("system {}", self.name);
        answer(self.run, &by, self.base.model.clone(), work, &mut take)
    }
}

/// Answers of the model at `model`, handed to `take` as they come. `by` is who answers, for messages.
///
/// # Errors
/// The model cannot compute, the user said stop, or `take` has had enough.
pub fn answer<'a>(run: &Run, by: &str, model: PathBuf, work: Generating, take: &'a mut Take<'a>) -> anyhow::Result<()> {
    let lines = Lines(run.reporter.as_ref());
    let job = job(run, model, Work::Generate(work));
    let host = StageHost::new(&lines).with_answers(take);
    match run.place.run(&job, &host) {
        Ok(_) => Ok(()),
        Err(JobError::Refused(refused)) => Err(host.into_refusal().unwrap_or_else(|| refused.into())),
        Err(error) => {
            let is_stop = matches!(&error, JobError::Failed(failure) if failure.ending == Ending::Interrupted);
            let error = Err(ending(error));
            if is_stop { error } else { error.with_context(|| by.to_owned()) }
        }
    }
}

fn generation(row_index: usize, answer: Answered) -> Generation {
    let Answered { text, n_tokens, truncated, latency_ms } = answer;
    Generation { response: PolicyResponse { row_index, sample_index: 0, text, n_tokens, truncated }, latency_ms }
}

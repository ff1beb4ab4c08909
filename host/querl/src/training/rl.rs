//! Reinforcement learning, wired.

use super::host::StageHost;
use super::{Base, best, check_prompts, ending, job, other_outcome, prompts};
use crate::metrics_log::MetricsLog;
use crate::run::Run;
use crate::stages::facts::Facts;
use querl_core::ports::{Environment, Progress};
use querl_core::records::{DatasetRow, Split};
use querl_device::{Device, Job, Outcome, Reinforcing, Work};
use querl_model::TextTokenizer;

/// What reinforcement learning learns from and is chosen by.
pub struct RlData<'a> {
    /// Rows of the training split.
    pub train: &'a [DatasetRow],
    /// Scores answers to them.
    pub train_environment: &'a dyn Environment,
    /// Rows of the validation split.
    pub val: &'a [DatasetRow],
    /// Scores answers to them.
    pub val_environment: &'a dyn Environment,
}

/// Optimises the fine-tuned policy against the environment; goes on where an earlier run on the same inputs, of which
/// `fingerprint` is the digest, was stopped.
///
/// # Errors
/// As [`sft`](super::sft), and what the environment reports.
pub fn rl(
    run: &Run,
    data: &RlData<'_>,
    fingerprint: &str,
    metrics: MetricsLog,
    progress: &dyn Progress,
) -> anyhow::Result<Facts> {
    let config = &run.config;
    check_prompts(run, Split::Train, data.train)?;
    check_prompts(run, Split::Val, data.val)?;
    let base = Base::of(run, &best(&run.dir.sft()));
    let tokenizer = TextTokenizer::load(&base.model)?;
    let work = Reinforcing {
        config: config.rl.clone(),
        lora: config.sft.clone(),
        adapter: base.adapter,
        train_prompts: prompts(data.train, &tokenizer)?,
        val_prompts: prompts(data.val, &tokenizer)?,
        fingerprint: Some(fingerprint.to_owned()),
        output_dir: run.dir.rl(),
    };
    // No card generates yet: the stage would end at its first rollout, after a fine-tuning of hours.
    let job = job(run, base.model, Work::Rl(Box::new(work)));
    let devices = if run.place.card().is_some() { vec![Device::Cpu] } else { job.devices };
    let job = Job { devices, ..job };
    if run.place.card().is_some() {
        progress.line("rl is done on the CPU, since answers are not written on a card yet");
    }
    let (train, val) = (data.train_environment, data.val_environment);
    let host = StageHost::new(progress).with_metrics(metrics).with_environments(train, val);
    let Outcome::Rl(summary) = run.place.run(&job, &host).map_err(ending)? else { return Err(other_outcome()) };
    let mut facts = Facts::default();
    facts.add("steps", summary.n_steps).add("episodes", summary.n_episodes);
    facts.add("dropped", summary.dropped.values().sum::<u64>()).add_parts(&summary.dropped);
    facts.add("val reward before", summary.first_val_reward).add("val reward best", summary.best_val_reward);
    facts.add("best step", summary.best_step);
    Ok(facts)
}

//! Reinforcement learning, wired.

use super::host::StageHost;
use super::{Base, add_device, best, check_prompts, job, memory, other_outcome, prompts};
use crate::failure::ending;
use crate::ledger::Facts;
use crate::metrics_log::MetricsLog;
use crate::run::Run;
use querl_core::ports::{Environment, Progress};
use querl_core::records::{DatasetRow, Split};
use querl_device::memory::Stage;
use querl_device::{Outcome, Reinforcing, Work};
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
    let longest_prompt = work.train_prompts.iter().chain(&work.val_prompts).map(Vec::len).max().unwrap_or(0);
    let (rl, lora) = (Box::new(config.rl.clone()), config.sft.clone());
    let asked = memory::asked(config, Stage::Rl { config: rl, lora, longest_prompt })?;
    let job = job(run, base.model, Work::Rl(Box::new(work)));
    memory::check(run.place.card(), &asked, progress)?;
    let (train, val) = (data.train_environment, data.val_environment);
    let host = StageHost::new(progress).with_metrics(metrics).with_environments(train, val);
    let explained = |error| ending(memory::explain(run.place.card(), &asked, error));
    let Outcome::Rl(summary) = run.place.run(&job, &host).map_err(explained)? else { return Err(other_outcome()) };
    let mut facts = Facts::default();
    facts.add("steps", summary.n_steps).add("episodes", summary.n_episodes);
    facts.add("dropped", summary.dropped.values().sum::<u64>()).add_parts(&summary.dropped);
    facts.add("val reward before", summary.first_val_reward).add("val reward best", summary.best_val_reward);
    facts.add("best step", summary.best_step);
    add_device(&mut facts, run);
    Ok(facts)
}

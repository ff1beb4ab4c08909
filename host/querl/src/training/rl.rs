//! Reinforcement learning, wired.

use super::{Base, Sink, best, check_prompts, ending, lora, prompts};
use crate::interrupt;
use crate::metrics_log::MetricsLog;
use crate::run::Run;
use crate::stages::facts::Facts;
use querl_core::ports::{Environment, Progress};
use querl_core::records::{DatasetRow, Split};
use querl_model::{Decoder, LoraAdapter, TextTokenizer, Weights};
use querl_train::rl::{self, RlTask};
use std::path::PathBuf;

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
    let decoder = Decoder::load_as(&base.model, Weights::Frozen, run.config.model.dtype)?;
    let load = |path: &PathBuf| LoraAdapter::load(path, decoder.config());
    let reference = base.adapter.as_ref().map(load).transpose()?;
    let policy = match &base.adapter {
        Some(path) => load(path)?,
        None => LoraAdapter::new(&decoder, lora(config), config.seed)?,
    };
    let (train_prompts, val_prompts) = (prompts(data.train, &tokenizer)?, prompts(data.val, &tokenizer)?);
    let task = RlTask {
        decoder: &decoder,
        base_path: &base.model,
        policy: &policy,
        reference: reference.as_ref(),
        tokenizer: &tokenizer,
        train: rl::RlData { prompts: &train_prompts, environment: data.train_environment },
        val: rl::RlData { prompts: &val_prompts, environment: data.val_environment },
        config: &config.rl,
        tokens_per_pass: config.model.tokens_per_pass,
        gradient_checkpointing: config.model.gradient_checkpointing,
        critic_lora: lora(config),
        seed: config.seed,
        fingerprint: Some(fingerprint),
        output_dir: &run.dir.rl(),
        progress,
        stop: interrupt::flag(),
    };
    let summary = rl::train(&task, &mut Sink(metrics)).map_err(ending)?;
    let mut facts = Facts::default();
    facts.add("steps", summary.n_steps).add("episodes", summary.n_episodes);
    facts.add("dropped", summary.dropped.values().sum::<u64>()).add_parts(&summary.dropped);
    facts.add("val reward before", summary.first_val_reward).add("val reward best", summary.best_val_reward);
    facts.add("best step", summary.best_step);
    Ok(facts)
}

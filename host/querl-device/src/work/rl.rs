//! Reinforcement learning, as a job.

use super::{Rank, Shown, load_adapter, lora};
use crate::host::{Figures, World};
use crate::{Host, JobError, Outcome, Reinforcing};
use querl_core::records::Split;
use querl_model::{LoraAdapter, TextTokenizer, Weights};
use querl_train::rl::{self, RlData, RlTask};

/// Optimises a policy against the host's scores; goes on where an earlier job with the same fingerprint was stopped.
pub(super) fn reinforce(rank: &Rank<'_>, reinforcing: &Reinforcing, host: &dyn Host) -> Result<Outcome, JobError> {
    let tokenizer = TextTokenizer::load(&rank.job.model.path)?;
    let decoder = rank.decoder(Weights::Frozen)?;
    let reference = reinforcing.adapter.as_ref().map(|path| load_adapter(path, &decoder)).transpose()?;
    let policy = match &reinforcing.adapter {
        Some(path) => load_adapter(path, &decoder)?,
        None => LoraAdapter::new(&decoder, lora(&reinforcing.lora), rank.job.seed)?,
    };
    let (train, val) = (World { host, split: Split::Train }, World { host, split: Split::Val });
    let task = RlTask {
        decoder: &decoder,
        base_path: &rank.job.model.path,
        policy: &policy,
        reference: reference.as_ref(),
        tokenizer: &tokenizer,
        train: RlData { prompts: &reinforcing.train_prompts, environment: &train },
        val: RlData { prompts: &reinforcing.val_prompts, environment: &val },
        config: &reinforcing.config,
        tokens_per_pass: rank.job.model.tokens_per_pass,
        gradient_checkpointing: rank.job.model.gradient_checkpointing,
        critic_lora: lora(&reinforcing.lora),
        seed: rank.job.seed,
        mesh: &rank.mesh,
        fingerprint: reinforcing.fingerprint.as_deref(),
        output_dir: &reinforcing.output_dir,
        progress: &Shown(host),
        stop: host.stop(),
    };
    Ok(Outcome::Rl(rl::train(&task, &mut Figures(host))?))
}

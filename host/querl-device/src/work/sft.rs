//! Supervised fine-tuning, as a job.

use super::{Rank, Shown, lora};
use crate::host::Figures;
use crate::{Fitting, Host, JobError, Outcome};
use querl_core::config::TuningMethod;
use querl_model::{LoraAdapter, Weights};
use querl_train::Policy;
use querl_train::sft::{self, SftTask};

/// Fine-tunes; goes on where an earlier job with the same fingerprint was stopped.
pub(super) fn fit(rank: &Rank<'_>, fitting: &Fitting, host: &dyn Host) -> Result<Outcome, JobError> {
    let config = &fitting.config;
    let (decoder, adapter) = match config.method {
        TuningMethod::Lora => {
            let decoder = rank.decoder(Weights::Frozen)?;
            let adapter = LoraAdapter::new(&decoder, lora(config), rank.job.seed)?;
            (decoder, Some(adapter))
        }
        TuningMethod::Full => (rank.decoder(Weights::Trained)?, None),
    };
    let task = SftTask {
        policy: Policy { decoder: &decoder, adapter: adapter.as_ref() },
        base_path: &rank.job.model.path,
        train: &fitting.train,
        val: &fitting.val,
        config,
        tokens_per_pass: rank.job.model.tokens_per_pass,
        gradient_checkpointing: rank.job.model.gradient_checkpointing,
        seed: rank.job.seed,
        mesh: &rank.mesh,
        fingerprint: fitting.fingerprint.as_deref(),
        output_dir: &fitting.output_dir,
        progress: &Shown(host),
        stop: host.stop(),
    };
    Ok(Outcome::Sft(sft::train(&task, &mut Figures(host))?))
}

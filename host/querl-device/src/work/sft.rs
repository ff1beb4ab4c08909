//! Supervised fine-tuning, as a job.

use super::{Shown, decoder, lora};
use crate::host::Figures;
use crate::{Fitting, Host, Job, JobError, Outcome};
use querl_core::config::TuningMethod;
use querl_model::{LoraAdapter, Weights};
use querl_train::Policy;
use querl_train::sft::{self, SftTask};

/// Fine-tunes; goes on where an earlier job with the same fingerprint was stopped.
pub(super) fn fit(job: &Job, fitting: &Fitting, host: &dyn Host) -> Result<Outcome, JobError> {
    let config = &fitting.config;
    let (decoder, adapter) = match config.method {
        TuningMethod::Lora => {
            let decoder = decoder(job, Weights::Frozen)?;
            let adapter = LoraAdapter::new(&decoder, lora(config), job.seed)?;
            (decoder, Some(adapter))
        }
        TuningMethod::Full => (decoder(job, Weights::Trained)?, None),
    };
    let task = SftTask {
        policy: Policy { decoder: &decoder, adapter: adapter.as_ref() },
        base_path: &job.model.path,
        train: &fitting.train,
        val: &fitting.val,
        config,
        tokens_per_pass: job.model.tokens_per_pass,
        gradient_checkpointing: job.model.gradient_checkpointing,
        seed: job.seed,
        fingerprint: fitting.fingerprint.as_deref(),
        output_dir: &fitting.output_dir,
        progress: &Shown(host),
        stop: host.stop(),
    };
    Ok(Outcome::Sft(sft::train(&task, &mut Figures(host))?))
}

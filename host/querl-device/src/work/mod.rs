//! Jobs, done: the model is loaded, the trainer or the engine does the work, the host hears of it.

mod generate;
mod measure;
mod rl;
mod sft;

use crate::{Device, Failure, Host, Job, JobError, Outcome, Share, Work};
use querl_core::config::SftConfig;
use querl_core::ports::Progress;
use querl_model::{Decoder, LoraAdapter, LoraSettings, ModelError, Modules, Place, Weights};
use std::path::Path;

/// Does a job, on a device that this build has.
///
/// # Errors
/// The device is none of this build's, the model cannot be loaded, training or generation fails or is stopped, or the host
/// has had enough.
pub fn do_job(job: &Job, host: &dyn Host) -> Result<Outcome, JobError> {
    if job.share != Share::WHOLE {
        let Share { rank, world_size } = job.share;
        let message =
            format!("a share of a job (rank {rank} of {world_size}) needs several cards, which this build has not");
        return Err(Failure::failed(message).into());
    }
    querl_model::set_threads(job.threads);
    match &job.work {
        Work::Sft(fitting) => sft::fit(job, fitting, host),
        Work::Rl(reinforcing) => rl::reinforce(job, reinforcing, host),
        Work::Generate(generating) => generate::answer(job, generating, host),
        Work::Measure(measuring) => measure::measure(job, measuring, host),
    }
}

/// The shape of new adapters: the policy's, and the critic's beside it.
pub fn lora(sft: &SftConfig) -> LoraSettings {
    LoraSettings {
        use_rslora: sft.use_rslora,
        use_dora: sft.use_dora,
        dropout: sft.lora_dropout,
        target_modules: Modules::from_names(&sft.lora_target_modules),
        ..LoraSettings::all_linear(sft.lora_rank, sft.lora_alpha)
    }
}

/// The base to train on, on the job's device.
fn decoder(job: &Job, weights: Weights) -> Result<Decoder, JobError> {
    Ok(Decoder::load_on(&job.model.path, weights, job.model.dtype, &place(job.device)?)?)
}

/// A device, opened.
fn place(device: Device) -> Result<Place, JobError> {
    match device {
        Device::Cpu => Ok(Place::Cpu),
        #[cfg(feature = "cuda")]
        Device::Cuda(index) => {
            let gpu = querl_model::device::Gpu::new(index).map_err(ModelError::from)?;
            Ok(Place::Card(gpu))
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => {
            Err(Failure::failed(format!("this build of querl has no device {device}; it knows the cpu alone")).into())
        }
    }
}

/// The host's display, as trainers see it.
struct Shown<'a>(&'a dyn Host);

impl Progress for Shown<'_> {
    fn update(&self, n_done: u64, n_total: u64, note: &str) {
        self.0.update(n_done, n_total, note);
    }

    fn line(&self, text: &str) {
        self.0.line(text);
    }
}

/// An adapter where its base stands.
fn load_adapter(path: &Path, decoder: &Decoder) -> Result<LoraAdapter, ModelError> {
    LoraAdapter::load(path, decoder.config())?.on(decoder.place())
}

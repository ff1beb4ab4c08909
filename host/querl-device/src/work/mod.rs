//! Jobs, done: the model is loaded, the trainer or the engine does the work, the host hears of it.

mod generate;
mod measure;
mod rl;
mod sft;
mod together;

use crate::{Device, Ending, Failure, Host, Job, JobError, Outcome, Work};
use querl_core::config::SftConfig;
use querl_core::ports::Progress;
use querl_model::{Decoder, LoraAdapter, LoraSettings, Mesh, ModelError, Modules, Place, Weights};
use std::path::Path;

/// Does a job, on devices that this build has.
///
/// # Errors
/// A device is none of this build's, the model cannot be loaded, training or generation fails or is stopped, or the host
/// has had enough.
pub fn do_job(job: &Job, host: &dyn Host) -> Result<Outcome, JobError> {
    querl_model::set_threads(job.threads);
    let n_devices = job.devices.len();
    if !n_devices.is_multiple_of(job.model.tensor_parallel) {
        let message = format!("{n_devices} devices make no copies of {} each", job.model.tensor_parallel);
        return Err(Failure { ending: Ending::Usage, message }.into());
    }
    match job.devices.as_slice() {
        [] => Err(Failure::failed("the job names no device; this is a fault of querl, please report it").into()),
        [device] => Rank { job, device: *device, mesh: Mesh::alone() }.work(host),
        devices => together::do_together(job, devices, host),
    }
}

/// One rank of a job.
struct Rank<'a> {
    job: &'a Job,
    device: Device,
    mesh: Mesh,
}

impl Rank<'_> {
    /// Does this rank's part of the job.
    fn work(&self, host: &dyn Host) -> Result<Outcome, JobError> {
        match &self.job.work {
            Work::Sft(fitting) => sft::fit(self, fitting, host),
            Work::Rl(reinforcing) => rl::reinforce(self, reinforcing, host),
            Work::Generate(generating) => generate::answer(self, generating, host),
            Work::Measure(_) if self.mesh.all.world_size() > 1 => {
                let message = "a measurement is of one device; name one, such as `cuda:0`".into();
                Err(Failure { ending: Ending::Usage, message }.into())
            }
            Work::Measure(measuring) => measure::measure(self.job, self.device, measuring, host),
        }
    }

    /// The base to train on, on this rank's device.
    fn decoder(&self, weights: Weights) -> Result<Decoder, JobError> {
        let (model, place) = (&self.job.model, place(self.device)?);
        #[cfg(feature = "cuda")]
        if let Place::Card(gpu) = &place {
            for ranks in [&self.mesh.data, &self.mesh.tensor] {
                ranks.connect(gpu).map_err(ModelError::from)?;
            }
        }
        match weights {
            Weights::Frozen => Ok(Decoder::load_part(&model.path, model.dtype, &place, &self.mesh.tensor)?),
            Weights::Trained if self.mesh.is_split() => {
                let message =
                    "full fine-tuning of a model that several devices hold together; set model.tensor_parallel to 1";
                Err(Failure { ending: Ending::Usage, message: message.into() }.into())
            }
            Weights::Trained => Ok(Decoder::load_on(&model.path, weights, model.dtype, &place)?),
        }
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

/// An adapter where its base stands, and of it the part that belongs to the base's.
fn load_adapter(path: &Path, decoder: &Decoder) -> Result<LoraAdapter, ModelError> {
    LoraAdapter::load(path, decoder.config())?.for_decoder(decoder)
}

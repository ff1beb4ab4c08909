//! A measurement, as a job: a model of random weights is made where it stays, and the trainers and the engine work on it.
//!
//! Measured are the calls that the stages make, not copies of them.

mod ceilings;
mod load;
mod operations;
mod ppo;
mod rollout;
mod rows;
mod sft;
mod usage;

use super::place;
use crate::memory::{Asked, Plan, Stage, Types};
use crate::{Device, Ending, Failure, Host, Job, JobError, KernelTime, Measured, Measuring, Outcome, Part};
use querl_model::{Decoder, DecoderConfig, Place};
use querl_train::{MetricSink, Metrics};
use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Makes the model and measures what is asked for. A part that cannot be measured, for want of memory above all, is left out with
/// the reason, and the others are measured; where somebody says stop, what was measured is the result.
pub(super) fn measure(job: &Job, device: Device, measuring: &Measuring, host: &dyn Host) -> Result<Outcome, JobError> {
    let shapes = Measuring::shapes_of(&measuring.shape)?;
    let place = place(device)?;
    let started = Instant::now();
    let decoder = Decoder::random(shapes.clone(), job.seed, job.model.dtype, &place)?;
    wait(&place)?;
    let made_s = started.elapsed().as_secs_f64();
    let mut measured = Measured {
        shape: measuring.shape.clone(),
        device: device_name(&place, device),
        dtype: job.model.dtype.name().into(),
        parameters: shapes.n_parameters() as u64,
        base_bytes: base_bytes(job, device, measuring, &shapes),
        made_s,
        ceilings: None,
        load: None,
        sft: None,
        rollouts: Vec::new(),
        ppo: None,
        left_out: Vec::new(),
    };
    host.line(&format!("{}: {} parameters made in {made_s:.1} s", measured.shape, measured.parameters));
    let bench = Bench { job, device, measuring, host, decoder: &decoder, place: &place };
    for (index, part) in measuring.parts.iter().enumerate() {
        host.update(index as u64, measuring.parts.len() as u64, part.name());
        bench.part(*part, &mut measured);
    }
    Ok(Outcome::Measured(Box::new(measured)))
}

/// What every part works with.
struct Bench<'a> {
    job: &'a Job,
    device: Device,
    measuring: &'a Measuring,
    host: &'a dyn Host,
    decoder: &'a Decoder,
    place: &'a Place,
}

impl Bench<'_> {
    fn part(&self, part: Part, measured: &mut Measured) {
        let done = match self.is_stopped() {
            true => Err(Failure { ending: Ending::Interrupted, message: "stopped before it began".into() }.into()),
            false => self.try_part(part, measured),
        };
        if let Err(error) = done {
            measured.left_out.push(format!("{}: {error}", part.name()));
            self.host.line(&format!("{} is left out: {error}", part.name()));
        }
    }

    fn is_stopped(&self) -> bool {
        self.host.stop().load(Ordering::Relaxed)
    }

    fn try_part(&self, part: Part, measured: &mut Measured) -> Result<(), JobError> {
        if part != Part::Load && measured.ceilings.is_none() {
            measured.ceilings = Some(ceilings::measure(self.place)?);
        }
        let ceilings = measured.ceilings;
        match part {
            Part::Load => measured.load = Some(load::measure(self)?),
            Part::Sft => measured.sft = Some(sft::measure(self, &ceilings.ok_or_else(nothing)?)?),
            Part::Rollout => {
                for n in &self.measuring.sequences {
                    if self.is_stopped() {
                        break;
                    }
                    measured.rollouts.push(rollout::measure(self, *n, &ceilings.ok_or_else(nothing)?)?);
                }
            }
            Part::Ppo => measured.ppo = Some(ppo::measure(self)?),
        }
        Ok(())
    }

    /// Bytes that a stage takes by the plan.
    fn planned(&self, stage: Stage) -> u64 {
        let (shapes, model) = (self.decoder.config().clone(), self.job.model.clone());
        Plan::new(&Asked { shapes, model, stage, types: types(self.device), n_devices: 1 }).total()
    }
}

fn types(device: Device) -> Types {
    if device == Device::Cpu { Types::PROCESSOR } else { Types::CARD }
}

fn base_bytes(job: &Job, device: Device, measuring: &Measuring, shapes: &DecoderConfig) -> u64 {
    let stage = Stage::Sft { config: measuring.sft.clone(), longest_row: 1 };
    let asked = Asked { shapes: shapes.clone(), model: job.model.clone(), stage, types: types(device), n_devices: 1 };
    Plan::new(&asked).base
}

fn nothing() -> JobError {
    Failure::failed("a measurement came to nothing; this is a fault of querl, please report it").into()
}

/// A card's own name; the processor has none that is known everywhere.
fn device_name(place: &Place, device: Device) -> String {
    match place {
        Place::Cpu => device.to_string(),
        #[cfg(feature = "cuda")]
        Place::Card(gpu) => gpu.stream().context().name().unwrap_or_else(|_| device.to_string()),
    }
}

/// Waits until the device has done what was asked of it.
fn wait(place: &Place) -> Result<(), JobError> {
    match place {
        Place::Cpu => Ok(()),
        #[cfg(feature = "cuda")]
        Place::Card(gpu) => Ok(gpu.synchronize().map_err(querl_model::ModelError::from)?),
    }
}

/// Runs `work` once without counting it and `n` times more; seconds of each.
fn times(place: &Place, n: usize, mut work: impl FnMut() -> Result<(), JobError>) -> Result<Vec<f64>, JobError> {
    let mut seconds = Vec::with_capacity(n);
    for index in 0..=n {
        let started = Instant::now();
        work()?;
        wait(place)?;
        if index > 0 {
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    Ok(seconds)
}

/// Does `work` once more and tells how long each kernel took of the card; on the processor nothing is done.
fn kernel_times(place: &Place, work: impl FnOnce() -> Result<(), JobError>) -> Result<Vec<KernelTime>, JobError> {
    match place {
        Place::Cpu => {
            drop(work);
            Ok(Vec::new())
        }
        #[cfg(feature = "cuda")]
        Place::Card(gpu) => {
            let (done, launched) = gpu.traced(work).map_err(querl_model::ModelError::from)?;
            done?;
            let mut times: std::collections::BTreeMap<&str, (u64, f64)> = std::collections::BTreeMap::new();
            for of in launched {
                let (calls, seconds) = times.entry(of.name).or_default();
                (*calls, *seconds) = (*calls + 1, *seconds + f64::from(of.milliseconds) / 1e3);
            }
            let time = |(name, (calls, seconds)): (&str, (u64, f64))| KernelTime { name: name.into(), calls, seconds };
            let mut times: Vec<KernelTime> = times.into_iter().map(time).collect();
            times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
            Ok(times)
        }
    }
}

/// Keeps figures with the time that passed since those before.
struct Kept {
    last: Instant,
    steps: Vec<(f64, Metrics)>,
}

impl Kept {
    fn new() -> Self {
        Self { last: Instant::now(), steps: Vec::new() }
    }
}

impl MetricSink for Kept {
    fn record(&mut self, _stage: &str, _step: u64, metrics: &Metrics) -> io::Result<()> {
        self.steps.push((self.last.elapsed().as_secs_f64(), metrics.clone()));
        self.last = Instant::now();
        Ok(())
    }

    fn mark(&mut self) -> io::Result<u64> {
        Ok(self.steps.len() as u64)
    }

    fn rewind(&mut self, mark: u64) -> io::Result<()> {
        self.steps.truncate(mark as usize);
        self.last = Instant::now();
        Ok(())
    }
}

//! Runs the benchmarks on a model with random weights. They call the code of the stages.

use crate::report::{BenchReport, Benchmark, Ceilings, KernelTime, Lengths, LoadResult, MemoryUse, Spread};
use crate::{rollout, training};
use anyhow::{Result, anyhow, bail};
use querl_core::config::{ModelConfig, RlConfig, SftConfig};
use querl_core::ports::LogMark;
use querl_model::{
    ComputeDevice, DType, Decoder, DecoderConfig, ExportSettings, Repeated, TextTokenizer, Weights, copies,
    matrix_products, small_model, write_random_model,
};
use querl_train::job::memory_plan::{DeviceSizes, MemoryPlan, MemoryRequest, PlannedStage};
use querl_train::{MetricSink, Metrics};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A model on its device, and the settings of the benchmarks.
pub(crate) struct Bench<'a> {
    pub(crate) decoder: &'a Decoder,
    pub(crate) place: &'a ComputeDevice,
    pub(crate) sizes: DeviceSizes,
    pub(crate) model: ModelConfig,
    pub(crate) sft: SftConfig,
    pub(crate) rl: RlConfig,
    pub(crate) lengths: Lengths,
    /// Number of measured repetitions, which follow one warm-up.
    pub(crate) repeats: usize,
    pub(crate) sequences: &'a [usize],
    pub(crate) seed: u64,
    pub(crate) folder: &'a Path,
    pub(crate) stop: &'a AtomicBool,
}

impl Bench<'_> {
    /// Runs a benchmark and adds its result. If it fails, usually out of memory, it is skipped with the reason. After a stop, all following
    /// benchmarks are skipped.
    pub(crate) fn run(&self, benchmark: Benchmark, report: &mut BenchReport) {
        let done = match self.is_stopped() {
            true => Err(anyhow!("stopped before it began")),
            false => self.try_run(benchmark, report),
        };
        if let Err(error) = done {
            eprintln!("{} is skipped: {error:#}", benchmark.name());
            report.left_out.push(format!("{}: {error:#}", benchmark.name()));
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn try_run(&self, benchmark: Benchmark, report: &mut BenchReport) -> Result<()> {
        if benchmark != Benchmark::Load && report.ceilings.is_none() {
            report.ceilings = Some(ceilings(self.place)?);
        }
        let ceilings = || report.ceilings.ok_or_else(no_values);
        match benchmark {
            Benchmark::Load => report.load = Some(self.load()?),
            Benchmark::Sft => report.sft = Some(training::sft(self, &ceilings()?)?),
            Benchmark::Rollout => {
                let ceilings = ceilings()?;
                for n in self.sequences.iter().take_while(|_| !self.is_stopped()) {
                    report.rollouts.push(rollout::measure(self, *n, &ceilings)?);
                }
            }
            Benchmark::Ppo => report.ppo = Some(training::ppo(self)?),
        }
        Ok(())
    }

    /// Writes a checkpoint in bf16 and loads it repeatedly, each time as a second model in addition to the measured one.
    fn load(&self) -> Result<LoadResult> {
        let folder = self.folder.join("checkpoint");
        let settings = ExportSettings { dtype: Some(DType::BF16), max_shard_bytes: ExportSettings::SHARD_BYTES };
        let written = write_random_model(self.decoder.config(), self.seed, &folder, &settings)?;
        let seconds = self.times(self.repeats, || {
            Decoder::load_on(&folder, Weights::Frozen, self.model.dtype, self.place)?;
            Ok(())
        });
        std::fs::remove_dir_all(&folder)?;
        let seconds = Spread::of(&seconds?).ok_or_else(no_values)?;
        Ok(LoadResult { file_bytes: written.n_bytes, seconds, bytes_per_s: seconds.rate(written.n_bytes as f64) })
    }

    /// Runs `work` once as warm-up and `n` more times; returns the seconds of each.
    pub(crate) fn times(&self, n: usize, mut work: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
        let mut seconds = Vec::with_capacity(n);
        for index in 0..=n {
            let started = Instant::now();
            work()?;
            synchronize(self.place)?;
            if index > 0 {
                seconds.push(started.elapsed().as_secs_f64());
            }
        }
        Ok(seconds)
    }

    /// Runs `work` once more and returns the GPU time of each kernel. Does nothing on the CPU.
    pub(crate) fn kernel_times(&self, work: impl FnOnce() -> Result<()>) -> Result<Vec<KernelTime>> {
        match self.place {
            ComputeDevice::Cpu => {
                drop(work);
                Ok(Vec::new())
            }
            ComputeDevice::Accelerator(accelerator) => {
                let (mut work, mut done) = (Some(work), Ok(()));
                let launches = accelerator.trace(&mut || done = work.take().map_or(Ok(()), |work| work()))?;
                done?;
                let mut times: std::collections::BTreeMap<&str, (u64, f64)> = std::collections::BTreeMap::new();
                for launch in launches {
                    let (calls, seconds) = times.entry(launch.name).or_default();
                    (*calls, *seconds) = (*calls + 1, *seconds + f64::from(launch.milliseconds) / 1e3);
                }
                let time =
                    |(name, (calls, seconds)): (&str, (u64, f64))| KernelTime { name: name.into(), calls, seconds };
                let mut times: Vec<KernelTime> = times.into_iter().map(time).collect();
                times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
                Ok(times)
            }
        }
    }

    pub(crate) fn reset_peak_memory(&self) -> Result<()> {
        match self.place {
            // Writing 5 resets the peak of the process (proc_pid_clear_refs(5)). If that is not permitted, the earlier peak remains.
            ComputeDevice::Cpu => drop(std::fs::write("/proc/self/clear_refs", "5")),
            ComputeDevice::Accelerator(accelerator) => accelerator.reset_peak_memory()?,
        }
        Ok(())
    }

    /// Peak memory since [`Bench::reset_peak_memory`], and the plan for `stage`.
    pub(crate) fn memory_use(&self, stage: PlannedStage) -> Result<MemoryUse> {
        let planned_bytes = self.plan(stage).total();
        match self.place {
            ComputeDevice::Cpu => Ok(MemoryUse { planned_bytes, peak_bytes: resident_peak(), non_tensor_bytes: None }),
            ComputeDevice::Accelerator(accelerator) => {
                let memory = accelerator.memory()?;
                let (peak_bytes, non_tensor_bytes) = (Some(memory.peak), Some(memory.other()));
                Ok(MemoryUse { planned_bytes, peak_bytes, non_tensor_bytes })
            }
        }
    }

    fn plan(&self, stage: PlannedStage) -> MemoryPlan {
        plan(self.decoder.config(), &self.model, stage, self.sizes)
    }
}

pub(crate) fn plan(shapes: &DecoderConfig, model: &ModelConfig, stage: PlannedStage, types: DeviceSizes) -> MemoryPlan {
    let (shapes, model) = (shapes.clone(), model.clone());
    MemoryPlan::new(&MemoryRequest { shapes, model, stage, types, n_devices: 1 })
}

fn ceilings(place: &ComputeDevice) -> Result<Ceilings> {
    let rate = |repeated: &Repeated, amount: f64| -> Result<Spread> {
        Ok(Spread::of(&repeated.seconds).ok_or_else(no_values)?.rate(amount))
    };
    let (products, copies) = (matrix_products(place)?, copies(place)?);
    Ok(Ceilings {
        matrix: rate(&products, 2.0 * (products.size as f64).powi(3))?,
        matrix_size: products.size,
        copy: rate(&copies, 2.0 * copies.size as f64)?,
        copied_bytes: copies.size as u64,
    })
}

pub(crate) fn no_values() -> anyhow::Error {
    anyhow!("a measurement has no values; internal error, please report it")
}

/// Opens the device; `auto` is a GPU if this build has CUDA, otherwise the CPU. Returns it with its names in settings and in reports.
///
/// # Errors
/// The name is unknown, or this build has no such device.
pub(crate) fn open_device(name: &str) -> Result<(ComputeDevice, String)> {
    let has_gpus = querl_cuda::install();
    match name {
        "cpu" => Ok((ComputeDevice::Cpu, "cpu".into())),
        "auto" if !has_gpus => Ok((ComputeDevice::Cpu, "cpu".into())),
        _ if name == "auto" || name.starts_with("cuda:") => {
            if !has_gpus {
                bail!("device is {name:?}; this build of querl-bench has no CUDA: build it with --features cuda");
            }
            let gpu = ComputeDevice::open_gpu(name.strip_prefix("cuda:").unwrap_or("0").parse()?)?;
            let product = match &gpu {
                ComputeDevice::Accelerator(accelerator) => accelerator.name(),
                ComputeDevice::Cpu => None,
            };
            Ok((gpu, product.unwrap_or_else(|| name.to_owned())))
        }
        _ => bail!("device is {name:?}; expected cpu, cuda:N or auto"),
    }
}

pub(crate) fn synchronize(place: &ComputeDevice) -> Result<()> {
    Ok(place.synchronize()?)
}

/// Free memory of a GPU; `None` on the CPU.
pub(crate) fn free_bytes(place: &ComputeDevice) -> Result<Option<u64>> {
    match place {
        ComputeDevice::Cpu => Ok(None),
        ComputeDevice::Accelerator(accelerator) => Ok(Some(accelerator.memory()?.free)),
    }
}

/// Linux only.
fn resident_peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kibibytes| kibibytes << 10)
}

/// A tokenizer with few tokens: it has end-of-sequence, and most tokens have no text.
pub(crate) fn tokenizer(folder: &Path) -> Result<TextTokenizer> {
    let shape = small_model::Shape {
        hidden_size: 16,
        intermediate_size: 16,
        n_layers: 1,
        n_heads: 1,
        n_kv_heads: 1,
        head_dim: 16,
        max_positions: 64,
    };
    small_model::write_files(folder, &["measured".to_owned()], 300, &shape)?;
    Ok(TextTokenizer::load(folder)?)
}

/// A metric sink that records the seconds since the previous record.
pub(crate) struct StepTimes(pub(crate) Vec<(f64, Metrics)>, Instant);

impl StepTimes {
    pub(crate) fn new() -> Self {
        Self(Vec::new(), Instant::now())
    }
}

impl MetricSink for StepTimes {
    fn record(&mut self, _stage: &str, _step: u64, metrics: &Metrics) -> io::Result<()> {
        self.0.push((self.1.elapsed().as_secs_f64(), metrics.clone()));
        self.1 = Instant::now();
        Ok(())
    }

    fn mark(&mut self) -> io::Result<LogMark> {
        Ok(LogMark { length: self.0.len() as u64, crc32c: None })
    }

    fn rewind(&mut self, mark: LogMark) -> io::Result<Option<String>> {
        self.0.truncate(mark.length as usize);
        self.1 = Instant::now();
        Ok(None)
    }
}

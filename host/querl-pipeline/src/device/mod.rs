//! The executor of jobs: this process on the CPU, or the library `libquerl_cuda` on GPUs.
//!
//! Driver and library are opened at run time: a program linked with either would not start on a machine without it.

mod driver;

pub use driver::{DeviceUnavailable, Driver, Gpu, OpenedLibrary, Probe, open_library, version_name};

use crate::failure::Stop;
use querl_core::config::{Config, DeviceSetting, ModelConfig, SftConfig};
use querl_core::ports::Progress;
use querl_model::{DecoderConfig, GpuUse};
use querl_train::job::interface::Description;
use querl_train::job::memory_plan::DeviceSizes;
use querl_train::job::{
    self, Callbacks, Device, Environments, GenerateJob, JobError, Resources, ResponseCallback, RlJob, SftJob,
};
use querl_train::rl::RlSummary;
use querl_train::sft::SftSummary;
use std::path::Path;
use std::sync::Mutex;

#[derive(Debug)]
pub(crate) struct Executor {
    backend: Backend,
    n_ranks: usize,
    /// The device that `auto` has chosen and why; reported before the first job.
    choice: Mutex<Option<String>>,
}

#[derive(Debug)]
enum Backend {
    InProcess,
    LibraryOnCpu(OpenedLibrary),
    Gpus(OpenedLibrary, Vec<UsedGpu>),
}

/// Settings of a job that a GPU may not support.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceRequirements<'a> {
    pub model: &'a ModelConfig,
    pub sft: &'a SftConfig,
    /// Attention shape of the model; `None` if the model is not downloaded yet.
    pub attention: Option<AttentionShape>,
    pub gpu_use: GpuUse,
}

/// Properties of a model's attention that a GPU may not support.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionShape {
    pub head_dim: usize,
    pub has_sliding_windows: bool,
}

impl<'a> DeviceRequirements<'a> {
    fn of(config: &'a Config, gpu_use: GpuUse) -> Result<Self, Stop> {
        let path = config.model.path.join("config.json");
        let attention = path.is_file().then(|| AttentionShape::of(&config.model.path)).transpose()?;
        Ok(Self { model: &config.model, sft: &config.sft, attention, gpu_use })
    }
}

impl AttentionShape {
    fn of(folder: &Path) -> Result<Self, Stop> {
        let shapes = DecoderConfig::load(&folder.join("config.json")).map_err(Stop::usage)?;
        Ok(Self { head_dim: shapes.head_dim, has_sliding_windows: !shapes.sliding_windows.is_empty() })
    }

    /// `key` names the model.
    fn check(self, key: &str, gpu_use: GpuUse) -> Result<(), DeviceUnavailable> {
        if self.has_sliding_windows {
            return Err(DeviceUnavailable(format!(
                "{key} names a model with a sliding window in its attention; a GPU computes full attention alone"
            )));
        }
        querl_model::ComputeDevice::check_gpu_head_dim(self.head_dim, gpu_use)
            .map_err(|error| DeviceUnavailable(format!("{key} names {error}")))
    }
}

#[derive(Debug)]
pub(crate) struct UsedGpu {
    pub index: usize,
    pub gpu: Gpu,
    pub free_bytes: Option<u64>,
}

impl Executor {
    pub(crate) fn in_process() -> Self {
        Self { backend: Backend::InProcess, n_ranks: 1, choice: Mutex::new(None) }
    }

    /// Chooses the executor for a checked configuration. `gpu_use`: what the GPU is used for in the stages that run.
    pub(crate) fn choose(config: &Config, gpu_use: GpuUse) -> Result<Self, Stop> {
        Self::of(&config.device, &DeviceRequirements::of(config, gpu_use)?)
    }

    pub(crate) fn of(name: &str, needs: &DeviceRequirements<'_>) -> Result<Self, Stop> {
        let (is_named, indices) = match DeviceSetting::from_name(name).unwrap_or(DeviceSetting::Auto) {
            DeviceSetting::Cpu { n_ranks } => return Ok(Self { n_ranks, ..Self::in_process() }),
            DeviceSetting::Auto => (false, vec![0]),
            DeviceSetting::Cuda(indices) => (true, indices),
        };
        match gpu_backend(&indices, needs) {
            Ok(backend) => {
                let n_ranks = indices.len();
                let executor = Self { backend, n_ranks, choice: Mutex::new(None) };
                let choice = (!is_named).then(|| format!("device: {}", executor.name()));
                Ok(Self { choice: Mutex::new(choice), ..executor })
            }
            Err(missing) if is_named => Err(refused(name, &missing)),
            Err(missing) => {
                let choice = format!("device: the CPU, since {missing}");
                Ok(Self { choice: Mutex::new(Some(choice)), ..Self::in_process() })
            }
        }
    }

    /// Checks that the GPU, if one is used, can generate with the model in `folder`, which the configuration key `key` names.
    pub(crate) fn check_answers_of(&self, key: &str, folder: &Path) -> Result<(), Stop> {
        if self.gpu().is_none() {
            return Ok(());
        }
        let checked = AttentionShape::of(folder)?.check(key, GpuUse::Generation);
        checked.map_err(|missing| Stop::usage(format!("{missing}; set device to \"cpu\"")))
    }

    pub(crate) fn name(&self) -> String {
        match &self.backend {
            Backend::InProcess if self.n_ranks > 1 => format!("{} ranks on the CPU", self.n_ranks),
            Backend::InProcess => Device::Cpu.to_string(),
            Backend::LibraryOnCpu(_) => "the CPU of libquerl_cuda".into(),
            Backend::Gpus(_, used) => {
                let indices: Vec<String> = used.iter().map(|used| used.index.to_string()).collect();
                format!("cuda:{}, {}", indices.join(","), used[0].gpu.name)
            }
        }
    }

    pub(crate) fn devices(&self) -> Vec<Device> {
        match &self.backend {
            Backend::Gpus(_, used) => used.iter().map(|used| Device::Cuda(used.index)).collect(),
            Backend::InProcess | Backend::LibraryOnCpu(_) => vec![Device::Cpu; self.n_ranks],
        }
    }

    /// The GPU with the least free memory of those in use; `None` on the CPU.
    pub(crate) fn gpu(&self) -> Option<&UsedGpu> {
        match &self.backend {
            Backend::Gpus(_, used) => used.iter().min_by_key(|used| used.free_bytes.unwrap_or(used.gpu.memory_bytes)),
            Backend::InProcess | Backend::LibraryOnCpu(_) => None,
        }
    }

    /// Properties that affect the last bits of training results, for fingerprints: compute capability, CUDA version, kernels, number of
    /// ranks. `None` for one rank on the CPU, which computes the same bits in the program and in the library.
    pub(crate) fn arithmetic(&self) -> Option<String> {
        let device = match &self.backend {
            Backend::InProcess | Backend::LibraryOnCpu(_) => (self.n_ranks > 1).then(|| "cpu".to_owned())?,
            Backend::Gpus(library, used) => arithmetic_of(library.library.description(), used[0].gpu.capability),
        };
        Some(if self.n_ranks > 1 { format!("{device}, {} ranks", self.n_ranks) } else { device })
    }

    pub(crate) fn run_sft(
        &self,
        job: &SftJob,
        threads: usize,
        callbacks: &Callbacks<'_>,
    ) -> Result<SftSummary, JobError> {
        let resources = self.resources(threads, callbacks.progress);
        match self.library() {
            None => job::run_sft(job, &resources, callbacks),
            Some(library) => library.run_sft(job, &resources, callbacks),
        }
    }

    pub(crate) fn run_rl(
        &self,
        job: &RlJob,
        threads: usize,
        environments: &Environments<'_>,
        callbacks: &Callbacks<'_>,
    ) -> Result<RlSummary, JobError> {
        let resources = self.resources(threads, callbacks.progress);
        match self.library() {
            None => job::run_rl(job, &resources, environments, callbacks),
            Some(library) => library.run_rl(job, &resources, environments, callbacks),
        }
    }

    pub(crate) fn run_generate(
        &self,
        job: &GenerateJob,
        threads: usize,
        on_responses: &mut ResponseCallback<'_>,
        callbacks: &Callbacks<'_>,
    ) -> Result<(), JobError> {
        let resources = self.resources(threads, callbacks.progress);
        match self.library() {
            None => job::run_generate(job, &resources, on_responses, callbacks),
            Some(library) => library.run_generate(job, &resources, on_responses, callbacks),
        }
    }

    /// Devices and threads of a job. The first time, reports what `auto` has chosen.
    fn resources(&self, threads: usize, progress: &dyn Progress) -> Resources {
        let choice = self.choice.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        choice.into_iter().for_each(|line| progress.line(&line));
        Resources { devices: self.devices(), threads }
    }

    fn library(&self) -> Option<&job::Library> {
        match &self.backend {
            Backend::InProcess => None,
            Backend::LibraryOnCpu(opened) | Backend::Gpus(opened, _) => Some(&opened.library),
        }
    }
}

/// The fingerprint text of the arithmetic of one GPU with this compute capability.
fn arithmetic_of(Description { cuda, kernels, .. }: &Description, capability: u32) -> String {
    let cuda = cuda.map(version_name).unwrap_or_default();
    format!("cuda {cuda}, capability {capability}, kernels {kernels}")
}

/// NCCL's version, such as `2.28.9`.
///
/// # Errors
/// NCCL cannot be opened, or is older than required.
pub fn nccl() -> Result<String, DeviceUnavailable> {
    querl_model::nccl_version().map_err(|error| DeviceUnavailable(error.to_string()))
}

/// Set in tests: jobs run in the library on its CPU, without a driver.
const ON_CPU: &str = "QUERL_CUDA_ON_CPU";

/// Checks the settings that GPUs do not support, for a configuration that names GPUs, on any machine.
///
/// # Errors
/// A setting is not supported on GPUs.
pub fn check_named(config: &Config) -> Result<(), Stop> {
    match DeviceSetting::from_name(&config.device) {
        Some(DeviceSetting::Cuda(_)) => {
            let needs = DeviceRequirements::of(config, GpuUse::Generation)?;
            check_settings(&needs).map_err(|missing| refused(&config.device, &missing))
        }
        _ => Ok(()),
    }
}

fn refused(name: &str, missing: &DeviceUnavailable) -> Stop {
    Stop::usage(format!("device is {name:?}, which cannot be used: {missing}; \"cpu\" and \"auto\" do without"))
}

fn gpu_backend(indices: &[usize], needs: &DeviceRequirements<'_>) -> Result<Backend, DeviceUnavailable> {
    if std::env::var_os(ON_CPU).is_some() {
        return open_library().map(Backend::LibraryOnCpu);
    }
    let driver = Probe::open().driver()?;
    let used = |&index: &usize| {
        let gpu = driver.gpus.get(index).cloned().ok_or_else(|| no_such_gpu(&driver, index))?;
        Ok(UsedGpu { index, gpu, free_bytes: driver.free_bytes(index).ok() })
    };
    let used = indices.iter().map(used).collect::<Result<Vec<_>, DeviceUnavailable>>()?;
    check_alike(&used)?;
    let library = open_library()?;
    check_fit(driver.cuda, &used[0].gpu, library.library.description())?;
    check_settings(needs)?;
    Ok(Backend::Gpus(library, used))
}

/// GPUs that share work must compute the same bits: otherwise the weights of the ranks drift apart.
fn check_alike(used: &[UsedGpu]) -> Result<(), DeviceUnavailable> {
    let first = &used[0];
    let Some(other) = used.iter().find(|other| other.gpu.capability != first.gpu.capability) else { return Ok(()) };
    let named = |used: &UsedGpu| {
        let (index, capability) = (used.index, capability_name(used.gpu.capability));
        format!("cuda:{index} ({}) has compute capability {capability}", used.gpu.name)
    };
    Err(DeviceUnavailable(format!("{} and {}; GPUs that share work must be alike", named(first), named(other))))
}

/// Rejects settings that only the CPU supports.
fn check_settings(
    &DeviceRequirements { model, sft, attention, gpu_use }: &DeviceRequirements<'_>,
) -> Result<(), DeviceUnavailable> {
    let storages = DeviceSizes::GPU.storages;
    if !storages.contains(&model.dtype) {
        let names: Vec<&str> = storages.iter().map(|dtype| dtype.name()).collect();
        let (found, expected) = (model.dtype.name(), names.join(" or "));
        return Err(DeviceUnavailable(format!(
            "model.dtype is {found:?} and a GPU stores a frozen base as {expected}; set it to one of these"
        )));
    }
    if sft.use_dora && sft.lora_dropout > 0.0 {
        return Err(DeviceUnavailable(
            "sft.use_dora is true and sft.lora_dropout above 0, which together the CPU alone can do; set sft.lora_dropout = 0 or sft.use_dora = false".into(),
        ));
    }
    attention.map_or(Ok(()), |attention| attention.check("model.path", gpu_use))
}

fn no_such_gpu(driver: &Driver, index: usize) -> DeviceUnavailable {
    let n_gpus = driver.gpus.len();
    DeviceUnavailable(format!(
        "the driver sees {n_gpus} GPU(s), cuda:0 to cuda:{}, and none is cuda:{index}",
        n_gpus - 1
    ))
}

/// Checks that the library's code runs on a GPU whose driver supports CUDA version `driver_cuda`.
///
/// # Errors
/// The driver is too old for the library, or the library has no kernels for the GPU.
pub fn check_fit(driver_cuda: u32, gpu: &Gpu, library: &Description) -> Result<(), DeviceUnavailable> {
    let Some(cuda) = library.cuda else {
        return Err(DeviceUnavailable(
            "libquerl_cuda was built without CUDA; build it with host/querl-gpu/build.sh".into(),
        ));
    };
    // Within one major version, an older driver can run code that was compiled by a newer CUDA.
    if driver_cuda / 1000 < cuda / 1000 {
        let (has, needs) = (version_name(driver_cuda), version_name(cuda));
        return Err(DeviceUnavailable(format!(
            "the driver supports CUDA {has} and libquerl_cuda was built with CUDA {needs}; update the driver, or build the library with CUDA {}",
            driver_cuda / 1000
        )));
    }
    match library.capabilities.iter().min() {
        Some(&least) if gpu.capability < least => Err(DeviceUnavailable(format!(
            "{} has compute capability {}; expected {} or newer",
            gpu.name,
            capability_name(gpu.capability),
            capability_name(least)
        ))),
        _ => Ok(()),
    }
}

/// Formats a compute capability: 90 as `9.0`.
pub fn capability_name(capability: u32) -> String {
    format!("{}.{}", capability / 10, capability % 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::config::{BaseDtype, TuningMethod};

    fn model(dtype: BaseDtype) -> ModelConfig {
        serde_json::from_value(serde_json::json!({"path": "model", "dtype": dtype})).unwrap()
    }

    #[test]
    fn settings_that_gpus_do_not_support_are_named() {
        let refusal = |dtype, sft: SftConfig| {
            let attention = Some(AttentionShape { head_dim: 64, has_sliding_windows: false });
            let needs = DeviceRequirements { model: &model(dtype), sft: &sft, attention, gpu_use: GpuUse::Generation };
            check_settings(&needs).map_err(|missing| missing.0)
        };
        let plain = SftConfig::default();
        assert_eq!(refusal(BaseDtype::Bf16, plain.clone()), Ok(()));
        let of_dtype = "model.dtype is \"f32\" and a GPU stores a frozen base as bf16 or int8 or fp8 or nf4; set it to one of these";
        assert_eq!(refusal(BaseDtype::F32, plain.clone()), Err(of_dtype.into()));
        let full = SftConfig { method: TuningMethod::Full, ..plain.clone() };
        let dora = SftConfig { use_dora: true, ..plain.clone() };
        let dropout = SftConfig { lora_dropout: 0.1, ..plain };
        for sft in [full, dora, dropout.clone()] {
            assert_eq!(refusal(BaseDtype::Nf4, sft), Ok(()));
        }
        let both = SftConfig { use_dora: true, ..dropout };
        let refused = refusal(BaseDtype::Bf16, both).unwrap_err();
        assert!(refused.starts_with("sft.use_dora is true and sft.lora_dropout above 0"), "{refused}");
    }

    /// Regression: a model was fine-tuned for hours, and its first generation failed.
    #[test]
    fn attention_without_gpu_kernels_is_rejected_before_any_stage() {
        let refusal_of = |attention, gpu_use| {
            let (model, sft) = (model(BaseDtype::Bf16), SftConfig::default());
            let needs = DeviceRequirements { model: &model, sft: &sft, attention: Some(attention), gpu_use };
            check_settings(&needs).map_err(|missing| missing.0)
        };
        let refusal = |head_dim, gpu_use| refusal_of(AttentionShape { head_dim, has_sliding_windows: false }, gpu_use);
        let windows = AttentionShape { head_dim: 64, has_sliding_windows: true };
        let message =
            "model.path names a model with a sliding window in its attention; a GPU computes full attention alone";
        assert_eq!(refusal_of(windows, GpuUse::Training), Err(message.into()));
        for head_dim in [8, 64, 120, 128] {
            assert_eq!(refusal(head_dim, GpuUse::Generation), Ok(()));
        }
        assert_eq!(refusal(20, GpuUse::Training), Ok(()));
        let odd = "model.path names a model with attention heads of size 20; a GPU generates with head sizes that are a multiple of 8, up to 128";
        assert_eq!(refusal(20, GpuUse::Generation), Err(odd.into()));
        let wide = "model.path names a model with attention heads of size 256; a GPU trains head sizes up to 128";
        assert_eq!(refusal(256, GpuUse::Training), Err(wide.into()));
        assert!(refusal(256, GpuUse::Generation).is_err());
    }

    #[test]
    fn gpus_of_two_kinds_do_not_share_work() {
        let used = |index, name: &str, capability| {
            let gpu = Gpu { name: name.into(), memory_bytes: 1 << 30, capability };
            UsedGpu { index, gpu, free_bytes: None }
        };
        let refusal = |used: &[UsedGpu]| check_alike(used).map_err(|missing| missing.0);
        assert_eq!(refusal(&[used(0, "H100", 90), used(3, "H200", 90)]), Ok(()));
        let sentence = "cuda:0 (H100) has compute capability 9.0 and cuda:1 (A100) has compute capability 8.0; GPUs that share \
                        work must be alike";
        assert_eq!(refusal(&[used(0, "H100", 90), used(1, "A100", 80)]), Err(sentence.into()));
    }

    fn described(cuda: Option<u32>, kernels: &str) -> Description {
        Description { version: "0.1.0".into(), cuda, capabilities: vec![80, 86, 90], kernels: kernels.into() }
    }

    /// Symptom: a training was stopped with one kernel and resumed with another one that gives different last bits.
    #[test]
    fn other_kernels_are_other_arithmetic() {
        let of = |kernels| arithmetic_of(&described(Some(13_000), kernels), 90);
        assert_eq!(of("aa"), "cuda 13.0, capability 90, kernels aa");
        assert_ne!(of("aa"), of("bb"));
    }

    #[test]
    fn a_library_must_fit_the_gpu_and_its_driver() {
        let description = |cuda| described(cuda, "");
        let gpu = |capability| Gpu { name: "A GPU".into(), memory_bytes: 1 << 30, capability };
        let refusal = |driver_cuda, capability, cuda| {
            check_fit(driver_cuda, &gpu(capability), &description(cuda)).map_err(|missing| missing.0)
        };
        assert_eq!(refusal(13_000, 90, Some(13_010)), Ok(()));
        assert_eq!(refusal(13_000, 120, Some(13_000)), Ok(()));
        let older = "the driver supports CUDA 12.8 and libquerl_cuda was built with CUDA 13.0; update the driver, or build the \
                     library with CUDA 12";
        assert_eq!(refusal(12_080, 90, Some(13_000)), Err(older.into()));
        let small = "A GPU has compute capability 7.5; expected 8.0 or newer";
        assert_eq!(refusal(13_000, 75, Some(13_000)), Err(small.into()));
        assert!(refusal(13_000, 90, None).unwrap_err().contains("built without CUDA"));
    }
}

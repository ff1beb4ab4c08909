//! Extension point for devices other than the CPU: memory, kernels, communication and the optimizer.
//!
//! This crate computes on the CPU alone. A crate that drives another device implements [`Accelerator`], and for transformer layers
//! and decoding [`crate::backend::LayerAccelerator`] and [`crate::backend::DecodePolicy`], and calls
//! [`crate::install_accelerators`]; operations then find the accelerator of a tensor by the tensor's device.

use crate::Ranks;
use candle_core::{DType, Device, Result, Tensor, bail};
use querl_core::config::BaseDtype;
use std::any::Any;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// State of a backend on its device, such as a RoPE table; this crate only stores it and passes it back.
pub type DeviceState = Arc<dyn Any + Send + Sync>;

/// One device with its kernels. Every operation is asynchronous unless it returns values to the host.
///
/// # Errors
/// Methods fail if the device is out of memory, or if earlier work on it failed.
pub trait Accelerator: Send + Sync {
    /// The candle device that holds this accelerator's tensors.
    fn device(&self) -> Device;
    /// The product name, such as `NVIDIA H100`.
    fn name(&self) -> Option<String>;
    /// Waits for all work that was submitted.
    #[allow(missing_docs)]
    fn synchronize(&self) -> Result<()>;

    /// Stores a frozen weight in the format of `dtype`.
    #[allow(missing_docs)]
    fn upload_weight(&self, values: WeightValues<'_>, dtype: BaseDtype) -> Result<Arc<dyn AcceleratorWeight>>;

    /// RMSNorm with gradients; see [`crate::kernels::rms_norm()`].
    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor>;
    /// Linear layer with a trained weight, with gradients; see [`crate::kernels::trained_linear`].
    fn trained_linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// Log-probabilities and entropies with a trained head `(V, H)`; see [`crate::kernels::token_logprobs`].
    fn trained_token_logprobs(
        &self,
        hidden: &Tensor,
        head: &Tensor,
        targets: &[u32],
        temperature: f64,
    ) -> Result<Tensor>;
    /// See [`crate::kernels::select_rows`].
    fn select_rows(&self, x: &Tensor, rows: Vec<u32>) -> Result<Tensor>;

    /// Sum of a tensor over ranks; a collective operation.
    fn all_reduce(&self, ranks: &Ranks, tensor: &Tensor) -> Result<Tensor>;
    /// Creates the communicator of `ranks` before a model takes the device's memory; a collective operation.
    fn connect(&self, ranks: &Ranks) -> Result<()>;
    /// Waits until submitted work is done on all ranks, so that results of all-reduces are complete; a collective operation.
    fn settle(&self, ranks: &Ranks) -> Result<()>;

    /// Global L2 norm of all gradients times `scale`, and `scale` times the factor of clipping to `max_norm` (`None`: no clipping).
    fn gradient_norm(&self, gradients: &[Tensor], scale: f32, max_norm: Option<f32>) -> Result<GradientNorm>;
    /// A [`GradientNorm`] from a norm and a scale that the host has computed.
    fn known_norm(&self, norm: f32, scale: f32) -> Result<GradientNorm>;
    /// One AdamW step on all tensors in place, with gradients times the scale in `norm`.
    fn adamw(&self, tensors: &[AdamWTensors<'_>], step: AdamWStep, norm: Option<&GradientNorm>) -> Result<()>;

    /// Device memory in use, after waiting for submitted work.
    fn memory(&self) -> Result<DeviceMemory>;
    /// Resets [`DeviceMemory::peak`] to the memory in use now.
    fn reset_peak_memory(&self) -> Result<()>;
    /// Runs `work` and returns its kernel launches in order.
    fn trace(&self, work: &mut dyn FnMut()) -> Result<Vec<KernelLaunch>>;
    /// For benchmarks: each call multiplies two square bf16 matrices of `size` rows with f32 accumulation, and waits for the result.
    fn matrix_product(&self, size: usize) -> Result<Box<dyn FnMut() -> Result<()> + '_>>;
    /// For benchmarks: each call copies `n_bytes` within device memory, and waits for the result.
    fn memory_copy(&self, n_bytes: usize) -> Result<Box<dyn FnMut() -> Result<()> + '_>>;
}

/// A frozen weight `(out, in)` in device memory.
pub trait AcceleratorWeight: Any + Send + Sync {
    /// Shape of the weight: number of outputs and of inputs.
    fn dims(&self) -> (usize, usize);
    /// See [`crate::kernels::frozen_linear`].
    fn linear(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// Log-probabilities and entropies with this weight as the head; see [`crate::kernels::token_logprobs`].
    fn token_logprobs(&self, hidden: &Tensor, targets: &[u32], temperature: f64) -> Result<Tensor>;
    /// Rows `ids` of the weight: `(ids, in)` f32.
    fn rows(&self, ids: &[u32]) -> Result<Tensor>;
    /// All values, `(out, in)` f32.
    fn to_tensor(&self) -> Result<Tensor>;
}

/// Values of a weight `(out, in)` before they are stored on a device.
pub enum WeightValues<'a> {
    /// Little-endian floats as a file stores them, row-major.
    Bytes {
        /// Bytes of all values.
        bytes: Cow<'a, [u8]>,
        /// Type of the values: f32, bf16 or f16.
        dtype: DType,
        /// Shape of the weight: number of outputs and of inputs.
        dims: (usize, usize),
    },
    /// A tensor on the CPU.
    Tensor(Tensor),
    /// Normally distributed values that depend on seed and index alone; see [`crate::backend::normal_part`].
    Random {
        /// Range of the full weight's rows that is stored.
        rows: Range<usize>,
        /// Range of the full weight's columns that is stored.
        columns: Range<usize>,
        /// Number of columns of the full weight.
        width: usize,
        /// Seed of this weight's values.
        seed: u64,
        /// Standard deviation of the values.
        deviation: f32,
    },
}

/// A trained f32 tensor with its gradient and AdamW moments, all of the same shape and on the same device.
pub struct AdamWTensors<'a> {
    /// Parameter values, updated in place.
    pub values: &'a Tensor,
    /// Gradient before clipping.
    pub gradient: &'a Tensor,
    /// First moments (running mean of gradients), updated in place.
    pub first: &'a Tensor,
    /// Second moments (running mean of squared gradients), updated in place.
    pub second: &'a Tensor,
    /// Factor of weight decay on the values, `1 - learning_rate * weight_decay`; 1 for vectors, which are not decayed.
    pub decay: f32,
}

/// Coefficients of one AdamW step for all tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Learning rate divided by the bias correction of the first moment.
    pub step_size: f32,
    /// Factor on the square root of the second moment: its bias correction.
    pub correction: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// Epsilon, added to the square root of the second moment.
    pub eps: f32,
}

/// Global L2 norm of gradients and the factor to multiply them by, on the host and in device memory.
#[derive(Clone)]
pub struct GradientNorm {
    /// L2 norm before clipping.
    pub norm: f32,
    /// Factor on gradients, clipping included.
    pub scale: f32,
    /// Norm and factor in device memory, where kernels read them.
    pub on_device: DeviceState,
}

/// Memory use of a device in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Peak memory of this process's tensors since [`Accelerator::reset_peak_memory`].
    pub peak: u64,
    /// Memory reserved for tensors of this process, in use or not.
    pub reserved: u64,
    #[allow(missing_docs)]
    pub free: u64,
    #[allow(missing_docs)]
    pub total: u64,
}

impl DeviceMemory {
    /// Memory in use by anything but tensors of this process: its context, libraries and kernels, and other processes.
    pub fn other(&self) -> u64 {
        self.total.saturating_sub(self.free).saturating_sub(self.reserved)
    }
}

/// A kernel launch, or a matrix product of the vendor's library under the name `product`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelLaunch {
    /// Name of the kernel, or `product`.
    pub name: &'static str,
    /// Time on the device from start to end of the launch.
    pub milliseconds: f32,
}

/// The accelerators of one kind on this machine.
pub trait Accelerators: Send + Sync {
    /// Opens the device with this index.
    ///
    /// # Errors
    /// There is no such device, or it cannot be used.
    fn open(&self, index: usize) -> Result<Arc<dyn Accelerator>>;
    /// The open accelerator that holds tensors of `device`.
    ///
    /// # Errors
    /// The accelerator is not open.
    fn of(&self, device: &Device) -> Result<Arc<dyn Accelerator>>;
}

static INSTALLED: OnceLock<&'static dyn Accelerators> = OnceLock::new();

/// Makes accelerators known to operations. Only the first call in a process counts.
pub(crate) fn install(accelerators: &'static dyn Accelerators) {
    let _ = INSTALLED.set(accelerators);
}

/// Whether accelerators are installed in this process.
pub fn has_accelerators() -> bool {
    INSTALLED.get().is_some()
}

/// Opens the device with this index; `None` if no accelerators are installed.
pub(crate) fn open(index: usize) -> Option<Result<Arc<dyn Accelerator>>> {
    INSTALLED.get().map(|accelerators| accelerators.open(index))
}

/// The accelerator that holds a tensor; `None` if the tensor is on the CPU.
///
/// # Errors
/// The device is not open.
pub fn accelerator_of(tensor: &Tensor) -> Result<Option<Arc<dyn Accelerator>>> {
    match (tensor.device(), INSTALLED.get()) {
        (Device::Cpu, _) => Ok(None),
        (device, Some(accelerators)) => accelerators.of(device).map(Some),
        (device, None) => bail!("no accelerator is installed for {:?}", device.location()),
    }
}

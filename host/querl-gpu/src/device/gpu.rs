//! One GPU: its stream, memory, querl's kernels and cuBLAS.

use super::launch::{Arg, Functions, Trace};
use super::staging::{SMALL_PIECE, Staging};
use candle_core::cuda_backend::cudarc::cublas::{CudaBlas, result as cublas, sys as blas};
use candle_core::cuda_backend::cudarc::driver::{
    CudaModule, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, ValidAsZeroBits, sys,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::{CudaDevice, Device, Error, Result, bail};
use half::bf16;
use querl_model::DeviceMemory;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

/// querl's kernels for every compute capability of the build, compiled by `build.rs`.
pub(super) static KERNELS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

/// Workspace of cuBLAS; its documentation recommends 32 MiB on Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// With less free memory than this, an internal error of cuBLAS is reported as out of memory: cuBLAS loads the code of a product
/// at its first use.
const CODE_BYTES: usize = 64 << 20;

/// All open GPUs: an operation of candle's graph knows only the device of its tensors.
static OPEN: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// A GPU with one stream; clones share it.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

struct Inner {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    functions: Functions,
    blas: Arc<CudaBlas>,
    n_processors: usize,
    staging: Staging,
    unpack_buffer: Mutex<Option<CudaSlice<bf16>>>,
    trace: Arc<Trace>,
    /// Read by cuBLAS as long as `blas` lives.
    _workspace: CudaSlice<u8>,
}

impl Gpu {
    /// Opens GPU `ordinal` with a new stream, which tensors of [`Gpu::device`] use as well.
    pub fn new(ordinal: usize) -> Result<Self> {
        let device = CudaDevice::new_with_stream(ordinal)?;
        // SAFETY: all work on this device's tensors goes to its one stream, in the order of the calls.
        unsafe { device.disable_event_tracking() };
        Self::on(device)
    }

    fn on(device: CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        keep_freed_memory(stream.context());
        let module = stream.context().load_module(Ptx::from_binary(KERNELS.to_vec())).map_err(Error::wrap)?;
        let blas = device.cublas_handle();
        let gpu = Self { inner: Arc::new(Inner::new(device, stream, module, blas, Arc::default())?) };
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|inner| inner.strong_count() > 0);
        open.push(Arc::downgrade(&gpu.inner));
        Ok(gpu)
    }

    /// A handle of the same GPU with its own stream, cuBLAS handle and staging memory, so that work overlaps (see [`Gpu::wait_for`]).
    /// Tensors are created on the first stream.
    pub fn with_new_stream(&self) -> Result<Self> {
        let stream = self.inner.stream.context().new_stream().map_err(Error::wrap)?;
        let blas = Arc::new(CudaBlas::new(stream.clone()).map_err(Error::wrap)?);
        let (device, module) = (self.inner.device.clone(), self.inner.functions.module.clone());
        let trace = self.inner.trace.clone(); // a trace includes the launches of both streams
        Ok(Self { inner: Arc::new(Inner::new(device, stream, module, blas, trace)?) })
    }

    /// Work submitted from now on starts after the work submitted to `other` so far. The host does not wait.
    pub fn wait_for(&self, other: &Self) -> Result<()> {
        self.inner.stream.join(&other.inner.stream).map_err(Error::wrap)
    }

    /// The open GPU that holds tensors of `device`.
    pub fn of(device: &Device) -> Result<Self> {
        let Device::Cuda(device) = device else { bail!("expected a tensor on a GPU; got one on the CPU") };
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let found = open.iter().filter_map(Weak::upgrade).find(|inner| inner.device.id() == device.id());
        found.map(|inner| Self { inner }).ok_or_else(|| Error::Msg("the GPU of a tensor is not open".into()))
    }

    pub fn device(&self) -> Device {
        Device::Cuda(self.inner.device.clone())
    }

    pub fn cuda_device(&self) -> &CudaDevice {
        &self.inner.device
    }

    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.inner.stream
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.inner.functions
    }

    pub(super) fn trace(&self) -> &Trace {
        &self.inner.trace
    }

    pub(super) fn staging(&self) -> &Staging {
        &self.inner.staging
    }

    pub(super) fn blas(&self) -> &CudaBlas {
        &self.inner.blas
    }

    /// Number of streaming multiprocessors.
    pub fn n_processors(&self) -> usize {
        self.inner.n_processors
    }

    pub fn synchronize(&self) -> Result<()> {
        self.inner.stream.synchronize().map_err(Error::wrap)
    }

    /// An error of cuBLAS. If it has no memory for the code of a product, it reports only an internal error.
    pub(super) fn blas_error(&self, error: cublas::CublasError) -> Error {
        use blas::cublasStatus_t::{CUBLAS_STATUS_INTERNAL_ERROR, CUBLAS_STATUS_NOT_INITIALIZED};
        let is_vague = matches!(error.0, CUBLAS_STATUS_INTERNAL_ERROR | CUBLAS_STATUS_NOT_INITIALIZED);
        let free_bytes = self.inner.stream.context().mem_get_info().map_or(usize::MAX, |(free, _)| free);
        match is_vague && free_bytes < CODE_BYTES {
            true => Error::Msg(format!("CUDA_ERROR_OUT_OF_MEMORY: {free_bytes} bytes are free, and {error:?}")),
            false => Error::wrap(error),
        }
    }

    /// Allocates uninitialised memory: everything must be written before it is read.
    pub(crate) fn alloc<T: DeviceRepr>(&self, len: usize) -> Result<CudaSlice<T>> {
        if len == 0 {
            return self.empty();
        }
        // SAFETY: every caller passes it to a kernel or a product that writes all of it; every bit pattern is a number.
        unsafe { self.inner.stream.alloc(len) }.map_err(Error::wrap)
    }

    /// An empty slice. Drivers need not allocate 0 bytes: this allocates one value and uses none.
    fn empty<T: DeviceRepr>(&self) -> Result<CudaSlice<T>> {
        // SAFETY: the memory is never read; the pointer comes from the same stream and is freed once, by the second slice.
        unsafe {
            let one = self.inner.stream.alloc::<T>(1).map_err(Error::wrap)?;
            Ok(self.inner.stream.upgrade_device_ptr(one.leak(), 0))
        }
    }

    /// Shared memory for at least `len` values of a packed weight, unpacked for a product. Each call returns the same memory, which grows
    /// if it is too small: stream order puts the next user's writes after the product that reads it. A second weight unpacked at the same
    /// time gets its own memory.
    pub(super) fn unpack_buffer(&self, len: usize) -> Result<UnpackBuffer<'_>> {
        let mut memory = match self.inner.unpack_buffer.try_lock() {
            Ok(memory) => memory,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(UnpackBuffer::Own(self.alloc(len)?)),
        };
        if memory.as_ref().is_none_or(|values| values.len() < len) {
            *memory = None; // freed before more is allocated
            *memory = Some(self.alloc(len)?);
        }
        Ok(UnpackBuffer::Shared(memory))
    }

    /// Copies values to the GPU. For few values the host does not wait for the copy.
    pub fn upload<T: DeviceRepr + Copy>(&self, values: &[T]) -> Result<CudaSlice<T>> {
        let mut to = self.alloc(values.len())?;
        match size_of_val(values) {
            0 => {}
            1..=SMALL_PIECE => {
                let mut ring = self.staging().small();
                let piece = ring.next(self.stream())?;
                piece.send(self.stream(), &mut to, 0, values.len(), |piece| piece.copy_from_slice(values))?;
            }
            _ => self.stream().memcpy_htod(values, &mut to).map_err(Error::wrap)?,
        }
        Ok(to)
    }

    pub fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<CudaSlice<T>> {
        if len == 0 {
            return self.alloc(0);
        }
        self.inner.stream.alloc_zeros(len).map_err(Error::wrap)
    }

    /// Copies values to the host, after waiting for submitted work.
    pub fn download<T: DeviceRepr>(&self, values: &impl DevicePtr<T>) -> Result<Vec<T>> {
        if values.is_empty() {
            return Ok(Vec::new());
        }
        self.inner.stream.clone_dtoh(values).map_err(Error::wrap)
    }

    pub fn copy<T: DeviceRepr>(&self, values: &impl DevicePtr<T>) -> Result<CudaSlice<T>> {
        if values.is_empty() {
            return self.alloc(0);
        }
        self.inner.stream.clone_dtod(values).map_err(Error::wrap)
    }

    /// The address of values that a kernel reads.
    pub(super) fn input<T>(&self, values: &impl DevicePtr<T>) -> Arg {
        Arg::pointer(values.device_ptr(&self.inner.stream).0)
    }

    /// The address of values that a kernel writes.
    pub(super) fn output<T>(&self, values: &mut impl DevicePtrMut<T>) -> Arg {
        Arg::pointer(values.device_ptr_mut(&self.inner.stream).0)
    }
}

pub(super) enum UnpackBuffer<'a> {
    /// The shared memory; never `None`.
    Shared(MutexGuard<'a, Option<CudaSlice<bf16>>>),
    Own(CudaSlice<bf16>),
}

impl Deref for UnpackBuffer<'_> {
    type Target = CudaSlice<bf16>;

    fn deref(&self) -> &CudaSlice<bf16> {
        match self {
            Self::Shared(memory) => memory.as_ref().expect("memory was allocated before the guard was returned"),
            Self::Own(values) => values,
        }
    }
}

impl DerefMut for UnpackBuffer<'_> {
    fn deref_mut(&mut self) -> &mut CudaSlice<bf16> {
        match self {
            Self::Shared(memory) => memory.as_mut().expect("memory was allocated before the guard was returned"),
            Self::Own(values) => values,
        }
    }
}

impl Inner {
    fn new(
        device: CudaDevice,
        stream: Arc<CudaStream>,
        module: Arc<CudaModule>,
        blas: Arc<CudaBlas>,
        trace: Arc<Trace>,
    ) -> Result<Self> {
        let context = stream.context().clone();
        let attribute = |which| context.attribute(which).map(|value| value.max(0) as usize).map_err(Error::wrap);
        let n_processors = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared_limit = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let workspace = stream.alloc_zeros::<u8>(WORKSPACE_BYTES).map_err(Error::wrap)?;
        prepare(&blas, &workspace, &stream)?;
        Ok(Self {
            device,
            stream,
            functions: Functions::new(module, shared_limit),
            blas,
            n_processors,
            staging: Staging::default(),
            unpack_buffer: Mutex::new(None),
            trace,
            _workspace: workspace,
        })
    }
}

impl Drop for Inner {
    /// Kernels and workspace are freed only after all work on the stream has finished.
    fn drop(&mut self) {
        if self.stream.synchronize().is_err() {
            // After an error that destroys the context, cuBLAS and cuRAND cannot be destroyed, and their wrappers panic: they remain
            // until the process ends, which follows such an error.
            std::mem::forget((self.device.clone(), self.blas.clone()));
            return;
        }
        // SAFETY: the handle and the stream exist. Setting the same stream again gives cuBLAS its own workspace: tensors of the device
        // may outlive this.
        let _ = unsafe { cublas::set_stream(*self.blas.handle(), self.stream.cu_stream().cast()) };
    }
}

/// Freed memory stays in the pool: by default it is returned at each synchronisation, and the next step allocates it again.
fn keep_freed_memory(context: &candle_core::cuda_backend::cudarc::driver::CudaContext) {
    if !context.has_async_alloc() {
        return;
    }
    let (mut pool, mut threshold) = (std::ptr::null_mut(), u64::MAX);
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: both calls get addresses of local values of their types; a driver that rejects them keeps its default, which is slower
    // but correct.
    unsafe {
        if sys::cuDeviceGetDefaultMemPool(&mut pool, context.cu_device()) == sys::CUresult::CUDA_SUCCESS {
            sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast());
        }
    }
}

/// Sets cuBLAS's workspace, because a captured step must not allocate, and keeps the partial sums of split products in f32.
fn prepare(handle: &CudaBlas, workspace: &CudaSlice<u8>, stream: &CudaStream) -> Result<()> {
    let (pointer, _guard) = workspace.device_ptr(stream);
    let mode = blas::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    // SAFETY: the workspace has this length and lives as long as the handle's last user.
    unsafe {
        blas::cublasSetWorkspace_v2(*handle.handle(), pointer as *mut _, workspace.len())
            .result()
            .map_err(Error::wrap)?;
        blas::cublasSetMathMode(*handle.handle(), mode).result().map_err(Error::wrap)
    }
}

impl Gpu {
    /// Device memory in use, after waiting for submitted work.
    pub fn memory(&self) -> Result<DeviceMemory> {
        self.synchronize()?;
        let (free, total) = self.stream().context().mem_get_info().map_err(Error::wrap)?;
        let peak = self.pool_attribute(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?;
        let reserved = self.pool_attribute(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        Ok(DeviceMemory { peak, reserved, free: free as u64, total: total as u64 })
    }

    /// Resets [`DeviceMemory::peak`] to the memory in use.
    pub fn reset_peak_memory(&self) -> Result<()> {
        let mut value = 0u64;
        let (pool, which) = (self.pool()?, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH);
        // SAFETY: the pool is the GPU's own, and the attribute is a 64-bit number that may be set to 0.
        unsafe { sys::cuMemPoolSetAttribute(pool, which, (&raw mut value).cast()) }.result().map_err(Error::wrap)
    }

    fn pool_attribute(&self, which: sys::CUmemPool_attribute) -> Result<u64> {
        let mut value = 0u64;
        // SAFETY: the pool is the GPU's own, and both attributes are 64-bit numbers.
        unsafe { sys::cuMemPoolGetAttribute(self.pool()?, which, (&raw mut value).cast()) }
            .result()
            .map_err(Error::wrap)?;
        Ok(value)
    }

    fn pool(&self) -> Result<sys::CUmemoryPool> {
        let context = self.stream().context();
        if !context.has_async_alloc() {
            bail!("this GPU's driver has no memory pools, so the memory of tensors is unknown");
        }
        context.bind_to_thread().map_err(Error::wrap)?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: it writes one pointer, to a live local.
        unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, context.cu_device()) }.result().map_err(Error::wrap)?;
        Ok(pool)
    }
}

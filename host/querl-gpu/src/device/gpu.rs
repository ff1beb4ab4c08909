//! One card: its stream, our kernels, cuBLAS.

use super::launch::Arg;
use super::trace::Trace;
use super::upload::Staging;
use candle_core::cuda_backend::cudarc::cublas::{CudaBlas, result as cublas, sys as blas};
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, ValidAsZeroBits, result, sys,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::{CudaDevice, Device, Error, Result, bail};
use half::bf16;
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

/// Our kernels for every processor that the build named, made by `build.rs`.
static KERNELS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

/// What cuBLAS may use between the steps of a product; its own documentation asks for 32 MiB on Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// With less free memory than this, an internal error of cuBLAS is taken for a want of it: an allowance for the code of its
/// products, which is loaded when they are first asked for.
const BYTES_OF_CODE: usize = 64 << 20;

/// Every card that is open. An operation of candle's graph knows the device of its tensors alone.
static OPEN: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// A card; clones share it.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

struct Inner {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    module: Arc<CudaModule>,
    /// With the shared memory that each may ask for.
    functions: Mutex<HashMap<&'static str, (CudaFunction, usize)>>,
    blas: Arc<CudaBlas>,
    n_processors: usize,
    shared_limit: usize,
    staging: Staging,
    /// See [`Gpu::widening`].
    widening: Mutex<Option<CudaSlice<bf16>>>,
    trace: Arc<Trace>,
    /// Read by cuBLAS as long as `blas` lives.
    _workspace: CudaSlice<u8>,
}

impl Gpu {
    /// Opens card `ordinal` with a stream of its own, which every tensor that is made on [`Gpu::device`] uses as well.
    ///
    /// # Errors
    /// No such card, or a driver that refuses our kernels.
    pub fn new(ordinal: usize) -> Result<Self> {
        let device = CudaDevice::new_with_stream(ordinal)?;
        // SAFETY: all work on this device's tensors goes to its one stream, in the order of the calls.
        unsafe { device.disable_event_tracking() };
        Self::on(device)
    }

    /// Loads our kernels beside what candle does on `device`.
    ///
    /// # Errors
    /// As [`Gpu::new`].
    pub fn on(device: CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        keep_freed_memory(stream.context());
        let module = stream.context().load_module(Ptx::from_binary(KERNELS.to_vec())).map_err(Error::wrap)?;
        let blas = device.cublas_handle();
        let gpu = Self { inner: Arc::new(Inner::new(device, stream, module, blas, Arc::default())?) };
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|inner| inner.strong_count() > 0);
        open.push(Arc::downgrade(&gpu.inner));
        super::install();
        Ok(gpu)
    }

    /// The same card with a stream, a cuBLAS and memory for uploads of its own: work on it runs beside the other's, in an order of
    /// its own (see [`Gpu::wait_for`]). Tensors are made on the other.
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn beside(&self) -> Result<Self> {
        let stream = self.inner.stream.context().new_stream().map_err(Error::wrap)?;
        let blas = Arc::new(CudaBlas::new(stream.clone()).map_err(Error::wrap)?);
        let (device, module) = (self.inner.device.clone(), self.inner.module.clone());
        let trace = self.inner.trace.clone(); // who asks what this card does is told of both
        Ok(Self { inner: Arc::new(Inner::new(device, stream, module, blas, trace)?) })
    }

    /// What is asked of this from now on comes after what was asked of `other` until now. The host does not wait.
    ///
    /// # Errors
    /// Something that was asked of either failed.
    pub fn wait_for(&self, other: &Self) -> Result<()> {
        self.inner.stream.join(&other.inner.stream).map_err(Error::wrap)
    }

    /// The open card whose tensors are made on `device`.
    ///
    /// # Errors
    /// It is no device of a [`Gpu`] that is still there.
    pub fn of(device: &Device) -> Result<Self> {
        let Device::Cuda(device) = device else { bail!("a tensor of the cpu where one of the card is needed") };
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let found = open.iter().filter_map(Weak::upgrade).find(|inner| inner.device.id() == device.id());
        found.map(|inner| Self { inner }).ok_or_else(|| Error::Msg("the card of a tensor is not open".into()))
    }

    /// For candle's tensors.
    pub fn device(&self) -> Device {
        Device::Cuda(self.inner.device.clone())
    }

    /// For candle's storages.
    pub fn cuda_device(&self) -> &CudaDevice {
        &self.inner.device
    }

    /// The stream of all work.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.inner.stream
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

    /// Streaming multiprocessors.
    pub fn n_processors(&self) -> usize {
        self.inner.n_processors
    }

    /// Waits until the card has done everything that was asked of it.
    ///
    /// # Errors
    /// Something that was asked of it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.inner.stream.synchronize().map_err(Error::wrap)
    }

    /// What cuBLAS has said, as an error. Where it could not load a product's code for want of memory, it speaks of itself alone.
    pub(super) fn blas_error(&self, error: cublas::CublasError) -> Error {
        use blas::cublasStatus_t::{CUBLAS_STATUS_INTERNAL_ERROR, CUBLAS_STATUS_NOT_INITIALIZED};
        let is_vague = matches!(error.0, CUBLAS_STATUS_INTERNAL_ERROR | CUBLAS_STATUS_NOT_INITIALIZED);
        let free_bytes = self.inner.stream.context().mem_get_info().map_or(usize::MAX, |(free, _)| free);
        match is_vague && free_bytes < BYTES_OF_CODE {
            true => Error::Msg(format!("CUDA_ERROR_OUT_OF_MEMORY: {free_bytes} bytes are free, and {error:?}")),
            false => Error::wrap(error),
        }
    }

    /// Memory whose values are whatever was there: everything must be written before it is read.
    pub(crate) fn alloc<T: DeviceRepr>(&self, len: usize) -> Result<CudaSlice<T>> {
        if len == 0 {
            return self.nothing();
        }
        // SAFETY: every caller hands it to a kernel or a product that writes all of it; every bit pattern is a number.
        unsafe { self.inner.stream.alloc(len) }.map_err(Error::wrap)
    }

    /// No values. A driver need not give memory of no size: this is a place of one value, of which none is used.
    fn nothing<T: DeviceRepr>(&self) -> Result<CudaSlice<T>> {
        // SAFETY: the memory is never read; the pointer comes from the same stream and is given back once, by the second slice.
        unsafe {
            let one = self.inner.stream.alloc::<T>(1).map_err(Error::wrap)?;
            Ok(self.inner.stream.upgrade_device_ptr(one.leak(), 0))
        }
    }

    /// Memory for at least `len` values of one weight, widened for a product. It is the same each time, grown where it is too small:
    /// what the next user writes into it, the card writes behind the product that reads it now. A second weight at the same time gets
    /// memory of its own.
    pub(super) fn widening(&self, len: usize) -> Result<Widening<'_>> {
        let mut place = match self.inner.widening.try_lock() {
            Ok(place) => place,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(Widening::Own(self.alloc(len)?)),
        };
        if place.as_ref().is_none_or(|values| values.len() < len) {
            *place = None; // given back before more is asked for
            *place = Some(self.alloc(len)?);
        }
        Ok(Widening::Shared(place))
    }

    /// Zeros.
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<CudaSlice<T>> {
        if len == 0 {
            return self.alloc(0);
        }
        self.inner.stream.alloc_zeros(len).map_err(Error::wrap)
    }

    /// Copies values from the card, which has to finish what was asked of it first.
    ///
    /// # Errors
    /// Something that was asked of it failed.
    pub fn download<T: DeviceRepr>(&self, values: &impl DevicePtr<T>) -> Result<Vec<T>> {
        if values.is_empty() {
            return Ok(Vec::new());
        }
        self.inner.stream.clone_dtoh(values).map_err(Error::wrap)
    }

    /// A copy on the card.
    ///
    /// # Errors
    /// The card has no memory left.
    pub fn copy<T: DeviceRepr>(&self, values: &impl DevicePtr<T>) -> Result<CudaSlice<T>> {
        if values.is_empty() {
            return self.alloc(0);
        }
        self.inner.stream.clone_dtod(values).map_err(Error::wrap)
    }

    /// Where values begin, for reading.
    pub(super) fn input<T>(&self, values: &impl DevicePtr<T>) -> Arg {
        Arg::pointer(values.device_ptr(&self.inner.stream).0)
    }

    /// Where values begin, for writing.
    pub(super) fn output<T>(&self, values: &mut impl DevicePtrMut<T>) -> Arg {
        Arg::pointer(values.device_ptr_mut(&self.inner.stream).0)
    }

    /// Starts a kernel. Nothing happens where the grid is empty.
    ///
    /// # Safety
    /// `args` are the kernel's parameters in order, and pointers reach as much memory as it touches for them.
    pub(super) unsafe fn launch(
        &self,
        name: &'static str,
        grid: [usize; 3],
        threads: usize,
        shared_bytes: usize,
        args: &mut [Arg],
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        if grid[0] > i32::MAX as usize || grid[1].max(grid[2]) > 65_535 {
            bail!("{name}: a grid of {grid:?} blocks is more than a card takes");
        }
        #[cfg(test)]
        super::launch::count();
        // First: a function is looked up in the context of this thread.
        self.inner.stream.context().bind_to_thread().map_err(Error::wrap)?;
        let function = self.function(name, shared_bytes)?;
        let mut args: Vec<_> = args.iter_mut().map(Arg::address).collect();
        let [x, y, z] = grid.map(|n| n as u32);
        let stream = self.inner.stream.cu_stream();
        let (block, shared) = ((threads as u32, 1, 1), shared_bytes as u32);
        self.noted(name, || {
            // SAFETY: the function lives as long as the module; that the arguments fit is the caller's promise.
            unsafe { result::launch_kernel(function.cu_function(), (x, y, z), block, shared, stream, &mut args) }
                .map_err(|error| Error::wrap(error).context(format!("{name}: {grid:?} blocks of {threads}")))
        })
    }

    fn function(&self, name: &'static str, shared_bytes: usize) -> Result<CudaFunction> {
        let mut functions = self.inner.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if shared_bytes > self.inner.shared_limit {
            bail!("{name}: {shared_bytes} bytes of shared memory; a block has {}", self.inner.shared_limit);
        }
        if let Some((function, allowed)) = functions.get(name)
            && shared_bytes <= *allowed
        {
            return Ok(function.clone());
        }
        let function = self.inner.module.load_function(name).map_err(Error::wrap)?;
        if shared_bytes > SHARED_WITHOUT_ASKING {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, shared_bytes as i32).map_err(Error::wrap)?;
        }
        functions.insert(name, (function.clone(), shared_bytes.max(SHARED_WITHOUT_ASKING)));
        Ok(function)
    }
}

/// See [`Gpu::widening`].
pub(super) enum Widening<'a> {
    /// The card's one place; there is always memory in it.
    Shared(MutexGuard<'a, Option<CudaSlice<bf16>>>),
    Own(CudaSlice<bf16>),
}

impl Deref for Widening<'_> {
    type Target = CudaSlice<bf16>;

    fn deref(&self) -> &CudaSlice<bf16> {
        match self {
            Self::Shared(place) => place.as_ref().expect("the place was filled before it was lent"),
            Self::Own(values) => values,
        }
    }
}

impl DerefMut for Widening<'_> {
    fn deref_mut(&mut self) -> &mut CudaSlice<bf16> {
        match self {
            Self::Shared(place) => place.as_mut().expect("the place was filled before it was lent"),
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
            module,
            functions: Mutex::default(),
            blas,
            n_processors,
            shared_limit,
            staging: Staging::default(),
            widening: Mutex::new(None),
            trace,
            _workspace: workspace,
        })
    }
}

impl Drop for Inner {
    /// Kernels and workspace are given back only when nothing on the stream uses them any more.
    fn drop(&mut self) {
        if self.stream.synchronize().is_err() {
            // After an error that the context does not survive, cuBLAS and cuRAND refuse to be given back, and their wrappers panic:
            // they stay until the process ends, which is what such an error is followed by.
            std::mem::forget((self.device.clone(), self.blas.clone()));
            return;
        }
        // SAFETY: the handle and the stream are there. Setting the stream, though it is the same, gives cuBLAS a workspace of
        // its own: tensors of the device may outlive the card.
        let _ = unsafe { cublas::set_stream(*self.blas.handle(), self.stream.cu_stream().cast()) };
    }
}

/// Dynamic shared memory that a block surely gets without the attribute that asks for more: of 48 KiB, 8 KiB are left to what
/// kernels declare themselves, which counts as well.
const SHARED_WITHOUT_ASKING: usize = 40 << 10;

/// Freed memory stays with the pool: the default hands it back at each synchronisation, and the next step asks for it again.
fn keep_freed_memory(context: &candle_core::cuda_backend::cudarc::driver::CudaContext) {
    if !context.has_async_alloc() {
        return;
    }
    let (mut pool, mut threshold) = (std::ptr::null_mut(), u64::MAX);
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: both calls get addresses of local values of the types that they read and write; a driver that refuses keeps its
    // default, which is slower and no less right.
    unsafe {
        if sys::cuDeviceGetDefaultMemPool(&mut pool, context.cu_device()) == sys::CUresult::CUDA_SUCCESS {
            sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast());
        }
    }
}

/// Gives cuBLAS its workspace, which a graph must not allocate, and keeps sums of split products in f32.
fn prepare(handle: &CudaBlas, workspace: &CudaSlice<u8>, stream: &CudaStream) -> Result<()> {
    let (pointer, _guard) = workspace.device_ptr(stream);
    let mode = blas::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    // SAFETY: the workspace is as long as is said and lives as long as the handle's last user.
    unsafe {
        blas::cublasSetWorkspace_v2(*handle.handle(), pointer as *mut _, workspace.len())
            .result()
            .map_err(Error::wrap)?;
        blas::cublasSetMathMode(*handle.handle(), mode).result().map_err(Error::wrap)
    }
}

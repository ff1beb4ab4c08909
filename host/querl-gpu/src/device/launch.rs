//! Kernel launches: arguments, grids, timing, CUDA graphs.

use super::gpu::Gpu;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaFunction, CudaGraph, CudaModule, result, sys};
use candle_core::{Error, Result, bail};
use querl_model::KernelLaunch;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One kernel argument. The driver reads as many bytes as the kernel declares, and GPUs are little-endian: a `usize` can be passed as `int`
/// and as `long long`.
pub(super) struct Arg(u64);

impl Arg {
    pub(super) fn pointer(address: u64) -> Self {
        Self(address)
    }

    /// A null pointer, for an optional argument that is absent.
    pub(super) fn null() -> Self {
        Self(0)
    }

    pub(super) fn address(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }
}

impl From<usize> for Arg {
    fn from(value: usize) -> Self {
        Self(value as u64)
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Self {
        Self(u64::from(value))
    }
}

impl From<u64> for Arg {
    fn from(value: u64) -> Self {
        Self(value)
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self(u64::from(value.to_bits()))
    }
}

impl From<f64> for Arg {
    fn from(value: f64) -> Self {
        Self(value.to_bits())
    }
}

pub(super) const THREADS: usize = 256;

/// Values that a thread of an element-wise kernel reads at once: 16 bytes of bf16.
const VALUES_PER_THREAD: usize = 8;

/// Number of blocks of an element-wise kernel over `n` values: at most as many as fill the GPU, since threads have grid-stride loops.
pub(super) fn blocks_for(n: usize, n_processors: usize) -> usize {
    n.div_ceil(THREADS * VALUES_PER_THREAD).min(n_processors * 16)
}

#[cfg(test)]
thread_local! {
    static LAUNCHES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
pub(super) fn count() {
    LAUNCHES.set(LAUNCHES.get() + 1);
}

/// Number of kernels and products that this thread has launched, except by CUDA graphs.
#[cfg(test)]
pub(crate) fn n_launches() -> usize {
    LAUNCHES.get()
}

/// Dynamic shared memory that every block gets without setting an attribute: of 48 KiB, 8 KiB are left for static shared memory.
const DEFAULT_SHARED_BYTES: usize = 40 << 10;

/// The kernels of the module that have been looked up, with the shared memory that each may use.
pub(super) struct Functions {
    pub(super) module: Arc<CudaModule>,
    loaded: Mutex<HashMap<&'static str, (CudaFunction, usize)>>,
    /// Maximum shared memory per block.
    limit: usize,
}

impl Functions {
    pub(super) fn new(module: Arc<CudaModule>, limit: usize) -> Self {
        Self { module, loaded: Mutex::default(), limit }
    }

    fn get(&self, name: &'static str, shared_bytes: usize) -> Result<CudaFunction> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if shared_bytes > self.limit {
            bail!("{name}: {shared_bytes} bytes of shared memory; a block has {}", self.limit);
        }
        if let Some((function, allowed)) = loaded.get(name)
            && shared_bytes <= *allowed
        {
            return Ok(function.clone());
        }
        let function = self.module.load_function(name).map_err(Error::wrap)?;
        if shared_bytes > DEFAULT_SHARED_BYTES {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, shared_bytes as i32).map_err(Error::wrap)?;
        }
        loaded.insert(name, (function.clone(), shared_bytes.max(DEFAULT_SHARED_BYTES)));
        Ok(function)
    }
}

#[derive(Default)]
pub(super) struct Trace {
    is_on: AtomicBool,
    launches: Mutex<Vec<Pending>>,
}

struct Pending {
    name: &'static str,
    begin: CudaEvent,
    end: CudaEvent,
}

impl Gpu {
    /// Launches a kernel. Does nothing if the grid is empty.
    ///
    /// # Safety
    /// `args` are the kernel's parameters in order, and pointers are valid for all memory that it accesses.
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
            bail!("{name}: a grid of {grid:?} blocks is more than a GPU supports");
        }
        #[cfg(test)]
        count();
        // A function is looked up in this thread's current context.
        self.stream().context().bind_to_thread().map_err(Error::wrap)?;
        let function = self.functions().get(name, shared_bytes)?;
        let mut args: Vec<_> = args.iter_mut().map(Arg::address).collect();
        let [x, y, z] = grid.map(|n| n as u32);
        let stream = self.stream().cu_stream();
        let (block, shared) = ((threads as u32, 1, 1), shared_bytes as u32);
        self.timed(name, || {
            // SAFETY: the function lives as long as the module; the caller promises that the arguments fit.
            unsafe { result::launch_kernel(function.cu_function(), (x, y, z), block, shared, stream, &mut args) }
                .map_err(|error| Error::wrap(error).context(format!("{name}: {grid:?} blocks of {threads}")))
        })
    }

    /// Calls `work` and returns its launches in order, with the GPU's times. Each launch takes some microseconds more of the host;
    /// launches of CUDA graphs are not traced, so generation captures none during a trace. One trace at a time, of all streams.
    pub fn traced<R>(&self, work: impl FnOnce() -> R) -> Result<(R, Vec<KernelLaunch>)> {
        self.pending().clear();
        self.trace().is_on.store(true, Ordering::Relaxed);
        let done = work();
        self.trace().is_on.store(false, Ordering::Relaxed);
        self.synchronize()?;
        let launches = std::mem::take(&mut *self.pending());
        let timed = launches.into_iter().map(|Pending { name, begin, end }| {
            Ok(KernelLaunch { name, milliseconds: begin.elapsed_ms(&end).map_err(Error::wrap)? })
        });
        Ok((done, timed.collect::<Result<_>>()?))
    }

    /// Runs `launch`, between two events if a trace is active.
    pub(super) fn timed<R>(&self, name: &'static str, launch: impl FnOnce() -> Result<R>) -> Result<R> {
        if !self.trace().is_on.load(Ordering::Relaxed) || self.is_capturing() {
            return launch();
        }
        let event = || self.stream().record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(Error::wrap);
        let begin = event()?;
        let launched = launch()?;
        let end = event()?;
        self.pending().push(Pending { name, begin, end });
        Ok(launched)
    }

    pub(crate) fn is_traced(&self) -> bool {
        self.trace().is_on.load(Ordering::Relaxed)
    }

    fn is_capturing(&self) -> bool {
        let status = self.stream().capture_status();
        !matches!(status, Ok(sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE))
    }

    fn pending(&self) -> MutexGuard<'_, Vec<Pending>> {
        self.trace().launches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct Graph(CudaGraph);

// SAFETY: a graph may be used from any thread, by one at a time: `launch` takes it by a mutable reference.
unsafe impl Send for Graph {}

impl Graph {
    /// Replays all launches on the stream on which they were captured; see [`Gpu::capture`] for the memory that must still exist.
    pub fn launch(&mut self) -> Result<()> {
        self.0.launch().map_err(Error::wrap)
    }
}

impl Gpu {
    /// Captures the launches of `work` as a CUDA graph, without executing them. `work` must not allocate, upload or synchronise. The
    /// stream must not be used by another thread (see [`Gpu::with_new_stream`]): its launches would be captured too.
    ///
    /// # Safety
    /// The graph contains addresses and keeps no memory alive: all memory that `work` uses must exist at the same address, and must not
    /// be used by others, whenever the graph is launched.
    pub unsafe fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream().begin_capture(mode).map_err(Error::wrap)?;
        let done = work();
        // Ends the capture in any case. No flags, because the graph owns no memory.
        let flags = sys::CUgraphInstantiate_flags(0);
        let graph = self.stream().end_capture(flags);
        done?;
        match graph.map_err(Error::wrap)? {
            Some(graph) => Ok(Graph(graph)),
            None => bail!("nothing was captured"),
        }
    }
}

//! All-reduce over the GPUs of ranks: NCCL on the GPUs' streams.
//!
//! Before each all-reduce the ranks synchronise on the host, so that no rank submits work after another has failed. NCCL gives every
//! rank the same bits. Results are the same from run to run if NCCL chooses the same algorithm, which it does for the same GPUs, links
//! and number of values; NVLink SHARP adds in its own order, and `NCCL_ALGO=Ring` in the environment disables it.
//!
//! Communicators do not block: a call returns at once, and this asks whether it is done, and between two questions whether
//! another rank has failed. So no rank waits within NCCL for one that will never come, and a communicator is aborted only while no
//! other thread is in a call of it, as NCCL asks for.

use super::gpu::Gpu;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtrMut, result, sys};
use candle_core::{Error, Result, bail};
use querl_model::{Communicator, NcclLibrary, Ranks, RanksError, nccl_version_name};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// With less free memory than this, a failure of CUDA within NCCL may be out of memory: NCCL allocates buffers of about this size.
const BUFFER_BYTES: usize = 64 << 20;

/// Time of busy polling before this thread sleeps between two polls; submitting an all-reduce takes less.
const SPIN_TIME: Duration = Duration::from_millis(1);
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// `ncclUniqueId`: the id that all ranks of one communicator share.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId([c_char; 128]);

/// `ncclConfig_t` as of 2.26, which later releases extend at the end; they read as many bytes as `size` says.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
}

impl Config {
    /// `NCCL_CONFIG_INITIALIZER`, but for `blocking`.
    const WITHOUT_BLOCKING: Self = Self {
        size: size_of::<Self>(),
        magic: 0xcafe_beef,
        version: NcclLibrary::OLDEST as c_uint,
        blocking: 0,
        cga_cluster_size: c_int::MIN,
        min_ctas: c_int::MIN,
        max_ctas: c_int::MIN,
        net_name: std::ptr::null(),
        split_share: c_int::MIN,
        traffic_class: c_int::MIN,
    };
}

type Status = c_int;
type Comm = *mut c_void;
type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> Status;
type InitRank = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Status;
type AllReduce = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Status;
type GetAsyncError = unsafe extern "C" fn(Comm, *mut Status) -> Status;
type End = unsafe extern "C" fn(Comm) -> Status;
type ErrorString = unsafe extern "C" fn(Status) -> *const c_char;
type LastError = unsafe extern "C" fn(Comm) -> *const c_char;

/// `ncclSuccess`, `ncclUnhandledCudaError`, `ncclInProgress`.
const SUCCESS: Status = 0;
const CUDA_FAILED: Status = 1;
const IN_PROGRESS: Status = 7;

/// `ncclSum`, `ncclFloat32`.
const SUM: c_int = 0;
const FLOAT32: c_int = 7;

struct Api {
    get_unique_id: GetUniqueId,
    init_rank: InitRank,
    all_reduce: AllReduce,
    get_async_error: GetAsyncError,
    destroy: End,
    abort: End,
    error_string: ErrorString,
    last_error: LastError,
    version: c_int,
}

impl Api {
    /// The library's functions, looked up at the first call.
    fn open() -> Result<&'static Self> {
        static API: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
        API.get_or_init(Self::load).as_ref().map_err(|message| Error::Msg(message.clone()))
    }

    fn load() -> std::result::Result<Self, String> {
        let found = NcclLibrary::open().map_err(|error| error.to_string())?;
        // SAFETY: these are the functions' types in nccl.h from 2.14 on.
        unsafe {
            Ok(Self {
                get_unique_id: function(found, "ncclGetUniqueId")?,
                init_rank: function(found, "ncclCommInitRankConfig")?,
                all_reduce: function(found, "ncclAllReduce")?,
                get_async_error: function(found, "ncclCommGetAsyncError")?,
                destroy: function(found, "ncclCommDestroy")?,
                abort: function(found, "ncclCommAbort")?,
                error_string: function(found, "ncclGetErrorString")?,
                last_error: function(found, "ncclGetLastError")?,
                version: found.version,
            })
        }
    }

    /// NCCL's message for a status, and its last error.
    fn message(&self, status: Status) -> String {
        // SAFETY: it takes any number, and gives a text that lives as long as the library, or null.
        let text = unsafe { message_at((self.error_string)(status)) };
        // SAFETY: it takes no communicator, and gives a place of the library's own that always ends with 0; what another thread
        // writes there meanwhile makes other words of it.
        let last = unsafe { message_at((self.last_error)(std::ptr::null_mut())) };
        match last.as_str() {
            "" => format!("{text} (error {status})"),
            last => format!("{text} (error {status}, {last})"),
        }
    }

    fn succeed(&self, what: &str, status: Status, stream: Option<&CudaStream>) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        let (message, version) = (self.message(status), nccl_version_name(self.version));
        let free_bytes = || stream.and_then(|stream| stream.context().mem_get_info().ok()).map(|(free, _)| free);
        let memory = (status == CUDA_FAILED).then(free_bytes).flatten();
        let says_so = ["out of memory", "Failed to CUDA"].iter().any(|said| message.contains(said));
        let cause = match memory {
            Some(free) if says_so => format!("CUDA_ERROR_OUT_OF_MEMORY, {free} bytes are free: "),
            // Out of memory without a message of NCCL, or another failure while the GPU is full: the cause is unknown.
            Some(free) if free < BUFFER_BYTES => format!("{free} bytes of the GPU are free: "),
            _ => String::new(),
        };
        bail!("{cause}{what} of NCCL {version} fails: {message}; NCCL_DEBUG=WARN in the environment prints the reason")
    }
}

/// # Safety
/// `text` ends with 0, or is null.
unsafe fn message_at(text: *const c_char) -> String {
    // SAFETY: as the caller promises.
    if text.is_null() { String::new() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned() }
}

/// # Safety
/// The function has the type `T`.
unsafe fn function<T: Copy>(found: &NcclLibrary, name: &str) -> std::result::Result<T, String> {
    // SAFETY: as the caller promises.
    let function = unsafe { found.library.get::<T>(name.as_bytes()) };
    function.map(|function| *function).map_err(|_| format!("libnccl.so.2 has no function `{name}`; it is no NCCL 2"))
}

/// One rank's handle of an NCCL communicator.
pub(crate) struct Nccl {
    api: &'static Api,
    /// The GPU's stream; its context lives as long as the communicator.
    stream: Arc<CudaStream>,
    /// `None` once it has ended. Locked during a call of NCCL: two threads must not use it at the same time.
    comm: Mutex<Option<Handle>>,
}

struct Handle(Comm);

// SAFETY: NCCL takes a communicator from any thread, from one at a time.
unsafe impl Send for Handle {}

/// Whether to continue waiting for NCCL; called between two polls.
pub(crate) type Check<'a> = &'a dyn Fn() -> Result<()>;

impl Nccl {
    /// Creates the id that all ranks of a new communicator need.
    pub(crate) fn unique_id() -> Result<UniqueId> {
        let (api, mut id) = (Api::open()?, UniqueId([0; 128]));
        // SAFETY: it writes one id.
        api.succeed("ncclGetUniqueId", unsafe { (api.get_unique_id)(&raw mut id) }, None)?;
        Ok(id)
    }

    /// Starts to join with this rank's GPU: until [`Nccl::joined`] the communicator can only be aborted.
    pub(crate) fn join(gpu: &Gpu, id: UniqueId, world_size: usize, rank: usize) -> Result<Self> {
        let (api, mut comm, mut config) = (Api::open()?, std::ptr::null_mut(), Config::WITHOUT_BLOCKING);
        let stream = gpu.stream().clone();
        stream.context().bind_to_thread().map_err(Error::wrap)?;
        // SAFETY: it writes one communicator, of the GPU whose context is this thread's, before it returns, and reads the config
        // before as well.
        let status = unsafe { (api.init_rank)(&raw mut comm, world_size as c_int, id, rank as c_int, &raw mut config) };
        if comm.is_null() {
            api.succeed("ncclCommInitRankConfig", status, Some(&stream))?;
            bail!("ncclCommInitRankConfig gives no communicator");
        }
        Ok(Self { api, stream, comm: Mutex::new(Some(Handle(comm))) })
    }

    /// Waits until all ranks have joined.
    pub(crate) fn joined(&self, check: Check) -> Result<()> {
        let held = self.held();
        self.done("ncclCommInitRankConfig", comm_of(&held)?, IN_PROGRESS, check)
    }

    /// Submits an all-reduce to the GPU's stream: `values` become their sum over all ranks, which must have the same number of values.
    pub(crate) fn all_reduce(&self, gpu: &Gpu, values: &mut impl DevicePtrMut<f32>, check: Check) -> Result<()> {
        let (n_values, stream) = (values.len(), gpu.stream().clone());
        stream.context().bind_to_thread().map_err(Error::wrap)?;
        let held = self.held();
        let comm = comm_of(&held)?;
        let (place, _in_use) = values.device_ptr_mut(&stream);
        // SAFETY: `values` are memory of this GPU of this length, and everything on this stream comes after what was put
        // there before; in-place sums are NCCL's own form. The communicator is held until the sum is on the stream.
        let status = unsafe {
            let stream = stream.cu_stream().cast();
            (self.api.all_reduce)(place as *const c_void, place as *mut c_void, n_values, FLOAT32, SUM, comm, stream)
        };
        self.done("ncclAllReduce", comm, status, check)
    }

    /// Waits until the operation that was started with `comm` (locked by the caller) is no longer in progress.
    fn done(&self, what: &str, comm: Comm, mut status: Status, check: Check) -> Result<()> {
        let begun = Instant::now();
        while status == IN_PROGRESS {
            check()?;
            match begun.elapsed() < SPIN_TIME {
                true => std::thread::yield_now(),
                false => std::thread::sleep(POLL_INTERVAL),
            }
            // SAFETY: the communicator is there, and it writes one status.
            let asked = unsafe { (self.api.get_async_error)(comm, &raw mut status) };
            if asked != SUCCESS {
                status = asked;
            }
        }
        self.api.succeed(what, status, Some(&self.stream))
    }

    fn end(&self, end: End) {
        // Not locked while it ends: a concurrent caller finds no communicator.
        let taken = self.held().take();
        if let Some(Handle(comm)) = taken {
            // NCCL finds the GPU without a context as well; bound in case a version does not.
            let _ = self.stream.context().bind_to_thread();
            // SAFETY: the communicator is there, nobody is in a call of it and nobody comes to it after. An error leaves nothing
            // to be done.
            unsafe { end(comm) };
        }
    }

    fn held(&self) -> MutexGuard<'_, Option<Handle>> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // Dropped without having been ended: the state of the other ranks is unknown.
        self.abort();
    }
}

fn comm_of(held: &Option<Handle>) -> Result<Comm> {
    let ended = || Error::Msg("the communicator of the ranks' GPUs has ended, since a rank has failed".into());
    held.as_ref().map(|Handle(comm)| *comm).ok_or_else(ended)
}

/// Numbers of values of the all-reduces in [`Gpu::connect`]: since 2.22, NCCL allocates memory for an algorithm at its first use, and
/// small and large sizes use different ones.
const WARM_UP_SIZES: [usize; 2] = [1, 4 << 20];

impl Communicator for Nccl {
    /// Aborts operations in progress, so that no rank waits for a failed one; their results are incomplete. All ranks call this, and NCCL
    /// may wait for them, so it needs a separate thread.
    fn abort(&self) {
        self.end(self.api.abort);
    }

    /// Frees the communicator after the last operation. As for [`Nccl::abort`], all ranks call this, each on a separate thread.
    fn close(&self) {
        self.end(self.api.destroy);
    }
}

impl Gpu {
    /// Submits an all-reduce: `values` become their sum over all ranks.
    pub fn all_reduce(&self, ranks: &Ranks, values: &mut impl DevicePtrMut<f32>) -> Result<()> {
        if ranks.world_size() == 1 {
            return Ok(());
        }
        ranks.barrier_before(operation_name(values.len())).map_err(Error::wrap)?;
        if values.is_empty() {
            return Ok(());
        }
        let nccl = self.communicator(ranks)?;
        nccl.all_reduce(self, values, &|| ranks.check().map_err(Error::wrap)).map_err(|error| ranks.fail(error))
    }

    /// Creates the communicator of `ranks`; a collective operation. NCCL allocates memory of each GPU for it, so this is called before a
    /// model fills the GPU; otherwise the first all-reduce creates it.
    pub fn connect(&self, ranks: &Ranks) -> Result<()> {
        if ranks.world_size() == 1 {
            return Ok(());
        }
        for n_values in WARM_UP_SIZES {
            self.all_reduce(ranks, &mut self.zeros(n_values)?)?;
        }
        self.settle(ranks)
    }

    /// Waits until submitted work is done on all ranks; a collective operation.
    pub fn settle(&self, ranks: &Ranks) -> Result<()> {
        let waited = self.synchronize();
        // An aborted all-reduce may cause a GPU error; report the reason for the abort instead.
        ranks.check().map_err(Error::wrap)?;
        waited?;
        ranks.barrier().map_err(Error::wrap)
    }

    /// This rank's end of the communicator, which is created when all ranks first call this.
    fn communicator(&self, ranks: &Ranks) -> Result<Arc<Nccl>> {
        let alone = || RanksError::Failed { rank: ranks.rank(), message: "its process group has no other rank".into() };
        let created = ranks.communicator().ok_or_else(alone).map_err(Error::wrap)?;
        if let Some(nccl) = created.get().and_then(|nccl| nccl.clone().downcast().ok()) {
            return Ok(nccl);
        }
        // All ranks open their memory before the broadcast below, and so before any GPU accesses another's memory.
        let ordinals = ranks.all_gather(self.ordinal()).map_err(Error::wrap)?;
        self.open_to(ordinals.iter().map(|ordinal| **ordinal)).map_err(|error| ranks.fail(error))?;
        let id = ranks.is_first().then(Nccl::unique_id).transpose().map_err(|error| ranks.fail(error))?;
        let id = ranks.broadcast(0, id).map_err(Error::wrap)?;
        let joining = Nccl::join(self, *id, ranks.world_size(), ranks.rank());
        let nccl = Arc::new(joining.map_err(|error| ranks.fail(error))?);
        ranks.register(nccl.clone());
        nccl.joined(&|| ranks.check().map_err(Error::wrap)).map_err(|error| ranks.fail(error))?;
        created.get_or_init(|| nccl.clone());
        Ok(nccl)
    }
}

/// Name of an all-reduce of `n_values` values, which the ranks compare before they start it.
pub(super) fn operation_name(n_values: usize) -> String {
    format!("all-reduce of {n_values} values on GPUs")
}

/// `CUmemAccessDesc`; cudarc has a different type for each version of CUDA.
#[repr(C)]
struct Access {
    /// 1: a device.
    kind: c_uint,
    ordinal: c_int,
    /// 3: to read and to write.
    flags: c_uint,
}

impl Gpu {
    pub(crate) fn ordinal(&self) -> usize {
        self.stream().context().ordinal()
    }

    /// Lets those GPUs of `peers` that can reach this GPU's memory access its memory pool. With NCCL, GPUs write to each other's memory;
    /// they can access single allocations, but not the pool from which all of querl's memory comes, until access is set (CUDA C++
    /// Programming Guide, "Device Accessibility for Multi-GPU Support").
    pub(crate) fn open_to(&self, peers: impl Iterator<Item = usize>) -> Result<()> {
        let context = self.stream().context();
        if !context.has_async_alloc() {
            return Ok(());
        }
        context.bind_to_thread().map_err(Error::wrap)?;
        for peer in peers.filter(|peer| *peer != self.ordinal()) {
            self.open_to_one(peer as c_int).map_err(Error::wrap)?;
        }
        Ok(())
    }

    fn open_to_one(&self, peer: c_int) -> std::result::Result<(), result::DriverError> {
        let (own, other) = (self.stream().context().cu_device(), result::device::get(peer)?);
        let (mut can_reach, mut pool) = (0, std::ptr::null_mut());
        let access = Access { kind: 1, ordinal: peer, flags: 3 };
        // SAFETY: the first two calls write a local value of their types; the third reads one description, which has the layout of
        // the driver's, and a pool that the driver has given.
        unsafe {
            sys::cuDeviceCanAccessPeer(&raw mut can_reach, other, own).result()?;
            if can_reach == 0 {
                return Ok(());
            }
            sys::cuDeviceGetDefaultMemPool(&raw mut pool, own).result()?;
            sys::cuMemPoolSetAccess(pool, (&raw const access).cast(), 1).result()
        }
    }
}

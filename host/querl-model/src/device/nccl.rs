//! Sums over several cards by NVIDIA's NCCL. Its library is opened when several cards are asked for, and never linked.

use super::elementwise::Element;
use super::gpu::Gpu;
use candle_core::cuda_backend::cudarc::driver::DevicePtrMut;
use candle_core::{Error, Result, bail};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SendError};
use std::thread;
use std::time::{Duration, Instant};

/// Every NCCL since 2 brings its library under this name.
const LIBRARY: &str = "libnccl.so.2";

/// The oldest that knows bf16, and whose version is written as below: 2.10.
const OLDEST: c_int = 21_000;

/// `ncclUniqueId`: what the ranks of one communicator have in common.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId([c_char; 128]);

type Status = c_int;
type Comm = *mut c_void;
type GetVersion = unsafe extern "C" fn(*mut c_int) -> Status;
type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> Status;
type InitRank = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> Status;
type AllReduce = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Status;
type End = unsafe extern "C" fn(Comm) -> Status;
type ErrorString = unsafe extern "C" fn(Status) -> *const c_char;

/// `ncclSum`, `ncclFloat32`, `ncclBfloat16`.
const SUM: c_int = 0;
const FLOAT32: c_int = 7;
const BFLOAT16: c_int = 9;

/// The functions that we call.
struct Api {
    get_unique_id: GetUniqueId,
    init_rank: InitRank,
    all_reduce: AllReduce,
    destroy: End,
    abort: End,
    error_string: ErrorString,
    version: c_int,
    /// The functions are its own.
    _library: Library,
}

impl Api {
    /// The library, opened at the first call.
    fn open() -> Result<&'static Self> {
        static API: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
        API.get_or_init(Self::load).as_ref().map_err(|message| Error::Msg(message.clone()))
    }

    fn load() -> std::result::Result<Self, String> {
        // SAFETY: the library's initialisers are NCCL's own; every program that uses it runs them.
        let library = unsafe { Library::new(LIBRARY) }.map_err(|error| {
            let remedy =
                "`pip install nvidia-nccl-cu13` or the NCCL package brings it; name its folder in LD_LIBRARY_PATH";
            format!("several cards need NCCL, and {LIBRARY} cannot be opened ({error}): {remedy}")
        })?;
        // SAFETY: these are the functions' types in nccl.h of every version 2.
        let api = unsafe {
            let get_version: GetVersion = function(&library, "ncclGetVersion")?;
            let mut version = 0;
            if get_version(&raw mut version) != 0 || version < OLDEST {
                let found = version_name(version);
                return Err(format!("{LIBRARY} is NCCL {found}; expected {} or newer", version_name(OLDEST)));
            }
            Self {
                get_unique_id: function(&library, "ncclGetUniqueId")?,
                init_rank: function(&library, "ncclCommInitRank")?,
                all_reduce: function(&library, "ncclAllReduce")?,
                destroy: function(&library, "ncclCommDestroy")?,
                abort: function(&library, "ncclCommAbort")?,
                error_string: function(&library, "ncclGetErrorString")?,
                version,
                _library: library,
            }
        };
        Ok(api)
    }

    fn succeed(&self, what: &str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: it takes any number, and gives a text that lives as long as the library, or null.
        let text = unsafe { (self.error_string)(status) };
        // SAFETY: a text of NCCL ends with 0.
        let words = if text.is_null() { "no words".into() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy() };
        let version = version_name(self.version);
        bail!(
            "{what} of NCCL {version} fails: {words} (error {status}); NCCL_DEBUG=WARN in the environment makes it say why"
        )
    }
}

/// # Safety
/// The function has the type `T`.
unsafe fn function<T: Copy>(library: &Library, name: &str) -> std::result::Result<T, String> {
    // SAFETY: as the caller promises.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|function| *function).map_err(|_| format!("{LIBRARY} has no function `{name}`; it is no NCCL 2"))
}

/// 22809 as `2.28.9`.
fn version_name(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
}

/// The version of NCCL that is found, such as `2.28.9`.
///
/// # Errors
/// There is none, or it is too old; the sentence says what to do.
pub fn nccl_version() -> Result<String> {
    Api::open().map(|api| version_name(api.version))
}

/// One rank's way into a communicator.
pub(crate) struct Joining(Receiver<Result<Nccl>>);

/// As long as cards may take to join. Within one machine they take seconds.
const LONGEST_JOIN: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 300 });

/// How often who waits looks whether the others are still there.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl Joining {
    /// The end of the communicator, once all ranks have joined. `check`: whether there is still somebody to wait for.
    ///
    /// # Errors
    /// As [`Nccl::join`]; `check` has an error; or it takes longer than cards do.
    pub(crate) fn wait(&self, check: impl Fn() -> Result<()>) -> Result<Nccl> {
        let begun = Instant::now();
        loop {
            match self.0.recv_timeout(LOOK_AGAIN) {
                Ok(joined) => return joined,
                Err(RecvTimeoutError::Disconnected) => bail!("the thread in which NCCL joins the cards is gone"),
                Err(RecvTimeoutError::Timeout) => check()?,
            }
            if begun.elapsed() > LONGEST_JOIN {
                let (seconds, version) = (LONGEST_JOIN.as_secs(), version_name(Api::open()?.version));
                bail!(
                    "the cards have not joined in {seconds} s (ncclCommInitRank of NCCL {version}); NCCL_DEBUG=INFO in the environment makes it say where it waits"
                )
            }
        }
    }
}

/// One rank's end of a communicator: its card, among those of the other ranks.
pub(crate) struct Nccl {
    api: &'static Api,
    /// Null once it was aborted. One thread sums; another may abort meanwhile, which is what NCCL has that call for.
    comm: AtomicPtr<c_void>,
}

impl Nccl {
    /// What all ranks of a new communicator are to be given.
    ///
    /// # Errors
    /// There is no NCCL, or it has no way to be reached.
    pub(crate) fn unique_id() -> Result<UniqueId> {
        let (api, mut id) = (Api::open()?, UniqueId([0; 128]));
        // SAFETY: it writes one id.
        api.succeed("ncclGetUniqueId", unsafe { (api.get_unique_id)(&raw mut id) })?;
        Ok(id)
    }

    /// Joins with this rank's card in a thread of its own, since NCCL's call ends for no rank before the last has come. Where nobody
    /// waits for the outcome any more, the communicator is ended.
    ///
    /// # Errors
    /// There is no NCCL, or no thread.
    pub(crate) fn begin_to_join(gpu: &Gpu, id: UniqueId, world_size: usize, rank: usize) -> Result<Joining> {
        Api::open()?;
        let (gpu, (outcome, joined)) = (gpu.clone(), mpsc::channel());
        let join = move || {
            if let Err(SendError(Ok(nobodys))) = outcome.send(Self::join(&gpu, id, world_size, rank)) {
                nobodys.abort();
            }
        };
        // Never waited for: where a rank is missing it ends with the process.
        thread::Builder::new().name(format!("NCCL of rank {rank}")).spawn(join).map_err(Error::wrap)?;
        Ok(Joining(joined))
    }

    /// Joins with this rank's card; returns when all ranks have joined.
    ///
    /// # Errors
    /// NCCL's: a card that two ranks name, cards that do not reach each other, no memory.
    fn join(gpu: &Gpu, id: UniqueId, world_size: usize, rank: usize) -> Result<Self> {
        let (api, mut comm) = (Api::open()?, std::ptr::null_mut());
        gpu.stream().context().bind_to_thread().map_err(Error::wrap)?;
        // SAFETY: it writes one communicator, of the card whose context is this thread's.
        let status = unsafe { (api.init_rank)(&raw mut comm, world_size as c_int, id, rank as c_int) };
        api.succeed("ncclCommInitRank", status)?;
        Ok(Self { api, comm: AtomicPtr::new(comm) })
    }

    /// Puts on the card's stream that `values` become their sum over all ranks, which all bring as many.
    ///
    /// # Errors
    /// NCCL's; or the communicator was aborted.
    pub(crate) fn sum<T: Element>(&self, gpu: &Gpu, values: &mut impl DevicePtrMut<T>) -> Result<()> {
        let kind = if size_of::<T>() == size_of::<f32>() { FLOAT32 } else { BFLOAT16 }; // the two types of elements
        let (n_values, stream) = (values.len(), gpu.stream().clone());
        gpu.stream().context().bind_to_thread().map_err(Error::wrap)?;
        let comm = self.comm.load(Ordering::Acquire);
        if comm.is_null() {
            bail!("a sum over cards of which one has failed");
        }
        let (place, _in_use) = values.device_ptr_mut(&stream);
        // SAFETY: `values` are memory of this card that holds as many, and everything on this stream comes after what was put
        // there before; in-place sums are NCCL's own form.
        let status = unsafe {
            let stream = stream.cu_stream().cast();
            (self.api.all_reduce)(place as *const c_void, place as *mut c_void, n_values, kind, SUM, comm, stream)
        };
        self.api.succeed("ncclAllReduce", status)
    }

    /// Ends what is on its way, so that nobody waits for a rank that has failed: what sums were to be written is not whole.
    pub(crate) fn abort(&self) {
        let comm = self.comm.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !comm.is_null() {
            // SAFETY: the communicator is there, and nobody begins to use it after. An error leaves nothing to be done.
            unsafe { (self.api.abort)(comm) };
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let comm = std::mem::replace(self.comm.get_mut(), std::ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: as in `abort`; all sums have ended, since whoever dropped the communicator has read what came of them.
            unsafe { (self.api.destroy)(comm) };
        }
    }
}

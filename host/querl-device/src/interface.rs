//! The C interface between the program and the library of devices. All of it; what is said through it is in
//! [`messages`](crate::Event), as JSON in UTF-8.
//!
//! The library has four entrances:
//!
//! ```c
//! uint32_t querl_cuda_abi(void);                                          // asked before anything else
//! int32_t  querl_cuda_describe(struct Bytes *out);                        // a Description
//! int32_t  querl_cuda_run(const uint8_t *job, size_t len,                 // a Job
//!                         const struct HostTable *host, struct Bytes *out); // Ended
//! void     querl_cuda_free(struct Bytes);                                 // of what the library wrote into `out`
//! ```
//!
//! What is allocated on one side is freed by the same side. Nothing unwinds across: a panic on either side is caught there and
//! becomes an answer in words. The library calls the host from several threads, all of which have ended when
//! `querl_cuda_run` returns. Jobs of one process are run one after another.

use std::ffi::c_void;
use std::sync::atomic::AtomicBool;

/// The version of everything in this file. Other things that must agree, such as the keys of a job, are covered by the
/// library's own version, which is the program's.
pub const ABI: u32 = 1;

/// Names of the entrances, as the library exports them.
pub const ENTRANCES: [&str; 4] = ["querl_cuda_abi", "querl_cuda_describe", "querl_cuda_run", "querl_cuda_free"];

/// The job is done; `out` says what came of it.
pub const DONE: i32 = 0;
/// It failed; `out` says why.
pub const FAILED: i32 = 1;
/// Somebody said stop; `out` says where.
pub const STOPPED: i32 = 2;
/// The device's memory did not suffice; `out` says what to change.
pub const OUT_OF_MEMORY: i32 = 3;

/// Bytes on their way across. Made by [`Bytes::from_vec`], and given back to the side that made them.
#[repr(C)]
#[derive(Debug)]
pub struct Bytes {
    data: *mut u8,
    len: usize,
    capacity: usize,
}

impl Bytes {
    /// Nothing: what whoever asks puts into `out`.
    pub const EMPTY: Self = Self { data: std::ptr::null_mut(), len: 0, capacity: 0 };

    /// Gives the bytes away, until [`Bytes::into_vec`] takes them back.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        Self { data: bytes.as_mut_ptr(), len: bytes.len(), capacity: bytes.capacity() }
    }

    /// Takes back what [`Bytes::from_vec`] gave away.
    ///
    /// # Safety
    /// These bytes are [`Bytes::EMPTY`] or were made by `from_vec` on this side of the border, and nobody uses them again.
    pub unsafe fn into_vec(self) -> Vec<u8> {
        if self.data.is_null() {
            return Vec::new();
        }
        // SAFETY: pointer, length and capacity are those of a vector of this side's allocator, as the caller promises.
        unsafe { Vec::from_raw_parts(self.data, self.len, self.capacity) }
    }

    /// What the other side wrote.
    ///
    /// # Safety
    /// These bytes are [`Bytes::EMPTY`] or were made by `from_vec` on either side, and are not freed while the slice lives.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: as the caller promises.
        unsafe { slice(self.data, self.len) }
    }
}

/// A slice of what the other side shows for the length of a call.
///
/// # Safety
/// `data` is null, or points to `len` bytes that nobody writes to while the slice lives.
pub unsafe fn slice<'a>(data: *const u8, len: usize) -> &'a [u8] {
    if data.is_null() {
        return &[];
    }
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(data, len) }
}

/// What the program gives the library for one job. Every pointer is good until `querl_cuda_run` returns, and may be used from
/// any thread.
#[repr(C)]
#[derive(Debug)]
pub struct HostTable {
    /// [`ABI`] of the program; looked at before any other field.
    pub abi: u32,
    /// Handed to every function below.
    pub context: *mut c_void,
    /// Takes an [`Event`](crate::Event).
    pub event: Event,
    /// Answers a [`Request`](crate::Request): [`DONE`] and a [`Reply`](crate::Reply), or another number and words.
    pub request: Request,
    /// Frees what `request` wrote.
    pub free: Free,
    /// One byte that is set once the job shall stop. Read as an atomic.
    pub stop: *const AtomicBool,
}

/// `querl_cuda_abi`.
pub type Abi = unsafe extern "C" fn() -> u32;
/// `querl_cuda_describe`.
pub type Describe = unsafe extern "C" fn(*mut Bytes) -> i32;
/// `querl_cuda_run`.
pub type Run = unsafe extern "C" fn(*const u8, usize, *const HostTable, *mut Bytes) -> i32;
/// `querl_cuda_free`, and the host's own.
pub type Free = unsafe extern "C" fn(Bytes);
/// Of the host: something to show.
pub type Event = unsafe extern "C" fn(*mut c_void, *const u8, usize);
/// Of the host: something to answer.
pub type Request = unsafe extern "C" fn(*mut c_void, *const u8, usize, *mut Bytes) -> i32;

/// The words of a panic, which is whatever it was raised with.
pub fn words_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

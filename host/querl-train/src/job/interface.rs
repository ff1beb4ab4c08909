//! The C interface between the program and `libquerl_cuda`, and the JSON messages (UTF-8) that cross it.
//!
//! The library exports four functions:
//!
//! ```c
//! uint32_t querl_cuda_abi(void);                                          // called before anything else
//! int32_t  querl_cuda_describe(struct Bytes *out);                        // a Description
//! int32_t  querl_cuda_run(const uint8_t *job, size_t len,                 // a Job
//!                         const struct HostTable *host, struct Bytes *out); // a JobResult
//! void     querl_cuda_free(struct Bytes);                                 // of what the library wrote into `out`
//! ```
//!
//! Memory is freed by the side that allocated it. Nothing unwinds across: a panic on either side is caught there and becomes an
//! error message. The library calls the program's functions from several threads; all have ended when `querl_cuda_run`
//! returns. Jobs of one process run one after another.

use super::{Failure, GenerateJob, GeneratedResponse, Resources, RlJob, SftJob};
use crate::Metrics;
use crate::rl::RlSummary;
use crate::sft::SftSummary;
use querl_core::ports::{LogMark, PolicyResponse, RolloutPrompt, RolloutResponse, RolloutSampling, ScoredResponses};
use querl_core::records::Split;
use serde::{Deserialize, Serialize};
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

/// The version of the functions and `repr(C)` types in this file. Messages may change with every version of querl: the library's
/// version must be the program's.
pub const ABI: u32 = 2;

/// Names of the exported functions.
pub const EXPORTS: [&str; 4] = ["querl_cuda_abi", "querl_cuda_describe", "querl_cuda_run", "querl_cuda_free"];

/// Success; `out` holds the result.
pub const DONE: i32 = 0;
/// Failure; `out` holds the error.
pub const FAILED: i32 = 1;
/// Stopped by the stop flag; `out` holds the error.
pub const STOPPED: i32 = 2;
/// The device ran out of memory; `out` holds the error.
pub const OUT_OF_MEMORY: i32 = 3;

/// Owned bytes. Made by [`Bytes::from_vec`], and freed by the side that made them.
#[repr(C)]
#[derive(Debug)]
pub struct Bytes {
    data: *mut u8,
    len: usize,
    capacity: usize,
}

impl Bytes {
    /// No bytes: the initial value of `out`.
    pub const EMPTY: Self = Self { data: std::ptr::null_mut(), len: 0, capacity: 0 };

    /// Releases ownership of a vector, until [`Bytes::into_vec`].
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        Self { data: bytes.as_mut_ptr(), len: bytes.len(), capacity: bytes.capacity() }
    }

    /// Takes ownership again of what [`Bytes::from_vec`] released.
    ///
    /// # Safety
    /// These bytes are [`Bytes::EMPTY`] or were made by `from_vec` on this side of the interface, and are not used again.
    pub unsafe fn into_vec(self) -> Vec<u8> {
        if self.data.is_null() {
            return Vec::new();
        }
        // SAFETY: pointer, length and capacity are those of a vector of this side's allocator, as the caller promises.
        unsafe { Vec::from_raw_parts(self.data, self.len, self.capacity) }
    }

    /// Borrows the bytes, whichever side of the interface allocated them.
    ///
    /// # Safety
    /// These bytes are [`Bytes::EMPTY`] or were made by `from_vec` on either side, and are not freed while the slice lives.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: as the caller promises.
        unsafe { slice(self.data, self.len) }
    }
}

/// A slice of the other side's memory, for the length of a call.
///
/// # Safety
/// `data` is null, or points to `len` bytes that are not written to while the slice lives.
pub unsafe fn slice<'a>(data: *const u8, len: usize) -> &'a [u8] {
    if data.is_null() {
        return &[];
    }
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(data, len) }
}

/// The program's functions for one job. Every pointer is valid until `querl_cuda_run` returns, and may be used from any thread.
#[repr(C)]
#[derive(Debug)]
pub struct HostTable {
    /// [`ABI`] of the program; checked before any other field is read.
    pub abi: u32,
    /// Passed to every function below.
    pub context: *mut c_void,
    /// Receives an [`Event`] as JSON.
    pub event: EventFn,
    /// Handles a [`Request`] as JSON: returns [`DONE`] and writes a [`Reply`], or returns another code and writes an error message.
    pub request: RequestFn,
    /// Frees the bytes that `request` wrote.
    pub free: FreeFn,
    /// Stop flag: one byte, read as an atomic; 1 stops the job.
    pub stop: *const AtomicBool,
}

/// Type of `querl_cuda_abi`.
pub type AbiFn = unsafe extern "C" fn() -> u32;
/// Type of `querl_cuda_describe`.
pub type DescribeFn = unsafe extern "C" fn(*mut Bytes) -> i32;
/// Type of `querl_cuda_run`.
pub type RunFn = unsafe extern "C" fn(*const u8, usize, *const HostTable, *mut Bytes) -> i32;
/// Type of `querl_cuda_free` and of [`HostTable::free`].
pub type FreeFn = unsafe extern "C" fn(Bytes);
/// Type of [`HostTable::event`].
pub type EventFn = unsafe extern "C" fn(*mut c_void, *const u8, usize);
/// Type of [`HostTable::request`].
pub type RequestFn = unsafe extern "C" fn(*mut c_void, *const u8, usize, *mut Bytes) -> i32;

/// The message in the payload of a caught panic.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

/// What `querl_cuda_describe` reports: versions and CUDA kernels of the library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Version of querl that the library was built from.
    pub version: String,
    /// Version of CUDA, such as 13000 for 13.0; `None` for a build that only has the CPU.
    pub cuda: Option<u32>,
    /// Compute capabilities that the library's kernels were compiled for, such as 90.
    pub capabilities: Vec<u32>,
    /// SHA-256 of the library's compiled kernels; empty without CUDA.
    #[serde(default)]
    pub kernels: String,
}

/// A job for the library to run: devices and work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Devices and threads that the job runs on.
    pub resources: Resources,
    /// The training or generation to run.
    pub work: Work,
}

/// The kinds of jobs: supervised fine-tuning, reinforcement learning or generation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Supervised fine-tuning, as [`run_sft`](super::run_sft).
    Sft(Box<SftJob>),
    /// Reinforcement learning, as [`run_rl`](super::run_rl).
    Rl(Box<RlJob>),
    /// Generation, as [`run_generate`](super::run_generate).
    Generate(Box<GenerateJob>),
}

/// Result of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobResult {
    /// Summary of a completed [`Work::Sft`].
    Sft(SftSummary),
    /// Summary of a completed [`Work::Rl`].
    Rl(RlSummary),
    /// [`Work::Generate`] is complete: all responses were passed to the response callback.
    Generated,
    /// The job failed.
    Failed(Failure),
    /// A callback of the program failed, with this message; the program keeps the error itself.
    CallbackFailed(String),
}

/// A message from the library that needs no reply: one variant per method of [`Progress`](querl_core::ports::Progress).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Event {
    Update { n_done: u64, n_total: u64, note: String },
    Line(String),
}

/// A message from the library that needs a [`Reply`]: a call of [`MetricSink`](crate::MetricSink),
/// [`Environment`](querl_core::ports::Environment), [`RolloutEngine`](querl_core::ports::RolloutEngine) or
/// [`ResponseCallback`](super::ResponseCallback).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Request {
    RecordMetrics {
        stage: String,
        step: u64,
        /// Metrics by name; values may be NaN or infinite.
        #[serde(with = "metrics_json")]
        metrics: Metrics,
    },
    MarkMetrics,
    RewindMetrics(LogMark),
    Score {
        split: Split,
        step: u64,
        responses: Vec<PolicyResponse>,
    },
    MarkEpisodes(Split),
    RewindEpisodes {
        split: Split,
        mark: LogMark,
    },
    Responses(Vec<GeneratedResponse>),
    SetPolicy {
        version: u64,
        adapter: PathBuf,
    },
    Rollouts {
        prompts: Vec<RolloutPrompt>,
        sampling: RolloutSampling,
    },
}

/// The program's reply to a [`Request`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// The call succeeded and has no result.
    Done,
    /// End of a log, as [`MetricSink::mark`](crate::MetricSink::mark) returns it.
    Mark(LogMark),
    /// Difference of a log, as [`MetricSink::rewind`](crate::MetricSink::rewind) returns it.
    Rewound(Option<String>),
    /// One episode record per response.
    Scored(ScoredResponses),
    /// Responses of the rollout server, one list per prompt.
    Rollouts(Vec<Vec<RolloutResponse>>),
}

/// Metrics by name. JSON has no number for NaN and infinities, which metrics may be: they become strings.
mod metrics_json {
    use crate::Metrics;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
    use std::collections::BTreeMap;

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Value {
        Finite(f64),
        Other(String),
    }

    pub(super) fn serialize<S: Serializer>(metrics: &Metrics, serializer: S) -> Result<S::Ok, S::Error> {
        let value = |value: f64| if value.is_finite() { Value::Finite(value) } else { Value::Other(value.to_string()) };
        serializer.collect_map(metrics.iter().map(|(name, number)| (name, value(*number))))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Metrics, D::Error> {
        let values = BTreeMap::<String, Value>::deserialize(deserializer)?;
        let number = |value| match value {
            Value::Finite(number) => Ok(number),
            Value::Other(text) => text.parse().map_err(|_| D::Error::custom(format!("`{text}` is not a number"))),
        };
        values.into_iter().map(|(name, value)| Ok((name, number(value)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_round_trip_to_the_last_bit_and_infinite_ones_too() {
        let values = [0.1 + 0.2, -0.0, f64::MIN_POSITIVE, 1e300, f64::INFINITY, f64::NEG_INFINITY, 7.0];
        let metrics: Metrics = values.iter().enumerate().map(|(index, value)| (format!("v{index}"), *value)).collect();
        let sent = Request::RecordMetrics { stage: "sft".into(), step: 3, metrics };
        let text = serde_json::to_string(&sent).unwrap();
        let got: Request = serde_json::from_str(&text).unwrap();
        let Request::RecordMetrics { metrics, .. } = &got else { panic!("{got:?}") };
        let bits: Vec<u64> = metrics.values().map(|value| value.to_bits()).collect();
        assert_eq!(bits, values.map(f64::to_bits));
        let metrics = Metrics::from([("v".into(), f64::NAN)]);
        let nan = Request::RecordMetrics { stage: "rl".into(), step: 1, metrics };
        let got: Request = serde_json::from_str(&serde_json::to_string(&nan).unwrap()).unwrap();
        let Request::RecordMetrics { metrics, .. } = got else { panic!("no record") };
        assert!(metrics["v"].is_nan());
    }
}

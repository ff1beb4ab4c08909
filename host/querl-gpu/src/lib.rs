//! GPUs: the backend of querl-model for NVIDIA GPUs, and `libquerl_cuda`, the library that the program opens on a machine with one.
//!
//! [`install`] registers the GPUs with querl-model: [`device`] has the kernels (`cuda/`) and their launches, the training backend,
//! operations of candle's graph and all-reduce by NCCL; [`decode`] the decode policy with its paged KV cache and CUDA graphs. All of it
//! needs the feature `cuda`; without it the CPU is the only device. The library runs the jobs of [`querl_train::job`]: four functions, which
//! are the C interface of [`querl_train::job::interface`]. No panic leaves it. The crate must not depend on plugins, retrieval or the network.

#[cfg(feature = "cuda")]
mod decode;
#[cfg(feature = "cuda")]
#[allow(missing_docs)] // public for examples and tests of this crate
pub mod device;
mod foreign;
#[cfg(test)]
mod tests;

use foreign::{Host, HostEnvironment, HostRollouts};
use querl_core::records::Split;
use querl_train::job::interface::{self, Bytes, Description, HostTable, Job, JobResult, Work, panic_message};
use querl_train::job::{self, Callbacks, Environments, Failure, FailureKind, JobError};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

/// The version of the C interface. The program calls this before any other function.
#[unsafe(no_mangle)]
pub extern "C" fn querl_cuda_abi() -> u32 {
    interface::ABI
}

/// Writes a [`Description`]. Returns [`interface::DONE`], or another number on failure.
///
/// # Safety
/// `out` may be written to, and holds nothing that would have to be freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn querl_cuda_describe(out: *mut Bytes) -> i32 {
    let Ok(Ok(bytes)) = catch_unwind(|| serde_json::to_vec(&description())) else { return interface::FAILED };
    // SAFETY: as the caller promises.
    unsafe { out.write(Bytes::from_vec(bytes)) };
    interface::DONE
}

/// Runs a job and writes its [`JobResult`]. Returns [`interface::DONE`] or the kind of failure.
///
/// # Safety
/// `job` points to `len` bytes. `host` points to a number, and to a complete [`HostTable`] if that number is
/// [`interface::ABI`]; all of it is valid until this function returns. `out` may be written to, and holds nothing that would
/// have to be freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn querl_cuda_run(job: *const u8, len: usize, host: *const HostTable, out: *mut Bytes) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as the caller promises; the number is first in the table, in every version of it.
        let abi = unsafe { host.cast::<u32>().read() };
        if abi != interface::ABI {
            let message = format!("the program's interface is version {abi} and the library's is {}", interface::ABI);
            return JobResult::Failed(Failure::failed(message));
        }
        // SAFETY: the version is ours, so the caller promises that both are complete, for the length of this call.
        let (job, host) = unsafe { (interface::slice(job, len), Host::new(&*host)) };
        run(job, host)
    }));
    let panicked = |panic: Box<dyn std::any::Any + Send>| {
        let message = format!("libquerl_cuda panicked: {}; internal error, please report it", panic_message(&*panic));
        JobResult::Failed(Failure::failed(message))
    };
    let result = result.unwrap_or_else(panicked);
    // Every result can be serialised: numbers of a successful training are finite, and errors contain none.
    let bytes = serde_json::to_vec(&result).unwrap_or_default();
    // SAFETY: as the caller promises.
    unsafe { out.write(Bytes::from_vec(bytes)) };
    status_of(&result)
}

/// Frees bytes that this library wrote.
///
/// # Safety
/// `bytes` were written by this library, and are freed once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn querl_cuda_free(bytes: Bytes) {
    // SAFETY: as the caller promises.
    drop(unsafe { bytes.into_vec() });
}

/// Opens GPU `index` of this machine as the device of a model.
#[cfg(feature = "cuda")]
pub fn compute_device(index: usize) -> candle_core::Result<querl_model::ComputeDevice> {
    install();
    Ok(querl_model::ComputeDevice::Accelerator(std::sync::Arc::new(device::Gpu::new(index)?)))
}

/// Registers the GPUs of this machine with querl-model. Returns false in a build without the feature `cuda`.
pub fn install() -> bool {
    #[cfg(feature = "cuda")]
    device::install();
    cfg!(feature = "cuda")
}

fn description() -> Description {
    #[cfg(feature = "cuda")]
    let (cuda, capabilities, kernels) =
        (Some(device::cuda_version()), device::capabilities(), device::digest_of_kernels());
    #[cfg(not(feature = "cuda"))]
    let (cuda, capabilities, kernels) = (None, Vec::new(), String::new());
    Description { version: env!("CARGO_PKG_VERSION").into(), cuda, capabilities, kernels }
}

fn run(job: &[u8], host: Host<'_>) -> JobResult {
    let Job { resources, work } = match serde_json::from_slice(job) {
        Ok(job) => job,
        Err(error) => return JobResult::Failed(Failure::failed(format!("invalid job: {error}"))),
    };
    #[cfg(test)]
    tests::panic_if_requested(&work);
    install();
    let metrics = Mutex::new(host);
    let callbacks = Callbacks { progress: &host, metrics: &metrics, stop: host.stop() };
    let result = match &work {
        Work::Sft(job) => job::run_sft(job, &resources, &callbacks).map(JobResult::Sft),
        Work::Rl(job) => {
            let [train, val] = [Split::Train, Split::Val].map(|split| HostEnvironment(host, split));
            let rollouts = HostRollouts(host);
            let environments = Environments { train: &train, val: &val, rollouts: Some(&rollouts) };
            job::run_rl(job, &resources, &environments, &callbacks).map(JobResult::Rl)
        }
        Work::Generate(job) => {
            let mut on_responses = |responses| host.pass_responses(responses);
            job::run_generate(job, &resources, &mut on_responses, &callbacks).map(|()| JobResult::Generated)
        }
    };
    result.unwrap_or_else(|error| match error {
        JobError::Failed(failure) => JobResult::Failed(failure),
        error @ (JobError::Environment(_) | JobError::Callback(_)) => JobResult::CallbackFailed(error.to_string()),
    })
}

fn status_of(result: &JobResult) -> i32 {
    match result {
        JobResult::Failed(Failure { kind: FailureKind::Interrupted, .. }) => interface::STOPPED,
        JobResult::Failed(Failure { kind: FailureKind::OutOfMemory, .. }) => interface::OUT_OF_MEMORY,
        JobResult::Failed(_) | JobResult::CallbackFailed(_) => interface::FAILED,
        JobResult::Sft(_) | JobResult::Rl(_) | JobResult::Generated => interface::DONE,
    }
}

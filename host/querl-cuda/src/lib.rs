//! `libquerl_cuda`: the library that the program opens where there is a graphics card.
//!
//! In: a job. Out: what [`querl_device::do_job`] makes of it, built here with CUDA (feature `cuda`; without it the processor is
//! the only device). The four functions are the C interface of [`querl_device::interface`]; this crate refuses to know
//! anything else. No panic leaves it.

mod foreign;
#[cfg(test)]
mod tests;

use foreign::ForeignHost;
use querl_device::interface::{self, Bytes, HostTable, words_of};
use querl_device::{Description, Ended, Ending, Failure, Job, JobError};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The version of the interface. Asked before anything else.
#[unsafe(no_mangle)]
pub extern "C" fn querl_cuda_abi() -> u32 {
    interface::ABI
}

/// Writes a [`Description`]. Returns [`interface::DONE`], or another number where there is none.
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

/// Does a job, and writes how it [`Ended`]. Returns [`interface::DONE`] or the sort of failure.
///
/// # Safety
/// `job` points to `len` bytes. `host` points to a number, and to a whole [`HostTable`] if that number is
/// [`interface::ABI`]; all of it is good until this function returns. `out` may be written to, and holds nothing that would
/// have to be freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn querl_cuda_run(job: *const u8, len: usize, host: *const HostTable, out: *mut Bytes) -> i32 {
    let ended = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as the caller promises; the number stands first in the table, in every version of it.
        let abi = unsafe { host.cast::<u32>().read() };
        if abi != interface::ABI {
            let message = format!("the program's interface is version {abi} and the library's is {}", interface::ABI);
            return Ended::Failed(Failure::failed(message));
        }
        // SAFETY: the version is ours, so the caller promises that both are whole, for as long as this call takes.
        let (job, host) = unsafe { (interface::slice(job, len), ForeignHost::new(&*host)) };
        run(job, &host)
    }));
    let panicked = |panic: Box<dyn std::any::Any + Send>| {
        let message = format!(
            "libquerl_cuda stopped by itself: {}; this is a fault of querl, please report it",
            words_of(&*panic)
        );
        Ended::Failed(Failure::failed(message))
    };
    let ended = ended.unwrap_or_else(panicked);
    // Nothing of an end is without a JSON form: its numbers are finite where training ended well, and else there are none.
    let bytes = serde_json::to_vec(&ended).unwrap_or_default();
    // SAFETY: as the caller promises.
    unsafe { out.write(Bytes::from_vec(bytes)) };
    status_of(&ended)
}

/// Frees what this library wrote.
///
/// # Safety
/// `bytes` were written by this library, and are given back once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn querl_cuda_free(bytes: Bytes) {
    // SAFETY: as the caller promises.
    drop(unsafe { bytes.into_vec() });
}

#[cfg(feature = "cuda")]
fn description() -> Description {
    let (cuda, capabilities) = (querl_model::device::cuda_version(), querl_model::device::capabilities());
    Description { version: env!("CARGO_PKG_VERSION").into(), cuda: Some(cuda), capabilities }
}

#[cfg(not(feature = "cuda"))]
fn description() -> Description {
    Description { version: env!("CARGO_PKG_VERSION").into(), cuda: None, capabilities: Vec::new() }
}

fn run(job: &[u8], host: &ForeignHost<'_>) -> Ended {
    let job: Job = match serde_json::from_slice(job) {
        Ok(job) => job,
        Err(error) => return Ended::Failed(Failure::failed(format!("the job is not understood: {error}"))),
    };
    #[cfg(test)]
    tests::panic_if_asked(&job);
    match querl_device::do_job(&job, host) {
        Ok(outcome) => Ended::Done(outcome),
        Err(JobError::Failed(failure)) => Ended::Failed(failure),
        Err(error @ (JobError::Environment(_) | JobError::Refused(_))) => Ended::OfHost(error.to_string()),
    }
}

fn status_of(ended: &Ended) -> i32 {
    match ended {
        Ended::Done(_) => interface::DONE,
        Ended::Failed(Failure { ending: Ending::Interrupted, .. }) => interface::STOPPED,
        Ended::Failed(Failure { ending: Ending::OutOfMemory, .. }) => interface::OUT_OF_MEMORY,
        Ended::Failed(_) | Ended::OfHost(_) => interface::FAILED,
    }
}

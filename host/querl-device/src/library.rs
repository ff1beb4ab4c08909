//! The program's side of the border: a library that was opened, and jobs handed to it.

use crate::interface::{self, Bytes, HostTable, words_of};
use crate::{Description, Ended, Ending, Event, Failure, Host, Job, JobError, Outcome, Refused, Reply, Request};
use querl_core::ports::EnvironmentError;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

/// Why a library is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// It exports something else.
    #[error("it has no function `{0}`; it is no library of querl")]
    Entrance(&'static str),
    /// It speaks another version of the interface.
    #[error("its interface is version {found} and this program's is {expected}; build both from the same source")]
    Abi {
        /// The library's.
        found: u32,
        /// Ours.
        expected: u32,
    },
    /// It is of another program.
    #[error("it is of querl {found} and this program is querl {expected}; build both from the same source")]
    Version {
        /// The library's.
        found: String,
        /// Ours.
        expected: String,
    },
    /// It does not say what it is.
    #[error("it does not describe itself: {0}")]
    Description(String),
}

/// A library whose interface and version are ours.
#[derive(Debug)]
pub struct Library {
    run: interface::Run,
    free: interface::Free,
    description: Description,
}

impl Library {
    /// Looks at the version of the interface, then for the other functions, then at the library's own version, which must be
    /// `version`. `find` gives a function's address by its name.
    ///
    /// # Errors
    /// A function is missing, or a version is another.
    ///
    /// # Safety
    /// What `find` gives for `querl_cuda_abi` is a function as in [`interface`], and so are the others if that one returns
    /// [`interface::ABI`]. They stay where they are for the rest of the process.
    pub unsafe fn connect(
        find: impl Fn(&'static str) -> Option<*const ()>,
        version: &str,
    ) -> Result<Self, LibraryError> {
        let find = |name| find(name).filter(|address| !address.is_null()).ok_or(LibraryError::Entrance(name));
        let [abi, describe, run, free] = interface::ENTRANCES;
        // SAFETY: the caller promises that this address is of such a function; its form is the same in every version.
        let found = unsafe { std::mem::transmute::<*const (), interface::Abi>(find(abi)?)() };
        if found != interface::ABI {
            return Err(LibraryError::Abi { found, expected: interface::ABI });
        }
        // SAFETY: the library speaks our version of the interface, so the caller promises that these are such functions.
        let (describe, run, free) = unsafe {
            (
                std::mem::transmute::<*const (), interface::Describe>(find(describe)?),
                std::mem::transmute::<*const (), interface::Run>(find(run)?),
                std::mem::transmute::<*const (), interface::Free>(find(free)?),
            )
        };
        let description = describe_itself(describe, free)?;
        if description.version != version {
            return Err(LibraryError::Version { found: description.version, expected: version.into() });
        }
        Ok(Self { run, free, description })
    }

    /// What it says of itself.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Has a job done. The host is called from other threads meanwhile.
    ///
    /// # Errors
    /// As [`do_job`](crate::do_job); a panic within the library is a failure with its words.
    pub fn run(&self, job: &Job, host: &dyn Host) -> Result<Outcome, JobError> {
        let job =
            serde_json::to_vec(job).map_err(|error| Failure::failed(format!("the job has no JSON form: {error}")))?;
        let context = Context { host, error: Mutex::new(None) };
        let table = HostTable {
            abi: interface::ABI,
            context: (&raw const context).cast_mut().cast::<c_void>(),
            event: take_event,
            request: answer,
            free: free_ours,
            stop: host.stop(),
        };
        let mut out = Bytes::EMPTY;
        // SAFETY: the function is the library's; job, table and context outlive the call, after which the library uses none.
        let status = unsafe { (self.run)(job.as_ptr(), job.len(), &raw const table, &raw mut out) };
        let ended = read(&out, self.free);
        match ended {
            Ok(Ended::Done(outcome)) if status == interface::DONE => Ok(outcome),
            Ok(Ended::Failed(failure)) => Err(failure.into()),
            Ok(Ended::OfHost(message)) => Err(context.error_or(message)),
            Ok(Ended::Done(_)) => Err(unexpected(status, "says that all is done")),
            Err(error) => Err(unexpected(status, &error)),
        }
    }
}

fn unexpected(status: i32, what: &str) -> JobError {
    Failure::failed(format!("libquerl_cuda returned {status} and {what}; this is a fault of querl, please report it"))
        .into()
}

fn describe_itself(describe: interface::Describe, free: interface::Free) -> Result<Description, LibraryError> {
    let mut out = Bytes::EMPTY;
    // SAFETY: the function is the library's, and `out` is ours to be written to.
    let status = unsafe { describe(&raw mut out) };
    let description = read(&out, free);
    match status {
        interface::DONE => description.map_err(LibraryError::Description),
        status => Err(LibraryError::Description(format!("it returned {status}"))),
    }
}

/// Reads what the library wrote, and gives it back.
fn read<T: serde::de::DeserializeOwned>(out: &Bytes, free: interface::Free) -> Result<T, String> {
    // SAFETY: the library wrote these bytes, or nothing, and they are freed below alone.
    let value = serde_json::from_slice(unsafe { out.as_slice() })
        .map_err(|error| format!("says what is not understood: {error}"));
    // SAFETY: the bytes are the library's and were not given back before; a copy is passed, and the original is not used again.
    unsafe { free(std::ptr::read(out)) };
    value
}

/// What the callbacks work on.
struct Context<'a> {
    host: &'a dyn Host,
    /// The host's first own error, which is the job's: across the border go its words alone.
    error: Mutex<Option<JobError>>,
}

impl Context<'_> {
    fn keep(&self, error: JobError) -> String {
        let words = error.to_string();
        self.error.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(error);
        words
    }

    fn error_or(&self, message: String) -> JobError {
        let kept = self.error.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        kept.unwrap_or_else(|| Failure { ending: Ending::Failed, message }.into())
    }

    fn answer(&self, request: Request) -> Result<Reply, String> {
        let host = self.host;
        let of_log = |error: std::io::Error| error.to_string();
        let of_world = |error: EnvironmentError| self.keep(JobError::Environment(error));
        Ok(match request {
            Request::Record { stage, step, metrics } => {
                host.record(&stage, step, &metrics).map_err(of_log)?;
                Reply::Done
            }
            Request::MarkMetrics => Reply::Mark(host.mark_metrics().map_err(of_log)?),
            Request::RewindMetrics(mark) => {
                host.rewind_metrics(mark).map_err(of_log)?;
                Reply::Done
            }
            Request::Score { split, step, responses } => {
                Reply::Scored(host.score(split, step, &responses).map_err(of_world)?)
            }
            Request::MarkEpisodes(split) => Reply::Mark(host.mark_episodes(split).map_err(of_world)?),
            Request::RewindEpisodes { split, mark } => {
                host.rewind_episodes(split, mark).map_err(of_world)?;
                Reply::Done
            }
            Request::Take(answers) => {
                host.take(answers).map_err(|refused: Refused| self.keep(refused.into()))?;
                Reply::Done
            }
        })
    }
}

/// # Safety
/// `context` is that of a [`HostTable`] that [`Library::run`] made and whose call is still under way; `data` points to `len`
/// bytes.
unsafe extern "C" fn take_event(context: *mut c_void, data: *const u8, len: usize) {
    // A panic of the host's display has no business in the job; it must not unwind into the library.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as the caller promises; a context is only read, and may be from several threads: a `dyn Host` is `Sync`.
        let (context, bytes) = unsafe { (&*context.cast::<Context<'_>>(), interface::slice(data, len)) };
        match serde_json::from_slice(bytes) {
            Ok(Event::Update { n_done, n_total, note }) => context.host.update(n_done, n_total, &note),
            Ok(Event::Line(text)) => context.host.line(&text),
            Err(error) => context.host.line(&format!("libquerl_cuda says what is not understood: {error}")),
        }
    }));
}

/// # Safety
/// As [`take_event`], and `out` may be written to.
unsafe extern "C" fn answer(context: *mut c_void, data: *const u8, len: usize, out: *mut Bytes) -> i32 {
    let answered = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as in `take_event`.
        let (context, bytes) = unsafe { (&*context.cast::<Context<'_>>(), interface::slice(data, len)) };
        let request = serde_json::from_slice(bytes).map_err(|error| format!("a request is not understood: {error}"))?;
        serde_json::to_vec(&context.answer(request)?).map_err(|error| format!("a reply has no JSON form: {error}"))
    }));
    let panicked = |panic: Box<dyn std::any::Any + Send>| Err(format!("the host panicked: {}", words_of(&*panic)));
    let (status, bytes) = match answered.unwrap_or_else(panicked) {
        Ok(bytes) => (interface::DONE, bytes),
        Err(words) => (interface::FAILED, words.into_bytes()),
    };
    // SAFETY: the caller promises that `out` may be written to; it holds nothing that would have to be dropped.
    unsafe { out.write(Bytes::from_vec(bytes)) };
    status
}

/// # Safety
/// `bytes` were written by [`answer`], and are given back once.
unsafe extern "C" fn free_ours(bytes: Bytes) {
    // SAFETY: as the caller promises.
    drop(unsafe { bytes.into_vec() });
}

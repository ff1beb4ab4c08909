//! The program's side of the C interface: an opened library, with the functions of [`job`](super).

use super::interface::{
    self, AbiFn, Bytes, DescribeFn, Description, Event, FreeFn, HostTable, Job, JobResult, Reply, Request, RunFn, Work,
    panic_message,
};
use super::{
    CallbackError, Callbacks, Environments, Failure, FailureKind, GenerateJob, JobError, Resources, ResponseCallback,
    RlJob, SftJob, lock,
};
use crate::rl::RlSummary;
use crate::sft::SftSummary;
use querl_core::fsx::io_problem;
use querl_core::ports::{Environment, EnvironmentError, RolloutEngine};
use querl_core::records::Split;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

/// Why a library cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum LibraryError {
    #[error("it has no function `{0}`; it is not a library of querl")]
    Export(&'static str),
    #[error("its interface is version {found} and this program's is {expected}; build both from the same source")]
    Abi { found: u32, expected: u32 },
    #[error("it is of querl {found} and this program is querl {expected}; build both from the same source")]
    Version { found: String, expected: String },
    #[error("its description cannot be read: {0}")]
    Description(String),
}

/// A loaded `libquerl_cuda` whose version is that of this program.
#[derive(Debug)]
pub struct Library {
    run: RunFn,
    free: FreeFn,
    description: Description,
}

impl Library {
    /// Connects to a loaded library: checks the version of the C interface, looks up the other functions, then checks that the library is
    /// of querl `version`. `find` returns a function's address by its name.
    ///
    /// # Errors
    /// A function is missing, or a version differs.
    ///
    /// # Safety
    /// The address of `querl_cuda_abi` is a function with the signature in [`interface`]; if it returns [`interface::ABI`], the other
    /// addresses are so too. All stay valid for the rest of the process.
    pub unsafe fn connect(
        find: impl Fn(&'static str) -> Option<*const ()>,
        version: &str,
    ) -> Result<Self, LibraryError> {
        let find = |name| find(name).filter(|address| !address.is_null()).ok_or(LibraryError::Export(name));
        let [abi, describe, run, free] = interface::EXPORTS;
        // SAFETY: the caller promises that this address is of such a function; its signature is the same in every version.
        let found = unsafe { std::mem::transmute::<*const (), AbiFn>(find(abi)?)() };
        if found != interface::ABI {
            return Err(LibraryError::Abi { found, expected: interface::ABI });
        }
        // SAFETY: the interface has our version, so the caller promises that these are such functions.
        let (describe, run, free) = unsafe {
            (
                std::mem::transmute::<*const (), DescribeFn>(find(describe)?),
                std::mem::transmute::<*const (), RunFn>(find(run)?),
                std::mem::transmute::<*const (), FreeFn>(find(free)?),
            )
        };
        let description = read_description(describe, free)?;
        if description.version != version {
            return Err(LibraryError::Version { found: description.version, expected: version.into() });
        }
        Ok(Self { run, free, description })
    }

    /// Versions and compute capabilities of the library.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Runs [`run_sft`](super::run_sft) in the library.
    ///
    /// # Errors
    /// As [`run_sft`](super::run_sft); a panic within the library is a failure with the panic's message.
    pub fn run_sft(
        &self,
        job: &SftJob,
        resources: &Resources,
        callbacks: &Callbacks<'_>,
    ) -> Result<SftSummary, JobError> {
        match self.run(Work::Sft(Box::new(job.clone())), resources, &Context::new(callbacks))? {
            JobResult::Sft(summary) => Ok(summary),
            _ => Err(unexpected("another job's result")),
        }
    }

    /// Runs [`run_rl`](super::run_rl) in the library.
    ///
    /// # Errors
    /// As [`Library::run_sft`], and those of the environments.
    pub fn run_rl(
        &self,
        job: &RlJob,
        resources: &Resources,
        environments: &Environments<'_>,
        callbacks: &Callbacks<'_>,
    ) -> Result<RlSummary, JobError> {
        let context = Context { environments: Some(*environments), ..Context::new(callbacks) };
        match self.run(Work::Rl(Box::new(job.clone())), resources, &context)? {
            JobResult::Rl(summary) => Ok(summary),
            _ => Err(unexpected("another job's result")),
        }
    }

    /// Runs [`run_generate`](super::run_generate) in the library.
    ///
    /// # Errors
    /// As [`Library::run_sft`], and those of `on_responses`.
    pub fn run_generate(
        &self,
        job: &GenerateJob,
        resources: &Resources,
        on_responses: &mut ResponseCallback<'_>,
        callbacks: &Callbacks<'_>,
    ) -> Result<(), JobError> {
        let on_responses: &mut ResponseCallback<'_> = on_responses;
        let context = Context { on_responses: Some(Mutex::new(on_responses)), ..Context::new(callbacks) };
        match self.run(Work::Generate(Box::new(job.clone())), resources, &context)? {
            JobResult::Generated => Ok(()),
            _ => Err(unexpected("another job's result")),
        }
    }

    fn run(&self, work: Work, resources: &Resources, context: &Context<'_, '_>) -> Result<JobResult, JobError> {
        let job = serde_json::to_vec(&Job { resources: resources.clone(), work })
            .map_err(|error| Failure::failed(format!("the job has no JSON form: {error}")))?;
        let table = HostTable {
            abi: interface::ABI,
            context: (&raw const *context).cast_mut().cast::<c_void>(),
            event: on_event,
            request: on_request,
            free: free_reply,
            stop: context.callbacks.stop,
        };
        let mut out = Bytes::EMPTY;
        // SAFETY: the function belongs to the library; job, table and context outlive the call, after which the library uses none.
        let status = unsafe { (self.run)(job.as_ptr(), job.len(), &raw const table, &raw mut out) };
        match read(&out, self.free) {
            Ok(JobResult::Failed(failure)) => Err(failure.into()),
            Ok(JobResult::CallbackFailed(message)) => Err(context.first_error_or(message)),
            Ok(result) if status == interface::DONE => Ok(result),
            Ok(_) => Err(unexpected(&format!("success with status {status}"))),
            Err(error) => Err(unexpected(&format!("status {status} and {error}"))),
        }
    }
}

fn unexpected(what: &str) -> JobError {
    Failure::failed(format!("libquerl_cuda returned {what}; internal error, please report it")).into()
}

fn read_description(describe: DescribeFn, free: FreeFn) -> Result<Description, LibraryError> {
    let mut out = Bytes::EMPTY;
    // SAFETY: the function belongs to the library, and `out` is ours to be written to.
    let status = unsafe { describe(&raw mut out) };
    let description = read(&out, free);
    match status {
        interface::DONE => description.map_err(LibraryError::Description),
        status => Err(LibraryError::Description(format!("it returned {status}"))),
    }
}

/// Reads what the library wrote, and frees it.
fn read<T: serde::de::DeserializeOwned>(out: &Bytes, free: FreeFn) -> Result<T, String> {
    // SAFETY: the library wrote these bytes, or nothing, and they are freed below alone.
    let value =
        serde_json::from_slice(unsafe { out.as_slice() }).map_err(|error| format!("an invalid message: {error}"));
    // SAFETY: the bytes are the library's and were not freed before; a copy is passed, and the original is not used again.
    unsafe { free(std::ptr::read(out)) };
    value
}

/// State of a job's callbacks.
struct Context<'a, 'c> {
    callbacks: &'a Callbacks<'c>,
    environments: Option<Environments<'a>>,
    on_responses: Option<Mutex<&'a mut ResponseCallback<'a>>>,
    /// The first error of a callback, which becomes the job's error: only its message is passed through the library's interface.
    error: Mutex<Option<JobError>>,
}

impl<'a, 'c> Context<'a, 'c> {
    fn new(callbacks: &'a Callbacks<'c>) -> Self {
        Self { callbacks, environments: None, on_responses: None, error: Mutex::new(None) }
    }
}

impl Context<'_, '_> {
    fn keep(&self, error: JobError) -> String {
        let message = error.to_string();
        lock(&self.error).get_or_insert(error);
        message
    }

    fn first_error_or(&self, message: String) -> JobError {
        lock(&self.error).take().unwrap_or_else(|| Failure { kind: FailureKind::Failed, message }.into())
    }

    fn environment(&self, split: Split) -> Result<&dyn Environment, String> {
        match (self.environments, split) {
            (Some(environments), Split::Train) => Ok(environments.train),
            (Some(environments), Split::Val) => Ok(environments.val),
            _ => Err(format!("this job has no environment of the {} split", split.name())),
        }
    }

    fn rollouts(&self) -> Result<&dyn RolloutEngine, String> {
        let rollouts = self.environments.and_then(|environments| environments.rollouts);
        rollouts.ok_or_else(|| "this job has no rollout engine".into())
    }

    fn answer(&self, request: Request) -> Result<Reply, String> {
        let metrics = || lock(self.callbacks.metrics);
        let io = |error: std::io::Error| io_problem(&error);
        let scoring = |error: EnvironmentError| self.keep(JobError::Environment(error));
        Ok(match request {
            Request::RecordMetrics { stage, step, metrics: values } => {
                metrics().record(&stage, step, &values).map_err(io)?;
                Reply::Done
            }
            Request::MarkMetrics => Reply::Mark(metrics().mark().map_err(io)?),
            Request::RewindMetrics(mark) => Reply::Rewound(metrics().rewind(mark).map_err(io)?),
            Request::Score { split, step, responses } => {
                Reply::Scored(self.environment(split)?.score(step, &responses).map_err(scoring)?)
            }
            Request::MarkEpisodes(split) => Reply::Mark(self.environment(split)?.mark().map_err(scoring)?),
            Request::RewindEpisodes { split, mark } => {
                Reply::Rewound(self.environment(split)?.rewind(mark).map_err(scoring)?)
            }
            Request::SetPolicy { version, adapter } => {
                self.rollouts()?.set_policy(version, &adapter).map_err(|failure| scoring(failure.into()))?;
                Reply::Done
            }
            Request::Rollouts { prompts, sampling } => {
                let responses = self.rollouts()?.generate(&prompts, &sampling);
                Reply::Rollouts(responses.map_err(|failure| scoring(failure.into()))?)
            }
            Request::Responses(responses) => {
                let on_responses = self.on_responses.as_ref().ok_or("this job has no response callback")?;
                lock(on_responses)(responses).map_err(|error: CallbackError| self.keep(error.into()))?;
                Reply::Done
            }
        })
    }
}

/// # Safety
/// `context` comes from a [`HostTable`] of [`Library::run`] whose call is still running; `data` points to `len` bytes.
unsafe extern "C" fn on_event(context: *mut c_void, data: *const u8, len: usize) {
    // A panic of the progress display must not unwind into the library, and does not stop the job.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as the caller promises; a context is only read, possibly from several threads: its fields are `Sync`.
        let (context, bytes) = unsafe { (&*context.cast::<Context<'_, '_>>(), interface::slice(data, len)) };
        let progress = context.callbacks.progress;
        match serde_json::from_slice(bytes) {
            Ok(Event::Update { n_done, n_total, note }) => progress.update(n_done, n_total, &note),
            Ok(Event::Line(text)) => progress.line(&text),
            Err(error) => progress.line(&format!("libquerl_cuda sent an invalid message: {error}")),
        }
    }));
}

/// # Safety
/// As [`on_event`], and `out` may be written to.
unsafe extern "C" fn on_request(context: *mut c_void, data: *const u8, len: usize, out: *mut Bytes) -> i32 {
    let answered = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as in `on_event`.
        let (context, bytes) = unsafe { (&*context.cast::<Context<'_, '_>>(), interface::slice(data, len)) };
        let request = serde_json::from_slice(bytes).map_err(|error| format!("invalid request: {error}"))?;
        serde_json::to_vec(&context.answer(request)?).map_err(|error| format!("a reply has no JSON form: {error}"))
    }));
    let panicked = |panic: Box<dyn std::any::Any + Send>| Err(format!("the host panicked: {}", panic_message(&*panic)));
    let (status, bytes) = match answered.unwrap_or_else(panicked) {
        Ok(bytes) => (interface::DONE, bytes),
        Err(message) => (interface::FAILED, message.into_bytes()),
    };
    // SAFETY: the caller promises that `out` may be written to; it holds nothing that would have to be dropped.
    unsafe { out.write(Bytes::from_vec(bytes)) };
    status
}

/// # Safety
/// `bytes` were written by [`on_request`], and are freed once.
unsafe extern "C" fn free_reply(bytes: Bytes) {
    // SAFETY: as the caller promises.
    drop(unsafe { bytes.into_vec() });
}

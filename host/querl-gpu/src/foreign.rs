//! The program as the library sees it: progress, metrics, environments, rollout engine and responses, called through a [`HostTable`].

use querl_core::ports::{
    Environment, EnvironmentError, LogMark, PolicyResponse, Progress, RolloutEngine, RolloutPrompt, RolloutResponse,
    RolloutSampling, ScoredResponses,
};
use querl_core::records::{CallFailure, FailureKind, Split};
use querl_train::job::interface::{self, Bytes, Event, HostTable, Reply, Request};
use querl_train::job::{CallbackError, GeneratedResponse};
use querl_train::{MetricSink, Metrics};
use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// The program's functions, which are valid for the length of a job. For an error in the program only the message is passed here; the
/// program keeps the error itself.
#[derive(Clone, Copy)]
pub(crate) struct Host<'a>(&'a HostTable);

// SAFETY: the interface demands that the table's functions, context and flag may be used from any thread.
unsafe impl Send for Host<'_> {}
// SAFETY: as above, and by several threads at once.
unsafe impl Sync for Host<'_> {}

impl<'a> Host<'a> {
    /// # Safety
    /// The table has our version, is complete, and valid for as long as this is used.
    pub(crate) unsafe fn new(table: &'a HostTable) -> Self {
        Self(table)
    }

    pub(crate) fn stop(&self) -> &'a AtomicBool {
        // SAFETY: the flag is valid and shared for as long as the table is (see `new`).
        unsafe { &*self.0.stop }
    }

    pub(crate) fn pass_responses(&self, responses: Vec<GeneratedResponse>) -> Result<(), CallbackError> {
        self.request_done(&Request::Responses(responses)).map_err(CallbackError)
    }

    fn send(&self, event: &Event) {
        // An event that cannot be serialised is skipped.
        let Ok(bytes) = serde_json::to_vec(event) else { return };
        // SAFETY: the table is complete (see `new`), and the bytes are valid for the length of the call.
        unsafe { (self.0.event)(self.0.context, bytes.as_ptr(), bytes.len()) }
    }

    fn request(&self, request: &Request) -> Result<Reply, String> {
        let request = serde_json::to_vec(request).map_err(|error| format!("a request has no JSON form: {error}"))?;
        let mut out = Bytes::EMPTY;
        // SAFETY: as in `send`; `out` is ours to be written to.
        let status = unsafe { (self.0.request)(self.0.context, request.as_ptr(), request.len(), &raw mut out) };
        // SAFETY: the program wrote these bytes, or nothing, and they are freed below alone.
        let bytes = unsafe { out.as_slice() };
        let reply = match status {
            interface::DONE => serde_json::from_slice(bytes).map_err(|error| format!("invalid reply: {error}")),
            _ => Err(String::from_utf8_lossy(bytes).into_owned()),
        };
        // SAFETY: the bytes are the program's, and freed once.
        unsafe { (self.0.free)(out) };
        reply
    }

    fn request_done(&self, request: &Request) -> Result<(), String> {
        match self.request(request)? {
            Reply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    fn request_mark(&self, request: &Request) -> Result<LogMark, String> {
        match self.request(request)? {
            Reply::Mark(mark) => Ok(mark),
            other => Err(unexpected(&other)),
        }
    }

    fn request_rewind(&self, request: &Request) -> Result<Option<String>, String> {
        match self.request(request)? {
            Reply::Rewound(difference) => Ok(difference),
            other => Err(unexpected(&other)),
        }
    }
}

fn unexpected(reply: &Reply) -> String {
    let kind = match reply {
        Reply::Done => "done",
        Reply::Mark(_) => "a mark",
        Reply::Rewound(_) => "a rewound log",
        Reply::Scored(_) => "scores",
        Reply::Rollouts(_) => "rollouts",
    };
    format!("the host replied {kind} to another request; internal error, please report it")
}

impl Progress for Host<'_> {
    fn update(&self, n_done: u64, n_total: u64, note: &str) {
        self.send(&Event::Update { n_done, n_total, note: note.into() });
    }

    fn line(&self, text: &str) {
        self.send(&Event::Line(text.into()));
    }
}

impl MetricSink for Host<'_> {
    fn record(&mut self, stage: &str, step: u64, metrics: &Metrics) -> io::Result<()> {
        let request = Request::RecordMetrics { stage: stage.into(), step, metrics: metrics.clone() };
        self.request_done(&request).map_err(io::Error::other)
    }

    fn mark(&mut self) -> io::Result<LogMark> {
        self.request_mark(&Request::MarkMetrics).map_err(io::Error::other)
    }

    fn rewind(&mut self, mark: LogMark) -> io::Result<Option<String>> {
        self.request_rewind(&Request::RewindMetrics(mark)).map_err(io::Error::other)
    }
}

pub(crate) struct HostEnvironment<'a>(pub(crate) Host<'a>, pub(crate) Split);

impl Environment for HostEnvironment<'_> {
    fn score(&self, step: u64, responses: &[PolicyResponse]) -> Result<ScoredResponses, EnvironmentError> {
        let request = Request::Score { split: self.1, step, responses: responses.to_vec() };
        match self.0.request(&request).map_err(EnvironmentError::Record)? {
            Reply::Scored(scored) => Ok(scored),
            other => Err(EnvironmentError::Record(unexpected(&other))),
        }
    }

    fn mark(&self) -> Result<LogMark, EnvironmentError> {
        self.0.request_mark(&Request::MarkEpisodes(self.1)).map_err(EnvironmentError::Record)
    }

    fn rewind(&self, mark: LogMark) -> Result<Option<String>, EnvironmentError> {
        let request = Request::RewindEpisodes { split: self.1, mark };
        self.0.request_rewind(&request).map_err(EnvironmentError::Record)
    }
}

pub(crate) struct HostRollouts<'a>(pub(crate) Host<'a>);

/// Only the message is needed here, because the program keeps the failure itself.
fn rollout_failure(message: String) -> CallFailure {
    CallFailure { kind: FailureKind::Rejected, message }
}

impl RolloutEngine for HostRollouts<'_> {
    fn set_policy(&self, version: u64, adapter: &Path) -> Result<(), CallFailure> {
        let request = Request::SetPolicy { version, adapter: adapter.to_owned() };
        self.0.request_done(&request).map_err(rollout_failure)
    }

    fn generate(
        &self,
        prompts: &[RolloutPrompt],
        sampling: &RolloutSampling,
    ) -> Result<Vec<Vec<RolloutResponse>>, CallFailure> {
        let request = Request::Rollouts { prompts: prompts.to_vec(), sampling: sampling.clone() };
        match self.0.request(&request).map_err(rollout_failure)? {
            Reply::Rollouts(responses) => Ok(responses),
            other => Err(rollout_failure(unexpected(&other))),
        }
    }
}

//! The host as the library sees it: functions of the program, called with JSON.

use querl_core::ports::{EnvironmentError, PolicyResponse, Progress, ScoredResponses};
use querl_core::records::Split;
use querl_device::interface::{self, Bytes, HostTable};
use querl_device::{Answered, Event, Host, Refused, Reply, Request};
use std::io;
use std::sync::atomic::AtomicBool;

/// The program's table, for the length of a job.
pub(crate) struct ForeignHost<'a>(&'a HostTable);

// SAFETY: the interface demands that the table's functions, context and flag may be used from any thread.
unsafe impl Send for ForeignHost<'_> {}
// SAFETY: as above, and by several threads at once.
unsafe impl Sync for ForeignHost<'_> {}

impl<'a> ForeignHost<'a> {
    /// # Safety
    /// The table is one of our version, whole, and good for as long as this is used.
    pub(crate) unsafe fn new(table: &'a HostTable) -> Self {
        Self(table)
    }

    fn tell(&self, event: &Event) {
        // What has no JSON form is not shown: a display is no reason to stop.
        let Ok(bytes) = serde_json::to_vec(event) else { return };
        // SAFETY: the table is whole (see `new`), and the bytes are good for the length of the call.
        unsafe { (self.0.event)(self.0.context, bytes.as_ptr(), bytes.len()) }
    }

    /// # Errors
    /// The host's words, or what is wrong with its answer.
    fn ask(&self, request: &Request) -> Result<Reply, String> {
        let request = serde_json::to_vec(request).map_err(|error| format!("a request has no JSON form: {error}"))?;
        let mut out = Bytes::EMPTY;
        // SAFETY: as in `tell`; `out` is ours to be written to.
        let status = unsafe { (self.0.request)(self.0.context, request.as_ptr(), request.len(), &raw mut out) };
        // SAFETY: the host wrote these bytes, or nothing, and they are freed below alone.
        let bytes = unsafe { out.as_slice() };
        let reply = match status {
            interface::DONE => {
                serde_json::from_slice(bytes).map_err(|error| format!("a reply is not understood: {error}"))
            }
            _ => Err(String::from_utf8_lossy(bytes).into_owned()),
        };
        // SAFETY: the bytes are the host's, and given back once.
        unsafe { (self.0.free)(out) };
        reply
    }

    fn ask_to_do(&self, request: &Request) -> Result<(), String> {
        match self.ask(request)? {
            Reply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    fn ask_for_mark(&self, request: &Request) -> Result<u64, String> {
        match self.ask(request)? {
            Reply::Mark(mark) => Ok(mark),
            other => Err(unexpected(&other)),
        }
    }
}

fn unexpected(reply: &Reply) -> String {
    let sort = match reply {
        Reply::Done => "done",
        Reply::Mark(_) => "a mark",
        Reply::Scored(_) => "scores",
    };
    format!("the host answered {sort} to another question; this is a fault of querl, please report it")
}

impl Progress for ForeignHost<'_> {
    fn update(&self, n_done: u64, n_total: u64, note: &str) {
        self.tell(&Event::Update { n_done, n_total, note: note.into() });
    }

    fn line(&self, text: &str) {
        self.tell(&Event::Line(text.into()));
    }
}

/// The words are all that is known here of an error of the program's: it keeps the error itself.
impl Host for ForeignHost<'_> {
    fn stop(&self) -> &AtomicBool {
        // SAFETY: the flag is good and shared for as long as the table is (see `new`).
        unsafe { &*self.0.stop }
    }

    fn record(&self, stage: &str, step: u64, metrics: &querl_train::Metrics) -> io::Result<()> {
        let request = Request::Record { stage: stage.into(), step, metrics: metrics.clone() };
        self.ask_to_do(&request).map_err(io::Error::other)
    }

    fn mark_metrics(&self) -> io::Result<u64> {
        self.ask_for_mark(&Request::MarkMetrics).map_err(io::Error::other)
    }

    fn rewind_metrics(&self, mark: u64) -> io::Result<()> {
        self.ask_to_do(&Request::RewindMetrics(mark)).map_err(io::Error::other)
    }

    fn score(
        &self,
        split: Split,
        step: u64,
        responses: &[PolicyResponse],
    ) -> Result<ScoredResponses, EnvironmentError> {
        let request = Request::Score { split, step, responses: responses.to_vec() };
        match self.ask(&request).map_err(EnvironmentError::Record)? {
            Reply::Scored(scored) => Ok(scored),
            other => Err(EnvironmentError::Record(unexpected(&other))),
        }
    }

    fn mark_episodes(&self, split: Split) -> Result<u64, EnvironmentError> {
        self.ask_for_mark(&Request::MarkEpisodes(split)).map_err(EnvironmentError::Record)
    }

    fn rewind_episodes(&self, split: Split, mark: u64) -> Result<(), EnvironmentError> {
        self.ask_to_do(&Request::RewindEpisodes { split, mark }).map_err(EnvironmentError::Record)
    }

    fn take(&self, answers: Vec<Answered>) -> Result<(), Refused> {
        self.ask_to_do(&Request::Take(answers)).map_err(Refused)
    }
}

//! Calls to retrieval and judge: some at a time, each cut off at an episode's deadline, timed.

use futures::StreamExt;
use querl_core::records::{CallFailure, FailureKind};
use std::time::{Duration, Instant};

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Missed {
    /// The service failed.
    Failed(CallFailure),
    /// It had not answered when the deadline passed.
    Late(Duration),
}

impl Missed {
    /// What records say of it, where it was the deadline.
    pub fn lateness(&self) -> Option<CallFailure> {
        matches!(self, Self::Late(_)).then(|| self.clone().into_failure())
    }

    /// What records say of it.
    pub fn into_failure(self) -> CallFailure {
        match self {
            Self::Failed(failure) => failure,
            Self::Late(deadline) => {
                let message = format!("no answer within rl.episode_deadline_ms = {}", deadline.as_millis());
                CallFailure { kind: FailureKind::Timeout, message }
            }
        }
    }
}

/// The answer of `call`, unless the deadline passes before it.
pub async fn within<T>(
    deadline: Option<Duration>,
    call: impl Future<Output = Result<T, CallFailure>>,
) -> Result<T, Missed> {
    let Some(deadline) = deadline else { return call.await.map_err(Missed::Failed) };
    match tokio::time::timeout(deadline, call).await {
        Ok(answer) => answer.map_err(Missed::Failed),
        Err(_) => Err(Missed::Late(deadline)),
    }
}

/// All `calls`, in order, at most `n_at_once` under way; with the seconds from the first one's start to the last one's end.
pub async fn all<F: Future>(calls: Vec<F>, n_at_once: usize) -> (Vec<F::Output>, f64) {
    // Taken when this is first looked at: beside calls that do not wait, the clock starts when these ones do.
    let started = Instant::now();
    let answers = futures::stream::iter(calls).buffered(n_at_once.max(1)).collect().await;
    (answers, started.elapsed().as_secs_f64())
}

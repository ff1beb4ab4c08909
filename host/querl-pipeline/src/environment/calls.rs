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

/// The answer of `call`, unless the deadline passes before it. Waiting for its turn does not count.
pub async fn within<T>(
    deadline: Option<Duration>,
    call: impl Future<Output = Result<T, CallFailure>>,
) -> Result<T, Missed> {
    let Some(deadline) = deadline else { return call.await.map_err(Missed::Failed) };
    match querl_data::within_deadline(deadline, call).await {
        Some(answer) => answer.map_err(Missed::Failed),
        None => Err(Missed::Late(deadline)),
    }
}

/// All `calls`, in order, at most `n_at_once` under way; with the seconds from the first one's start to the last one's end.
pub async fn all<F: Future>(calls: Vec<F>, n_at_once: usize) -> (Vec<F::Output>, f64) {
    // Taken when this is first looked at: beside calls that do not wait, the clock starts when these ones do.
    let started = Instant::now();
    // Not in order: one that is late must not keep the place of those behind it, which are done.
    let numbered = calls.into_iter().enumerate().map(|(index, call)| async move { (index, call.await) });
    let mut answers: Vec<(usize, F::Output)> =
        futures::stream::iter(numbered).buffer_unordered(n_at_once.max(1)).collect().await;
    answers.sort_unstable_by_key(|(index, _)| *index);
    (answers.into_iter().map(|(_, answer)| answer).collect(), started.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first call ends after all the others, though only two are under way at once.
    #[tokio::test]
    async fn one_that_is_late_does_not_keep_the_others_waiting() {
        let done = tokio::sync::Semaphore::new(0);
        let call = |index: usize| {
            let done = &done;
            async move {
                match index {
                    0 => drop(done.acquire_many(10).await),
                    _ => done.add_permits(1),
                }
                index
            }
        };
        let calls = all((0..11).map(call).collect(), 2);
        let (answers, _) = tokio::time::timeout(Duration::from_secs(30), calls).await.expect("the others went by");
        assert_eq!(answers, (0..11).collect::<Vec<_>>());
    }
}

//! Calls of models and indexes in this process: limited concurrency and time, on blocking threads.

use crate::client::deadline::queued;
use querl_core::records::{CallFailure, FailureKind};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::sync::Semaphore;

/// More at once than there are processor cores makes all of it slower, and needs the memory of each.
static CORES: LazyLock<Arc<Semaphore>> =
    LazyLock::new(|| Arc::new(Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from))));

/// The limits of one model or index. All of them together do no more at once than there are cores.
pub(crate) struct LocalModelCalls {
    what: &'static str,
    slots: Arc<Semaphore>,
    timeout: Duration,
}

impl LocalModelCalls {
    /// `timeout_s` counts from the start of the work; queue time is unlimited.
    pub(crate) fn new(what: &'static str, max_concurrent: usize, timeout_s: f64) -> Self {
        // `from_secs_f64` panics on what the configuration's own check should have refused.
        let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::from_secs(60));
        Self { what, slots: Arc::new(Semaphore::new(max_concurrent.max(1))), timeout }
    }

    /// Runs `work` on a blocking thread. A caller that is cancelled before a slot is free leaves the queue; work that has started runs
    /// to its end and keeps its slot.
    pub(crate) async fn run<T: Send + 'static, E: std::fmt::Display + Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, CallFailure> {
        let own = queued(self.slots.clone().acquire_owned()).await.expect("the semaphore is never closed");
        let core = queued(CORES.clone().acquire_owned()).await.expect("the semaphore is never closed");
        let task = tokio::task::spawn_blocking(move || {
            let result = work();
            drop((own, core));
            result
        });
        let seconds = self.timeout.as_secs_f64();
        let task = tokio::time::timeout(self.timeout, task).await;
        let done = task.map_err(|_| self.failure(FailureKind::Timeout, &format!("no answer within {seconds} s")))?;
        let failed = |problem: String| self.failure(FailureKind::ServerError, &problem);
        done.map_err(|error| failed(error.to_string()))?.map_err(|error| failed(error.to_string()))
    }

    fn failure(&self, kind: FailureKind, problem: &str) -> CallFailure {
        CallFailure { kind, message: format!("{}: {problem}", self.what) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn sleep(milliseconds: u64) -> Result<(), String> {
        std::thread::sleep(Duration::from_millis(milliseconds));
        Ok(())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn no_more_is_done_at_once_than_is_allowed() {
        static NOW: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        let work = LocalModelCalls::new("model", 1, 30.0);
        let one = || {
            work.run(|| {
                MOST.fetch_max(NOW.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                sleep(5)?;
                NOW.fetch_sub(1, Ordering::SeqCst);
                Ok::<(), String>(())
            })
        };
        futures::future::try_join_all((0..8).map(|_| one())).await.unwrap();
        assert_eq!(MOST.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn work_that_takes_too_long_fails_and_keeps_its_slot() {
        let work = LocalModelCalls::new("model", 1, 0.02);
        let failure = work.run(|| sleep(200)).await.unwrap_err();
        assert_eq!((failure.kind, failure.message.as_str()), (FailureKind::Timeout, "model: no answer within 0.02 s"));
        assert_eq!(work.slots.available_permits(), 0);
        tokio::time::sleep(Duration::from_millis(400)).await;
        assert_eq!(work.slots.available_permits(), 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_failure_names_what_failed() {
        let failure = LocalModelCalls::new("model", 1, 30.0).run(|| Err::<(), _>("no weights")).await.unwrap_err();
        assert_eq!((failure.kind, failure.message.as_str()), (FailureKind::ServerError, "model: no weights"));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn who_stops_waiting_costs_nothing() {
        static DONE: AtomicUsize = AtomicUsize::new(0);
        let work = Arc::new(LocalModelCalls::new("model", 1, 30.0));
        let (busy, waiting) = (work.clone(), work.clone());
        let (begin, begun) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let wait = move || {
            begin.send(()).map_err(|error| error.to_string())?;
            released.recv().map_err(|error| error.to_string())
        };
        let busy = tokio::spawn(async move { busy.run(wait).await });
        tokio::task::spawn_blocking(move || begun.recv()).await.unwrap().unwrap();
        let count = || {
            DONE.fetch_add(1, Ordering::SeqCst);
            Ok::<(), String>(())
        };
        let waiting = tokio::spawn(async move { waiting.run(count).await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        waiting.abort();
        release.send(()).unwrap();
        busy.await.unwrap().unwrap();
        work.run(|| sleep(0)).await.unwrap();
        assert_eq!(DONE.load(Ordering::SeqCst), 0);
    }
}

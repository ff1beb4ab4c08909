//! Calls to external services. This file has the service context that all calls of a run share, deadlines and the stop flag; the
//! submodules have HTTP, response cache, budget, chat completions and the batch API.

pub(crate) mod batch;
pub(crate) mod chat;
pub(crate) mod http;
pub(crate) mod response_cache;
pub(crate) mod spend;

use querl_core::config::CallsConfig;
use response_cache::{InFlightRequests, ResponseCache};
use spend::SpendTracker;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// HTTP settings, spend tracker, response cache and stop flag that all external calls of a run share.
#[derive(Clone, Default)]
pub struct ServiceContext {
    pub(crate) config: CallsConfig,
    pub(crate) tracker: Arc<SpendTracker>,
    pub(crate) cache: Option<Arc<ResponseCache>>,
    pub(crate) in_flight: Arc<InFlightRequests>,
    pub(crate) retrieval_ttl: Duration,
    pub(crate) fresh_since: Option<Instant>,
    pub(crate) stop: StopFlag,
    pub(crate) keys: KeyAccess,
}

/// Whether API keys are read from the environment and files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum KeyAccess {
    #[default]
    Read,
    Ignore,
}

impl ServiceContext {
    /// A context with the call settings of a configuration, a new spend tracker and no response cache.
    pub fn new(config: &CallsConfig) -> Self {
        Self { config: config.clone(), ..Self::default() }
    }

    /// Counts the spend of all calls in `tracker`.
    #[must_use]
    pub fn with_spend_tracker(self, tracker: Arc<SpendTracker>) -> Self {
        Self { tracker, ..self }
    }

    /// Caches responses in `cache`; those of retrieval expire after `retrieval_ttl`.
    #[must_use]
    pub fn with_cache(self, cache: Arc<ResponseCache>, retrieval_ttl: Duration) -> Self {
        Self { cache: Some(cache), retrieval_ttl, ..self }
    }

    /// Ignores cached retrieval responses from before this call: the knowledge base may have changed.
    #[must_use]
    pub fn with_fresh_retrievals(self) -> Self {
        Self { fresh_since: Some(Instant::now()), ..self }
    }

    /// Stops sending requests and retries once `stop` is true.
    #[must_use]
    pub fn until(self, stop: &'static AtomicBool) -> Self {
        Self { stop: StopFlag::new(stop), ..self }
    }

    /// A context that opens clients without API keys, for a cost estimate that calls no service.
    #[must_use]
    pub fn without_keys(self) -> Self {
        Self { keys: KeyAccess::Ignore, ..self }
    }

    pub(crate) fn with_config(&self, config: CallsConfig) -> Self {
        Self { config, ..self.clone() }
    }

    /// The spend tracker of these calls.
    pub fn spend_tracker(&self) -> &Arc<SpendTracker> {
        &self.tracker
    }
}

/// Time that a call with a deadline has spent in queues.
#[derive(Default)]
struct QueueTime(Mutex<QueueState>);

#[derive(Default)]
struct QueueState {
    n_waiting: usize,
    since: Option<Instant>,
    before: Duration,
}

tokio::task_local! {
    static QUEUE_TIME: Arc<QueueTime>;
}

/// Runs `call` and drops it after `limit`, which does not include its time in queues; `None` if it was dropped.
pub async fn within_deadline<T>(limit: Duration, call: impl Future<Output = T>) -> Option<T> {
    let (started, queue_time) = (Instant::now(), Arc::new(QueueTime::default()));
    let mut call = std::pin::pin!(QUEUE_TIME.scope(queue_time.clone(), call));
    loop {
        let left = limit.saturating_sub(started.elapsed().saturating_sub(queue_time.total()));
        tokio::select! {
            biased;
            done = &mut call => return Some(done),
            () = tokio::time::sleep(left) => {}
        }
        if started.elapsed().saturating_sub(queue_time.total()) >= limit {
            return None;
        }
    }
}

pub(crate) async fn queued<T>(wait: impl Future<Output = T>) -> T {
    let _guard = queue_guard();
    wait.await
}

pub(crate) fn queue_guard() -> Option<QueueGuard> {
    QUEUE_TIME.try_with(Arc::clone).ok().map(QueueGuard::begin)
}

pub(crate) struct QueueGuard(Arc<QueueTime>);

impl QueueGuard {
    fn begin(queue_time: Arc<QueueTime>) -> Self {
        let mut state = queue_time.state();
        state.n_waiting += 1;
        state.since = state.since.or_else(|| Some(Instant::now()));
        drop(state);
        Self(queue_time)
    }
}

impl Drop for QueueGuard {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.n_waiting -= 1;
        if state.n_waiting == 0
            && let Some(since) = state.since.take()
        {
            state.before += since.elapsed();
        }
    }
}

impl QueueTime {
    fn total(&self) -> Duration {
        let state = self.state();
        state.before + state.since.map(|since| since.elapsed()).unwrap_or_default()
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Flag that is set when the user interrupts the run.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StopFlag(Option<&'static AtomicBool>);

impl StopFlag {
    pub(crate) fn new(flag: &'static AtomicBool) -> Self {
        Self(Some(flag))
    }

    pub(crate) fn is_set(self) -> bool {
        self.0.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// Awaits `wait` until the flag is set; `None` if it was set first.
    pub(crate) async fn before<T>(self, wait: impl Future<Output = T>) -> Option<T> {
        if self.0.is_none() {
            return Some(wait.await);
        }
        let mut wait = std::pin::pin!(wait);
        while !self.is_set() {
            if let Ok(done) = tokio::time::timeout(POLL_INTERVAL, &mut wait).await {
                return (!self.is_set()).then_some(done);
            }
        }
        None
    }

    pub(crate) async fn pause(self, pause: Duration) {
        self.before(queued(tokio::time::sleep(pause))).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::sleep;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_millis(300);

    /// Regression: episodes were dropped as late because of calls queued before them.
    #[tokio::test]
    async fn deadline_excludes_queue_time() {
        assert_eq!(within_deadline(LONG / 3, queued(sleep(LONG))).await, Some(()));
        assert_eq!(within_deadline(SHORT, sleep(LONG)).await, None);
        let both = async {
            queued(sleep(LONG)).await;
            sleep(LONG).await;
        };
        let started = Instant::now();
        assert_eq!(within_deadline(SHORT, both).await, None);
        assert!(started.elapsed() >= LONG, "queue time is not limited");
    }

    #[tokio::test]
    async fn a_call_without_a_deadline_can_queue() {
        assert_eq!(queued(async { 1 }).await, 1);
    }
}

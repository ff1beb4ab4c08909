//! Deadlines of calls, which exclude the time spent in queues (for a slot, a rate limit, the budget), and the stop flag.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Time that a call with a deadline spent in queues.
#[derive(Debug, Default)]
struct QueueTime(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    n_waiting: usize,
    since: Option<Instant>,
    before: Duration,
}

tokio::task_local! {
    static QUEUE_TIME: Arc<QueueTime>;
}

/// The result of `call`; `None`, and the call is dropped, where it takes longer than `limit` without queue time.
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Set once the user interrupts the run; never set without a flag.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StopFlag(Option<&'static AtomicBool>);

impl StopFlag {
    pub(crate) fn new(flag: &'static AtomicBool) -> Self {
        Self(Some(flag))
    }

    pub(crate) fn is_set(self) -> bool {
        self.0.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// The result of `wait`; `None` once the flag is set.
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
    async fn waiting_for_a_turn_does_not_count_and_the_answer_does() {
        assert_eq!(within_deadline(LONG / 3, queued(sleep(LONG))).await, Some(()));
        assert_eq!(within_deadline(SHORT, sleep(LONG)).await, None);
        let both = async {
            queued(sleep(LONG)).await;
            sleep(LONG).await;
        };
        let started = Instant::now();
        assert_eq!(within_deadline(SHORT, both).await, None);
        assert!(started.elapsed() >= LONG, "the turn was waited for");
    }

    #[tokio::test]
    async fn without_a_limit_turns_are_waited_for_all_the_same() {
        assert_eq!(queued(async { 1 }).await, 1);
    }
}

//! A limit on the time that others take to answer: waiting for one's turn, which others' calls decide on, does not count.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long one who has a limit waited for turns.
#[derive(Debug, Default)]
struct Waits(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Of parts that run side by side.
    n_waiting: usize,
    since: Option<Instant>,
    before: Duration,
}

tokio::task_local! {
    static WAITS: Arc<Waits>;
}

/// What `call` comes to; `None` where it is not done within `limit`, waiting for turns not counted, and is dropped.
pub async fn within<T>(limit: Duration, call: impl Future<Output = T>) -> Option<T> {
    let (started, waits) = (Instant::now(), Arc::new(Waits::default()));
    let mut call = std::pin::pin!(WAITS.scope(waits.clone(), call));
    loop {
        let left = limit.saturating_sub(started.elapsed().saturating_sub(waits.total()));
        tokio::select! {
            biased;
            done = &mut call => return Some(done),
            () = tokio::time::sleep(left) => {}
        }
        if started.elapsed().saturating_sub(waits.total()) >= limit {
            return None;
        }
    }
}

/// Waits for one's turn.
pub(crate) async fn turn<T>(wait: impl Future<Output = T>) -> T {
    let _waiting = waiting();
    wait.await
}

/// The same for one who cannot say beforehand when the turn comes: until what this gives is dropped.
pub(crate) fn waiting() -> Option<Waiting> {
    WAITS.try_with(Arc::clone).ok().map(Waiting::begin)
}

/// While it is there, somebody waits.
pub(crate) struct Waiting(Arc<Waits>);

impl Waiting {
    fn begin(waits: Arc<Waits>) -> Self {
        let mut state = waits.state();
        state.n_waiting += 1;
        state.since = state.since.or_else(|| Some(Instant::now()));
        drop(state);
        Self(waits)
    }
}

impl Drop for Waiting {
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

impl Waits {
    fn total(&self) -> Duration {
        let state = self.state();
        state.before + state.since.map(|since| since.elapsed()).unwrap_or_default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// How often somebody who waits looks whether it was said.
const LOOK: Duration = Duration::from_millis(50);

/// Set once the user said stop; without a flag nobody ever does.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StopFlag(Option<&'static AtomicBool>);

impl StopFlag {
    pub(crate) fn new(flag: &'static AtomicBool) -> Self {
        Self(Some(flag))
    }

    pub(crate) fn is_set(self) -> bool {
        self.0.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// What `wait` comes to; `None` once the user said stop.
    pub(crate) async fn before<T>(self, wait: impl Future<Output = T>) -> Option<T> {
        if self.0.is_none() {
            return Some(wait.await);
        }
        let mut wait = std::pin::pin!(wait);
        while !self.is_set() {
            if let Ok(done) = tokio::time::timeout(LOOK, &mut wait).await {
                return (!self.is_set()).then_some(done);
            }
        }
        None
    }

    /// Waits so long, or until the user says stop.
    pub(crate) async fn pause(self, pause: Duration) {
        self.before(turn(tokio::time::sleep(pause))).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::sleep;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_millis(300);

    /// Keeps away: episodes that are dropped as late, since others had asked before them.
    #[tokio::test]
    async fn waiting_for_a_turn_does_not_count_and_the_answer_does() {
        assert_eq!(within(LONG / 3, turn(sleep(LONG))).await, Some(()));
        assert_eq!(within(SHORT, sleep(LONG)).await, None);
        let both = async {
            turn(sleep(LONG)).await;
            sleep(LONG).await;
        };
        let started = Instant::now();
        assert_eq!(within(SHORT, both).await, None);
        assert!(started.elapsed() >= LONG, "the turn was waited for");
    }

    #[tokio::test]
    async fn without_a_limit_turns_are_waited_for_all_the_same() {
        assert_eq!(turn(async { 1 }).await, 1);
    }
}

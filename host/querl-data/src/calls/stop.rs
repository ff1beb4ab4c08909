//! The user's word that nobody is to be called any more.

use crate::deadline::turn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often somebody who waits looks whether it was said.
const LOOK: Duration = Duration::from_millis(50);

/// Set once the user said stop; without a flag nobody ever does.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StopFlag(Option<&'static AtomicBool>);

impl StopFlag {
    pub(crate) fn new(flag: &'static AtomicBool) -> Self {
        Self(Some(flag))
    }

    pub(super) fn is_set(self) -> bool {
        self.0.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// What `wait` comes to; `None` once the user said stop.
    pub(super) async fn before<T>(self, wait: impl Future<Output = T>) -> Option<T> {
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
    pub(super) async fn pause(self, pause: Duration) {
        self.before(turn(tokio::time::sleep(pause))).await;
    }
}

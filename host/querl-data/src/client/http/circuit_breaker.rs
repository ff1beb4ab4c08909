//! Circuit breaker: stops calls to an endpoint that does not respond.

use querl_core::records::{CallFailure, FailureKind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Opens after `limit` consecutive calls without a response, each after all its attempts, and stays open: the stage stops, keeps its
/// finished rows, and the next run starts with a closed breaker.
#[derive(Debug)]
pub(super) struct CircuitBreaker {
    limit: usize,
    in_a_row: AtomicUsize,
    opened: OnceLock<CallFailure>,
}

impl CircuitBreaker {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, in_a_row: AtomicUsize::new(0), opened: OnceLock::new() }
    }

    pub(super) fn opened(&self) -> Option<&CallFailure> {
        self.opened.get()
    }

    /// Opens at once, after a long `Retry-After`.
    pub(super) fn open(&self, failure: &CallFailure) {
        if self.limit == 0 {
            return;
        }
        let message = format!("{}; run again then", failure.message);
        let _ = self.opened.set(CallFailure { kind: FailureKind::Down, message });
    }

    /// Counts the outcome of a call to `address`.
    pub(super) fn count<T>(&self, address: &str, ended: &Result<T, CallFailure>) {
        let failure = match ended {
            Ok(_) => return self.in_a_row.store(0, Ordering::Relaxed),
            Err(failure) => failure,
        };
        let without_answer = matches!(
            failure.kind,
            FailureKind::Timeout | FailureKind::Unreachable | FailureKind::RateLimited | FailureKind::ServerError
        );
        if !without_answer {
            return;
        }
        let n_failed = self.in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
        if self.limit > 0 && n_failed >= self.limit {
            let message = format!(
                "{address}: given up after {n_failed} calls in a row without an answer; run again once it is up; the last: {failure}"
            );
            let _ = self.opened.set(CallFailure { kind: FailureKind::Down, message });
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn failed(kind: FailureKind) -> Result<(), CallFailure> {
        Err(CallFailure { kind, message: "no".into() })
    }

    #[test]
    fn an_answer_starts_the_count_anew_and_a_refusal_is_no_silence() {
        let breaker = CircuitBreaker::new(2);
        for ended in [failed(FailureKind::Timeout), Ok(()), failed(FailureKind::Timeout)] {
            breaker.count("x", &ended);
        }
        breaker.count("x", &failed(FailureKind::Rejected));
        assert_eq!(breaker.opened(), None);
        breaker.count("x", &failed(FailureKind::RateLimited));
        assert_eq!(breaker.opened().unwrap().kind, FailureKind::Down);
    }
}

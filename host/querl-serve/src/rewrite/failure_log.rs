//! Rate-limited warnings about failed requests, which are many under overload or while another service is down.

use querl_core::log_limit::LogLimit;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Writes at most one line per subject and reason in an interval, and counts the failures in between.
#[derive(Debug)]
pub(super) struct FailureLog {
    interval: Duration,
    lines: Mutex<BTreeMap<(String, &'static str), FailureLines>>,
}

#[derive(Debug)]
struct FailureLines {
    limit: LogLimit,
    /// True until a line reports that requests succeed again.
    is_open: bool,
    /// Number of failures since such a line.
    n_failures: u64,
}

impl FailureLog {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, lines: Mutex::default() }
    }

    /// Logs a failure, or counts it for the next line of the same subject and reason.
    pub(super) fn warn(&self, subject: &str, reason: &'static str, message: &str) {
        if let Some(n_since) = self.n_since(subject, reason, Instant::now()) {
            tracing::warn!("{subject}: {reason}: {message}{}", more(n_since));
        }
    }

    /// Like [`Self::warn`], at level info, for a failure that a client may have caused.
    pub(super) fn note(&self, subject: &str, reason: &'static str, message: &str) {
        if let Some(n_since) = self.n_since(subject, reason, Instant::now()) {
            tracing::info!("{subject}: {reason}: {message}{}", more(n_since));
        }
    }

    /// Logs that requests succeed again, once after a line of [`Self::warn`] with the same subject and reason.
    pub(super) fn note_success(&self, subject: &str, reason: &'static str, message: &str) {
        if let Some(n_failures) = self.n_until_success(subject, reason) {
            tracing::info!("{subject}: {message} after {n_failures} failure(s)");
        }
    }

    /// Number of failures since the last line; `None` if it is too early for the next line.
    fn n_since(&self, subject: &str, reason: &'static str, now: Instant) -> Option<u64> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let first = || FailureLines { limit: LogLimit::new(1, self.interval), is_open: false, n_failures: 0 };
        let lines = lines.entry((subject.to_owned(), reason)).or_insert_with(first);
        lines.n_failures += 1;
        let n_since = lines.limit.admit(now)?;
        lines.is_open = true;
        Some(n_since)
    }

    /// Number of failures since the last line about a success; `None` if the last line is not about a failure.
    fn n_until_success(&self, subject: &str, reason: &'static str) -> Option<u64> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = lines.get_mut(&(subject.to_owned(), reason)).filter(|lines| lines.is_open)?;
        lines.is_open = false;
        lines.limit.take_left_out();
        Some(std::mem::take(&mut lines.n_failures))
    }
}

fn more(n_since: u64) -> String {
    if n_since == 0 { String::new() } else { format!(" ({n_since} more failures since the last such line)") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: an overloaded server wrote a line for each fallback.
    #[test]
    fn a_tenant_and_reason_has_one_line_a_second_with_the_number_since() {
        let (log, start) = (FailureLog::new(Duration::from_secs(1)), Instant::now());
        let at = |tenant, reason, ms| log.n_since(tenant, reason, start + Duration::from_millis(ms));
        assert_eq!(at("shop", "timeout", 0), Some(0));
        assert_eq!((at("shop", "timeout", 10), at("shop", "timeout", 999)), (None, None));
        assert_eq!((at("shop", "model_failed", 20), at("rival", "timeout", 30)), (Some(0), Some(0)));
        assert_eq!(at("shop", "timeout", 1000), Some(2));
        assert_eq!((at("shop", "timeout", 1500), at("shop", "timeout", 2100)), (None, Some(1)));
    }

    /// A service that alternately fails and succeeds has two lines per interval.
    #[test]
    fn a_success_has_a_line_once_after_a_line_about_a_failure() {
        let (log, start) = (FailureLog::new(Duration::from_secs(60)), Instant::now());
        let failed = |s| log.n_since("upstream", "down", start + Duration::from_secs(s));
        let succeeded = || log.n_until_success("upstream", "down");
        assert_eq!(succeeded(), None);
        assert_eq!((failed(0), failed(1), failed(2)), (Some(0), None, None));
        assert_eq!((succeeded(), succeeded()), (Some(3), None));
        assert_eq!((failed(3), succeeded(), failed(59)), (None, None, None));
        assert_eq!((failed(60), succeeded()), (Some(2), Some(3)));
    }
}

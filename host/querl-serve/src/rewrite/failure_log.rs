//! Warnings about requests without a rewrite: under overload there are more of them than a log has room for.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// At most one line of a tenant and a reason in this time.
const INTERVAL: Duration = Duration::from_secs(1);

/// The last line of each tenant and reason.
#[derive(Default)]
pub(super) struct FailureLog(Mutex<BTreeMap<(String, &'static str), LastLine>>);

struct LastLine {
    at: Instant,
    n_since: u64,
}

impl FailureLog {
    /// Logs a failure, or counts it for the next line of its tenant and reason.
    pub(super) fn warn(&self, tenant: &str, reason: &'static str, message: &str) {
        let others = match self.n_since(tenant, reason, Instant::now()) {
            None => return,
            Some(0) => String::new(),
            Some(n_since) => format!(" ({n_since} more since the last such line)"),
        };
        tracing::warn!("tenant {tenant}: {reason}: {message}{others}");
    }

    /// Failures since the last line; `None` where it is too early for the next one.
    fn n_since(&self, tenant: &str, reason: &'static str, now: Instant) -> Option<u64> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(last) = lines.get_mut(&(tenant.to_owned(), reason)) else {
            lines.insert((tenant.to_owned(), reason), LastLine { at: now, n_since: 0 });
            return Some(0);
        };
        if now.duration_since(last.at) < INTERVAL {
            last.n_since += 1;
            return None;
        }
        Some(std::mem::replace(last, LastLine { at: now, n_since: 0 }).n_since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: an overloaded server wrote a line for each fallback.
    #[test]
    fn a_tenant_and_reason_has_one_line_a_second_with_the_number_since() {
        let (log, start) = (FailureLog::default(), Instant::now());
        let at = |tenant, reason, ms| log.n_since(tenant, reason, start + Duration::from_millis(ms));
        assert_eq!(at("shop", "timeout", 0), Some(0));
        assert_eq!((at("shop", "timeout", 10), at("shop", "timeout", 999)), (None, None));
        assert_eq!((at("shop", "model_failed", 20), at("rival", "timeout", 30)), (Some(0), Some(0)));
        assert_eq!(at("shop", "timeout", 1000), Some(2));
        assert_eq!((at("shop", "timeout", 1500), at("shop", "timeout", 2100)), (None, Some(1)));
    }
}

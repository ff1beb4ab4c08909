//! How much of a plugin's log reaches the host's, over all of its calls.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A run makes 100,000 calls and more: what each may log is much too much together. So many full calls are enough to see why.
const FULL_CALLS: usize = 64;

/// What a plugin may still log in the life of its host.
#[derive(Debug)]
pub(crate) struct LogBudget(AtomicUsize);

/// What becomes of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Line {
    Written,
    /// Written, and nothing after it will be.
    Last,
    Silent,
}

impl LogBudget {
    /// For calls that may log `log_bytes` each.
    pub(crate) fn new(log_bytes: usize) -> Self {
        Self(AtomicUsize::new(log_bytes.saturating_mul(FULL_CALLS)))
    }

    pub(crate) fn take(&self, n_bytes: usize) -> Line {
        let before =
            self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(n_bytes)));
        match before.unwrap_or_else(|left| left) {
            0 => Line::Silent,
            left if left <= n_bytes => Line::Last,
            _ => Line::Written,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_ends_once() {
        let budget = LogBudget::new(1);
        assert_eq!([63, 1, 1].map(|n_bytes| budget.take(n_bytes)), [Line::Written, Line::Last, Line::Silent]);
    }
}

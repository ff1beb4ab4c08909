//! The host's log lines of a plugin, limited by number and size: a plugin may be hostile, and a server keeps its log for weeks.

use crate::text::printable;
use querl_core::log_limit::LogLimit;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use wasmtime::component::{ComponentType, Lift};

/// Minimum number of bytes that a log line counts as: about the size of the prefix that the host writes.
pub(crate) const MIN_LINE_BYTES: usize = 64;

/// Longer lines are cut. `querl plugin dev`, traces and `faults/` have them in full.
const MAX_LINE_BYTES: usize = 500;

/// Maximum number of lines at WARN and ERROR, which are shown without `-v`, per [`INTERVAL`].
const MAX_LINES: u32 = 20;

const INTERVAL: Duration = Duration::from_secs(10);

/// A plugin may log `FULL_CALLS * log_bytes` bytes in a run. A run makes 100,000 calls and more, so that a limit per call alone would allow
/// gigabytes.
const FULL_CALLS: usize = 64;

/// Level of a line that a guest logs (`log.level` of the contract).
#[derive(Debug, Clone, Copy, ComponentType, Lift)]
#[component(enum)]
#[repr(u8)]
#[allow(dead_code, reason = "made from what a guest passes")]
pub(crate) enum Level {
    #[component(name = "debug")]
    Debug,
    #[component(name = "info")]
    Info,
    #[component(name = "warn")]
    Warn,
    #[component(name = "error")]
    Error,
}

impl Level {
    /// True if lines of this level are shown.
    fn is_enabled(self) -> bool {
        match self {
            Self::Debug => tracing::enabled!(tracing::Level::DEBUG),
            Self::Info => tracing::enabled!(tracing::Level::INFO),
            Self::Warn => tracing::enabled!(tracing::Level::WARN),
            Self::Error => tracing::enabled!(tracing::Level::ERROR),
        }
    }
}

/// Writes the log lines of one plugin. All its calls share the limits, and lines that are not shown do not count.
pub(crate) struct PluginLog {
    /// Name and version of the plugin.
    plugin: String,
    /// Bytes that may still be written until the host ends.
    bytes_left: AtomicUsize,
    /// Limit of the lines at WARN and ERROR.
    warnings: Mutex<LogLimit>,
}

impl PluginLog {
    /// The log of a plugin whose calls may log `log_bytes` each.
    pub(crate) fn new(plugin: String, log_bytes: usize) -> Self {
        let bytes_left = AtomicUsize::new(log_bytes.saturating_mul(FULL_CALLS));
        Self { plugin, bytes_left, warnings: Mutex::new(LogLimit::new(MAX_LINES, INTERVAL)) }
    }

    /// Writes a line, unless its level is not shown or a limit is reached.
    pub(crate) fn write(&self, level: Level, line: &str) {
        if !level.is_enabled() || self.bytes_left.load(Ordering::Relaxed) == 0 {
            return;
        }
        if matches!(level, Level::Warn | Level::Error) {
            let admitted = self.warnings.lock().unwrap_or_else(PoisonError::into_inner).admit(Instant::now());
            let Some(n_left_out) = admitted else { return };
            self.report_left_out(n_left_out);
        }
        let (plugin, line) = (self.plugin.as_str(), printable(line, MAX_LINE_BYTES));
        match level {
            Level::Debug => tracing::debug!(plugin, "{line}"),
            Level::Info => tracing::info!(plugin, "{line}"),
            Level::Warn => tracing::warn!(plugin, "{line}"),
            Level::Error => tracing::error!(plugin, "{line}"),
        }
        let n_bytes = line.len().max(MIN_LINE_BYTES);
        let taken = |left: usize| Some(left.saturating_sub(n_bytes));
        let before = self.bytes_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken);
        if (1..=n_bytes).contains(&before.unwrap_or_else(|left| left)) {
            tracing::warn!(plugin, "has used up its log budget; further lines are not shown");
        }
    }

    fn report_left_out(&self, n_lines: u64) {
        if n_lines > 0 {
            let (plugin, seconds) = (self.plugin.as_str(), INTERVAL.as_secs());
            tracing::warn!(plugin, "{n_lines} more log line(s) left out; at most {MAX_LINES} in {seconds} s are shown");
        }
    }
}

impl Drop for PluginLog {
    fn drop(&mut self) {
        let n_left_out = self.warnings.get_mut().unwrap_or_else(PoisonError::into_inner).take_left_out();
        self.report_left_out(n_left_out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Symptom: lines at INFO, which are not shown without `-v`, used up the budget, after which warnings were not shown either.
    #[test]
    fn budget_is_for_lines_that_are_shown_and_ends_with_one_note() {
        let written = tempfile::NamedTempFile::new().unwrap();
        let file = Mutex::new(written.reopen().unwrap());
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(file).finish();
        tracing::subscriber::with_default(subscriber, || {
            let log = PluginLog::new("x 0.1.0".into(), 2);
            (0..5).for_each(|_| log.write(Level::Debug, "hidden"));
            (0..5).for_each(|index| log.write(Level::Info, &format!("line {index}")));
        });
        let text = std::fs::read_to_string(written.path()).unwrap();
        assert!(text.contains("line 1") && !text.contains("line 2"), "{text}");
        assert_eq!(text.matches("has used up its log budget; further lines are not shown").count(), 1, "{text}");
    }
}

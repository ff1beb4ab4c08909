//! Metrics of training steps.

use std::collections::BTreeMap;

/// Names and values of one step, under the names that verl gives them.
pub type Metrics = BTreeMap<String, f64>;

/// Takes metrics as they come: a file, a chart.
pub trait MetricSink {
    /// Metrics of one step of `stage` (`sft`, `rl`).
    ///
    /// # Errors
    /// They cannot be kept.
    fn record(&mut self, stage: &str, step: u64, metrics: &Metrics) -> std::io::Result<()>;
}

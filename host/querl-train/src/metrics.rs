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

    /// Makes sure that what was recorded outlives the process, and says how much it is: a checkpoint keeps the answer.
    ///
    /// # Errors
    /// It cannot be kept.
    fn mark(&mut self) -> std::io::Result<u64>;

    /// Forgets what was recorded after [`mark`](Self::mark) gave `mark`, by this process or one before it.
    ///
    /// # Errors
    /// What is kept cannot be changed.
    fn rewind(&mut self, mark: u64) -> std::io::Result<()>;
}

/// `name/mean`, `name/max`, `name/min`.
pub(crate) fn summary(name: &str, values: &[f64]) -> Metrics {
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let min = values.iter().copied().fold(f64::INFINITY, f64::min);
    Metrics::from([(format!("{name}/mean"), mean), (format!("{name}/max"), max), (format!("{name}/min"), min)])
}

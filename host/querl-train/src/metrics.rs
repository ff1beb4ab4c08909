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

/// `name/mean`, `name/max`, `name/min`.
pub(crate) fn summary(name: &str, values: &[f64]) -> Metrics {
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let min = values.iter().copied().fold(f64::INFINITY, f64::min);
    Metrics::from([(format!("{name}/mean"), mean), (format!("{name}/max"), max), (format!("{name}/min"), min)])
}

//! What tests keep of a training's metrics.

use crate::{MetricSink, Metrics};

/// Keeps metrics with their steps, but for those that measure time.
#[derive(Default)]
pub(crate) struct Recorder(pub(crate) Vec<(u64, Metrics)>);

impl MetricSink for Recorder {
    fn record(&mut self, _stage: &str, step: u64, metrics: &Metrics) -> std::io::Result<()> {
        let is_result = |name: &str| !name.starts_with("timing_s/") && !name.starts_with("perf/");
        self.0.push((step, metrics.clone().into_iter().filter(|(name, _)| is_result(name)).collect()));
        Ok(())
    }

    fn mark(&mut self) -> std::io::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn rewind(&mut self, mark: u64) -> std::io::Result<()> {
        self.0.truncate(mark as usize);
        Ok(())
    }
}

impl Recorder {
    /// One metric's values, in order.
    pub(crate) fn column(&self, name: &str) -> Vec<f64> {
        self.0.iter().filter_map(|(_, metrics)| metrics.get(name).copied()).collect()
    }
}

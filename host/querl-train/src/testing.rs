//! For tests: a recording metric sink, injected out-of-memory errors, and GPUs.

use crate::{MetricSink, Metrics, TrainError};
use candle_core::Error;
use querl_model::ComputeDevice;
use std::cell::Cell;

/// Records metrics with their steps, except those that measure time.
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

thread_local! {
    static OUT_OF_MEMORY: Cell<Option<(u64, &'static str)>> = const { Cell::new(None) };
}

/// The next call of [`out_of_memory_at`] on this thread with this step and phase fails as CUDA does.
pub(crate) fn inject_out_of_memory(step: u64, phase: &'static str) {
    OUT_OF_MEMORY.set(Some((step, phase)));
}

pub(crate) fn out_of_memory_at(step: u64, phase: &'static str) -> candle_core::Result<()> {
    if OUT_OF_MEMORY.get() == Some((step, phase)) {
        OUT_OF_MEMORY.set(None);
        return Err(Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".into()));
    }
    Ok(())
}

/// A GPU; in `tests/cuda/run.sh` a simulated one.
pub(crate) fn gpu(index: usize) -> Result<ComputeDevice, TrainError> {
    querl_cuda::install();
    Ok(ComputeDevice::open_gpu(index)?)
}

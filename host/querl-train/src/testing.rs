//! For tests: a recording metric sink, injected out-of-memory errors, and GPUs.

use crate::{MetricSink, Metrics, TrainError};
use candle_core::Error;
use querl_core::ports::LogMark;
use querl_model::ComputeDevice;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Debug, Default)]
pub(crate) struct Recorder(pub(crate) Vec<(u64, Metrics)>);

impl MetricSink for Recorder {
    fn record(&mut self, _stage: &str, step: u64, metrics: &Metrics) -> std::io::Result<()> {
        self.0.push((step, metrics.clone()));
        Ok(())
    }

    fn mark(&mut self) -> std::io::Result<LogMark> {
        Ok(LogMark { length: self.0.len() as u64, crc32c: None })
    }

    fn rewind(&mut self, mark: LogMark) -> std::io::Result<Option<String>> {
        self.0.truncate(mark.length as usize);
        Ok(None)
    }
}

impl Recorder {
    pub(crate) fn get(&self, step: u64, name: &str) -> f64 {
        self.0.iter().find_map(|(at, metrics)| (*at == step).then(|| metrics.get(name).copied())?).unwrap()
    }

    /// The values of one metric, of all steps that have it.
    pub(crate) fn column(&self, name: &str) -> Vec<f64> {
        self.0.iter().filter_map(|(_, metrics)| metrics.get(name).copied()).collect()
    }

    pub(crate) fn mean(&self, name: &str, steps: std::ops::Range<u64>) -> f64 {
        let n = (steps.end - steps.start) as f64;
        steps.map(|step| self.get(step, name)).sum::<f64>() / n
    }

    /// All recorded metrics by step, except time and memory.
    pub(crate) fn results(&self) -> Vec<(u64, Metrics)> {
        let is_result = |name: &str| !name.starts_with("timing_s/") && !name.starts_with("perf/");
        let of_step = |(step, metrics): &(u64, Metrics)| {
            let results = metrics.iter().filter(|(name, _)| is_result(name));
            (*step, results.map(|(name, value)| (name.clone(), *value)).collect())
        };
        self.0.iter().map(of_step).collect()
    }
}

/// A metric sink that calls `on_record` with the metrics before it records them.
pub(crate) struct Watched<F> {
    pub(crate) recorder: Recorder,
    pub(crate) on_record: F,
}

impl<F: FnMut(u64, &Metrics)> MetricSink for Watched<F> {
    fn record(&mut self, stage: &str, step: u64, metrics: &Metrics) -> std::io::Result<()> {
        (self.on_record)(step, metrics);
        self.recorder.record(stage, step, metrics)
    }

    fn mark(&mut self) -> std::io::Result<LogMark> {
        self.recorder.mark()
    }

    fn rewind(&mut self, mark: LogMark) -> std::io::Result<Option<String>> {
        self.recorder.rewind(mark)
    }
}

thread_local! {
    static OUT_OF_MEMORY: Cell<Option<(u64, &'static str)>> = const { Cell::new(None) };
}

/// Makes the next call of [`out_of_memory_at`] on this thread with this step and phase fail with CUDA's out-of-memory error.
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

thread_local! {
    static STOP_AT: Cell<usize> = const { Cell::new(0) };
}

/// Sets which call of [`stop_if_due`] on this thread, counted from 1, sets the stop flag; 0: none.
pub(crate) fn stop_at_call(call: usize) {
    STOP_AT.set(call);
}

pub(crate) fn stop_if_due(stop: &AtomicBool) {
    let call = STOP_AT.get();
    stop.fetch_or(call == 1, Ordering::SeqCst);
    STOP_AT.set(call.saturating_sub(1));
}

/// The GPU with this index; a simulated GPU in `tests/cuda/run.sh`.
pub(crate) fn gpu(index: usize) -> Result<ComputeDevice, TrainError> {
    querl_cuda::install();
    Ok(ComputeDevice::open_gpu(index)?)
}

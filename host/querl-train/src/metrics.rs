//! Metrics of training steps, and where they go.

use std::collections::BTreeMap;

/// Values of one step, by verl's names.
pub type Metrics = BTreeMap<String, f64>;

/// Receives metrics: a file, a chart.
pub trait MetricSink {
    /// Metrics of one step of `stage` (`sft`, `rl`).
    ///
    /// # Errors
    /// They cannot be written.
    fn record(&mut self, stage: &str, step: u64, metrics: &Metrics) -> std::io::Result<()>;

    /// Syncs what was recorded to disk and returns its length, which a checkpoint keeps.
    ///
    /// # Errors
    /// It cannot be synced.
    fn mark(&mut self) -> std::io::Result<u64>;

    /// Removes what was recorded after [`mark`](Self::mark) returned `mark`, in this process or an earlier one.
    ///
    /// # Errors
    /// The log cannot be truncated.
    fn rewind(&mut self, mark: u64) -> std::io::Result<()>;
}

/// `name/mean`, `name/max`, `name/min`.
pub(crate) fn summary(name: &str, values: &[f64]) -> Metrics {
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let min = values.iter().copied().fold(f64::INFINITY, f64::min);
    Metrics::from([(format!("{name}/mean"), mean), (format!("{name}/max"), max), (format!("{name}/min"), min)])
}

/// `perf/cpu_memory_used_gb` and `perf/max_cpu_memory_used_gb`: resident memory of this process in GiB, now and its peak.
/// Linux only; empty elsewhere.
pub(crate) fn memory_metrics() -> Metrics {
    std::fs::read_to_string("/proc/self/status").map(|status| parse_status(&status)).unwrap_or_default()
}

fn parse_status(status: &str) -> Metrics {
    let names = [("VmRSS:", "perf/cpu_memory_used_gb"), ("VmHWM:", "perf/max_cpu_memory_used_gb")];
    let kibibytes = |key: &str| -> Option<f64> {
        let rest = status.lines().find_map(|line| line.strip_prefix(key))?;
        rest.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    names.iter().filter_map(|(key, name)| Some(((*name).to_owned(), kibibytes(key)? / f64::from(1 << 20)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_and_its_peak_are_in_gibibytes() {
        let metrics = parse_status("Name:\tquerl\nVmHWM:\t 3145728 kB\nVmRSS:\t 1572864 kB\nThreads:\t3\n");
        assert_eq!(metrics["perf/cpu_memory_used_gb"], 1.5);
        assert_eq!(metrics["perf/max_cpu_memory_used_gb"], 3.0);
        assert!(parse_status("Name:\tquerl\n").is_empty());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_uses_memory() {
        let metrics = memory_metrics();
        assert!(metrics["perf/cpu_memory_used_gb"] > 0.0);
        assert!(metrics["perf/max_cpu_memory_used_gb"] >= metrics["perf/cpu_memory_used_gb"]);
    }
}

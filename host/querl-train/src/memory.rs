//! How much memory this process takes.

use crate::Metrics;

/// `perf/cpu_memory_used_gb` and `perf/max_cpu_memory_used_gb`: resident memory of this process in GiB, now and at most so far.
/// Empty where the system does not tell: Linux alone does.
pub(crate) fn memory_metrics() -> Metrics {
    std::fs::read_to_string("/proc/self/status").map(|status| of_status(&status)).unwrap_or_default()
}

fn of_status(status: &str) -> Metrics {
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
    fn resident_memory_now_and_at_most_is_in_gibibytes() {
        let metrics = of_status("Name:\tquerl\nVmHWM:\t 3145728 kB\nVmRSS:\t 1572864 kB\nThreads:\t3\n");
        assert_eq!(metrics["perf/cpu_memory_used_gb"], 1.5);
        assert_eq!(metrics["perf/max_cpu_memory_used_gb"], 3.0);
        assert!(of_status("Name:\tquerl\n").is_empty());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_takes_some_memory() {
        let metrics = memory_metrics();
        assert!(metrics["perf/cpu_memory_used_gb"] > 0.0);
        assert!(metrics["perf/max_cpu_memory_used_gb"] >= metrics["perf/cpu_memory_used_gb"]);
    }
}

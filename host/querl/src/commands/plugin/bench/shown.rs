//! What was measured, as text and as JSON.

use super::measure::{Bench, Call, Measured};
use super::suggest::Suggestion;
use serde_json::{Value, json};

/// Fuel and microseconds by item at three places of the calls, in order of size.
struct Figures {
    fuel: [f64; 3],
    micros: [f64; 3],
    memory_bytes: usize,
}

impl Figures {
    /// Median, 95th percentile and most.
    fn of(result: &Measured) -> Self {
        let by_item = |value: fn(&Call) -> f64| {
            let mut values: Vec<f64> = result.calls.iter().map(|call| value(call) / result.n_items as f64).collect();
            values.sort_by(f64::total_cmp);
            let last = values.len().saturating_sub(1) as f64;
            [0.5, 0.95, 1.0].map(|share| values.get((last * share).round() as usize).copied().unwrap_or(f64::NAN))
        };
        Self {
            fuel: by_item(|call| call.fuel as f64),
            micros: by_item(|call| call.wall.as_secs_f64() * 1e6),
            memory_bytes: result.calls.iter().map(|call| call.memory_bytes).max().unwrap_or(0),
        }
    }
}

pub(super) fn text(bench: &Bench, results: &[Measured], suggestion: &Suggestion) -> String {
    let plugin = &bench.plugin;
    let mut text = format!(
        "{} {}, component of {} bytes\ncold start: compiled in {:.1} ms, once; loaded from the cache in {:.2} ms\n\n",
        plugin.id(),
        plugin.version(),
        plugin.n_bytes(),
        millis(bench.compile),
        millis(bench.load),
    );
    text.push_str(&format!(
        "{:<12}  {:>5}  {:>5}  {:>30}  {:>26}  {:>9}\n",
        "kind", "batch", "calls", "fuel by item (p50, p95, max)", "us by item (p50, p95, max)", "memory"
    ));
    for result in results {
        let Figures { fuel, micros, memory_bytes } = Figures::of(result);
        let fuel = fuel.map(|fuel| format!("{fuel:.0}")).join(", ");
        let micros = micros.map(|micros| format!("{micros:.2}")).join(", ");
        text.push_str(&format!(
            "{:<12}  {:>5}  {:>5}  {fuel:>30}  {micros:>26}  {:>5.1} MiB\n",
            result.kind.name(),
            result.n_items,
            result.calls.len(),
            memory_bytes as f64 / f64::from(1 << 20),
        ));
    }
    text.push_str("\nlimits that leave room above this, for plugin.toml:\n");
    text + &suggestion.to_toml()
}

pub(super) fn json(bench: &Bench, results: &[Measured], suggestion: &Suggestion) -> Value {
    let result = |result: &Measured| {
        let Figures { fuel, micros, memory_bytes } = Figures::of(result);
        let spread = |[p50, p95, max]: [f64; 3]| json!({ "p50": p50, "p95": p95, "max": max });
        json!({
            "kind": result.kind.name(),
            "batch": result.n_items,
            "calls": result.calls.len(),
            "fuel_per_item": spread(fuel),
            "micros_per_item": spread(micros),
            "memory_bytes": memory_bytes,
        })
    };
    json!({
        "plugin": bench.plugin.id(),
        "version": bench.plugin.version(),
        "sha256": bench.plugin.digest(),
        "component_bytes": bench.plugin.n_bytes(),
        "compile_ms": millis(bench.compile),
        "cold_start_ms": millis(bench.load),
        "results": results.iter().map(result).collect::<Vec<_>>(),
        "limits": {
            "fuel_per_call": suggestion.fuel_per_call,
            "fuel_per_item": suggestion.fuel_per_item,
            "timeout_ms": suggestion.timeout_ms,
            "memory_bytes": suggestion.memory_bytes,
        },
    })
}

fn millis(duration: std::time::Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

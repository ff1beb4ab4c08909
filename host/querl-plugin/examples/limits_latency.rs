//! How long after its limit a guest is stopped. `cargo run --release -p querl-plugin --example limits_latency`
//!
//! Fuel: guests that never end, stopped by the default fuel of one item; the time is that of the whole call. The clock: the same
//! guests with plenty of fuel and 200 ms; the time is what the call takes beyond. The guests take turns, so that what else the
//! machine does hits all of them.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{episode, guest, host_with, with_plenty_of_fuel};
use querl_core::config::PluginLimits;
use querl_core::ports::RewardModel;
use std::time::{Duration, Instant};

const N_RUNS: usize = 50;
const TIMEOUT: Duration = Duration::from_millis(200);
const GUESTS: [(&str, &str, &str); 4] = [
    ("infinite-loop", "loop", "a loop"),
    ("asks-settings", "x", "a loop of calls of the host"),
    ("logs-megabytes", "x", "a loop that logs 8 MiB a line"),
    ("bulk-copy", "x", "a loop of copies of 64 MiB"),
];

fn main() {
    // A time limit above the duration of all of them: fuel ends them.
    let by_fuel = times(&PluginLimits { timeout_ms: 60_000, ..PluginLimits::default() });
    let by_clock = times(&with_plenty_of_fuel(TIMEOUT.as_millis() as u64));
    for ((_, _, what), times) in GUESTS.iter().zip(by_fuel) {
        print(&format!("stopped by fuel, whole call: {what}"), times, Duration::ZERO);
    }
    for ((_, _, what), times) in GUESTS.iter().zip(by_clock) {
        print(&format!("stopped by the clock, beyond {} ms: {what}", TIMEOUT.as_millis()), times, TIMEOUT);
    }
}

/// The durations of the calls of each guest.
fn times(limits: &PluginLimits) -> [Vec<Duration>; GUESTS.len()] {
    let host = host_with(limits.clone());
    let plugins: Vec<_> = GUESTS.iter().map(|(name, query, _)| (guest(&host, name), *query)).collect();
    let mut times = [const { Vec::new() }; GUESTS.len()];
    for _ in 0..N_RUNS {
        for (times, (plugin, query)) in times.iter_mut().zip(&plugins) {
            times.push(time(&**plugin, query));
        }
    }
    times
}

fn time(plugin: &dyn RewardModel, query: &str) -> Duration {
    let start = Instant::now();
    plugin.score_batch(&[episode("a", query)]).unwrap_err();
    start.elapsed()
}

fn print(what: &str, mut times: Vec<Duration>, less: Duration) {
    times.sort();
    let at = |share: f64| (times[((times.len() - 1) as f64 * share) as usize] - less).as_secs_f64() * 1e3;
    println!("{what}: p50 {:.1} ms, p95 {:.1} ms, max {:.1} ms", at(0.5), at(0.95), at(1.0));
}

//! Host memory over a million scored items. `cargo run --release -p querl-plugin --example soak [N_ITEMS]`, on Linux
//!
//! Batches of 64 through reward-competition, on one thread; every 1000th batch a fault of another guest comes between (a panic,
//! a loop, a memory bomb), as they would in a long run. What is resident is sampled after a warm-up of a tenth of the items;
//! ends with an error where the most of it is more than 5 % above the first sample.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{candidate, competition, episode, guest, host_with};
use querl_core::config::PluginLimits;
use querl_core::records::Episode;
use std::process::ExitCode;
use std::time::Instant;

const BATCH: usize = 64;
const N_ITEMS: usize = 1_000_000;
const BATCHES_A_FAULT: usize = 1000;
const N_SAMPLES: usize = 100;

fn main() -> ExitCode {
    let n_items = std::env::args().nth(1).map_or(N_ITEMS, |count| count.parse().unwrap());
    let n_batches = n_items.div_ceil(BATCH);
    let host = host_with(PluginLimits::default());
    let reward = competition(&host);
    let faulty = [("panics", "panic"), ("infinite-loop", "loop"), ("memory-bomb", "bomb")];
    let faulty = faulty.map(|(name, query)| (guest(&host, name), query));
    let (mut samples, mut n_scored, mut n_faults) = (Vec::new(), 0, 0);
    let start = Instant::now();
    for index in 0..n_batches {
        n_scored += reward.score_batch(&batch(index)).unwrap().iter().filter(|score| score.is_ok()).count();
        if index % BATCHES_A_FAULT == 0 {
            let (plugin, query) = &faulty[(index / BATCHES_A_FAULT) % faulty.len()];
            plugin.score_batch(&[episode("odd", query)]).unwrap_err();
            n_faults += 1;
        }
        if index >= n_batches / 10 && index % (n_batches / N_SAMPLES).max(1) == 0 {
            samples.push(resident_kib());
        }
    }
    println!("{n_scored} items scored, {n_faults} faults between them, in {:.1} s", start.elapsed().as_secs_f64());
    verdict(&samples)
}

/// A different text in each batch, with the length of a real one.
fn batch(index: usize) -> Vec<Episode> {
    let scores = [0.9, 0.8, 0.7, 0.6, 0.5];
    let of = |place: usize| Episode {
        policy: candidate(&scores, Some(4.5)),
        baseline: Some(candidate(&scores, Some(4.0))),
        ..episode(&format!("step-{index:06}/{place}/0"), "胶原蛋白肽怎么吃，一天几次，饭前还是饭后")
    };
    (0..BATCH).map(of).collect()
}

fn verdict(samples: &[usize]) -> ExitCode {
    let (first, last, most) = (samples[0], samples[samples.len() - 1], *samples.iter().max().unwrap());
    let growth = 100.0 * (most as f64 / first as f64 - 1.0);
    println!(
        "resident memory in {} samples: first {first} KiB, last {last} KiB, most {most} KiB, {growth:.2} % above the first",
        samples.len()
    );
    if growth <= 5.0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Resident memory of this process in KiB.
fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

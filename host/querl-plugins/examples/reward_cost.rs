//! What calling a reward plugin costs. `cargo run --release -p querl-plugins --example reward_cost`
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{candidate, episode, host, repository, weighted};
use querl_core::records::Episode;
use std::time::Instant;

const BATCH: usize = 64;
const N_BATCHES: usize = 2000;
const N_STARTS: usize = 50;

fn main() {
    let reward = host().reward(&weighted("plugins/reward-competition")).unwrap();
    let batch: Vec<Episode> = (0..BATCH).map(five_hits).collect();
    let mut times: Vec<f64> = (0..N_BATCHES)
        .map(|_| {
            let start = Instant::now();
            reward.score_batch(&batch).unwrap();
            start.elapsed().as_secs_f64() * 1e6 / BATCH as f64
        })
        .collect();
    print_times("scoring, batches of 64, 5 hits a side, microseconds an item", &mut times);
    let single = &batch[..1];
    let mut times: Vec<f64> = (0..N_BATCHES)
        .map(|_| {
            let start = Instant::now();
            reward.score_batch(single).unwrap();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    print_times("scoring, batches of 1, microseconds an item", &mut times);

    let component = host().load(&repository().join("plugins/reward-competition")).unwrap().path().to_owned();
    let config = querl_core::config::WeightedPluginConfig { path: component, ..weighted("") };
    let mut starts: Vec<f64> = (0..N_STARTS)
        .map(|_| {
            let host = host();
            let start = Instant::now();
            let reward = host.reward(&config).unwrap();
            reward.score_batch(single).unwrap();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    print_times("file to first score, compiled code cached, milliseconds", &mut starts);
    let mut hosts: Vec<f64> = (0..N_STARTS)
        .map(|_| {
            let start = Instant::now();
            host();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    print_times("making a host, milliseconds", &mut hosts);
}

fn five_hits(index: usize) -> Episode {
    let scores = [0.9, 0.8, 0.7, 0.6, 0.5];
    Episode {
        policy: candidate(&scores, Some(4.5)),
        baseline: candidate(&scores, Some(4.0)),
        ..episode(&format!("step-000001/{index}/0"), "胶原蛋白肽怎么吃，一天几次，饭前还是饭后")
    }
}

fn print_times(what: &str, times: &mut [f64]) {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!("{what}: median {:.2}, 5% {:.2}, 95% {:.2}", at(0.5), at(0.05), at(0.95));
}

//! Guests that exhaust memory: the memory of the process stays within the limits. These tests are a separate process and run one at a time,
//! because the memory of the process is measured.
#![allow(clippy::unwrap_used)]
#![cfg(target_os = "linux")]

mod common;

use common::{Lines, assert_others_are_served, episode, fault_of, guest, host, host_with, with_plenty_of_fuel};
use querl_core::config::PluginLimits;
use querl_core::ports::{FaultKind, PluginFault, RewardModel};
use std::sync::{Mutex, PoisonError};

static ALONE: Mutex<()> = Mutex::new(());

const MIB: usize = 1 << 20;

/// Host memory in addition to the guest's own: arguments, compiled code, messages.
const HOST_BYTES: usize = 24 * MIB;

/// A memory statistic of this process in bytes: `VmRSS` is the resident memory, `VmHWM` its peak.
fn resident(figure: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(figure)?.strip_prefix(':')).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

/// Peak and remaining memory of `job` in bytes; runs it once before, so that everything is compiled.
fn growth(job: impl Fn()) -> (usize, usize) {
    job();
    // Resets the peak to the current memory.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = resident("VmRSS");
    job();
    (resident("VmHWM").saturating_sub(before), resident("VmRSS").saturating_sub(before))
}

/// Runs a guest until its fault. The process uses at most `guest_bytes` + [`HOST_BYTES`] for it, and releases all of it.
fn alone_within(plugin: &dyn RewardModel, query: &str, guest_bytes: usize) -> PluginFault {
    let run = || plugin.score_batch(&[episode("a", query)]).unwrap_err();
    let (most, stays) = growth(|| drop(run()));
    assert!(most < guest_bytes + HOST_BYTES, "{} takes {} MiB", plugin.name(), most / MIB);
    assert!(stays < HOST_BYTES, "{} keeps {} MiB", plugin.name(), stays / MIB);
    run()
}

/// As [`alone_within`]; then in a batch with other episodes. Returns the fault.
fn fault_within(name: &str, query: &str, limits: PluginLimits, guest_bytes: usize) -> PluginFault {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let host = host_with(limits);
    let plugin = guest(&host, name);
    alone_within(&*plugin, query, guest_bytes);
    fault_of(&host, &*plugin, query)
}

#[test]
fn memory_bomb_is_stopped_at_the_limit() {
    let limits = PluginLimits { memory_bytes: 32 * MIB, ..with_plenty_of_fuel(5000) };
    let fault = fault_within("memory-bomb", "bomb", limits, 32 * MIB);
    assert_eq!(fault.kind, FaultKind::Limit);
    let message = fault.to_string();
    assert!(message.starts_with("plugin guest-memory-bomb 0.2.0: episode `step-1/b/0`: requested "), "{message}");
    assert!(message.ends_with("`plugins.limits.memory_bytes` allows 33554432"), "{message}");
}

#[test]
fn output_beyond_the_limit_is_a_fault() {
    // The text, and the byte buffer into which the SDK writes it.
    let fault = fault_within("output-flood", "flood", with_plenty_of_fuel(5000), 72 * MIB);
    assert_eq!(fault.kind, FaultKind::Limit);
    let message = fault.to_string();
    assert!(message.ends_with("returned more than 16777216 bytes (`plugins.limits.output_bytes`)"), "{message}");
}

#[test]
fn result_of_200_mb_never_becomes_the_hosts() {
    let fault = fault_within("huge-result", "x", with_plenty_of_fuel(5000), 200 * MIB);
    assert_eq!(fault.kind, FaultKind::Limit);
    let message = fault.to_string();
    assert!(message.contains("episode `step-1/b/0`: returned more than 16777216 bytes"), "{message}");
}

#[test]
fn small_guest_memory_does_not_become_large_host_memory() {
    let fault = fault_within("amplified-result", "x", with_plenty_of_fuel(5000), 4 * MIB + (16 << 20));
    assert_eq!(fault.kind, FaultKind::Limit);
    assert!(fault.message.contains("returned more than 16777216 bytes"), "{fault}");
}

#[test]
fn small_packed_results_do_not_become_large_host_memory() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let fault = alone_within(&*guest(&host(), "packed-amplified"), "x", 2 * 16 * MIB);
    assert_eq!(fault.kind, FaultKind::Limit);
    assert!(fault.message.contains("returned more than 16777216 bytes"), "{fault}");
}

#[test]
fn endless_log_is_not_kept() {
    let (text, fault) = Lines::of(|| fault_within("logs-megabytes", "x", with_plenty_of_fuel(300), 20 * MIB));
    assert_eq!(fault.kind, FaultKind::Limit);
    assert!(text.len() < 10 * 100_000, "{}", text.len());
}

#[test]
fn tables_and_bulk_copies_stay_within_their_memory() {
    fault_within("table-bomb", "x", with_plenty_of_fuel(5000), 4 * MIB);
    fault_within("bulk-copy", "x", PluginLimits::default(), 66 * MIB);
}

#[test]
fn deep_recursion_gives_its_stack_back() {
    fault_within("deep-recursion", "x", with_plenty_of_fuel(5000), 2 * MIB);
}

#[test]
fn a_thousand_faults_leave_the_host_as_it_was() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let host = host();
    let plugins =
        ["divides-by-zero", "invalid-utf8-log", "infinite-total", "bad-pointer"].map(|name| guest(&host, name));
    let (_, stays) = growth(|| {
        for turn in 0..1000 {
            plugins[turn % plugins.len()].score_batch(&[episode("a", "x")]).unwrap_err();
        }
    });
    assert!(stays < 4 * MIB, "{} MiB", stays / MIB);
    assert_others_are_served(&host);
}

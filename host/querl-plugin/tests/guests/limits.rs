//! Guests that do not terminate or exceed their limits: fuel, time, stack, tables.

use crate::common::{
    assert_others_are_served, cpu_time, episode, fault_message, fault_of, guest, host, host_with, refusal, title,
    with_plenty_of_fuel,
};
use querl_core::config::PluginLimits;
use querl_core::ports::FaultKind;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_millis(200);

/// CPU time beyond [`TIMEOUT`] of a call of `name` with enough fuel: the median of a few runs. CPU time, because the machine may be busy
/// with other tests. Each run must fail with the message about the time limit, and the next call must succeed.
fn overshoot(name: &str, query: &str) -> Duration {
    let host = host_with(with_plenty_of_fuel(TIMEOUT.as_millis() as u64));
    let plugin = guest(&host, name);
    let run = || {
        let start = cpu_time();
        let fault = plugin.score_batch(&[episode("a", query)]).unwrap_err();
        let elapsed = cpu_time() - start;
        assert_eq!(fault.kind, FaultKind::Limit);
        let message = fault.to_string();
        assert!(message.contains("episode `a`: ran for longer than 200 ms (`plugins.limits.timeout_ms`)"), "{message}");
        assert!(elapsed >= TIMEOUT && elapsed < TIMEOUT * 10, "{elapsed:?}");
        assert_eq!(plugin.score_batch(&[episode("b", "好")]).unwrap()[0].as_ref().unwrap().total, 0.5);
        elapsed - TIMEOUT
    };
    let mut beyond: Vec<_> = (0..7).map(|_| run()).collect();
    beyond.sort();
    assert_others_are_served(&host);
    beyond[3]
}

/// Asserts that `name` is stopped by the fuel limit long before the time limit, with the message about fuel.
fn assert_stopped_by_fuel(name: &str, query: &str) {
    let start = Instant::now();
    // A time limit of a minute, so that it has no effect.
    let (message, kind) = fault_message(name, query, PluginLimits { timeout_ms: 60_000, ..PluginLimits::default() });
    assert_eq!(kind, FaultKind::Limit);
    let expected = format!("plugin {}: episode `step-1/b/0`: used up its fuel", title(name));
    assert!(message.starts_with(&expected), "{message}");
    assert!(message.contains("plugins.limits.fuel_per_item"), "{message}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

/// One tick takes 10 ms.
const SOON: Duration = Duration::from_millis(250);

#[test]
fn infinite_loop_is_stopped_by_fuel() {
    assert_stopped_by_fuel("infinite-loop", "loop");
}

#[test]
fn endless_calls_of_the_host_are_stopped_by_fuel() {
    assert_stopped_by_fuel("asks-settings", "x");
}

#[test]
fn host_work_for_a_guest_that_does_little_itself_takes_its_fuel() {
    assert_stopped_by_fuel("logs-megabytes", "x");
}

#[test]
fn bulk_copies_take_fuel_by_the_byte() {
    assert_stopped_by_fuel("bulk-copy", "x");
}

/// Loops, endless host calls, host calls that make the host do much work, and bulk copies.
#[test]
fn guests_with_plenty_of_fuel_are_stopped_by_the_clock() {
    for (name, query) in
        [("infinite-loop", "loop"), ("asks-settings", "x"), ("logs-megabytes", "x"), ("bulk-copy", "x")]
    {
        let overshoot = overshoot(name, query);
        assert!(overshoot < SOON, "{name}: {overshoot:?}");
    }
}

#[test]
fn sleep_does_not_hold_the_host() {
    let host = host();
    let plugin = guest(&host, "sleeps");
    let start = Instant::now();
    // Sleeping returns immediately; the behaviour of std with a clock that does not advance is not tested.
    let _ = plugin.score_batch(&[episode("a", "sleep")]);
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(plugin.score_batch(&[episode("a", "好")]).unwrap()[0].as_ref().unwrap().total, 0.5);
    assert_others_are_served(&host);
}

#[test]
fn deep_recursion_is_a_fault_and_not_the_end_of_the_process() {
    let (message, kind) = fault_message("deep-recursion", "x", with_plenty_of_fuel(5000));
    let expected =
        "plugin deep-recursion 0.1.0: episode `step-1/b/0`: recursed too deeply: its stack of 1048576 bytes is used up";
    assert_eq!(message, expected);
    assert_eq!(kind, FaultKind::Trap);
}

#[test]
fn table_bomb_is_stopped_at_the_limit() {
    let (message, kind) = fault_message("table-bomb", "x", PluginLimits::default());
    let expected = "episode `step-1/b/0`: requested a table of 100001 elements; a host allows 100000";
    assert!(message.ends_with(expected), "{message}");
    assert_eq!(kind, FaultKind::Limit);
}

#[test]
fn loop_while_an_instance_starts_is_stopped() {
    let start = Instant::now();
    let message = refusal("loops-at-start");
    assert!(message.contains(": used up its fuel"), "{message}");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn loop_in_describe_is_stopped() {
    let message = refusal("loops-in-describe");
    assert!(message.contains("(not yet described): used up its fuel"), "{message}");
}

#[test]
fn loop_while_arguments_are_handed_over_is_stopped() {
    let host = host();
    let message = guest(&host, "loops-in-realloc").score_batch(&[episode("a", "好")]).unwrap_err().to_string();
    assert!(message.starts_with("plugin loops-in-realloc 0.1.0: episode `a`: used up its fuel"), "{message}");
    assert_others_are_served(&host);
}

#[test]
fn loop_after_the_result_is_stopped() {
    assert_stopped_by_fuel("loops-after-return", "x");
}

#[test]
fn the_item_of_a_fault_is_found_within_twice_the_time_of_a_call() {
    let host = host_with(with_plenty_of_fuel(100));
    let plugin = guest(&host, "infinite-loop");
    let start = Instant::now();
    let fault = fault_of(&host, &*plugin, "loop").to_string();
    assert!(fault.contains("episode `step-1/b/0`: ran for longer than 100 ms"), "{fault}");
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

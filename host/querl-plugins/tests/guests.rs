//! Hostile and odd guests: what each does, what the host says, and that the host serves the next call.
#![allow(clippy::unwrap_used)]

mod common;

use common::{episode, guest, host, host_with};
use querl_core::config::PluginLimits;
use querl_core::ports::RewardModel;
use querl_core::records::Reward;
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What the host says of a batch in which the second episode's query is `query`; then sees that an ordinary batch is scored.
fn fault(plugin: &dyn RewardModel, query: &str) -> String {
    let batch = [episode("step-1/a/0", "好"), episode("step-1/b/0", query), episode("step-1/c/0", "好")];
    let fault = plugin.score_batch(&batch).unwrap_err();
    assert_eq!(fault.version, "0.1.0");
    let next = plugin.score_batch(&[episode("step-2/a/0", "好")]).unwrap();
    assert_eq!(next[0].as_ref().unwrap().total, 0.5, "the next call is served");
    fault.to_string()
}

fn first(plugin: &dyn RewardModel, query: &str) -> Reward {
    plugin.score_batch(&[episode("a", query)]).unwrap().remove(0).unwrap()
}

fn component(reward: &Reward, name: &str) -> f64 {
    reward.components.iter().find(|part| part.name == name).unwrap().value
}

#[test]
fn infinite_loop_is_stopped_by_fuel() {
    let plugin = guest(&host(), "infinite-loop");
    let message = fault(&*plugin, "loop");
    assert!(
        message.starts_with("plugin guest-infinite-loop 0.1.0: episode `step-1/b/0`: used up its fuel"),
        "{message}"
    );
}

#[test]
fn infinite_loop_is_stopped_by_the_clock_where_fuel_is_plenty() {
    let plugin = guest(
        &host_with(PluginLimits { fuel_per_item: u64::MAX / 1000, timeout_ms: 200, ..Default::default() }),
        "infinite-loop",
    );
    let start = Instant::now();
    let fault = plugin.score_batch(&[episode("a", "loop")]).unwrap_err().to_string();
    let elapsed = start.elapsed();
    assert!(fault.contains("episode `a`: ran for longer than 200 ms"), "{fault}");
    assert!(elapsed >= Duration::from_millis(200) && elapsed < Duration::from_millis(1000), "{elapsed:?}");
}

#[test]
fn sleep_does_not_hold_the_host() {
    let plugin = guest(&host(), "sleeps");
    let start = Instant::now();
    // Sleeping returns at once; what std makes of a clock that does not move is its own.
    let _ = plugin.score_batch(&[episode("a", "sleep")]);
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(first(&*plugin, "好").total, 0.5);
}

#[test]
fn panic_message_is_in_the_fault_without_escapes() {
    let message = fault(&*guest(&host(), "panics"), "panic");
    assert!(message.starts_with("plugin guest-panics 0.1.0: episode `step-1/b/0`: panicked: "), "{message}");
    assert!(
        message.contains("src/lib.rs:") && message.contains("cannot stand the query `panic` [31min red"),
        "{message}"
    );
    assert!(!message.contains('\u{1b}') && !message.contains("RUST_BACKTRACE"), "{message}");
}

#[test]
fn wrong_batch_length_is_a_fault() {
    let plugin = guest(&host(), "wrong-length");
    let batch: Vec<_> = ["a", "b", "c"].iter().map(|id| episode(id, "好")).collect();
    let message = plugin.score_batch(&batch).unwrap_err().to_string();
    assert_eq!(
        message,
        "plugin guest-wrong-length 0.1.0: returned 2 scores for 3 episodes (a batch from episode `a` to `c`)"
    );
}

#[test]
fn nan_is_a_fault() {
    let message = fault(&*guest(&host(), "nan"), "nan");
    let expected = "episode `step-1/b/0`: total is NaN; expected a number within the declared range 0 to 1";
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn total_out_of_the_declared_range_is_a_fault() {
    let message = fault(&*guest(&host(), "out-of-range"), "far");
    let expected = "episode `step-1/b/0`: total is 1.5; expected a number within the declared range 0 to 1";
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn memory_bomb_is_stopped_at_the_limit() {
    let plugin = guest(&host_with(PluginLimits { memory_bytes: 32 << 20, ..Default::default() }), "memory-bomb");
    let message = fault(&*plugin, "bomb");
    assert!(message.contains("episode `step-1/b/0`: asked for "), "{message}");
    assert!(message.ends_with("`plugins.limits.memory_bytes` allows 33554432"), "{message}");
}

#[test]
fn output_beyond_the_limit_is_a_fault() {
    let message = fault(&*guest(&host(), "output-flood"), "flood");
    assert!(message.ends_with("handed over more than 16777216 bytes (`plugins.limits.output_bytes`)"), "{message}");
}

#[test]
fn clocks_stand_still_and_random_numbers_are_fixed() {
    let plugin = guest(&host(), "reads-world");
    let found = first(&*plugin, "好");
    for name in ["elapsed_s", "since_1970_s", "n_args", "n_vars", "files", "stdin"] {
        assert_eq!(component(&found, name), 0.0, "{name}");
    }
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(
        found,
        first(&*guest(&host(), "reads-world"), "好"),
        "another host, another time, the same random numbers"
    );
}

#[test]
fn socket_is_a_fault_that_names_the_call() {
    let message = guest(&host(), "opens-socket").score_batch(&[episode("a", "好")]).unwrap_err().to_string();
    assert!(message.contains("episode `a`: ") && message.contains("wasi:sockets/"), "{message}");
}

#[test]
fn no_state_passes_from_call_to_call() {
    let plugin = guest(&host(), "keeps-state");
    for _ in 0..3 {
        assert_eq!(component(&first(&*plugin, "好"), "n_calls"), 1.0);
    }
}

#[test]
fn log_is_one_clean_line_each_and_is_cut() {
    let written = Lines::default();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(written.clone()).finish();
    tracing::subscriber::with_default(subscriber, || first(&*guest(&host(), "logs"), "flood"));
    let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
    assert!(text.contains("plain [31mred[0m second line") && text.contains("plugin=\"guest-logs 0.1.0\""), "{text}");
    assert!(!text.contains('\u{1b}'));
    assert!(text.contains("logged more than 65536 bytes in one call; the rest is cut"));
    assert!(text.len() < 100_000, "{}", text.len());
}

#[test]
fn every_guest_has_a_test() {
    let tests = include_str!("guests.rs");
    for entry in std::fs::read_dir(common::repository().join("tests/guests")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let quoted = name.strip_prefix("guest-").map(|name| format!("\"{name}\""));
        assert!(quoted.is_none_or(|quoted| tests.contains(&quoted)), "no test uses {name}");
    }
}

/// Where the log goes in a test.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl tracing_subscriber::fmt::MakeWriter<'_> for Lines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

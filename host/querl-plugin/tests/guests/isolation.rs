//! Guests that access the environment, keep state between calls, or write to the log.

use crate::common::{Lines, assert_others_are_served, episode, fault_message, guest, host};
use querl_core::config::PluginLimits;
use querl_core::ports::{FaultKind, RewardModel};
use querl_core::records::Reward;
use std::time::Duration;

fn first(plugin: &dyn RewardModel, query: &str) -> Reward {
    plugin.score_batch(&[episode("a", query)]).unwrap().remove(0).unwrap()
}

fn component(reward: &Reward, name: &str) -> f64 {
    reward.components.iter().find(|part| part.name == name).unwrap().value
}

#[test]
fn panic_message_is_in_the_fault_without_escapes() {
    let (message, kind) = fault_message("panics", "panic", PluginLimits::default());
    assert_eq!(kind, FaultKind::Trap);
    assert!(message.starts_with("plugin guest-panics 0.2.0: episode `step-1/b/0`: panicked: "), "{message}");
    assert!(message.contains("src/lib.rs:"), "{message}");
    assert!(message.contains("cannot stand the query `panic` [31min red"), "{message}");
    assert!(!message.contains('\u{1b}') && !message.contains("RUST_BACKTRACE"), "{message}");
}

#[test]
fn clocks_stand_still_and_random_numbers_are_fixed() {
    let found = first(&*guest(&host(), "reads-world"), "好");
    for name in ["elapsed_s", "since_1970_s", "n_args", "n_vars", "files", "stdin"] {
        assert_eq!(component(&found, name), 0.0, "{name}");
    }
    std::thread::sleep(Duration::from_millis(2));
    let later = first(&*guest(&host(), "reads-world"), "好");
    assert_eq!(found, later, "another host, another time, the same random numbers");
}

#[test]
fn socket_is_a_fault_that_names_the_call() {
    let host = host();
    let message = guest(&host, "opens-socket").score_batch(&[episode("a", "好")]).unwrap_err().to_string();
    assert!(message.starts_with("plugin guest-opens-socket 0.2.0: episode `a`: called `wasi:sockets/"), "{message}");
    assert!(message.ends_with("plugins have no files, sockets or other input and output"), "{message}");
    assert_others_are_served(&host);
}

#[test]
fn wasi_gives_only_what_it_must() {
    let expected = [
        ("hoards-handles", "holds more than 4096 handles to streams and clocks"),
        ("asks-for-random-bytes", "requested 1000000000 random bytes at once"),
        ("exits", "called exit: a plugin returns, or panics with a message"),
    ];
    for (name, sentence) in expected {
        let (message, kind) = fault_message(name, "x", PluginLimits::default());
        assert_eq!(message, format!("plugin {name} 0.1.0: episode `step-1/b/0`: {sentence}"));
        assert_eq!(kind, FaultKind::Trap);
    }
}

#[test]
fn no_state_passes_from_call_to_call() {
    let plugin = guest(&host(), "keeps-state");
    for _ in 0..3 {
        assert_eq!(component(&first(&*plugin, "好"), "n_calls"), 1.0);
    }
    let count = || component(&first(&*plugin, "好"), "n_calls");
    let counts = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(count)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(counts, [1.0; 8]);
}

#[test]
fn log_is_one_clean_line_each_and_is_cut() {
    let (text, _) = Lines::of(|| first(&*guest(&host(), "logs"), "flood"));
    assert!(text.contains("plain [31mred[0m second line") && text.contains("plugin=\"guest-logs 0.2.0\""), "{text}");
    assert!(!text.contains('\u{1b}'));
    assert_eq!(text.matches("logged more than 65536 bytes in one call; the rest is cut").count(), 1);
    let longest = text.lines().map(str::len).max();
    assert!(longest < Some(700) && text.len() < 100_000, "{longest:?} of {}", text.len());
}

/// Regression: only the log of each call was limited, not that of a run with many calls.
#[test]
fn log_of_many_calls_ends_with_a_note() {
    let host = host();
    let plugin = guest(&host, "logs");
    let (text, ()) = Lines::of(|| (0..200).for_each(|_| drop(first(&*plugin, "flood"))));
    assert!(text.len() < 80 * 65_536, "{}", text.len());
    assert_eq!(text.matches("further lines are not shown").count(), 1);
    let (text, _) = Lines::of(|| first(&*guest(&host, "logs"), "flood"));
    assert_eq!(text, "", "independent of the caller");
}

/// Symptom: without `-v`, a plugin that warned at each call wrote 31,103 lines in one run.
#[test]
fn warnings_beyond_twenty_in_ten_seconds_are_counted_in_one_line() {
    let (text, _) = Lines::of(|| first(&*guest(&host(), "logs-nothing"), "x"));
    assert_eq!(text.matches("plugin=\"logs-nothing 0.1.0\"").count(), 21, "{text}");
    // 1024 lines, which count as 64 bytes each, and the note that the rest is cut.
    assert_eq!(text.matches("1005 more log line(s) left out; at most 20 in 10 s are shown").count(), 1, "{text}");
}

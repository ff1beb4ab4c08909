//! The explanation of a call that failed: which limit it hit, how it panicked, what the host refused.

use crate::engine::{TABLE_ELEMENTS, WASM_STACK_BYTES};
use crate::guest::{Guest, HostRefusal, WALL_TIMEOUTS};
use crate::limits::{CallSize, Limits};
use crate::packed::FormError;
use crate::text::printable;
use querl_core::ports::FaultKind;
use querl_core::text::grouped;
use std::time::Duration;
use wasmtime::Trap;

const MAX_MESSAGE_BYTES: usize = 2000;

const MAX_TRACEBACK_LINES: usize = 40;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallPhase {
    /// The component was being instantiated.
    Starting,
    /// The called function was running.
    Running,
}

/// Kind and message of the fault of a failed call: which limit was hit and where it is configured, or the guest's panic message.
pub(crate) fn explain(
    phase: CallPhase,
    error: &wasmtime::Error,
    guest: &Guest,
    limits: &Limits,
    size: CallSize,
) -> (FaultKind, String) {
    if let Some(bytes) = guest.memory.refused_bytes {
        let (key, limit) = (limits.key("memory_bytes"), guest.memory.limit_bytes);
        return (FaultKind::Limit, format!("requested {bytes} bytes of memory; {key} allows {limit}"));
    }
    if let Some(elements) = guest.memory.refused_elements {
        let message = format!("requested a table of {elements} elements; a host allows {TABLE_ELEMENTS}");
        return (FaultKind::Limit, message);
    }
    if guest.refused_host_call {
        let (key, limit) = (limits.key("host_calls_per_item"), grouped(limits.values.host_calls_per_item));
        let items = if size.n_items == 1 { String::new() } else { format!(" for each of {} items", size.n_items) };
        return (FaultKind::Limit, format!("called the host more often than {limit} times{items} ({key})"));
    }
    match error.downcast_ref::<Trap>() {
        Some(trap) => trapped(*trap, guest, limits, size),
        None => refused(phase, error, limits),
    }
}

fn trapped(trap: Trap, guest: &Guest, limits: &Limits, size: CallSize) -> (FaultKind, String) {
    match trap {
        Trap::OutOfFuel => (FaultKind::Limit, out_of_fuel(limits, size.n_fuel_items)),
        Trap::Interrupt if guest.time.is_used_up() => (FaultKind::Limit, out_of_time(limits, size.n_items)),
        Trap::Interrupt => (FaultKind::Host, waited_for_the_machine(limits, guest.time.used())),
        Trap::UnreachableCodeReached if !guest.stderr.is_empty() => {
            (FaultKind::Trap, last_words(&String::from_utf8_lossy(&guest.stderr)))
        }
        Trap::UnreachableCodeReached => (FaultKind::Trap, "aborted without a message".into()),
        Trap::StackOverflow => {
            (FaultKind::Trap, format!("recursed too deeply: its stack of {WASM_STACK_BYTES} bytes is used up"))
        }
        // Compilers keep a stack of their own in the linear memory, which deep recursion overflows before that of WebAssembly.
        Trap::MemoryOutOfBounds => {
            (FaultKind::Trap, format!("trapped: {trap}; possibly a stack overflow by deep recursion"))
        }
        trap => (FaultKind::Trap, format!("trapped: {trap}")),
    }
}

fn out_of_fuel(limits: &Limits, n_items: usize) -> String {
    let (of_call, of_item) = (grouped(limits.values.fuel_per_call), grouped(limits.values.fuel_per_item));
    let items = if n_items == 1 { "1 item".to_owned() } else { format!("each of {} items", grouped(n_items as u64)) };
    let key = limits.key("fuel_per_item");
    format!("used up its fuel: {of_call} for the call and {of_item} for {items} ({key}); it loops, or needs more")
}

/// `timeout_ms` is the limit of a call, independent of its number of items: a filter gets a complete split.
fn out_of_time(limits: &Limits, n_items: usize) -> String {
    let (ms, key) = (grouped(limits.values.timeout_ms), limits.key("timeout_ms"));
    match n_items {
        1 => format!("ran for longer than {ms} ms ({key})"),
        n => format!(
            "ran for longer than {ms} ms with {} items in one call ({key}); raise it for so many",
            grouped(n as u64)
        ),
    }
}

/// The fault of a call that used up its wall time without running much: the machine was busy, and no item is the cause.
fn waited_for_the_machine(limits: &Limits, ran: Duration) -> String {
    let wall_ms = grouped(limits.values.timeout_ms.saturating_mul(WALL_TIMEOUTS.into()));
    let (ran_ms, key) = (grouped(ran.as_millis() as u64), limits.key("timeout_ms"));
    format!(
        "was not finished after {wall_ms} ms, {WALL_TIMEOUTS} times {key}, in which it ran for {ran_ms} ms: the machine is busy with \
         other work; try again when it is not, or raise that limit"
    )
}

/// The fault of a call in which the host refused an operation or a result of the guest.
fn refused(phase: CallPhase, error: &wasmtime::Error, limits: &Limits) -> (FaultKind, String) {
    if let Some(refused) = error.downcast_ref::<HostRefusal>() {
        return (FaultKind::Trap, refused.to_string());
    }
    match error.downcast_ref::<FormError>() {
        Some(FormError::TooLarge) => return (FaultKind::Limit, too_large(limits)),
        Some(other) => return (FaultKind::Result, other.to_string()),
        None => {}
    }
    let cause = error.root_cause().to_string();
    // wasmtime has no type for this; the text is that of `consume_fuel` in its component/func/options.rs.
    if cause.contains("fuel allocated for hostcalls has been exhausted") {
        return (FaultKind::Limit, too_large(limits));
    }
    let cause = printable(&cause, MAX_MESSAGE_BYTES);
    match phase {
        // Errors of the guest during instantiation are traps and limits.
        CallPhase::Starting => {
            let advice = "see whether the machine is out of memory or of address space";
            (FaultKind::Host, format!("this host could not start it: {cause}; {advice}"))
        }
        CallPhase::Running => (FaultKind::Result, format!("returned what cannot be read: {cause}")),
    }
}

/// The message for a result that exceeds `output_bytes`.
fn too_large(limits: &Limits) -> String {
    let (bytes, key) = (limits.values.output_bytes, limits.key("output_bytes"));
    format!("returned more than {bytes} bytes ({key})")
}

/// First line of a traceback of Python.
const TRACEBACK: &str = "Traceback (most recent call last):";

/// Python's exception, and its traceback with its lines, between line breaks.
fn python_error(stderr: &str) -> Option<String> {
    let lines: Vec<String> = stderr[stderr.find(TRACEBACK)?..]
        .lines()
        // Excludes the panic of componentize-py's runtime, which adds no information.
        .take_while(|line| !line.starts_with("thread '"))
        .filter(|line| !line.trim().is_empty())
        .map(|line| {
            let indent = line.len() - line.trim_start().len();
            " ".repeat(indent) + &printable(line.trim(), MAX_MESSAGE_BYTES)
        })
        .collect();
    let last_frame = lines.iter().rposition(|line| line.starts_with(' '))?;
    let exception = lines.get(last_frame + 1)?;
    // The end of a traceback has the location of the error.
    let n_left_out = lines.len().saturating_sub(MAX_TRACEBACK_LINES);
    let left_out = (n_left_out > 0).then(|| format!("({n_left_out} lines before)"));
    let shown: Vec<String> = left_out.into_iter().chain(lines[n_left_out..].iter().cloned()).collect();
    Some(format!("{exception}\n{}\n", shown.join("\n")))
}

/// The error text that a guest wrote before it ended: Python's exception, Rust's panic message without its note on RUST_BACKTRACE,
/// JavaScript's exception with its stack (`score@plugin.js:3`), or other lines of a component that aborted.
fn last_words(stderr: &str) -> String {
    if let Some(message) = python_error(stderr) {
        return format!("raised: {message}");
    }
    let word = if stderr.contains("panicked at ") {
        "panicked"
    } else if stderr.contains(".js:") {
        "threw"
    } else {
        "ended after it wrote"
    };
    let lines = stderr.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("note: run with"));
    format!("{word}: {}", printable(&lines.collect::<Vec<_>>().join(" "), MAX_MESSAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::CallTime;
    use crate::log::PluginLog;
    use querl_core::config::PluginLimits;
    use std::sync::Arc;
    use std::time::Instant;

    #[test]
    fn machine_without_memory_is_not_the_plugins_fault() {
        let error = wasmtime::Error::msg("maximum concurrent core instance limit of 0 reached");
        let limits = Limits::of_host(&PluginLimits::default());
        let (kind, message) = refused(CallPhase::Starting, &error, &limits);
        assert_eq!(kind, FaultKind::Host);
        assert!(message.starts_with("this host could not start it: maximum concurrent"), "{message}");
        assert_eq!(refused(CallPhase::Running, &error, &limits).0, FaultKind::Result);
    }

    /// Symptom: deep recursion of a guest in Rust was reported without a word about recursion.
    #[test]
    fn access_out_of_bounds_names_deep_recursion() {
        let time = CallTime::new(Instant::now(), Duration::from_secs(60));
        let guest = Guest::new(Arc::new(PluginLog::new("x 0.1.0".into(), 0)), Arc::default(), 0, 0, time);
        let limits = Limits::of_host(&PluginLimits::default());
        let (kind, message) = trapped(Trap::MemoryOutOfBounds, &guest, &limits, CallSize::of(1));
        assert_eq!(kind, FaultKind::Trap);
        let expected = "trapped: wasm trap: out of bounds memory access; possibly a stack overflow by deep recursion";
        assert_eq!(message, expected);
    }

    #[test]
    fn traceback_of_python_keeps_its_lines() {
        let stderr = "log line\nTraceback (most recent call last):\n  File \"/0/plugin.py\", line 9, in score\n    \
                      return 1 / 0\n           ~~^~~\nZeroDivisionError: division by zero\nthread \'<unnamed>\' (1) panicked at runtime/src/lib.rs:1:1:\nPython function threw\n";
        let expected = "raised: ZeroDivisionError: division by zero\nTraceback (most recent call last):\n  File \"/0/plugin.py\", line 9, in \
                        score\n    return 1 / 0\n           ~~^~~\nZeroDivisionError: division by zero\n";
        assert_eq!(last_words(stderr), expected);
        let deep = format!("{TRACEBACK}\n{}E: x\n", "  File\n".repeat(100));
        let message = last_words(&deep);
        assert!(message.starts_with("raised: E: x\n(62 lines before)\n  File\n"), "{message}");
        assert!(message.ends_with("\nE: x\n"), "{message}");
        let expected = "panicked: thread 'a' panicked at src/lib.rs:1:1: no";
        assert_eq!(last_words("thread 'a' panicked at src/lib.rs:1:1:\nno\n"), expected);
        let expected = "threw: TypeError: x is undefined score@plugin.js:3";
        assert_eq!(last_words("TypeError: x is undefined\nscore@plugin.js:3\n"), expected);
        assert_eq!(last_words("no words\n"), "ended after it wrote: no words");
    }

    #[test]
    fn limits_are_reported_with_their_numbers_and_items() {
        let limits = Limits::of_host(&PluginLimits {
            fuel_per_call: 200_000_000,
            fuel_per_item: 10_000_000,
            timeout_ms: 5000,
            ..PluginLimits::default()
        });
        assert_eq!(
            out_of_fuel(&limits, 64),
            "used up its fuel: 200,000,000 for the call and 10,000,000 for each of 64 items \
             (`plugins.limits.fuel_per_item`); it loops, or needs more"
        );
        let expected = "ran for longer than 5,000 ms with 20,000 items in one call (`plugins.limits.timeout_ms`); raise it for so many";
        assert_eq!(out_of_time(&limits, 20_000), expected);
        assert_eq!(
            waited_for_the_machine(&limits, Duration::from_millis(1200)),
            "was not finished after 50,000 ms, 10 times `plugins.limits.timeout_ms`, in which it ran for 1,200 ms: the machine is busy with \
             other work; try again when it is not, or raise that limit"
        );
    }
}

//! Why a call ended without a result, in words.

use crate::engine::{TABLE_ELEMENTS, WASM_STACK_BYTES};
use crate::guest::{Guest, Refused};
use crate::limits::Limits;
use crate::text::printable;
use querl_core::ports::FaultKind;
use wasmtime::Trap;

/// More of a panic's message than this is not shown.
const MAX_MESSAGE_BYTES: usize = 2000;

/// What happened, said so that the author of the plugin or of the configuration knows what to do.
pub(crate) fn explain(error: &wasmtime::Error, guest: &Guest, limits: &Limits, n_items: usize) -> (FaultKind, String) {
    if let Some(bytes) = guest.memory.refused_bytes {
        let (key, limit) = (limits.key("memory_bytes"), guest.memory.limit_bytes);
        return (FaultKind::Limit, format!("asked for {bytes} bytes of memory; {key} allows {limit}"));
    }
    if let Some(elements) = guest.memory.refused_elements {
        let message = format!("asked for a table of {elements} elements; a host allows {TABLE_ELEMENTS}");
        return (FaultKind::Limit, message);
    }
    match error.downcast_ref::<Trap>() {
        Some(trap) => trapped(*trap, guest, limits, n_items),
        None => refused(error, limits),
    }
}

fn trapped(trap: Trap, guest: &Guest, limits: &Limits, n_items: usize) -> (FaultKind, String) {
    match trap {
        Trap::OutOfFuel => (FaultKind::Limit, out_of_fuel(limits, n_items)),
        Trap::Interrupt => {
            let (ms, key) = (limits.values.timeout_ms, limits.key("timeout_ms"));
            (FaultKind::Limit, format!("ran for longer than {ms} ms ({key})"))
        }
        Trap::UnreachableCodeReached if !guest.stderr.is_empty() => {
            (FaultKind::Trap, format!("panicked: {}", panic_message(&String::from_utf8_lossy(&guest.stderr))))
        }
        Trap::UnreachableCodeReached => (FaultKind::Trap, "aborted without a message".into()),
        Trap::StackOverflow => {
            (FaultKind::Trap, format!("recursed too deeply: its stack of {WASM_STACK_BYTES} bytes is used up"))
        }
        trap => (FaultKind::Trap, format!("trapped: {trap}")),
    }
}

fn out_of_fuel(limits: &Limits, n_items: usize) -> String {
    let (of_call, of_item) = (limits.values.fuel_per_call, limits.values.fuel_per_item);
    let items = if n_items == 1 { "1 item".to_owned() } else { format!("each of {n_items} items") };
    let key = limits.key("fuel_per_item");
    format!("used up its fuel, {of_call} and {of_item} for {items} ({key}): it loops, or needs more")
}

/// The host refused what the guest did or returned.
fn refused(error: &wasmtime::Error, limits: &Limits) -> (FaultKind, String) {
    if let Some(refused) = error.downcast_ref::<Refused>() {
        return (FaultKind::Trap, refused.to_string());
    }
    let cause = error.root_cause().to_string();
    // wasmtime has no type for this; the text is that of `consume_fuel` in its component/func/options.rs.
    if cause.contains("fuel allocated for hostcalls has been exhausted") {
        let (bytes, key) = (limits.values.output_bytes, limits.key("output_bytes"));
        return (FaultKind::Limit, format!("handed over more than {bytes} bytes ({key})"));
    }
    (FaultKind::Result, format!("handed over what cannot be read: {}", printable(&cause, MAX_MESSAGE_BYTES)))
}

/// Rust's panic text without its advice for shells.
fn panic_message(stderr: &str) -> String {
    let told = stderr.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("note: run with"));
    printable(&told.collect::<Vec<_>>().join(" "), MAX_MESSAGE_BYTES)
}

//! Why a call ended without a result, in words.

use crate::engine::{TABLE_ELEMENTS, WASM_STACK_BYTES};
use crate::guest::{Guest, Refused};
use crate::text::printable;
use querl_core::config::PluginLimits;
use wasmtime::Trap;

/// More of a panic's message than this is not shown.
const MAX_MESSAGE_BYTES: usize = 2000;

/// What happened, said so that the author of the plugin or of the configuration knows what to do.
pub(crate) fn explain(error: &wasmtime::Error, guest: &Guest, limits: &PluginLimits, n_items: usize) -> String {
    if let Some(bytes) = guest.memory.refused_bytes {
        let limit = guest.memory.limit_bytes;
        return format!("asked for {bytes} bytes of memory; `plugins.limits.memory_bytes` allows {limit}");
    }
    if let Some(elements) = guest.memory.refused_elements {
        return format!("asked for a table of {elements} elements; a host allows {TABLE_ELEMENTS}");
    }
    match error.downcast_ref::<Trap>() {
        Some(Trap::OutOfFuel) => format!(
            "used up its fuel, {} for each of {n_items} items (`plugins.limits.fuel_per_item`): it loops, or needs more",
            limits.fuel_per_item
        ),
        Some(Trap::Interrupt) => {
            format!("ran for longer than {} ms (`plugins.limits.timeout_ms`)", limits.timeout_ms)
        }
        Some(Trap::UnreachableCodeReached) if !guest.stderr.is_empty() => {
            format!("panicked: {}", panic_message(&String::from_utf8_lossy(&guest.stderr)))
        }
        Some(Trap::UnreachableCodeReached) => "aborted without a message".into(),
        Some(Trap::StackOverflow) => {
            format!("recursed too deeply: its stack of {WASM_STACK_BYTES} bytes is used up")
        }
        Some(trap) => format!("trapped: {trap}"),
        None => refused_result(error, limits),
    }
}

/// The host refused what the guest did or returned.
fn refused_result(error: &wasmtime::Error, limits: &PluginLimits) -> String {
    if let Some(refused) = error.downcast_ref::<Refused>() {
        return refused.to_string();
    }
    let cause = error.root_cause().to_string();
    // wasmtime has no type for this; the text is that of `consume_fuel` in its component/func/options.rs.
    if cause.contains("fuel allocated for hostcalls has been exhausted") {
        return format!("handed over more than {} bytes (`plugins.limits.output_bytes`)", limits.output_bytes);
    }
    format!("handed over what cannot be read: {}", printable(&cause, MAX_MESSAGE_BYTES))
}

/// Rust's panic text without its advice for shells.
fn panic_message(stderr: &str) -> String {
    let told = stderr.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("note: run with"));
    printable(&told.collect::<Vec<_>>().join(" "), MAX_MESSAGE_BYTES)
}

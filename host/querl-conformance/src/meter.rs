//! Measures what calls use, from the host's reports.

use querl_plugin::CallReport;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Total usage of a sequence of calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) n_calls: usize,
    pub(crate) n_items: usize,
    pub(crate) fuel: u64,
    pub(crate) wall: Duration,
    /// Largest memory of one of the calls, in bytes.
    pub(crate) memory_bytes: usize,
}

impl Usage {
    const NONE: Self = Self { n_calls: 0, n_items: 0, fuel: 0, wall: Duration::ZERO, memory_bytes: 0 };
}

/// Peak usage of any call of the suite.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Peak {
    /// Fuel by number of items.
    fuel: BTreeMap<usize, u64>,
    pub(crate) memory_bytes: usize,
}

impl Peak {
    /// Items and fuel of the call that used the largest share of its allowed fuel.
    pub(crate) fn nearest_to(&self, allowed: impl Fn(usize) -> u64) -> (usize, u64) {
        let share = |n_items: usize, fuel: u64| fuel as f64 / allowed(n_items).max(1) as f64;
        let calls = self.fuel.iter().map(|(n_items, fuel)| (*n_items, *fuel));
        calls.max_by(|a, b| share(a.0, a.1).total_cmp(&share(b.0, b.1))).unwrap_or_default()
    }
}

thread_local! {
    // The host reports a call on the thread that made it.
    static USAGE: Cell<Usage> = const { Cell::new(Usage::NONE) };
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Meter {
    peak: Arc<Mutex<Peak>>,
}

impl Meter {
    /// Adds a call to the usage of the calling thread and to the peak.
    pub(crate) fn record(&self, call: &CallReport<'_>) {
        let mut usage = USAGE.get();
        usage.n_calls += 1;
        usage.n_items += call.n_items;
        usage.fuel += call.fuel;
        usage.wall += call.wall;
        usage.memory_bytes = usage.memory_bytes.max(call.memory_bytes);
        USAGE.set(usage);
        let mut peak = self.peak.lock().unwrap_or_else(PoisonError::into_inner);
        let fuel = peak.fuel.entry(call.n_items).or_default();
        *fuel = call.fuel.max(*fuel);
        peak.memory_bytes = peak.memory_bytes.max(call.memory_bytes);
    }

    pub(crate) fn peak(&self) -> Peak {
        self.peak.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The result of `job`, and the usage of the calls that it made on this thread.
pub(crate) fn measured<R>(job: impl FnOnce() -> R) -> (R, Usage) {
    USAGE.set(Usage::NONE);
    let result = job();
    (result, USAGE.take())
}

//! One call into a plugin: a fresh instance, limits, and a fault where it goes wrong.

use crate::engine::{Slots, TICK};
use crate::fault;
use crate::guest::Guest;
use crate::load::Exports;
use querl_core::config::PluginLimits;
use querl_core::ports::{FaultKind, PluginFault};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wasmtime::Store;
use wasmtime::component::Instance;

/// A plugin with its settings, ready to be called from any thread.
#[derive(Clone)]
pub(crate) struct Caller {
    pub(crate) name: Arc<str>,
    pub(crate) version: Arc<str>,
    /// Name and version.
    pub(crate) title: Arc<str>,
    pub(crate) exports: Exports,
    pub(crate) settings: Arc<BTreeMap<String, String>>,
    pub(crate) limits: Arc<PluginLimits>,
    pub(crate) slots: Arc<Slots>,
}

impl Caller {
    /// Runs `job` in a fresh instance with fuel for `n_items`.
    ///
    /// # Errors
    /// The guest trapped, hit a limit or returned what cannot be read.
    pub(crate) fn call<R>(
        &self,
        n_items: usize,
        job: impl FnOnce(&mut Store<Guest>, &Instance) -> wasmtime::Result<R>,
    ) -> Result<R, PluginFault> {
        let _slot = self.slots.take();
        let mut store = self.store(n_items);
        let done = self.exports.pre.instantiate(&mut store).and_then(|instance| job(&mut store, &instance));
        done.map_err(|error| {
            tracing::debug!(plugin = &*self.title, "{error:?}");
            self.fault(fault::explain(&error, store.data(), &self.limits, n_items))
        })
    }

    fn store(&self, n_items: usize) -> Store<Guest> {
        let limits = &*self.limits;
        let guest = Guest::new(self.title.clone(), self.settings.clone(), limits.memory_bytes, limits.log_bytes);
        let mut store = Store::new(self.exports.pre.engine(), guest);
        store.limiter(|guest| &mut guest.memory);
        let fuel = limits.fuel_per_item.saturating_mul(n_items.max(1) as u64);
        store.set_fuel(fuel).expect("fuel is on in this engine");
        // A tick may be about to come: one more, so that a call never gets less than its time.
        store.set_epoch_deadline(limits.timeout_ms.div_ceil(TICK.as_millis() as u64) + 1);
        store.epoch_deadline_trap();
        store.set_hostcall_fuel(limits.output_bytes);
        store
    }

    /// A fault of this plugin.
    pub(crate) fn fault(&self, message: String) -> PluginFault {
        let kind = FaultKind::Result;
        PluginFault { plugin: self.name.to_string(), version: self.version.to_string(), message, kind }
    }

    /// A list of results that does not fit the list of arguments: nobody can say which item it lost.
    pub(crate) fn wrong_length(&self, n_results: usize, results: &str, what: &str, ids: &[&str]) -> PluginFault {
        let message = format!("returned {n_results} {results} for {} {what}s", ids.len());
        self.in_batch(&message, what, ids)
    }

    fn in_batch(&self, message: &str, what: &str, ids: &[&str]) -> PluginFault {
        match ids {
            [] => self.fault(message.to_owned()),
            [id] => self.fault(format!("{what} `{id}`: {message}")),
            [first, .., last] => self.fault(format!("{message} (a batch from {what} `{first}` to `{last}`)")),
        }
    }

    /// Names the item at which a batch went wrong, by trying them one by one for no longer than one call may take.
    pub(crate) fn located(
        &self,
        fault: PluginFault,
        what: &str,
        ids: &[&str],
        mut alone: impl FnMut(usize) -> Result<(), PluginFault>,
    ) -> PluginFault {
        if ids.len() == 1 {
            return self.in_batch(&fault.message, what, ids);
        }
        let start = Instant::now();
        let patience = Duration::from_millis(self.limits.timeout_ms);
        for (index, id) in ids.iter().enumerate().take_while(|_| start.elapsed() < patience) {
            if let Err(fault) = alone(index) {
                return self.fault(format!("{what} `{id}`: {}", fault.message));
            }
        }
        self.in_batch(&fault.message, what, ids)
    }
}

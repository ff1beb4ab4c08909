//! One call into a plugin: a fresh instance, limits, and a fault where it goes wrong.

use crate::fault::{self, Stage};
use crate::guest::Guest;
use crate::limits::Limits;
use crate::load::Exports;
use crate::log::LogBudget;
use crate::slots::Slots;
use querl_core::config::OnLimit;
use querl_core::ports::{FaultKind, PluginFault, StyleModel};
use querl_core::records::Rejection;
use querl_core::text::grouped;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use wasmtime::component::Instance;
use wasmtime::{Store, UpdateDeadline};

/// What one call into a plugin used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CallReport<'a> {
    /// The plugin's id; while it is asked for it, its file.
    pub plugin: &'a str,
    /// Interface and function: `rewards.score-batch`.
    pub function: &'static str,
    /// Items of the batch; 1 for a function without one.
    pub n_items: usize,
    /// Instructions of the guest, those that start its instance included. The same on every machine.
    pub fuel: u64,
    /// From the slot in the pool to the result; waiting for a slot is not in it.
    pub wall: Duration,
    /// Linear memory at its largest, all memories of the instance together.
    pub memory_bytes: usize,
    /// True where the call ended in a fault. A result that the contract forbids is found later, and is false here.
    pub failed: bool,
}

/// Hears of every call, on the thread that made it, before the caller has its result. It holds up that thread and a slot of the
/// pool: it takes notes, and calls no plugin.
pub type Observer = Arc<dyn Fn(&CallReport<'_>) + Send + Sync>;

/// The size of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) n_items: usize,
    /// The call has the fuel of so many items.
    pub(crate) n_fuel_items: usize,
}

impl Load {
    pub(crate) fn of(n_items: usize) -> Self {
        Self { n_items, n_fuel_items: n_items }
    }

    /// Some items of a batch that hit a limit, with the fuel that the whole batch had: what is within the limits with its
    /// neighbours is so without them.
    pub(crate) fn part_of(n_whole: usize, n_items: usize) -> Self {
        Self { n_items, n_fuel_items: n_whole }
    }
}

/// When finding the items to drop has to end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    start: Instant,
    ms: u64,
}

/// Finding all items of a batch that are to be dropped takes at most so many times as long as a call may.
const PATIENCE_TIMEOUTS: u64 = 10;

/// A plugin with its settings, ready to be called from any thread.
#[derive(Clone)]
pub(crate) struct Caller {
    pub(crate) name: Arc<str>,
    pub(crate) version: Arc<str>,
    /// Name and version.
    pub(crate) title: Arc<str>,
    pub(crate) exports: Exports,
    pub(crate) settings: Arc<BTreeMap<String, String>>,
    pub(crate) style_model: Option<Arc<dyn StyleModel>>,
    pub(crate) limits: Arc<Limits>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) observer: Option<Observer>,
    /// Items of this plugin that were dropped at limits over the life of the host.
    pub(crate) n_dropped: Arc<AtomicU64>,
    pub(crate) log_budget: Arc<LogBudget>,
}

impl Caller {
    /// Runs `job`, a call of `function`, in a fresh instance.
    ///
    /// # Errors
    /// The guest trapped, hit a limit or returned what cannot be read.
    pub(crate) fn call<R>(
        &self,
        function: &'static str,
        load: Load,
        job: impl FnOnce(&mut Store<Guest>, &Instance) -> wasmtime::Result<R>,
    ) -> Result<R, PluginFault> {
        let _slot = self.slots.take();
        let start = Instant::now();
        let mut store = self.store(load, start);
        let done = match self.exports.pre.instantiate(&mut store) {
            Ok(instance) => job(&mut store, &instance).map_err(|error| (Stage::Running, error)),
            Err(error) => Err((Stage::Starting, error)),
        };
        self.report(function, load, start, &store, done.is_err());
        done.map_err(|(stage, error)| {
            tracing::debug!(plugin = &*self.title, "{error:?}");
            let (kind, message) = fault::explain(stage, &error, store.data(), &self.limits, load);
            self.fault(kind, message)
        })
    }

    fn store(&self, load: Load, start: Instant) -> Store<Guest> {
        let limits = &self.limits.values;
        let mut guest = Guest::new(
            self.title.clone(),
            self.settings.clone(),
            limits.memory_bytes,
            limits.log_bytes,
            self.log_budget.clone(),
        );
        guest.style_model.clone_from(&self.style_model);
        guest.deadline = start.checked_add(Duration::from_millis(limits.timeout_ms));
        let mut store = Store::new(self.exports.pre.engine(), guest);
        store.limiter(|guest| &mut guest.memory);
        store.set_fuel(self.limits.fuel(load.n_fuel_items)).expect("fuel is on in this engine");
        // The clock itself is asked at every tick, not the ticks counted: on a busy machine they come late.
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|store| store.data().check_time().map(|()| UpdateDeadline::Continue(1)));
        store.set_hostcall_fuel(limits.output_bytes);
        store
    }

    fn report(&self, function: &'static str, load: Load, start: Instant, store: &Store<Guest>, failed: bool) {
        let Some(observer) = &self.observer else { return };
        let left = store.get_fuel().expect("fuel is on in this engine");
        observer(&CallReport {
            plugin: &self.name,
            function,
            n_items: load.n_items,
            fuel: self.limits.fuel(load.n_fuel_items).saturating_sub(left),
            wall: start.elapsed(),
            memory_bytes: store.data().memory.used_bytes,
            failed,
        });
    }

    /// A fault of this plugin.
    pub(crate) fn fault(&self, kind: FaultKind, message: String) -> PluginFault {
        PluginFault { plugin: self.name.to_string(), version: self.version.to_string(), message, kind }
    }

    /// The plugin returned what the contract does not allow.
    pub(crate) fn wrong(&self, message: String) -> PluginFault {
        self.fault(FaultKind::Result, message)
    }

    /// A list of results that does not fit the list of arguments: nobody can say which item it lost.
    pub(crate) fn wrong_length(&self, n_results: usize, results: &str, what: &str, ids: &[&str]) -> PluginFault {
        self.in_batch(&self.wrong(format!("returned {n_results} {results} for {} {what}s", ids.len())), what, ids)
    }

    /// `fault` with the items of the batch in which it happened.
    pub(crate) fn in_batch(&self, fault: &PluginFault, what: &str, ids: &[&str]) -> PluginFault {
        let message = &fault.message;
        let message = match ids {
            [] => message.clone(),
            [id] => format!("{what} `{id}`: {message}"),
            [first, .., last] => format!("{message} (a batch from {what} `{first}` to `{last}`)"),
        };
        self.fault(fault.kind, message)
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
            return self.in_batch(&fault, what, ids);
        }
        let start = Instant::now();
        let patience = Duration::from_millis(self.limits.values.timeout_ms);
        for (index, id) in ids.iter().enumerate().take_while(|_| start.elapsed() < patience) {
            if let Err(fault) = alone(index) {
                return self.in_batch(&fault, what, &[id]);
            }
        }
        self.in_batch(&fault, what, ids)
    }

    pub(crate) fn patience(&self) -> Patience {
        Patience { start: Instant::now(), ms: self.limits.values.timeout_ms.saturating_mul(PATIENCE_TIMEOUTS) }
    }

    /// # Errors
    /// Finding what to drop of this batch has taken too long.
    pub(crate) fn check(&self, patience: Patience, what: &str, ids: &[&str]) -> Result<(), PluginFault> {
        if patience.start.elapsed() < Duration::from_millis(patience.ms) {
            return Ok(());
        }
        let (ms, key) = (grouped(patience.ms), self.limits.key("timeout_ms"));
        let message = format!(
            "finding the {what}s to drop took longer than {ms} ms, {PATIENCE_TIMEOUTS} times {key}: many hit a limit; raise \
             that limit, or let limits fail"
        );
        Err(self.in_batch(&self.fault(FaultKind::Limit, message), what, ids))
    }

    /// True where the item at which a limit was hit is to be dropped.
    pub(crate) fn drops(&self, fault: &PluginFault) -> bool {
        fault.kind == FaultKind::Limit && self.limits.values.on_limit == OnLimit::Drop
    }

    /// Counts an item that hit a limit, and says what becomes of it.
    ///
    /// # Errors
    /// It is one too many.
    pub(crate) fn dropped(&self, fault: &PluginFault, what: &str, id: &str) -> Result<Rejection, PluginFault> {
        let n_dropped = self.n_dropped.fetch_add(1, Ordering::Relaxed) + 1;
        let max_dropped = self.limits.values.max_dropped;
        if n_dropped > max_dropped {
            let message = format!(
                "dropped {n_dropped} items at limits; `plugins.limits.max_dropped` allows {max_dropped} (the last: {what} \
                 `{id}`: {})",
                fault.message
            );
            return Err(self.fault(FaultKind::TooManyDropped, message));
        }
        tracing::warn!(plugin = &*self.title, "{what} `{id}` is dropped: {}", fault.message);
        Ok(Rejection { code: LIMIT_CODE.into(), detail: fault.message.clone() })
    }
}

/// The code with which the host drops an item at which a plugin hit a limit.
pub const LIMIT_CODE: &str = "plugin_limit";

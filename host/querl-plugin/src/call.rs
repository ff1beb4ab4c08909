//! One call into a plugin: a fresh instance, limits, and a [`PluginFault`] when it fails.

use crate::contract::{GuestInstance, ItemResult};
use crate::engine::Slots;
use crate::fault::{self, CallPhase};
use crate::guest::{CallTime, Guest, HostCalls};
use crate::limits::{CallSize, Limits, UsedNames};
use crate::load::{Exports, PluginKind};
use crate::log::PluginLog;
use crate::series::Series;
use querl_core::config::OnLimit;
use querl_core::ports::{EpisodeInputs, FaultKind, HostFunctions, PluginFault};
use querl_core::records::Rejection;
use querl_core::text::grouped;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use wasmtime::{Store, UpdateDeadline};

/// Rejection code of an item that the host drops because the plugin hit a limit (fuel, time, memory, output) at it.
pub const LIMIT_CODE: &str = "plugin_limit";

/// Maximum time for finding all items of a batch that must be dropped, as a multiple of `timeout_ms`.
const DROP_TIMEOUTS: u64 = 10;

/// Resources that one call into a plugin used, and its outcome.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CallReport<'a> {
    /// The plugin's id; during `info.describe`, before the id is known, its file.
    pub plugin: &'a str,
    /// The called interface and function, for example `rewards.score-batch`.
    pub function: &'static str,
    /// Number of items in the batch; 1 for a function that takes no batch.
    pub n_items: usize,
    /// Fuel used: WebAssembly instructions of the guest, instantiation included. The same on every machine.
    pub fuel: u64,
    /// Wall time of the call, from the slot in the pool to the result; waiting for a slot is not included.
    pub wall: Duration,
    /// Peak size of all linear memories of the instance together, in bytes.
    pub memory_bytes: usize,
    /// True if the call ended in a fault. False for a result that the contract forbids, since results are checked after the call.
    pub failed: bool,
    /// Rejections and totals of a call that scored episodes or dialogues; 0 and `None` for other calls.
    pub outcome: Outcome,
    /// Lines that the plugin logged, each with its level: `info: no hits`.
    pub log: &'a [String],
}

/// Counts of one scoring call, before its results are checked.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Outcome {
    /// Number of items that the plugin rejected.
    pub n_rejected: usize,
    /// Smallest and largest total score; `None` if no item was scored.
    pub totals: Option<(f64, f64)>,
}

impl Outcome {
    fn of(results: &[ItemResult]) -> Self {
        let mut outcome = Self::default();
        for result in results {
            match (result, &mut outcome.totals) {
                (Err(_), _) => outcome.n_rejected += 1,
                (Ok(score), Some((min, max))) => (*min, *max) = (min.min(score.total), max.max(score.total)),
                (Ok(score), totals) => *totals = Some((score.total, score.total)),
            }
        }
        outcome
    }
}

/// Callback after every call, on the calling thread, before the caller has its result. It blocks that thread and a slot of the
/// pool, and must not call a plugin.
pub type Observer = Arc<dyn Fn(&CallReport<'_>) + Send + Sync>;

/// Which batches of rewards are scored a second time, to find plugins whose results vary. Plugins that import host functions are
/// never scored again, since those calls would be made twice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Rechecks {
    /// About one in 64 batches of at least 2 episodes, chosen by their first and last id. Up to 4 of its episodes are scored
    /// again, either alone or in another `RewardForm`.
    #[default]
    Sampled,
    /// Every batch of at least 2 episodes: each episode alone, and the batch in every form. For tests of plugins.
    Every,
    /// No batch is scored again.
    Off,
}

/// Deadline of the search for the items of a batch that hit a limit, which are then dropped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DropDeadline {
    start: Instant,
    ms: u64,
}

/// A plugin with its settings, ready to be called from any thread.
#[derive(Clone)]
pub(crate) struct Caller {
    pub(crate) name: Arc<str>,
    pub(crate) version: Arc<str>,
    pub(crate) title: Arc<str>,
    pub(crate) exports: Exports,
    pub(crate) settings: Arc<BTreeMap<String, String>>,
    /// Implementation of the host functions that the plugin imports, with the kind of the port that it is opened as; `None`
    /// without one.
    pub(crate) functions: Option<(PluginKind, Arc<dyn HostFunctions>)>,
    pub(crate) limits: Arc<Limits>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) observer: Option<Observer>,
    pub(crate) rechecks: Rechecks,
    /// The parts of an episode or sample that the plugin declares to read.
    pub(crate) inputs: EpisodeInputs,
    /// Number of items that this plugin hit a limit at and that were dropped, since the host was started.
    pub(crate) n_dropped: Arc<AtomicU64>,
    pub(crate) log: Arc<PluginLog>,
    pub(crate) used_names: Arc<UsedNames>,
}

impl Caller {
    /// Calls `function` of the plugin by `job`, in a fresh instance, under the limits of a batch of this size.
    pub(crate) fn call<R>(
        &self,
        function: &'static str,
        size: CallSize,
        job: impl FnOnce(GuestInstance<'_>) -> wasmtime::Result<R>,
    ) -> Result<R, PluginFault> {
        self.call_for("", function, size, job, |_| Outcome::default())
    }

    /// Like [`call`](Self::call), for the item or group `item_id`, to which calls of host functions are attributed; `item_id` is
    /// empty for a batch of several items.
    pub(crate) fn score(
        &self,
        item_id: &str,
        function: &'static str,
        size: CallSize,
        job: impl FnOnce(GuestInstance<'_>) -> wasmtime::Result<Vec<ItemResult>>,
    ) -> Result<Vec<ItemResult>, PluginFault> {
        self.call_for(item_id, function, size, job, |results| Outcome::of(results))
    }

    fn call_for<R>(
        &self,
        item_id: &str,
        function: &'static str,
        size: CallSize,
        job: impl FnOnce(GuestInstance<'_>) -> wasmtime::Result<R>,
        outcome: impl FnOnce(&R) -> Outcome,
    ) -> Result<R, PluginFault> {
        let _slot = self.slots.take();
        let start = Instant::now();
        let mut store = self.new_store(size, start, item_id);
        let result = match self.exports.pre.instantiate(&mut store) {
            Ok(instance) => job(GuestInstance { store: &mut store, instance: &instance })
                .map_err(|error| (CallPhase::Running, error)),
            Err(error) => Err((CallPhase::Starting, error)),
        };
        self.report(function, size, start, &store, result.as_ref().ok().map(outcome));
        result.map_err(|(phase, error)| {
            tracing::debug!(plugin = &*self.title, "{error:?}");
            let (kind, message) = fault::explain(phase, &error, store.data(), &self.limits, size);
            PluginFault { log: store.into_data().logged, ..self.fault(kind, message) }
        })
    }

    /// A store with the limits of one call: memory, fuel, time, output bytes.
    fn new_store(&self, size: CallSize, start: Instant, item_id: &str) -> Store<Guest> {
        let limits = &self.limits.values;
        let mut guest = Guest::new(
            self.log.clone(),
            self.settings.clone(),
            limits.memory_bytes,
            limits.log_bytes,
            CallTime::new(start, Duration::from_millis(limits.timeout_ms)),
        );
        guest.host = self.functions.as_ref().map(|(kind, functions)| HostCalls {
            functions: functions.clone(),
            plugin: self.name.clone(),
            kind: *kind,
            item_id: item_id.to_owned(),
            n_left: (self.exports.series > Series::V0_1)
                .then(|| limits.host_calls_per_item.saturating_mul(size.n_items.max(1) as u64)),
        });
        let mut store = Store::new(self.exports.pre.engine(), guest);
        store.limiter(|guest| &mut guest.memory);
        store.set_fuel(self.limits.fuel(size)).expect("fuel is on in this engine");
        // At each epoch tick the clocks are compared with the limit. Ticks are not counted, because on a busy machine they are late.
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|store| store.data().check_time().map(|()| UpdateDeadline::Continue(1)));
        // Bytes that the guest may pass to the host, not instructions.
        store.set_hostcall_fuel(limits.output_bytes);
        store
    }

    /// Calls the observer; `outcome` is `None` for a call that failed.
    fn report(
        &self,
        function: &'static str,
        size: CallSize,
        start: Instant,
        store: &Store<Guest>,
        outcome: Option<Outcome>,
    ) {
        let Some(observer) = &self.observer else { return };
        let left = store.get_fuel().expect("fuel is on in this engine");
        observer(&CallReport {
            plugin: &self.name,
            function,
            n_items: size.n_items,
            fuel: self.limits.fuel(size).saturating_sub(left),
            wall: start.elapsed(),
            memory_bytes: store.data().memory.used_bytes,
            failed: outcome.is_none(),
            outcome: outcome.unwrap_or_default(),
            log: &store.data().logged,
        });
    }

    /// True if the plugin imports host functions and they are configured. Their calls are recorded with an item or group, so each
    /// is then scored in a call of its own.
    pub(crate) fn calls_host(&self) -> bool {
        self.functions.is_some() && !self.exports.host_functions.is_empty()
    }

    pub(crate) fn fault(&self, kind: FaultKind, message: String) -> PluginFault {
        PluginFault { plugin: self.name.to_string(), version: self.version.to_string(), message, kind, log: Vec::new() }
    }

    /// The rejection, if its code is valid; otherwise the message of a fault.
    pub(crate) fn rejection(&self, rejection: Rejection) -> Result<Rejection, String> {
        self.used_names.add_checked_code(&rejection.code)?;
        Ok(rejection)
    }

    /// The fault of a plugin that returned a value that the contract forbids.
    pub(crate) fn invalid_result(&self, message: String) -> PluginFault {
        self.fault(FaultKind::Result, message)
    }

    /// The fault of a plugin that returned more or fewer results than it got items: which item lacks one cannot be known.
    pub(crate) fn wrong_length(&self, n_results: usize, results: &str, what: &str, ids: &[&str]) -> PluginFault {
        let message = format!("returned {n_results} {results} for {} {what}s", ids.len());
        self.in_batch(&self.invalid_result(message), what, ids)
    }

    /// `fault` with the item's id added to its message; for a batch of several items the first and the last id.
    pub(crate) fn in_batch(&self, fault: &PluginFault, what: &str, ids: &[&str]) -> PluginFault {
        let message = &fault.message;
        let message = match ids {
            [] => message.clone(),
            [id] => format!("{what} `{id}`: {message}"),
            [first, .., last] => format!("{message} (a batch from {what} `{first}` to `{last}`)"),
        };
        PluginFault { log: fault.log.clone(), ..self.fault(fault.kind, message) }
    }

    /// Finds the item at which a batch failed by calling the plugin with each item alone, for at most `timeout_ms`, and names it
    /// in the fault. A fault that no item causes is returned as it is.
    pub(crate) fn locate(
        &self,
        fault: PluginFault,
        what: &str,
        ids: &[&str],
        mut run_single: impl FnMut(usize) -> Result<(), PluginFault>,
    ) -> PluginFault {
        if ids.len() == 1 || fault.kind == FaultKind::Host {
            return self.in_batch(&fault, what, ids);
        }
        let start = Instant::now();
        let timeout = Duration::from_millis(self.limits.values.timeout_ms);
        for (index, id) in ids.iter().enumerate().take_while(|_| start.elapsed() < timeout) {
            if let Err(fault) = run_single(index) {
                return self.in_batch(&fault, what, &[id]);
            }
        }
        self.in_batch(&fault, what, ids)
    }

    pub(crate) fn drop_deadline(&self) -> DropDeadline {
        DropDeadline { start: Instant::now(), ms: self.limits.values.timeout_ms.saturating_mul(DROP_TIMEOUTS) }
    }

    pub(crate) fn check_drop_deadline(
        &self,
        deadline: DropDeadline,
        what: &str,
        ids: &[&str],
    ) -> Result<(), PluginFault> {
        if deadline.start.elapsed() < Duration::from_millis(deadline.ms) {
            return Ok(());
        }
        let (ms, key) = (grouped(deadline.ms), self.limits.key("timeout_ms"));
        let message = format!(
            "finding the {what}s to drop took longer than {ms} ms, {DROP_TIMEOUTS} times {key}: many hit a limit; raise \
             that limit, or set `plugins.limits.on_limit` to \"fail\""
        );
        Err(self.in_batch(&self.fault(FaultKind::Limit, message), what, ids))
    }

    /// True if `fault` is a hit limit and `plugins.limits.on_limit` is `drop`, so that the item is dropped and the run continues.
    pub(crate) fn drops(&self, fault: &PluginFault) -> bool {
        fault.kind == FaultKind::Limit && self.limits.values.on_limit == OnLimit::Drop
    }

    /// Counts a dropped item and returns its rejection with [`LIMIT_CODE`]; a fault if more than `plugins.limits.max_dropped`
    /// were dropped.
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
        Ok(Rejection::new(LIMIT_CODE, fault.message.clone()))
    }
}

//! The host's state of one guest instance (the data of its store), and the host functions that guests call.

use crate::engine::{CORE_INSTANCES, MEMORIES, TABLE_ELEMENTS, TABLES};
use crate::log::{Level, MIN_LINE_BYTES, PluginLog};
use crate::text::{is_key, printable};
use querl_bundle::{HostInterface, Kind};
use querl_core::ports::HostFunctions;
use querl_core::records::{HostCallError, HostRequest, HostResponse};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use wasmtime::{Error, ResourceLimiter, Result, StoreContextMut, Trap};

/// Fuel for one host call, in addition to one per byte that is copied.
const HOST_CALL_FUEL: u64 = 100;

/// Maximum number of recorded keys. They are suggested for an unknown key.
const MAX_KEYS: usize = 1000;

/// Limit on handles to streams and clocks, which take host memory.
const MAX_HANDLES: usize = 4096;

/// The host refuses a call that the guest makes, which ends the guest's call; the text is the message for the user.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct HostRefusal(pub(crate) String);

/// Charges fuel for a host call that copies `n_bytes`, since fuel counts guest instructions only. A guest without enough fuel is
/// stopped at its next instruction.
pub(crate) fn charge(store: &mut StoreContextMut<'_, Guest>, n_bytes: usize) {
    let left = store.get_fuel().expect("fuel is on in this engine");
    let left = left.saturating_sub(HOST_CALL_FUEL).saturating_sub(n_bytes as u64);
    store.set_fuel(left).expect("fuel is on in this engine");
}

/// State of one guest instance on the host's side; the data of its wasmtime store.
pub(crate) struct Guest {
    plugin_log: Arc<PluginLog>,
    pub(crate) settings: Arc<BTreeMap<String, String>>,
    /// Keys of the settings that the guest has read.
    pub(crate) keys_read: BTreeSet<String>,
    pub(crate) memory: MemoryBudget,
    /// Host functions of the call; `None` if the port was opened without an implementation of them.
    pub(crate) host: Option<HostCalls>,
    /// True once the guest has called a host function more often than its limit allows.
    pub(crate) refused_host_call: bool,
    pub(crate) time: CallTime,
    /// Text that the guest wrote to stderr, at most `log_bytes`: the message of a panic.
    pub(crate) stderr: Vec<u8>,
    /// Lines that the call logged, up to `log_bytes`.
    pub(crate) logged: Vec<String>,
    /// State of the deterministic random number generator of WASI.
    pub(crate) random: u64,
    n_handles: usize,
    log_bytes_left: usize,
    log_bytes: usize,
    is_log_cut: bool,
}

impl Guest {
    pub(crate) fn new(
        plugin_log: Arc<PluginLog>,
        settings: Arc<BTreeMap<String, String>>,
        memory_bytes: usize,
        log_bytes: usize,
        time: CallTime,
    ) -> Self {
        Self {
            plugin_log,
            settings,
            keys_read: BTreeSet::new(),
            memory: MemoryBudget {
                limit_bytes: memory_bytes,
                used_bytes: 0,
                refused_bytes: None,
                refused_elements: None,
            },
            host: None,
            refused_host_call: false,
            time,
            stderr: Vec::new(),
            logged: Vec::new(),
            random: 0,
            n_handles: 0,
            log_bytes_left: log_bytes,
            log_bytes,
            is_log_cut: false,
        }
    }

    pub(crate) fn add_handle(&mut self) -> Result<()> {
        self.n_handles += 1;
        if self.n_handles <= MAX_HANDLES {
            return Ok(());
        }
        Err(HostRefusal(format!("holds more than {MAX_HANDLES} handles to streams and clocks")).into())
    }

    pub(crate) fn drop_handle(&mut self) {
        self.n_handles = self.n_handles.saturating_sub(1);
    }

    /// Adds to the captured stderr, up to `log_bytes`.
    pub(crate) fn write_stderr(&mut self, bytes: &[u8]) {
        let room = self.log_bytes.saturating_sub(self.stderr.len());
        self.stderr.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }
}

impl Guest {
    /// Implements `settings.get` of the contract.
    pub(crate) fn setting(&mut self, key: String) -> Option<String> {
        let value = self.settings.get(&key).cloned();
        let is_kept = self.keys_read.len() < MAX_KEYS && is_key(&key);
        if value.is_some() || is_kept {
            self.keys_read.insert(key);
        }
        value
    }

    /// Implements `log.log` of the contract.
    pub(crate) fn log(&mut self, level: Level, message: &str) {
        if self.is_log_cut {
            return;
        }
        let room = self.log_bytes_left;
        self.is_log_cut = room == 0 || message.len() > room;
        self.log_bytes_left = room.saturating_sub(message.len().max(MIN_LINE_BYTES));
        if room > 0 {
            let line = printable(message, room);
            self.plugin_log.write(level, &line);
            self.logged.push(format!("{}: {line}", format!("{level:?}").to_lowercase()));
        }
        if self.is_log_cut {
            let note = format!("logged more than {} bytes in one call; the rest is cut", self.log_bytes);
            self.plugin_log.write(Level::Warn, &note);
        }
    }
}

/// Implementation and limit of the host functions that one call of a plugin may use.
pub(crate) struct HostCalls {
    pub(crate) functions: Arc<dyn HostFunctions>,
    /// Name of the plugin, to which calls of host functions are attributed.
    pub(crate) plugin: Arc<str>,
    pub(crate) kind: Kind,
    /// Id of the item or group that is scored; empty for a batch of several items.
    pub(crate) item_id: String,
    /// Host function calls that are still permitted; `None` for contract 0.1, which has no limit.
    pub(crate) n_left: Option<u64>,
}

impl Guest {
    /// Calls a host function for the guest. Checks the time limit before and after, since epochs do not interrupt host code.
    pub(crate) fn call_host(
        &mut self,
        interface: HostInterface,
        request: &HostRequest,
    ) -> Result<std::result::Result<HostResponse, HostCallError>> {
        self.check_time()?;
        let Some(host) = self.host.as_mut().filter(|host| interface.is_for(host.kind)) else {
            return Ok(Err(HostCallError::NotConfigured));
        };
        if let Some(n_left) = &mut host.n_left {
            let Some(n_after) = n_left.checked_sub(1) else {
                self.refused_host_call = true;
                return Err(Error::msg("host call limit"));
            };
            *n_left = n_after;
        }
        let (start, cpu) = (Instant::now(), thread_cpu_time());
        let response = host.functions.call(&host.plugin, &host.item_id, request);
        let waits = matches!(interface, HostInterface::Judge | HostInterface::Similarity);
        self.time.add_host_call(start.elapsed(), thread_cpu_time().saturating_sub(cpu), waits);
        self.check_time()?;
        Ok(response)
    }

    /// Fails if the call has used its time; called at every epoch tick.
    pub(crate) fn check_time(&self) -> Result<()> {
        match self.time.is_over(self.time.start.elapsed()) {
            true => Err(Trap::Interrupt.into()),
            false => Ok(()),
        }
    }
}

/// Maximum wall time of a call, as a multiple of `timeout_ms`.
pub(crate) const WALL_TIMEOUTS: u32 = 10;

/// Time that a call has used: CPU time of its thread, plus wall time of host functions that do not wait for a service, limited by
/// `timeout_ms`. The wall time without that waiting is limited to [`WALL_TIMEOUTS`] times as much, so that a busy machine does
/// not stop a good plugin.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallTime {
    limit: Duration,
    start: Instant,
    /// CPU time of the thread when the call started.
    cpu_start: Duration,
    /// CPU time of host functions.
    host_cpu: Duration,
    /// Wall time of host functions that do not wait for a service.
    host_wall: Duration,
    /// Wall time of host functions that wait for a service.
    waited: Duration,
}

impl CallTime {
    /// The time of a call that starts on this thread.
    pub(crate) fn new(start: Instant, limit: Duration) -> Self {
        let cpu_start = thread_cpu_time();
        let zero = Duration::ZERO;
        Self { limit, start, cpu_start, host_cpu: zero, host_wall: zero, waited: zero }
    }

    fn add_host_call(&mut self, wall: Duration, cpu: Duration, waits: bool) {
        self.host_cpu += cpu;
        if waits {
            self.waited += wall;
        } else {
            self.host_wall += wall;
        }
    }

    /// The time that counts against `timeout_ms`.
    pub(crate) fn used(&self) -> Duration {
        thread_cpu_time().saturating_sub(self.cpu_start).saturating_sub(self.host_cpu) + self.host_wall
    }

    /// True if the time used exceeds `timeout_ms`.
    pub(crate) fn is_used_up(&self) -> bool {
        self.used() > self.limit
    }

    /// `elapsed`: wall time since the start.
    fn is_over(&self, elapsed: Duration) -> bool {
        self.is_used_up() || elapsed.saturating_sub(self.waited) > self.limit.saturating_mul(WALL_TIMEOUTS)
    }
}

/// CPU time of this thread.
#[cfg(unix)]
fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Wall time, on platforms without CPU time per thread.
#[cfg(not(unix))]
fn thread_cpu_time() -> Duration {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// Limiter of the linear memories and tables of one instance.
pub(crate) struct MemoryBudget {
    pub(crate) limit_bytes: usize,
    pub(crate) used_bytes: usize,
    /// Total bytes of memory that the guest requested when it hit the limit.
    pub(crate) refused_bytes: Option<usize>,
    /// Elements that the guest requested for one table when it hit the limit.
    pub(crate) refused_elements: Option<usize>,
}

impl ResourceLimiter for MemoryBudget {
    fn memory_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> Result<bool> {
        let total = self.used_bytes + (desired - current);
        if total > self.limit_bytes {
            self.refused_bytes = Some(total);
            return Err(Error::msg("memory limit"));
        }
        self.used_bytes = total;
        Ok(true)
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> Result<bool> {
        if desired > TABLE_ELEMENTS {
            self.refused_elements = Some(desired);
            return Err(Error::msg("table limit"));
        }
        Ok(true)
    }

    // The pool has these limits, too; without the pool, only these apply.
    fn instances(&self) -> usize {
        CORE_INSTANCES as usize
    }

    fn memories(&self) -> usize {
        MEMORIES as usize
    }

    fn tables(&self) -> usize {
        TABLES as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longer than any test takes.
    const LIMIT: Duration = Duration::from_secs(60);

    /// Symptom: on a busy machine a plugin was stopped after 5 s, in which it had run for a fraction of a second.
    #[test]
    fn time_without_the_cpu_counts_only_towards_the_limit_of_wall_time() {
        let mut time = CallTime::new(Instant::now(), LIMIT);
        assert!(!time.is_over(LIMIT * WALL_TIMEOUTS), "{time:?}");
        let elapsed = LIMIT * (WALL_TIMEOUTS + 1);
        assert!(time.is_over(elapsed) && !time.is_used_up(), "{time:?}");
        time.add_host_call(LIMIT, Duration::ZERO, true);
        assert!(!time.is_over(elapsed), "waiting for a service does not count: {time:?}");
        time.add_host_call(LIMIT * 2, Duration::ZERO, false);
        assert!(time.is_used_up(), "a host function that waits for none does: {time:?}");
    }

    #[test]
    fn a_loop_uses_up_its_time() {
        let (start, limit) = (Instant::now(), Duration::from_millis(20));
        let time = CallTime::new(start, limit);
        while !time.is_used_up() {
            assert!(start.elapsed() < Duration::from_secs(60), "{time:?}");
        }
        assert!(start.elapsed() >= limit);
    }
}

//! The wasmtime engine: which WebAssembly features are accepted, the pool of instances, the thread that increments the epoch, and
//! the slots that bound concurrent calls.

use crate::error::PluginError;
use querl_core::config::PluginLimits;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::Duration;
use wasmtime::{Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, WasmFeatures};

/// Period of the epoch: how often the time of a running guest is checked.
const TICK: Duration = Duration::from_millis(10);

/// Maximum core module instances of one component. A Rust component has 3 (and 1 memory, 2 tables); a Python component, linked
/// from shared libraries with a stub for each WASI call, has 38.
pub(crate) const CORE_INSTANCES: u32 = 64;
pub(crate) const MEMORIES: u32 = 2;
pub(crate) const TABLES: u32 = 16;
pub(crate) const TABLE_ELEMENTS: usize = 100_000;
pub(crate) const WASM_STACK_BYTES: usize = 1 << 20;

/// Bytes at the start of a memory, and of a table, that a slot of the pool keeps between instances and copies back from the initial image.
/// Pages beyond it are returned to the kernel, and the next instance has a page fault for each page that it touches. The memory of a Rust
/// component is smaller than this. That of an interpreter is 9 to 13 MiB with few touched pages, so that copying all of it would
/// take longer than the page faults. `pagemap_scan`, which copies only touched pages, is not used: wasmtime 48 checks for present pages, so
/// that a page in swap would keep the data of the previous instance.
const MEMORY_KEEP_RESIDENT: usize = 2 << 20;
const TABLE_KEEP_RESIDENT: usize = 64 << 10;

/// How address space for the linear memories of guests is reserved. It decides how code is compiled, and changes no result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MemoryReservation {
    /// Reserved when the host starts, for all slots: 4 GiB for each memory, and guard pages, so that accesses need no bounds
    /// checks.
    #[default]
    Pool,
    /// Reserved for each instance as it grows, for hosts whose limit on address space (`ulimit -v`) is too low for the pool.
    /// Calls are slower.
    OnDemand,
}

/// Set for a compiler whose host reserves memory on demand.
const ON_DEMAND_VARIABLE: &str = "QUERL_PLUGIN_MEMORY_ON_DEMAND";

impl MemoryReservation {
    /// Name and value of the environment variable that makes a compiler process compile for this kind of reservation; `None` for
    /// the pool.
    pub(crate) fn environment(self) -> Option<(&'static str, &'static str)> {
        (self == Self::OnDemand).then_some((ON_DEMAND_VARIABLE, "1"))
    }

    fn of_environment() -> Self {
        if std::env::var_os(ON_DEMAND_VARIABLE).is_some() { Self::OnDemand } else { Self::Pool }
    }
}

/// Starts an engine for these limits and `n_slots` concurrent calls, with a thread that increments its epoch until the engine is
/// dropped.
pub(crate) fn start(limits: &PluginLimits, n_slots: u32) -> Result<(Engine, MemoryReservation), PluginError> {
    let mut pooled = config(MemoryReservation::Pool);
    pooled.allocation_strategy(InstanceAllocationStrategy::Pooling(pool(limits, n_slots)));
    let (engine, reservation) = match Engine::new(&pooled) {
        Ok(engine) => (engine, MemoryReservation::Pool),
        Err(error) => {
            tracing::debug!("no address space for the pool of plugin instances: {error:#}");
            let on_demand = Engine::new(&config(MemoryReservation::OnDemand));
            (on_demand.map_err(|error| PluginError::Host(format!("{error:#}")))?, MemoryReservation::OnDemand)
        }
    };
    let weak = engine.weak();
    let ticker = move || {
        while let Some(engine) = weak.upgrade() {
            engine.increment_epoch();
            drop(engine);
            std::thread::sleep(TICK);
        }
    };
    let spawned = std::thread::Builder::new().name("querl-plugin-clock".into()).spawn(ticker);
    spawned.map_err(|error| PluginError::Host(format!("no thread for its clock: {error}")))?;
    Ok((engine, reservation))
}

/// An engine that only compiles, for the engine of [`start`]: it reserves no address space.
pub(crate) fn for_compiling() -> wasmtime::Result<Engine> {
    Engine::new(&config(MemoryReservation::of_environment()))
}

/// Accepted WebAssembly features: WebAssembly 2.0, further features that LLVM uses for Rust, and components. An explicit list, so
/// that a newer wasmtime does not accept more: no threads, tail calls, exceptions, garbage collection, 64-bit memories.
const ACCEPTED: WasmFeatures = WasmFeatures::WASM2
    .union(WasmFeatures::EXTENDED_CONST)
    .union(WasmFeatures::RELAXED_SIMD)
    .union(WasmFeatures::MULTI_MEMORY)
    .union(WasmFeatures::COMPONENT_MODEL)
    // wasmparser counts this feature as part of WebAssembly 1.0, wasmtime as part of garbage collection.
    .difference(WasmFeatures::GC_TYPES);

/// Features that differ between machines or runs are off, or deterministic.
fn config(reservation: MemoryReservation) -> Config {
    let mut config = Config::new();
    config
        .wasm_features(ACCEPTED.complement(), false)
        .wasm_features(ACCEPTED, true)
        .relaxed_simd_deterministic(true)
        .cranelift_nan_canonicalization(true)
        .consume_fuel(true)
        .epoch_interruption(true)
        .max_wasm_stack(WASM_STACK_BYTES);
    if reservation == MemoryReservation::OnDemand {
        config
            .memory_reservation(0)
            .memory_reservation_for_growth(1 << 20)
            .memory_guard_size(0)
            .guard_before_linear_memory(false);
    }
    config
}

fn pool(limits: &PluginLimits, n_slots: u32) -> PoolingAllocationConfig {
    let mut pool = PoolingAllocationConfig::default();
    pool.total_component_instances(n_slots)
        .total_core_instances(n_slots * CORE_INSTANCES)
        .max_core_instances_per_component(CORE_INSTANCES)
        .total_memories(n_slots * MEMORIES)
        .max_memories_per_component(MEMORIES)
        .max_memory_size(limits.memory_bytes.next_multiple_of(WASM_PAGE_BYTES))
        .total_tables(n_slots * TABLES)
        .max_tables_per_component(TABLES)
        .table_elements(TABLE_ELEMENTS)
        .linear_memory_keep_resident(MEMORY_KEEP_RESIDENT)
        .table_keep_resident(TABLE_KEEP_RESIDENT);
    pool
}

const WASM_PAGE_BYTES: usize = 64 << 10;

/// A fair semaphore: as many concurrent calls as the pool has slots; further calls wait in order of arrival.
#[derive(Debug)]
pub(crate) struct Slots {
    queue: Mutex<Queue>,
}

#[derive(Debug)]
struct Queue {
    n_free: u32,
    waiting: VecDeque<Arc<Waiter>>,
}

#[derive(Debug)]
struct Waiter {
    thread: Thread,
    has_slot: AtomicBool,
}

impl Slots {
    pub(crate) fn new(n_slots: u32) -> Self {
        Self { queue: Mutex::new(Queue { n_free: n_slots, waiting: VecDeque::new() }) }
    }

    /// Waits for a slot. Dropping the returned guard frees it.
    pub(crate) fn take(&self) -> Slot<'_> {
        let place = self.queue().join();
        if let Some(waiter) = place {
            while !waiter.has_slot.load(Ordering::Acquire) {
                std::thread::park();
            }
        }
        Slot(self)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    /// Takes a free slot, or joins the queue.
    fn join(&mut self) -> Option<Arc<Waiter>> {
        if self.n_free > 0 {
            self.n_free -= 1;
            return None;
        }
        let waiter = Arc::new(Waiter { thread: std::thread::current(), has_slot: AtomicBool::new(false) });
        self.waiting.push_back(waiter.clone());
        Some(waiter)
    }
}

/// One of the slots for concurrent calls; dropping it passes the slot to the next waiting call.
#[derive(Debug)]
pub(crate) struct Slot<'a>(&'a Slots);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue();
        // Handed to the first waiter: a thread that comes later cannot overtake.
        match queue.waiting.pop_front() {
            Some(next) => {
                next.has_slot.store(true, Ordering::Release);
                next.thread.unpark();
            }
            None => queue.n_free += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_threads_are_served_in_order() {
        let slots = Slots::new(1);
        let served = Mutex::new(Vec::new());
        let first = slots.take();
        std::thread::scope(|scope| {
            for n in 0..8 {
                scope.spawn({
                    let (slots, served) = (&slots, &served);
                    move || {
                        let _slot = slots.take();
                        served.lock().unwrap_or_else(PoisonError::into_inner).push(n);
                    }
                });
                while slots.queue().waiting.len() <= n {
                    std::thread::yield_now();
                }
            }
            drop(first);
        });
        assert_eq!(*served.lock().unwrap_or_else(PoisonError::into_inner), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(slots.queue().n_free, 1);
    }
}

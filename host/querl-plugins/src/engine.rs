//! The engine: what guests may be made of, the pool they run in, and the clock that stops them.

use crate::error::PluginError;
use querl_core::config::PluginLimits;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;
use wasmtime::{Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

/// How often the wall-clock limit is looked at.
pub(crate) const TICK: Duration = Duration::from_millis(10);

/// Calls that run at the same time; more wait for a slot.
pub(crate) const N_SLOTS: u32 = 16;

/// Of one component: core modules, memories, tables. A Rust component has 3, 1 and 2; Python's, linked from shared libraries with
/// a stub for each WASI call, 38 core modules.
const CORE_INSTANCES: u32 = 64;
const MEMORIES: u32 = 2;
const TABLES: u32 = 16;
pub(crate) const TABLE_ELEMENTS: usize = 100_000;
pub(crate) const WASM_STACK_BYTES: usize = 1 << 20;

/// An engine for these limits, with its clock running for as long as the engine lives.
pub(crate) fn start(limits: &PluginLimits) -> Result<Engine, PluginError> {
    let failed = |error: wasmtime::Error| PluginError::Host(format!("{error:#}"));
    let engine = Engine::new(&config(limits)).map_err(failed)?;
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
    Ok(engine)
}

/// Everything that differs between machines or runs is off; proposals that the contract does not need are off too.
fn config(limits: &PluginLimits) -> Config {
    let mut config = Config::new();
    config
        .wasm_component_model(true)
        .wasm_memory64(false)
        .relaxed_simd_deterministic(true)
        .cranelift_nan_canonicalization(true)
        .consume_fuel(true)
        .epoch_interruption(true)
        .max_wasm_stack(WASM_STACK_BYTES)
        .allocation_strategy(InstanceAllocationStrategy::Pooling(pool(limits)));
    config
}

fn pool(limits: &PluginLimits) -> PoolingAllocationConfig {
    let mut pool = PoolingAllocationConfig::default();
    pool.total_component_instances(N_SLOTS)
        .total_core_instances(N_SLOTS * CORE_INSTANCES)
        .max_core_instances_per_component(CORE_INSTANCES)
        .total_memories(N_SLOTS * MEMORIES)
        .max_memories_per_component(MEMORIES)
        .max_memory_size(limits.memory_bytes.next_multiple_of(WASM_PAGE_BYTES))
        .total_tables(N_SLOTS * TABLES)
        .max_tables_per_component(TABLES)
        .table_elements(TABLE_ELEMENTS);
    pool
}

const WASM_PAGE_BYTES: usize = 64 << 10;

/// Lets as many calls in as the pool has slots; the others wait.
#[derive(Debug)]
pub(crate) struct Slots {
    n_free: Mutex<u32>,
    freed: Condvar,
}

impl Slots {
    pub(crate) fn new(n_slots: u32) -> Self {
        Self { n_free: Mutex::new(n_slots), freed: Condvar::new() }
    }

    /// Waits for a slot; dropping what it returns frees it.
    pub(crate) fn take(&self) -> Slot<'_> {
        let n_free = self.n_free.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.freed.wait_while(n_free, |n_free| *n_free == 0);
        *waited.unwrap_or_else(PoisonError::into_inner) -= 1;
        Slot(self)
    }
}

/// A place in the pool.
#[derive(Debug)]
pub(crate) struct Slot<'a>(&'a Slots);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        *self.0.n_free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.freed.notify_one();
    }
}

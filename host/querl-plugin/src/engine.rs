//! The engine: what guests may be made of, the pool they run in, and the clock that stops them.

use crate::error::PluginError;
use querl_core::config::PluginLimits;
use std::time::Duration;
use wasmtime::{Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, WasmFeatures};

/// How often the wall-clock limit is looked at.
const TICK: Duration = Duration::from_millis(10);

/// Of one component: core modules, memories, tables. A Rust component has 3, 1 and 2; Python's, linked from shared libraries with
/// a stub for each WASI call, 38 core modules.
const CORE_INSTANCES: u32 = 64;
const MEMORIES: u32 = 2;
const TABLES: u32 = 16;
pub(crate) const TABLE_ELEMENTS: usize = 100_000;
pub(crate) const WASM_STACK_BYTES: usize = 1 << 20;

/// An engine for these limits and so many calls at a time, with its clock running for as long as the engine lives.
pub(crate) fn start(limits: &PluginLimits, n_slots: u32) -> Result<Engine, PluginError> {
    let failed = |error: wasmtime::Error| PluginError::Host(format!("{error:#}"));
    let mut config = config();
    config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool(limits, n_slots)));
    let engine = Engine::new(&config).map_err(failed)?;
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

/// An engine that compiles what the engine of [`start`] runs, and runs nothing itself: it needs no address space for a pool.
pub(crate) fn for_compiling() -> wasmtime::Result<Engine> {
    Engine::new(&config())
}

/// What guests may be made of: WebAssembly 2.0, what LLVM makes of Rust besides, and components. Named here one by one, so that
/// a wasmtime that knows more does not accept more: no threads, tail calls, exceptions, garbage collection, 64-bit memories.
const ACCEPTED: WasmFeatures = WasmFeatures::WASM2
    .union(WasmFeatures::EXTENDED_CONST)
    .union(WasmFeatures::RELAXED_SIMD)
    .union(WasmFeatures::MULTI_MEMORY)
    .union(WasmFeatures::COMPONENT_MODEL)
    // A part of WebAssembly 1.0 for wasmparser, and garbage collection for wasmtime.
    .difference(WasmFeatures::GC_TYPES);

/// Everything that differs between machines or runs is off, or made the same.
fn config() -> Config {
    let mut config = Config::new();
    config
        .wasm_features(ACCEPTED.complement(), false)
        .wasm_features(ACCEPTED, true)
        .relaxed_simd_deterministic(true)
        .cranelift_nan_canonicalization(true)
        .consume_fuel(true)
        .epoch_interruption(true)
        .max_wasm_stack(WASM_STACK_BYTES);
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
        .table_elements(TABLE_ELEMENTS);
    pool
}

const WASM_PAGE_BYTES: usize = 64 << 10;

//! Types that all crates of querl share: pipeline records, traits of external components (teacher, judge, retriever,
//! environment, plugins), the resolved configuration, the layout of a run directory, atomic file writes, the reader of models'
//! configurations, a scan of stored floats for NaN and Inf, the memory of the process, and sanitised text for terminals.
//!
//! This crate must not depend on tensors, WebAssembly, HTTP or an async runtime.

pub mod config;
pub mod dir_lock;
pub mod edits;
pub mod episodes;
pub mod floats;
pub mod fsx;
pub mod memory;
pub mod model_config;
pub mod ports;
pub mod records;
pub mod responses;
pub mod run_dir;
pub mod scoring;
pub mod serving;
pub mod text;

/// The same cases in each run of a property test.
#[cfg(test)]
pub(crate) fn properties(cases: u32) -> proptest::test_runner::Config {
    let rng_seed = proptest::test_runner::RngSeed::Fixed(7);
    proptest::test_runner::Config { cases, rng_seed, failure_persistence: None, ..Default::default() }
}

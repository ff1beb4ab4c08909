//! The pipeline as a library: runs, ledger, stages, environment, evaluation and report.
//!
//! In: a configuration. Out: a run directory. The caller shows messages and progress (`querl_core::ports::Reporter`);
//! nothing is printed here. This crate must not depend on a command line.

pub mod corpus;
pub mod device;
mod environment;
pub mod estimate;
mod evaluation;
pub mod exchange;
pub mod failure;
pub mod faults;
mod files;
pub mod host_functions;
pub mod interrupt;
pub mod ledger;
pub mod metrics_log;
mod pass_at_k;
pub mod pins;
pub mod plan;
mod plugin_activity;
pub mod plugins;
pub mod pooling;
pub mod release;
pub mod report;
pub mod retrieval;
pub mod run;
pub mod run_logs;
mod second_retrieval;
pub mod serving;
pub mod stages;
pub mod sweep;
mod tensorboard;
mod training;
mod untrained;

pub use environment::RewardEnvironment;
pub use training::memory::memory_of_config;
pub use training::{check_first_prompt, hub_name, preflight};

/// Configuration of property tests: the same cases in each run.
#[cfg(test)]
pub(crate) fn properties(cases: u32) -> proptest::test_runner::Config {
    let rng_seed = proptest::test_runner::RngSeed::Fixed(7);
    proptest::test_runner::Config { cases, rng_seed, failure_persistence: None, ..Default::default() }
}

//! The pipeline as a library: runs, ledger, stages, environment, evaluation and report.
//!
//! In: a configuration. Out: a run directory. The caller shows messages and progress (`querl_core::ports::Reporter`);
//! nothing is printed here. This crate must not depend on a command line.

pub mod device;
mod environment;
pub mod estimate;
mod evaluation;
pub mod failure;
pub mod faults;
pub mod interrupt;
pub mod ledger;
pub mod metrics_log;
pub mod pins;
pub mod plugins;
pub mod report;
pub mod retrieval;
pub mod run;
pub mod stages;
mod tensorboard;
mod training;

pub use training::memory::memory_of_config;

//! The pipeline as a library: runs, stages, environment, evaluation and report.
//!
//! In: a resolved configuration. Out: a run directory, and results as values. This crate must not depend on the command line: it reports
//! to the installed [`console::Console`] and prints nothing itself.

#![allow(unreachable_pub)]

pub mod console;
pub mod cuda;
pub mod device;
#[cfg_attr(test, allow(missing_docs))] // test fixtures are public to the other modules
pub mod environment;
pub mod estimate;
pub mod evaluation;
pub mod failure;
pub mod interrupt;
pub mod lengths;
pub mod metrics_log;
pub mod plugins;
pub mod report;
pub mod retrieval;
pub mod run;
pub mod stages;
pub mod style_model;
pub mod tensorboard;
pub mod training;

//! One file per command. A new one is a file here, a line in [`crate::cli::Command`] and an arm in `main`.

pub mod cache;
pub mod check;
pub mod compile_plugin;
pub mod data;
pub mod doctor;
pub mod model;
pub mod plugin;
pub mod rag;
pub mod report;
pub mod run;
pub mod serve;
pub mod style;
pub mod watch;

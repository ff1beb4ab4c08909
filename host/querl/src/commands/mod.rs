//! One module per command. A new command needs a module here, a variant of [`crate::cli::Command`] and an arm in `main`.

pub mod audit;
pub mod cache;
pub mod config;
pub mod data;
pub mod deploy;
pub mod doctor;
pub mod export;
pub mod import;
pub mod model;
pub mod plan;
pub mod plugin;
pub mod rag;
pub mod release;
pub mod run;
pub mod serve;
pub mod style;
pub mod sweep;
pub mod track;
pub mod watch;

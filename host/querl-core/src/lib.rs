//! What the crates of querl say to each other: records in the order of the pipeline, the ports (traits) through which the
//! stages reach the world, the resolved configuration, the layout of a run directory, files that appear whole or not at
//! all, and text of others made harmless to a terminal.
//!
//! In: nothing. Out: plain values. This crate refuses to know tensors, WebAssembly, HTTP and any async runtime.

pub mod config;
pub mod episodes;
pub mod fsx;
pub mod ports;
pub mod records;
pub mod run_dir;
pub mod text;

//! Types that all crates of querl share: pipeline records, traits of external components (teacher, judge, retriever,
//! environment, plugins), the resolved configuration, the layout of a run directory, atomic file writes, a scan of stored
//! floats for NaN and Inf, and sanitised text for terminals.
//!
//! This crate must not depend on tensors, WebAssembly, HTTP or an async runtime.

pub mod config;
pub mod dir_lock;
pub mod episodes;
pub mod floats;
pub mod fsx;
pub mod ports;
pub mod records;
pub mod run_dir;
pub mod text;

//! Graphics cards: NVIDIA's driver, and the library that does jobs on what it drives. Both are opened here and while the program
//! runs: a program linked with either would not start on a machine without it.

mod driver;
mod library;
mod nccl;

pub use driver::{Card, Driver, Probe, version_name};
pub use library::{Found, open};
pub use nccl::nccl;

/// Why there is no card to use, as a sentence without its first capital and full stop.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Missing(pub String);

/// Set in tests: jobs go through the library although there is no driver, and its processor does them.
pub const ON_CPU: &str = "QUERL_CUDA_ON_CPU";

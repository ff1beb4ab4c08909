//! Moving a run to verl, TRL, ms-swift or OpenRLHF, and its adapter back.
//!
//! In: a run with finished data stages. Out: a folder with the dataset, the plugins, the SFT adapter, the engine's settings equivalent to
//! `[rl]` and a training script. [`import_adapter`] makes the adapter that the engine trained the `rl` stage of the run.

mod folder;
mod grpo;
mod import;
mod mapping;
mod openrlhf;
mod rows;
mod source;
mod swift;
mod trl;
mod verl;

pub use folder::Exported;
pub(crate) use folder::shell_word;
pub use import::{CheckpointFormat, Imported, import_adapter};
pub use openrlhf::export_openrlhf;
pub use source::ExportedRun;
pub use swift::export_swift;
pub use trl::export_trl;
pub(crate) use verl::indivisible;
pub use verl::{Cluster, export_verl};

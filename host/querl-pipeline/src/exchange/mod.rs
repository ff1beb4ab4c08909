//! Moving a run to verl or TRL, and its adapter back.
//!
//! In: a run with finished data stages. Out: a folder with the dataset, the plugins, the SFT adapter, the settings that mean the same as `[rl]`
//! and a script that trains. [`import_adapter`] makes what was trained there the `rl` stage of the run.

mod folder;
mod import;
mod mapping;
mod rows;
mod source;
mod trl;
mod verl;

pub use folder::Exported;
pub use import::{CheckpointFormat, Imported, import_adapter};
pub use source::ExportedRun;
pub use trl::export_trl;
pub use verl::{Cluster, export_verl};

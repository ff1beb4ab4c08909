//! Checkpoints of a stage: `best` and `last`, each a folder that PEFT (or, after full fine-tuning, transformers) reads.

use crate::{Policy, TrainError};
use candle_core::DType;
use querl_model::{LoraAdapter, Mesh};
use std::path::Path;

/// Folder of the checkpoint with the best validation result.
pub const BEST: &str = "best";

/// Folder of the newest checkpoint.
pub const LAST: &str = "last";

/// Folder of what a stopped training goes on from.
pub const STATE: &str = "state";

/// How an adapter names its base: by folder name, since a path would only be right on this machine.
pub(crate) fn base_name(base: &Path) -> String {
    base.file_name().unwrap_or(base.as_os_str()).to_string_lossy().into_owned()
}

/// Saves what a policy has learned: its adapter, or all weights with the base's other files. The ranks of a copy of the model come
/// here together, and the first of all writes.
///
/// # Errors
/// A file cannot be written, or a rank has failed.
pub(crate) fn save_policy(mesh: &Mesh, policy: Policy<'_>, directory: &Path, base: &Path) -> Result<(), TrainError> {
    let adapter = policy.adapter.map(LoraAdapter::whole).transpose()?;
    if !mesh.all.is_first() {
        return Ok(());
    }
    if let Some(adapter) = adapter {
        return Ok(adapter.save(directory, &base_name(base))?);
    }
    querl_model::copy_model_files(base, directory, DType::F32)?;
    Ok(policy.decoder.save(directory, DType::F32)?)
}

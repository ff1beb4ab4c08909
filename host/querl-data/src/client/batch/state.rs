//! The state file of a stage's batches, next to its output.

use crate::error::DataError;
use crate::text::hash_of;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::Path;

/// All batches of a stage.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct BatchState {
    /// Digest of endpoint and request parameters; empty in a file of an earlier version.
    #[serde(default)]
    pub(super) identity: String,
    pub(super) batches: Vec<Batch>,
}

/// One uploaded file and its batch. What an earlier version did not note has a value that says so: a batch under way is
/// paid, whichever version submitted it over.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Batch {
    pub(super) file_id: String,
    #[serde(default)]
    pub(super) uploaded_at: u64,
    #[serde(default = "once")]
    pub(super) n_unknown: u32,
    #[serde(default)]
    pub(super) n_lost: u32,
    /// `None` until the service is known to have created the batch.
    #[serde(default)]
    pub(super) batch_id: Option<String>,
    #[serde(default)]
    pub(super) most: f64,
    #[serde(default)]
    pub(super) prompt_tokens: u64,
    #[serde(default)]
    pub(super) is_charged: bool,
    /// Rows that were submitted; `ids` loses those without a response. 0 where unknown.
    #[serde(default)]
    pub(super) n_rows: usize,
    pub(super) ids: Vec<String>,
}

fn once() -> u32 {
    1
}

impl BatchState {
    /// The state at `path`; `None` where there is no file.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, DataError> {
        match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| {
                let problem = format!("not a state file of batches: {error}; remove the file to submit all rows again");
                DataError::file(path, problem)
            }),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(DataError::file(path, format!("cannot be read: {error}"))),
        }
    }

    /// Without batches there is no file.
    pub(super) fn write(&self, path: &Path) -> Result<(), DataError> {
        if self.batches.is_empty() {
            return match std::fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(DataError::write(path, error)),
                _ => Ok(()),
            };
        }
        let bytes = serde_json::to_vec(self).map_err(|error| DataError::write(path, error.into()))?;
        querl_core::fsx::write_atomic(path, &bytes).map_err(|error| DataError::write(path, error))
    }

    /// The batch index of each prompt, by [`key`]; the later of two.
    pub(super) fn locations(&self) -> HashMap<u64, usize> {
        let batches = self.batches.iter().enumerate();
        batches.flat_map(|(index, batch)| batch.ids.iter().map(move |id| (key(id), index))).collect()
    }

    pub(super) fn describe(&self) -> String {
        let name = |batch: &Batch| batch.batch_id.clone().unwrap_or_else(|| format!("over file {}", batch.file_id));
        let names: Vec<String> = self.batches.iter().take(3).map(name).collect();
        let more = self.batches.len().saturating_sub(names.len());
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("batch {}{more}", names.join(", "))
    }
}

pub(super) fn key(id: &str) -> u64 {
    hash_of(id)
}

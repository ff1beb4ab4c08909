//! What was handed over, noted beside the stage's output.

use crate::error::DataError;
use crate::text::hash_of;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::Path;

/// All batches of a stage.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Note {
    pub(super) batches: Vec<Batch>,
}

/// One file of questions and what is made of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Batch {
    pub(super) file_id: String,
    /// `None` until the service has taken it.
    pub(super) batch_id: Option<String>,
    /// The most that it may cost.
    #[serde(default)]
    pub(super) most: f64,
    pub(super) ids: Vec<String>,
}

impl Note {
    /// The note at `path`; empty where there is none.
    ///
    /// # Errors
    /// The file is there and is no note.
    pub(super) fn read(path: &Path) -> Result<Self, DataError> {
        match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
                let problem = format!("not a note of batches: {error}; remove the file to hand all rows over anew");
                DataError::file(path, problem)
            }),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(DataError::file(path, format!("cannot be read: {error}"))),
        }
    }

    /// # Errors
    /// The file cannot be written.
    pub(super) fn write(&self, path: &Path) -> Result<(), DataError> {
        let bytes = serde_json::to_vec_pretty(self).map_err(|error| DataError::write(path, error.into()))?;
        querl_core::fsx::write_atomic(path, &bytes).map_err(|error| DataError::write(path, error))
    }

    /// The batch of each question, by [`key`]. Of one in two of them the later counts.
    pub(super) fn places(&self) -> HashMap<u64, usize> {
        let batches = self.batches.iter().enumerate();
        batches.flat_map(|(index, batch)| batch.ids.iter().map(move |id| (key(id), index))).collect()
    }
}

/// Stands for a question's id.
pub(super) fn key(id: &str) -> u64 {
    hash_of(id)
}

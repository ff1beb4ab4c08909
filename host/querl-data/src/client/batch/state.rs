//! What was submitted, noted beside the stage's output.

use crate::error::DataError;
use crate::text::hash_of;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::Path;

/// All batches of a stage.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct BatchState {
    /// Stands for whom the batches are with and what they are asked beside the prompts; empty in a note of an earlier version.
    #[serde(default)]
    pub(super) identity: String,
    pub(super) batches: Vec<Batch>,
}

/// One file of questions and what is made of it. What an earlier version did not note has a value that says so: a batch under way is
/// paid, whichever version submitted it over.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Batch {
    pub(super) file_id: String,
    /// When the service had the file, in seconds since 1970: no batch over it is older. 0 where nobody knows.
    #[serde(default)]
    pub(super) uploaded_at: u64,
    /// How often the service was asked to work on it without our having learnt what came of that. An earlier version noted
    /// only what it had learnt.
    #[serde(default = "once")]
    pub(super) n_unknown: u32,
    /// How many of these stand on the account as lost.
    #[serde(default)]
    pub(super) n_lost: u32,
    /// `None` until it is known that the service has taken it.
    #[serde(default)]
    pub(super) batch_id: Option<String>,
    /// The most that it may cost.
    #[serde(default)]
    pub(super) most: f64,
    /// Of its prompts, estimated.
    #[serde(default)]
    pub(super) prompt_tokens: u64,
    /// Whether its answers stand on the account.
    #[serde(default)]
    pub(super) is_charged: bool,
    /// Rows that were submitted, while `ids` loses those that have no answer. 0 where nobody knows.
    #[serde(default)]
    pub(super) n_rows: usize,
    pub(super) ids: Vec<String>,
}

fn once() -> u32 {
    1
}

impl BatchState {
    /// The note at `path`; `None` where there is none.
    ///
    /// # Errors
    /// The file is there and is no note.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, DataError> {
        match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| {
                let problem = format!("not a note of batches: {error}; remove the file to hand all rows over anew");
                DataError::file(path, problem)
            }),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(DataError::file(path, format!("cannot be read: {error}"))),
        }
    }

    /// Without batches there is no file.
    ///
    /// # Errors
    /// The file cannot be written.
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

    /// The batch of each question, by [`key`]. Of one in two of them the later counts.
    pub(super) fn locations(&self) -> HashMap<u64, usize> {
        let batches = self.batches.iter().enumerate();
        batches.flat_map(|(index, batch)| batch.ids.iter().map(move |id| (key(id), index))).collect()
    }

    /// The batches in words, for a sentence that names them.
    pub(super) fn describe(&self) -> String {
        let name = |batch: &Batch| batch.batch_id.clone().unwrap_or_else(|| format!("over file {}", batch.file_id));
        let names: Vec<String> = self.batches.iter().take(3).map(name).collect();
        let more = self.batches.len().saturating_sub(names.len());
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("batch {}{more}", names.join(", "))
    }
}

/// Stands for a question's id.
pub(super) fn key(id: &str) -> u64 {
    hash_of(id)
}

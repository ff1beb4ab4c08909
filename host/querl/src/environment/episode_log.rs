//! `episodes.jsonl`: every scored episode, appended batch by batch.

use querl_core::ports::EnvironmentError;
use querl_core::records::EpisodeRecord;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The file, opened to append.
#[derive(Debug)]
pub struct EpisodeLog {
    path: PathBuf,
    file: Mutex<File>,
}

impl EpisodeLog {
    /// Opens the log at `path`, which may have records of earlier steps.
    ///
    /// # Errors
    /// As the file system says.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { path: path.into(), file: Mutex::new(file) })
    }

    /// Appends one batch, in a single write.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(&self, records: &[EpisodeRecord]) -> Result<(), EnvironmentError> {
        let failed = |error: &dyn std::fmt::Display| {
            EnvironmentError::Record(format!("{}: cannot be written: {error}", self.path.display()))
        };
        let mut lines = Vec::new();
        for record in records {
            serde_json::to_writer(&mut lines, record).map_err(|error| failed(&error))?;
            lines.push(b'\n');
        }
        let mut file = self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        file.write_all(&lines).map_err(|error| failed(&error))
    }
}

//! `episodes.jsonl`: every scored episode, appended batch by batch.

use querl_core::ports::EnvironmentError;
use querl_core::records::EpisodeRecord;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

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
    pub fn open(path: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { path: path.into(), file: Mutex::new(file) })
    }

    /// Appends one batch, in a single write.
    ///
    /// # Errors
    /// The file cannot be written; it then ends where it ended before, as far as the file system lets it.
    pub fn append(&self, records: &[EpisodeRecord]) -> Result<(), EnvironmentError> {
        let mut lines = Vec::new();
        for record in records {
            serde_json::to_writer(&mut lines, record).map_err(|error| self.failed(&error))?;
            lines.push(b'\n');
        }
        let mut file = self.file();
        let end = file.metadata().map_err(|error| self.failed(&error))?.len();
        file.write_all(&lines).map_err(|error| {
            // What was written of it is half a batch; where it cannot be taken back, readers pass over the torn line.
            let _ = file.set_len(end);
            self.failed(&error)
        })
    }

    /// Bytes so far, all of them on disk.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn mark(&self) -> Result<u64, EnvironmentError> {
        let file = self.file();
        let length = file.sync_all().and_then(|()| Ok(file.metadata()?.len()));
        length.map_err(|error| self.failed(&error))
    }

    /// Cuts the file to the bytes that it had when [`mark`](Self::mark) returned `mark`.
    ///
    /// # Errors
    /// It has fewer, or cannot be written.
    pub fn rewind(&self, mark: u64) -> Result<(), EnvironmentError> {
        let file = self.file();
        let length = file.metadata().map_err(|error| self.failed(&error))?.len();
        if length < mark {
            return Err(EnvironmentError::Record(format!(
                "{}: has {length} bytes, and had {mark} when the checkpoint was written; run the stage anew with `--from rl`",
                self.path.display()
            )));
        }
        file.set_len(mark).and_then(|()| file.sync_all()).map_err(|error| self.failed(&error))
    }

    fn file(&self) -> MutexGuard<'_, File> {
        self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn failed(&self, error: &dyn std::fmt::Display) -> EnvironmentError {
        EnvironmentError::Record(format!("{}: cannot be written: {error}", self.path.display()))
    }
}

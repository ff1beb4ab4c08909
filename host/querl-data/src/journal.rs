//! What a stage has done so far, kept beside its output, so that a kill loses at most the rows under way.

use crate::error::DataError;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Finished rows of a stage whose output is not written yet: one JSON record a line, in the order in which they were finished.
#[derive(Debug)]
pub struct Journal {
    output: PathBuf,
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Where the journal of `output` is: `rewrites.jsonl` has `rewrites.journal.jsonl` beside it.
    pub fn path_beside(output: &Path) -> PathBuf {
        output.with_extension("journal.jsonl")
    }

    /// Opens the journal beside `output`, with the records of earlier runs: those
    /// of the output, then those of the journal. A last line that a kill cut short is dropped.
    ///
    /// # Errors
    /// A file cannot be read or written, or holds a line that is not a record.
    pub fn open<T: DeserializeOwned>(output: &Path) -> Result<(Self, Vec<T>), DataError> {
        let mut records: Vec<T> = if output.exists() { querl_core::fsx::read_jsonl(output)? } else { Vec::new() };
        let path = Self::path_beside(output);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|error| DataError::write(&path, error))?;
        }
        if path.exists() {
            drop_torn_line(&path)?;
            records.extend(querl_core::fsx::read_jsonl::<T>(&path)?);
        }
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(|error| DataError::write(&path, error))?;
        Ok((Self { output: output.to_owned(), path, file }, records))
    }

    /// Adds one finished record.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append<T: Serialize>(&mut self, record: &T) -> Result<(), DataError> {
        let written = serde_json::to_vec(record).map_err(std::io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line)
        });
        written.map_err(|error| DataError::write(&self.path, error))
    }

    /// Writes the stage's output whole, then takes the journal away.
    ///
    /// # Errors
    /// A file cannot be written; the journal is then still there.
    pub fn finish<T: Serialize>(self, records: &[T]) -> Result<(), DataError> {
        querl_core::fsx::write_jsonl(&self.output, records).map_err(|error| DataError::write(&self.output, error))?;
        std::fs::remove_file(&self.path).map_err(|error| DataError::write(&self.path, error))
    }
}

fn drop_torn_line(path: &Path) -> Result<(), DataError> {
    let cut = || {
        let bytes = std::fs::read(path)?;
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        if whole < bytes.len() {
            OpenOptions::new().write(true).open(path)?.set_len(whole as u64)?;
        }
        Ok(())
    };
    cut().map_err(|error| DataError::write(path, error))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn torn_last_line_is_dropped_and_the_rest_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("data/rows.jsonl");
        let (mut journal, none) = Journal::open::<u32>(&output).unwrap();
        assert!(none.is_empty());
        journal.append(&11).unwrap();
        journal.append(&12).unwrap();
        drop(journal);
        let path = output.with_extension("journal.jsonl");
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"1").unwrap();
        let (mut journal, kept) = Journal::open::<u32>(&output).unwrap();
        assert_eq!(kept, [11, 12]);
        journal.append(&13).unwrap();
        journal.finish(&[11, 12, 13]).unwrap();
        assert!(!path.exists());
        let (_, kept) = Journal::open::<u32>(&output).unwrap();
        assert_eq!(kept, [11, 12, 13]);
    }
}

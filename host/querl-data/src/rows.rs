//! Rows that are read from where they are as often as they are needed, so that nothing holds them all.

use crate::error::DataError;
use querl_core::fsx::{NumberedLine, ReadError, open_jsonl};
use serde::de::DeserializeOwned;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

/// One reading of [`Rows`], from the first to the last.
pub type RowIter<'a, T> = Box<dyn Iterator<Item = Result<T, DataError>> + 'a>;

/// Rows with an order, which can be read more than once and are the same each time.
pub trait Rows<T> {
    /// Reads from the first row on.
    ///
    /// # Errors
    /// What holds them cannot be opened, or was changed since the first reading.
    fn read(&self) -> Result<RowIter<'_, T>, DataError>;
}

impl<T: Clone> Rows<T> for Vec<T> {
    fn read(&self) -> Result<RowIter<'_, T>, DataError> {
        Ok(Box::new(self.iter().cloned().map(Ok)))
    }
}

/// The records that a stage left in a file of JSON lines.
#[derive(Debug)]
pub struct RecordFile<T> {
    path: PathBuf,
    of: PhantomData<fn() -> T>,
}

impl<T> RecordFile<T> {
    /// Those in `path`.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), of: PhantomData }
    }
}

impl<T: DeserializeOwned + 'static> Rows<T> for RecordFile<T> {
    fn read(&self) -> Result<RowIter<'_, T>, DataError> {
        let lines = open_jsonl::<T>(&self.path)?;
        Ok(Box::new(lines.map(|line| line.map(|NumberedLine { value, .. }| value).map_err(of_record))))
    }
}

/// A record that a stage wrote is not for the user to mend.
fn of_record(error: ReadError) -> DataError {
    match error {
        ReadError::Line { path, line, problem } => DataError::File {
            path: format!("{path}:{line}"),
            problem: format!("not a valid record: {problem}; remove the file, and `querl run` makes it again"),
        },
        error @ ReadError::Io { .. } => DataError::Lines(error),
    }
}

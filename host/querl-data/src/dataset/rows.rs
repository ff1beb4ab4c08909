//! Rows that are read from their file as often as needed, so that memory never holds all of them.

use crate::error::DataError;
use querl_core::fsx::{AtomicFile, NumberedLine, ReadError, open_jsonl};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// One reading of [`Rows`], from the first to the last.
pub type RowIter<'a, T> = Box<dyn Iterator<Item = Result<T, DataError>> + 'a>;

/// Rows with an order, which can be read more than once and are the same each time.
pub trait Rows<T> {
    /// Reads from the first row.
    ///
    /// # Errors
    /// The source cannot be opened, or has changed since the first reading.
    fn read(&self) -> Result<RowIter<'_, T>, DataError>;

    /// The file that holds the rows, if there is one.
    fn path(&self) -> Option<&Path> {
        None
    }
}

/// A file that is read several times and must not change in between.
#[derive(Debug)]
pub(crate) struct UnchangedFile {
    pub(crate) path: PathBuf,
    version: Option<(u64, SystemTime)>,
}

impl UnchangedFile {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), version: version(path) }
    }

    pub(crate) fn check(&self) -> Result<(), DataError> {
        if version(&self.path) == self.version { Ok(()) } else { Err(changed_meanwhile(Some(&self.path))) }
    }

    /// The rows, and behind the last of them an error if the file was changed while they were read.
    pub(crate) fn guard<'a, T: 'a>(&'a self, rows: impl Iterator<Item = Result<T, DataError>> + 'a) -> RowIter<'a, T> {
        let behind = std::iter::once_with(|| self.check().err().map(Err));
        Box::new(rows.chain(behind.flatten()))
    }
}

fn version(path: &Path) -> Option<(u64, SystemTime)> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.len(), meta.modified().ok()?))
}

pub(crate) fn changed_meanwhile(path: Option<&Path>) -> DataError {
    let problem = "was changed while it was read; run the same command again";
    match path {
        Some(path) => DataError::file(path, problem),
        None => DataError::setting("what the stage reads", problem),
    }
}

impl<T: Clone> Rows<T> for Vec<T> {
    fn read(&self) -> Result<RowIter<'_, T>, DataError> {
        Ok(Box::new(self.iter().cloned().map(Ok)))
    }
}

/// The records that a stage left in a file of JSON lines.
#[derive(Debug)]
pub struct RecordFile<T> {
    file: UnchangedFile,
    of: PhantomData<fn() -> T>,
}

impl<T> RecordFile<T> {
    /// Those in `path`.
    pub fn new(path: &Path) -> Self {
        Self { file: UnchangedFile::new(path), of: PhantomData }
    }
}

impl<T: DeserializeOwned + 'static> Rows<T> for RecordFile<T> {
    fn read(&self) -> Result<RowIter<'_, T>, DataError> {
        self.file.check()?;
        let lines = open_jsonl::<T>(&self.file.path)?;
        Ok(self.file.guard(lines.map(|line| line.map(|NumberedLine { value, .. }| value).map_err(of_record))))
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.file.path)
    }
}

/// A file of records while a stage writes it.
pub struct RecordWriter {
    path: PathBuf,
    file: AtomicFile,
    n: u64,
}

impl RecordWriter {
    /// Begins what will be `path`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path) -> Result<Self, DataError> {
        let file = AtomicFile::create(path).map_err(|error| DataError::write(path, error))?;
        Ok(Self { path: path.to_owned(), file, n: 0 })
    }

    /// Adds a record.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn add(&mut self, record: &impl Serialize) -> Result<(), DataError> {
        self.n += 1;
        self.file.write_line(record).map_err(|error| DataError::write(&self.path, error))
    }

    /// Records so far.
    pub fn n(&self) -> u64 {
        self.n
    }

    /// Puts the file in its place.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn commit(self) -> Result<(), DataError> {
        self.file.commit().map_err(|error| DataError::write(&self.path, error))
    }
}

fn of_record(error: ReadError) -> DataError {
    match error {
        ReadError::Line { path, line, problem } => DataError::File {
            path: format!("{path}:{line}"),
            problem: format!("not a valid record: {problem}; remove the file, and `querl run` makes it again"),
        },
        error @ ReadError::Io { .. } => DataError::Lines(error),
    }
}

//! Rows and records in files. They are read whenever they are needed and not held in memory. Also the journal of a stage.

use crate::error::DataError;
use querl_core::fsx::{AtomicFile, NumberedLine, ReadError, UTF8_MARK, open_jsonl};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Iterator over the rows of [`Rows`].
pub type RowIter<'a, T> = Box<dyn Iterator<Item = Result<T, DataError>> + 'a>;

/// A sequence of rows that can be read several times and is the same each time.
pub trait Rows<T> {
    /// Reads all rows from the first.
    ///
    /// # Errors
    /// The source cannot be opened, or has changed since the first reading.
    fn read(&self) -> Result<RowIter<'_, T>, DataError>;

    /// The file that holds the rows, if there is one.
    fn path(&self) -> Option<&Path> {
        None
    }
}

/// A file with a check that it has not changed between readings.
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

    /// The rows of this file, followed by an error if the file changed while they were read.
    pub(crate) fn guard<'a, T: 'a>(&'a self, rows: impl Iterator<Item = Result<T, DataError>> + 'a) -> RowIter<'a, T> {
        let last = std::iter::once_with(|| self.check().err().map(Err));
        Box::new(rows.chain(last.flatten()))
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

/// The output of a stage: a JSON lines file of records of type `T`.
#[derive(Debug)]
pub struct RecordFile<T> {
    file: UnchangedFile,
    of: PhantomData<fn() -> T>,
}

impl<T> RecordFile<T> {
    /// The record file at `path`, which is opened when it is read.
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

/// Writes the output of a stage to a temporary file that replaces the output on commit.
pub struct RecordWriter {
    path: PathBuf,
    file: AtomicFile,
    n: u64,
}

impl RecordWriter {
    /// Opens a writer for `path`; the file appears there on [`commit`](Self::commit).
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path) -> Result<Self, DataError> {
        let file = AtomicFile::create(path).map_err(|error| DataError::write(path, error))?;
        Ok(Self { path: path.to_owned(), file, n: 0 })
    }

    /// Appends a record.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn add(&mut self, record: &impl Serialize) -> Result<(), DataError> {
        self.n += 1;
        self.file.write_line(record).map_err(|error| DataError::write(&self.path, error))
    }

    /// Number of records written so far.
    pub fn n(&self) -> u64 {
        self.n
    }

    /// Syncs the file and renames it to its path.
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

/// A record that a later run of the same stage can reuse.
pub trait JournalRecord: Serialize + DeserializeOwned + 'static {
    /// Hash of the request that led to the record; `None` for a failed record, which is tried again.
    fn key(&self) -> Option<u64>;
}

/// Byte offset of a record in the stage's output or journal, or a marker that there is no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordLocation(u64);

impl RecordLocation {
    pub(crate) const PENDING: Self = Self(u64::MAX);
    pub(crate) const SKIPPED: Self = Self(u64::MAX - 1);
    /// Marks offsets in the journal.
    const IN_JOURNAL: u64 = 1 << 63;

    pub(crate) fn is_recorded(self) -> bool {
        self != Self::PENDING && self != Self::SKIPPED
    }
}

/// Finished rows of a stage whose output is not written yet: one JSON record per line, in order of completion. A kill loses only the rows in
/// flight. Records stay in their files: memory holds an offset per row, and a table of earlier records by key.
#[derive(Debug)]
pub struct Journal<T> {
    output: PathBuf,
    path: PathBuf,
    file: File,
    end: u64,
    earlier: HashMap<u64, RecordLocation>,
    of: PhantomData<fn() -> T>,
}

impl Journal<()> {
    /// Path of the journal of `output`: `rewrites.journal.jsonl` for `rewrites.jsonl`.
    pub fn path_for(output: &Path) -> PathBuf {
        output.with_extension("journal.jsonl")
    }
}

impl<T: JournalRecord> Journal<T> {
    /// Opens the journal of `output` and indexes the records of earlier runs: those of the output, then those of the journal.
    /// Removes a last line that a kill truncated.
    ///
    /// # Errors
    /// A file cannot be read or written, or holds a line that is not a record.
    pub fn open(output: &Path) -> Result<Self, DataError> {
        let path = Journal::path_for(output);
        let mut earlier = HashMap::new();
        if output.exists() {
            index_records::<T>(output, 0, &mut earlier)?;
        }
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|error| DataError::write(&path, error))?;
        }
        if path.exists() {
            drop_torn_line(&path).map_err(|error| DataError::write(&path, error))?;
            index_records::<T>(&path, RecordLocation::IN_JOURNAL, &mut earlier)?;
        }
        let opened = OpenOptions::new().create(true).append(true).open(&path);
        let opened = opened.and_then(|file| Ok((file.metadata()?.len(), file)));
        let (end, file) = opened.map_err(|error| DataError::write(&path, error))?;
        Ok(Self { output: output.to_owned(), path, file, end, earlier, of: PhantomData })
    }

    pub(crate) fn earlier(&self, key: u64) -> Option<RecordLocation> {
        self.earlier.get(&key).copied()
    }

    /// Number of records from earlier runs.
    pub fn n_earlier(&self) -> usize {
        self.earlier.len()
    }

    pub(crate) fn append(&mut self, record: &T) -> Result<RecordLocation, DataError> {
        let written = serde_json::to_vec(record).map_err(io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line)?;
            Ok(line.len() as u64)
        });
        let location = RecordLocation(RecordLocation::IN_JOURNAL | self.end);
        self.end += written.map_err(|error| DataError::write(&self.path, error))?;
        Ok(location)
    }

    pub(crate) fn output(&self) -> &Path {
        &self.output
    }

    pub(crate) fn records(&self) -> Result<RecordReader<T>, DataError> {
        let output = if self.output.exists() { Some(IndexedLines::open(&self.output)?) } else { None };
        Ok(RecordReader { output, journal: IndexedLines::open(&self.path)?, of: PhantomData })
    }

    pub(crate) fn remove(self) -> Result<(), DataError> {
        std::fs::remove_file(&self.path).map_err(|error| DataError::write(&self.path, error))
    }
}

fn index_records<T: JournalRecord>(
    path: &Path,
    bit: u64,
    earlier: &mut HashMap<u64, RecordLocation>,
) -> Result<(), DataError> {
    for line in open_jsonl::<T>(path)? {
        let NumberedLine { offset, value, .. } = line?;
        if let Some(key) = value.key() {
            earlier.insert(key, RecordLocation(offset | bit));
        }
    }
    Ok(())
}

fn drop_torn_line(path: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().read(true).write(true).open(path)?;
    let n_bytes = file.metadata()?.len();
    let (mut end, mut block) = (n_bytes, vec![0; 1 << 16]);
    let whole = loop {
        let start = end.saturating_sub(block.len() as u64);
        let block = &mut block[..(end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(block)?;
        match block.iter().rposition(|byte| *byte == b'\n') {
            Some(at) => break start + at as u64 + 1,
            None if start == 0 => break 0,
            None => end = start,
        }
    };
    if whole < n_bytes { file.set_len(whole) } else { Ok(()) }
}

/// Reads records of a stage's output and journal by location.
pub(crate) struct RecordReader<T> {
    output: Option<IndexedLines>,
    journal: IndexedLines,
    of: PhantomData<fn() -> T>,
}

impl<T: JournalRecord> RecordReader<T> {
    /// The record at `location`; `None` for a row without a record.
    pub(crate) fn at(&mut self, location: RecordLocation) -> Result<Option<T>, DataError> {
        if !location.is_recorded() {
            return Ok(None);
        }
        let offset = location.0 & !RecordLocation::IN_JOURNAL;
        let lines = match (location.0 == offset, &mut self.output) {
            (true, Some(output)) => output,
            _ => &mut self.journal,
        };
        lines.read(offset).map(Some)
    }
}

/// Reads lines at given offsets, which are mostly consecutive.
#[derive(Debug)]
pub(crate) struct IndexedLines {
    path: PathBuf,
    reader: BufReader<File>,
    at: u64,
    buffer: Vec<u8>,
}

impl IndexedLines {
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let file = File::open(path).map_err(|error| DataError::read(path, error))?;
        let reader = BufReader::with_capacity(1 << 16, file);
        Ok(Self { path: path.to_owned(), reader, at: 0, buffer: Vec::new() })
    }

    pub(crate) fn read<T: DeserializeOwned>(&mut self, offset: u64) -> Result<T, DataError> {
        let mut read = || -> io::Result<T> {
            self.reader.seek_relative(offset as i64 - self.at as i64)?;
            self.buffer.clear();
            self.at = offset + self.reader.read_until(b'\n', &mut self.buffer)? as u64;
            let line = self.buffer.strip_prefix(UTF8_MARK).unwrap_or(&self.buffer);
            Ok(serde_json::from_slice(line)?)
        };
        let record = read();
        if record.is_err() {
            // The position is unknown after an error.
            self.at = self.reader.seek(SeekFrom::Start(0)).unwrap_or(self.at);
        }
        record.map_err(|error| {
            let problem = format!("cannot be read at byte {offset}: {error}");
            DataError::reading(&self.path, &error, || DataError::file(&self.path, problem))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    impl JournalRecord for u32 {
        fn key(&self) -> Option<u64> {
            (*self > 9).then_some(u64::from(*self))
        }
    }

    #[test]
    fn a_truncated_last_line_is_dropped_and_the_rest_is_kept() {
        let (_folder, output) = crate::scratch_file("data/rows.jsonl");
        let mut journal = Journal::<u32>::open(&output).unwrap();
        for record in [11, 5, 12] {
            journal.append(&record).unwrap();
        }
        assert_eq!((journal.n_earlier(), journal.earlier(11)), (0, None));
        drop(journal);
        let path = output.with_extension("journal.jsonl");
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"1").unwrap();
        let mut journal = Journal::<u32>::open(&output).unwrap();
        assert_eq!(journal.n_earlier(), 2, "failed records are tried again");
        let location = journal.append(&13).unwrap();
        let mut records = journal.records().unwrap();
        let found = [journal.earlier(12).unwrap(), location, journal.earlier(11).unwrap(), RecordLocation::PENDING];
        assert_eq!(found.map(|location| records.at(location).unwrap()), [Some(12), Some(13), Some(11), None]);
    }

    #[test]
    fn a_record_of_the_journal_replaces_that_of_the_output() {
        let (_folder, output) = crate::scratch_file("rows.jsonl");
        std::fs::write(&output, "21\n22\n").unwrap();
        let mut journal = Journal::<u32>::open(&output).unwrap();
        journal.append(&22).unwrap();
        drop(journal);
        let journal = Journal::<u32>::open(&output).unwrap();
        let mut records = journal.records().unwrap();
        assert_eq!(journal.earlier(22), Some(RecordLocation(RecordLocation::IN_JOURNAL)));
        assert_eq!(records.at(journal.earlier(21).unwrap()).unwrap(), Some(21));
        journal.remove().unwrap();
        assert!(!Journal::path_for(&output).exists());
    }

    #[test]
    fn a_long_truncated_line_is_dropped() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("11\n{}", "1".repeat(200_000))).unwrap();
        drop_torn_line(file.path()).unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap(), b"11\n");
        std::fs::write(file.path(), "1".repeat(70_000)).unwrap();
        drop_torn_line(file.path()).unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap(), b"");
    }

    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(crate::properties(64))]

        #[test]
        fn a_journal_that_is_cut_anywhere_has_all_whole_records(
            records in proptest::collection::hash_set(10..u32::MAX, 1..8), cut in any::<prop::sample::Index>(),
        ) {
            let (_folder, output) = crate::scratch_file("rows.jsonl");
            let mut journal = Journal::<u32>::open(&output).unwrap();
            for record in &records {
                journal.append(record).unwrap();
            }
            drop(journal);
            let path = Journal::path_for(&output);
            let bytes = std::fs::read(&path).unwrap();
            let kept = &bytes[..cut.index(bytes.len() + 1)];
            std::fs::write(&path, kept).unwrap();
            let n_whole = kept.iter().filter(|byte| **byte == b'\n').count();
            let mut journal = Journal::<u32>::open(&output).unwrap();
            prop_assert_eq!(journal.n_earlier(), n_whole);
            let last = journal.append(&7).unwrap();
            let mut found = journal.records().unwrap();
            prop_assert_eq!(found.at(last).unwrap(), Some(7));
            for record in records.iter().take(n_whole) {
                let location = journal.earlier(u64::from(*record)).unwrap();
                prop_assert_eq!(found.at(location).unwrap(), Some(*record));
            }
        }

        #[test]
        fn any_bytes_are_a_journal_or_an_error(bytes in vec(prop_oneof![any::<u8>(), Just(b'1'), Just(b'\n')], 0..60)) {
            let (_folder, output) = crate::scratch_file("rows.jsonl");
            for path in [Journal::path_for(&output), output.clone()] {
                std::fs::write(&path, &bytes).unwrap();
                match Journal::<u32>::open(&output) {
                    Ok(journal) => {
                        let mut records = journal.records().unwrap();
                        let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                        let whole = bytes[..end].strip_prefix(UTF8_MARK).unwrap_or(&bytes[..end]);
                        let lines = whole.split(|byte| *byte == b'\n');
                        for line in lines.filter(|line| !line.trim_ascii().is_empty()) {
                            let record: u32 = serde_json::from_slice(line).unwrap();
                            let location = journal.earlier(u64::from(record));
                            let found = location.map(|location| records.at(location).unwrap());
                            prop_assert_eq!(found, (record > 9).then_some(Some(record)));
                        }
                    }
                    Err(error) => {
                        let error = error.to_string();
                        prop_assert!(error.contains("rows.") && !error.contains('\n'), "{error}");
                    }
                }
            }
        }
    }
}

//! The journal of a stage: finished records next to its output, so that a kill loses only the rows in flight.
//!
//! RecordReader stay in their files. In memory is where each of them begins: 8 bytes a row, and of earlier runs a table by key.

use crate::error::DataError;
use querl_core::fsx::{NumberedLine, UTF8_MARK, open_jsonl};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

/// A record that a later run reuses.
pub trait JournalRecord: Serialize + DeserializeOwned + 'static {
    /// Hash of the request; `None` for a failed record, which is tried again.
    fn key(&self) -> Option<u64>;
}

/// Byte offset of a record in the output or its journal, or why there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordLocation(u64);

impl RecordLocation {
    pub(crate) const PENDING: Self = Self(u64::MAX);
    pub(crate) const SKIPPED: Self = Self(u64::MAX - 1);
    /// Offsets in the journal have this bit; no file is so long that its own would.
    const IN_JOURNAL: u64 = 1 << 63;

    pub(crate) fn is_recorded(self) -> bool {
        self != Self::PENDING && self != Self::SKIPPED
    }
}

/// Finished rows of a stage whose output is not written yet: one JSON record a line, in the order in which they were finished.
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
    /// Where the journal of `output` is: `rewrites.jsonl` has `rewrites.journal.jsonl`.
    pub fn path_for(output: &Path) -> PathBuf {
        output.with_extension("journal.jsonl")
    }
}

impl<T: JournalRecord> Journal<T> {
    /// Opens the journal of `output` and indexes the records of earlier runs: those of the output, then those of the journal.
    /// A last line that a kill cut short is dropped.
    ///
    /// # Errors
    /// A file cannot be read or written, or holds a line that is not a record.
    pub fn open(output: &Path) -> Result<Self, DataError> {
        let path = Journal::path_for(output);
        let mut earlier = HashMap::new();
        if output.exists() {
            add_answers::<T>(output, 0, &mut earlier)?;
        }
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|error| DataError::write(&path, error))?;
        }
        if path.exists() {
            drop_torn_line(&path).map_err(|error| DataError::write(&path, error))?;
            add_answers::<T>(&path, RecordLocation::IN_JOURNAL, &mut earlier)?;
        }
        let opened = OpenOptions::new().create(true).append(true).open(&path);
        let opened = opened.and_then(|file| Ok((file.metadata()?.len(), file)));
        let (end, file) = opened.map_err(|error| DataError::write(&path, error))?;
        Ok(Self { output: output.to_owned(), path, file, end, earlier, of: PhantomData })
    }

    pub(crate) fn earlier(&self, key: u64) -> Option<RecordLocation> {
        self.earlier.get(&key).copied()
    }

    /// How many answers of earlier runs there are.
    pub fn n_earlier(&self) -> usize {
        self.earlier.len()
    }

    pub(crate) fn append(&mut self, record: &T) -> Result<RecordLocation, DataError> {
        let written = serde_json::to_vec(record).map_err(io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line)?;
            Ok(line.len() as u64)
        });
        let place = RecordLocation(RecordLocation::IN_JOURNAL | self.end);
        self.end += written.map_err(|error| DataError::write(&self.path, error))?;
        Ok(place)
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

fn add_answers<T: JournalRecord>(
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

/// The records of a stage's output and journal, by place.
pub(crate) struct RecordReader<T> {
    output: Option<IndexedLines>,
    journal: IndexedLines,
    of: PhantomData<fn() -> T>,
}

impl<T: JournalRecord> RecordReader<T> {
    /// The record at `place`; `None` where there is none.
    pub(crate) fn at(&mut self, place: RecordLocation) -> Result<Option<T>, DataError> {
        if !place.is_recorded() {
            return Ok(None);
        }
        let offset = place.0 & !RecordLocation::IN_JOURNAL;
        let lines = match (place.0 == offset, &mut self.output) {
            (true, Some(output)) => output,
            _ => &mut self.journal,
        };
        lines.read(offset).map(Some)
    }
}

/// A file of lines, read from given offsets, which mostly follow one another.
#[derive(Debug)]
pub(crate) struct IndexedLines {
    path: PathBuf,
    reader: BufReader<File>,
    at: u64,
    buffer: Vec<u8>,
}

impl IndexedLines {
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let file = File::open(path).map_err(|error| DataError::file(path, format!("cannot be read: {error}")))?;
        let reader = BufReader::with_capacity(1 << 16, file);
        Ok(Self { path: path.to_owned(), reader, at: 0, buffer: Vec::new() })
    }

    /// The record that begins at `offset`.
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
            // The position of the reader is unknown after an error: seek to the start.
            self.at = self.reader.seek(SeekFrom::Start(0)).unwrap_or(self.at);
        }
        record.map_err(|error| DataError::file(&self.path, format!("cannot be read at byte {offset}: {error}")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    impl JournalRecord for u32 {
        fn key(&self) -> Option<u64> {
            (*self > 9).then_some(u64::from(*self))
        }
    }

    #[test]
    fn torn_last_line_is_dropped_and_the_rest_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("data/rows.jsonl");
        let mut journal = Journal::<u32>::open(&output).unwrap();
        for record in [11, 5, 12] {
            journal.append(&record).unwrap();
        }
        assert_eq!((journal.n_earlier(), journal.earlier(11)), (0, None));
        drop(journal);
        let path = output.with_extension("journal.jsonl");
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"1").unwrap();
        let mut journal = Journal::<u32>::open(&output).unwrap();
        assert_eq!(journal.n_earlier(), 2, "a record without an answer is asked again");
        let place = journal.append(&13).unwrap();
        let mut records = journal.records().unwrap();
        let found = [journal.earlier(12).unwrap(), place, journal.earlier(11).unwrap(), RecordLocation::PENDING];
        assert_eq!(found.map(|place| records.at(place).unwrap()), [Some(12), Some(13), Some(11), None]);
    }

    #[test]
    fn newer_answer_of_the_journal_stands_before_that_of_the_output() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("rows.jsonl");
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
    fn a_torn_line_longer_than_a_block_is_dropped() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("11\n{}", "1".repeat(200_000))).unwrap();
        drop_torn_line(file.path()).unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap(), b"11\n");
        std::fs::write(file.path(), "1".repeat(70_000)).unwrap();
        drop_torn_line(file.path()).unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap(), b"");
    }
}

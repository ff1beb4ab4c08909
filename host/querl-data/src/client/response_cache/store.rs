//! The database file of the response cache: tables, checksums, expiry, damaged files.

use crate::error::{DataError, catch_panic};
use querl_core::fsx::{io_problem, is_exhausted};
use redb::{
    Database, DatabaseError, ReadOnlyDatabase, ReadTransaction, ReadableDatabase, ReadableTable, ReadableTableMetadata,
    TableDefinition, WriteTransaction,
};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long a run waits for a file that another process has open.
const OPEN_TIMEOUT: Duration = Duration::from_secs(3);

/// Queued changes by table and key: a new response, or `None` to remove an entry.
pub(super) type Changes = HashMap<(CacheTable, String), Option<Vec<u8>>>;

querl_core::named_enum! {
    /// Tables of the response cache.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum CacheTable {
        /// Rewrites by teachers.
        Rewrites = "rewrites",
        /// Judgements by judges.
        Judgements = "judgements",
        /// Hits of retrieval services.
        Retrievals = "retrievals",
    }
}

impl CacheTable {
    fn definition(self) -> TableDefinition<'static, &'static str, &'static [u8]> {
        TableDefinition::new(self.name())
    }
}

/// Number and size of the entries of one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableStats {
    /// The table that the numbers are about.
    pub table: CacheTable,
    /// Number of stored responses.
    pub n_answers: u64,
    /// Size on disk.
    pub n_bytes: u64,
    /// When the oldest entry was stored, in seconds since 1970; `None` for an empty table.
    pub oldest_s: Option<u64>,
}

/// The open database; `None` only during drop.
pub(super) struct Store(Option<Opened>);

enum Opened {
    ForWriting(Database),
    ForReading(ReadOnlyDatabase),
}

impl Opened {
    fn begin_read(&self) -> Result<ReadTransaction, redb::TransactionError> {
        match self {
            Self::ForWriting(database) => database.begin_read(),
            Self::ForReading(database) => database.begin_read(),
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let database = self.0.take();
        let _ = catch_panic(|| drop(database));
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum StoreError {
    #[error("{0}")]
    Damaged(String),
    /// The disk is full or fails; the content of the file is intact.
    #[error("{0}")]
    Unavailable(String),
}

enum OpenError {
    InUse,
    Damaged(String),
    Other(String),
}

impl From<StoreError> for OpenError {
    fn from(store_error: StoreError) -> Self {
        match store_error {
            StoreError::Damaged(problem) => Self::Damaged(problem),
            StoreError::Unavailable(problem) => Self::Other(problem),
        }
    }
}

impl Store {
    /// Opens or creates the database; `None`, with a logged warning, if it cannot be used.
    pub(super) fn open(path: &Path) -> Option<Self> {
        let shown = path.display();
        match Self::try_open_soon(path) {
            Ok(store) => Some(store),
            Err(OpenError::InUse) => {
                tracing::warn!("{shown}: another process uses this cache; calls are made without it");
                None
            }
            Err(OpenError::Damaged(problem)) if !is_cache_file(path) => {
                tracing::warn!(
                    "{shown}: holds something that is not a cache ({problem}); it is left as it is, calls are made without a cache; name another file in cache.path"
                );
                None
            }
            Err(OpenError::Damaged(problem)) => {
                // Outside of the macro, which evaluates its arguments only where the log level is enabled.
                let aside = move_aside(path);
                tracing::warn!("{shown}: the cache is damaged ({problem}); {aside}, a new one is created");
                Self::try_open(path).ok()
            }
            Err(OpenError::Other(problem)) => {
                tracing::warn!("{shown}: no cache can be kept there ({problem}); calls are made without it");
                None
            }
        }
    }

    /// Opens the database read-only; `None` if there is no file or, with a logged warning, if it cannot be read.
    pub(super) fn open_for_reading(path: &Path) -> Option<Self> {
        let empty = path.metadata().map_or(true, |file| file.len() == 0);
        if empty {
            return None;
        }
        let problem = match catch_panic(|| ReadOnlyDatabase::open(path)) {
            Ok(Ok(database)) => return Some(Self(Some(Opened::ForReading(database)))),
            Ok(Err(DatabaseError::DatabaseAlreadyOpen)) => "another process uses it".to_owned(),
            Ok(Err(DatabaseError::RepairAborted)) => {
                "the process that last used it was killed; the next run repairs it".to_owned()
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it cannot be opened".to_owned(),
        };
        tracing::warn!("{}: the cache cannot be inspected ({problem}); its responses are not counted", path.display());
        None
    }

    /// Waits for a process that only reads the cache, which takes a moment.
    fn try_open_soon(path: &Path) -> Result<Self, OpenError> {
        let until = Instant::now() + OPEN_TIMEOUT;
        loop {
            match Self::try_open(path) {
                Err(OpenError::InUse) if Instant::now() < until => std::thread::sleep(OPEN_TIMEOUT / 30),
                opened => return opened,
            }
        }
    }

    fn try_open(path: &Path) -> Result<Self, OpenError> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|error| OpenError::Other(error.to_string()))?;
        }
        // redb may panic on a damaged file.
        let opened = catch_panic(|| Database::create(path));
        let database = match opened {
            Ok(Ok(database)) => database,
            Ok(Err(DatabaseError::DatabaseAlreadyOpen)) => return Err(OpenError::InUse),
            Ok(Err(error @ DatabaseError::UpgradeRequired(_))) => return Err(OpenError::Other(error.to_string())),
            Ok(Err(DatabaseError::Storage(redb::StorageError::Io(error)))) if is_intact_after(&error) => {
                return Err(OpenError::Other(io_problem(&error)));
            }
            Ok(Err(error)) => return Err(OpenError::Damaged(error.to_string())),
            Err(_) => return Err(OpenError::Damaged("it cannot be opened".into())),
        };
        let store = Self(Some(Opened::ForWriting(database)));
        // Creates all tables, so that a reader finds each of them.
        store.write(&Changes::new())?;
        Ok(store)
    }

    fn begin_read(&self) -> Result<ReadTransaction, redb::TransactionError> {
        self.0.as_ref().expect("only drop takes it").begin_read()
    }

    fn begin_write(&self) -> Result<WriteTransaction, redb::Error> {
        match self.0.as_ref().expect("only drop takes it") {
            Opened::ForWriting(database) => Ok(database.begin_write()?),
            Opened::ForReading(_) => Err(redb::Error::Io(ErrorKind::ReadOnlyFilesystem.into())),
        }
    }

    pub(super) fn get(
        &self,
        table: CacheTable,
        key: &str,
        max_age: Option<Duration>,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        guarded(|| {
            let read = self.begin_read()?;
            let found = read.open_table(table.definition())?.get(key)?;
            Ok(found.and_then(|entry| unpack(entry.value(), max_age)))
        })
    }

    pub(super) fn write(&self, changes: &Changes) -> Result<(), StoreError> {
        guarded(|| {
            let write = self.begin_write()?;
            for table in CacheTable::ALL {
                let mut open = write.open_table(table.definition())?;
                for ((_, key), response) in changes.iter().filter(|((of, _), _)| *of == table) {
                    match response {
                        Some(response) => drop(open.insert(key.as_str(), pack(response).as_slice())?),
                        None => drop(open.remove(key.as_str())?),
                    }
                }
            }
            write.commit()?;
            Ok(())
        })
    }

    /// If the tables exceed `max_bytes`, removes expired retrievals, then the oldest entries until a quarter of `max_bytes` is free.
    pub(super) fn prune(&self, max_bytes: u64, retrieval_ttl: Duration) -> Result<(), StoreError> {
        let mut n_bytes = 0;
        for table in CacheTable::ALL {
            n_bytes += self.stats(table)?.n_bytes;
        }
        if n_bytes <= max_bytes {
            return Ok(());
        }
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let dead_before_s = now_s.saturating_sub(retrieval_ttl.as_secs());
        let mut entries = self.entries()?;
        entries.sort_by_key(|entry| {
            (entry.table != CacheTable::Retrievals || entry.stored_s >= dead_before_s, entry.stored_s)
        });
        let mut changes = Changes::new();
        for entry in entries {
            let is_dead = entry.table == CacheTable::Retrievals && entry.stored_s < dead_before_s;
            if !is_dead && n_bytes <= max_bytes / 4 * 3 {
                break;
            }
            n_bytes = n_bytes.saturating_sub(entry.n_bytes);
            changes.insert((entry.table, entry.key), None);
        }
        self.write(&changes)
    }

    fn entries(&self) -> Result<Vec<Entry>, StoreError> {
        guarded(|| {
            let (read, mut entries) = (self.begin_read()?, Vec::new());
            for table in CacheTable::ALL {
                for entry in read.open_table(table.definition())?.iter()? {
                    let (key, value) = entry?;
                    let stored_s = head(value.value()).map_or(0, |(stored_s, _)| stored_s);
                    let key = key.value().to_owned();
                    let n_bytes = (key.len() + value.value().len()) as u64;
                    entries.push(Entry { table, key, stored_s, n_bytes });
                }
            }
            Ok(entries)
        })
    }

    fn stats(&self, table: CacheTable) -> Result<TableStats, StoreError> {
        guarded(|| {
            let read = self.begin_read()?;
            let open = read.open_table(table.definition())?;
            let mut oldest_s = None;
            for entry in open.iter()? {
                let stored_s = head(entry?.1.value()).map(|(stored_s, _)| stored_s);
                oldest_s = oldest_s.into_iter().chain(stored_s).min();
            }
            let n_bytes = open.stats()?.stored_bytes();
            Ok(TableStats { table, n_answers: open.len()?, n_bytes, oldest_s })
        })
    }

    fn clear(&self, tables: &[CacheTable]) -> Result<(), StoreError> {
        guarded(|| {
            let write = self.begin_write()?;
            for table in tables {
                write.delete_table(table.definition())?;
                drop(write.open_table(table.definition())?);
            }
            write.commit()?;
            Ok(())
        })
    }
}

/// A stored response without its content.
struct Entry {
    table: CacheTable,
    key: String,
    stored_s: u64,
    n_bytes: u64,
}

/// True for a damaged cache, false for a file of another type that was configured by mistake: checks the first bytes and the extension.
fn is_cache_file(path: &Path) -> bool {
    const BEGINNING: &[u8] = b"redb";
    let mut first = [0; BEGINNING.len()];
    let begins = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut first));
    (begins.is_ok() && first == BEGINNING) || path.extension().is_some_and(|extension| extension == "redb")
}

/// True if the error says nothing about the content: no file could be used at this path, or the machine has too little memory, disk or
/// handles. Other errors may be caused by a damaged length or offset.
fn is_intact_after(error: &io::Error) -> bool {
    let is_of_location = matches!(
        error.kind(),
        ErrorKind::NotFound
            | ErrorKind::PermissionDenied
            | ErrorKind::ReadOnlyFilesystem
            | ErrorKind::IsADirectory
            | ErrorKind::NotADirectory
    );
    is_of_location || is_exhausted(error)
}

fn guarded<T>(work: impl FnOnce() -> Result<T, redb::Error>) -> Result<T, StoreError> {
    match catch_panic(work) {
        Ok(done) => done.map_err(|error| store_error(&error)),
        Err(_) => Err(StoreError::Damaged("it cannot be read".into())),
    }
}

fn store_error(error: &redb::Error) -> StoreError {
    let problem = error.to_string();
    match error {
        // A damaged length or offset leads beyond the end of the file.
        redb::Error::Io(error)
            if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::InvalidData | ErrorKind::InvalidInput) =>
        {
            StoreError::Damaged(problem)
        }
        redb::Error::Io(_) | redb::Error::PreviousIo => StoreError::Unavailable(problem),
        _ => StoreError::Damaged(problem),
    }
}

/// An entry: seconds since 1970, the first 8 bytes of the SHA-256 of the response, the response.
fn pack(response: &[u8]) -> Vec<u8> {
    let stored_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    [&stored_s.to_be_bytes()[..], &Sha256::digest(response)[..8], response].concat()
}

fn head(entry: &[u8]) -> Option<(u64, &[u8])> {
    let (stored_s, rest) = entry.split_first_chunk::<8>()?;
    Some((u64::from_be_bytes(*stored_s), rest))
}

fn unpack(entry: &[u8], max_age: Option<Duration>) -> Option<Vec<u8>> {
    let (stored_s, rest) = head(entry)?;
    let (checksum, response) = rest.split_first_chunk::<8>()?;
    let age = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_secs(stored_s)).unwrap_or_default();
    let is_good = Sha256::digest(response)[..8] == checksum[..] && max_age.is_none_or(|most| age <= most);
    is_good.then(|| response.to_owned())
}

pub(super) fn move_aside(path: &Path) -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let aside = path.with_extension(format!("damaged-{seconds}"));
    match std::fs::rename(path, &aside) {
        Ok(()) => format!("it is kept as {}", aside.display()),
        Err(error) => format!("it cannot be put aside: {error}"),
    }
}

/// Number and size of the entries in each table of the cache at `path`; empty if there is no file.
///
/// # Errors
/// Another process has the cache open, or the file is damaged.
pub fn cache_stats(path: &Path) -> Result<Vec<TableStats>, DataError> {
    let Some(store) = open_existing(path)? else { return Ok(Vec::new()) };
    CacheTable::ALL
        .into_iter()
        .map(|table| store.stats(table).map_err(|store_error| DataError::file(path, store_error.to_string())))
        .collect()
}

/// Removes all entries of `tables` from the cache at `path`.
///
/// # Errors
/// Another process has the cache open, or the file is damaged.
pub fn clear_cache(path: &Path, tables: &[CacheTable]) -> Result<(), DataError> {
    match open_existing(path)? {
        Some(store) => store.clear(tables).map_err(|store_error| DataError::file(path, store_error.to_string())),
        None => Ok(()),
    }
}

fn open_existing(path: &Path) -> Result<Option<Store>, DataError> {
    if !path.exists() {
        return Ok(None);
    }
    let problem = match Store::try_open(path) {
        Ok(store) => return Ok(Some(store)),
        Err(OpenError::InUse) => "another process uses this cache; wait for its end".into(),
        Err(OpenError::Damaged(problem)) => format!("the cache is damaged ({problem}); remove the file"),
        Err(OpenError::Other(problem)) => problem,
    };
    Err(DataError::file(path, problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a cache that could not be opened for want of memory or file handles was renamed as damaged, and its responses were paid
    /// for again.
    #[test]
    fn want_of_memory_or_handles_is_no_damage() {
        let errors = [io::Error::from_raw_os_error(24), ErrorKind::OutOfMemory.into(), ErrorKind::StorageFull.into()];
        assert!(errors.iter().all(is_intact_after));
        assert!(
            ![ErrorKind::UnexpectedEof, ErrorKind::InvalidData].into_iter().any(|kind| is_intact_after(&kind.into()))
        );
    }
}

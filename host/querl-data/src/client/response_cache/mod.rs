//! Response cache: responses of external services on disk, so that no identical request is paid for twice.
//!
//! One file (redb) with a table for rewrites, judgements and retrievals. Writes are made by a thread of their own, many at a
//! time; a kill loses the last few and damages none. Concurrent identical requests share one call.
//! The cache never stops a run: where the file is in use, damaged or not writable, one warning is logged, and calls are made without
//! a cache.

mod cached;
mod single_flight;
mod store;
pub(crate) use cached::{CachedJudge, CachedRetriever, CachedTeacher, ServiceCache};
pub(crate) use single_flight::InFlightRequests;
pub use store::{CacheTable, TableStats, cache_stats, clear_cache};

use querl_core::config::CacheConfig;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;
use store::{Store, StoreError};

/// What the cache keeps, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheLimits {
    /// Above so many bytes of answers the oldest go, when the cache is opened.
    pub most_bytes: u64,
    /// Maximum age of retrieval responses.
    pub retrieval_ttl: Duration,
}

impl Default for CacheLimits {
    fn default() -> Self {
        Self::of(&CacheConfig::default())
    }
}

impl CacheLimits {
    /// Those of a configuration.
    pub fn of(config: &CacheConfig) -> Self {
        let ttl_s = config.retrieval_ttl_hours * 3600.0;
        Self {
            most_bytes: config.max_mib.saturating_mul(1 << 20),
            retrieval_ttl: Duration::try_from_secs_f64(ttl_s).unwrap_or(Duration::MAX),
        }
    }
}

/// An open cache. Dropping it writes what is left to write.
pub struct ResponseCache {
    path: PathBuf,
    store: Arc<Store>,
    is_broken: Arc<AtomicBool>,
    queue: Arc<WriteQueue>,
    writer: Option<JoinHandle<()>>,
}

impl ResponseCache {
    /// Opens the cache at `path`, which need not exist. `None`, with a warning, where it cannot be used: another
    /// process has it, or the place is not writable. A damaged file is put aside, and a new one begun.
    pub fn open(path: &Path, limits: CacheLimits) -> Option<Self> {
        let (store, queue) = (Arc::new(Store::open(path)?), Arc::new(WriteQueue::default()));
        let is_broken = Arc::new(AtomicBool::new(false));
        let writer = {
            let (store, queue, is_broken, path) = (store.clone(), queue.clone(), is_broken.clone(), path.to_owned());
            let write = move || write_all(&store, &queue, limits, &is_broken, &path);
            std::thread::Builder::new().name("cache".into()).spawn(write).ok()?
        };
        Some(Self { path: path.to_owned(), store, is_broken, queue, writer: Some(writer) })
    }

    /// Opens the cache at `path` to look things up, without any change to it. `None` where there is none or, with a
    /// warning, where it cannot be read.
    pub fn open_for_reading(path: &Path) -> Option<Self> {
        let (store, queue) = (Arc::new(Store::open_for_reading(path)?), Arc::new(WriteQueue::default()));
        Some(Self { path: path.to_owned(), store, is_broken: Arc::default(), queue, writer: None })
    }

    /// The answer kept under `key`, unless it is older than `max_age`.
    pub(crate) fn get(&self, table: CacheTable, key: &str, max_age: Option<Duration>) -> Option<Vec<u8>> {
        if self.is_broken.load(Ordering::Relaxed) {
            return None;
        }
        if let Some(change) = self.queue.get(table, key) {
            return change.filter(|_| max_age.is_none_or(|most| !most.is_zero()));
        }
        self.store.get(table, key, max_age).unwrap_or_else(|problem| {
            match &self.writer {
                Some(_) => give_up(&self.is_broken, &self.path, &problem),
                // Who only looks things up changes nothing, and cannot tell a damaged file from another program's.
                None if self.is_broken.swap(true, Ordering::SeqCst) => {}
                None => tracing::warn!("{}: the cache cannot be read ({problem})", self.path.display()),
            }
            None
        })
    }

    /// Stores a response: visible in this process at once, on disk a moment later.
    pub(crate) fn put(&self, table: CacheTable, key: &str, answer: Vec<u8>) {
        self.change(table, key, Some(answer));
    }

    pub(crate) fn forget(&self, table: CacheTable, key: &str) {
        self.change(table, key, None);
    }

    fn change(&self, table: CacheTable, key: &str, answer: Option<Vec<u8>>) {
        // Without a writer the queue would only grow.
        if self.writer.is_some() && !self.is_broken.load(Ordering::Relaxed) {
            self.queue.put(table, key, answer);
        }
    }
}

impl Drop for ResponseCache {
    fn drop(&mut self) {
        self.queue.close();
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

/// Writes all queued changes in one transaction: many take about as long as one.
fn write_all(store: &Store, queue: &WriteQueue, limits: CacheLimits, is_broken: &AtomicBool, path: &Path) {
    if let Err(problem) = store.prune(limits.most_bytes, limits.retrieval_ttl) {
        return give_up(is_broken, path, &problem);
    }
    while let Some(changes) = queue.next() {
        if let Err(problem) = store.write(&changes) {
            return give_up(is_broken, path, &problem);
        }
    }
}

fn give_up(is_broken: &AtomicBool, path: &Path, store_error: &StoreError) {
    if is_broken.swap(true, Ordering::SeqCst) {
        return;
    }
    let aside = match store_error {
        StoreError::Damaged(_) => store::move_aside(path),
        StoreError::Unavailable(_) => "what it holds is kept".to_owned(),
    };
    tracing::warn!(
        "{}: the cache cannot be used any more ({store_error}); {aside}, calls are made without it",
        path.display()
    );
}

/// Answers to keep, by table and key; `None` for those to forget.
pub(super) type Changes = HashMap<(CacheTable, String), Option<Vec<u8>>>;

/// What the writer has still to write.
#[derive(Default)]
pub(super) struct WriteQueue {
    state: Mutex<State>,
    grown: Condvar,
}

#[derive(Default)]
struct State {
    waiting: Changes,
    writing: Arc<Changes>,
    is_closed: bool,
}

impl WriteQueue {
    pub(super) fn put(&self, table: CacheTable, key: &str, answer: Option<Vec<u8>>) {
        self.state().waiting.insert((table, key.to_owned()), answer);
        self.grown.notify_one();
    }

    /// What is to become of an answer; `None` where the disk says it.
    pub(super) fn get(&self, table: CacheTable, key: &str) -> Option<Option<Vec<u8>>> {
        let place = (table, key.to_owned());
        let state = self.state();
        state.waiting.get(&place).or_else(|| state.writing.get(&place)).cloned()
    }

    /// Takes all that is there, and waits until something is; what was taken before is now on disk. `None` at the end.
    pub(super) fn next(&self) -> Option<Arc<Changes>> {
        let mut state = self.state();
        state.writing = Arc::default();
        while state.waiting.is_empty() {
            if state.is_closed {
                return None;
            }
            state = self.grown.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        state.writing = Arc::new(std::mem::take(&mut state.waiting));
        Some(state.writing.clone())
    }

    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.grown.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests;

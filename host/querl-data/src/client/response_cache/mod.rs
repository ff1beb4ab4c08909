//! Response cache: responses of external services on disk, so that no identical request is paid for twice.
//!
//! One file (redb) with a table for rewrites, judgements and retrievals. A thread writes queued responses in batches; a kill loses
//! the last few and damages none. The cache never stops a run: if the file is in use, damaged or not writable, one warning is logged
//! and calls are made without a cache.
//!
//! Single-flight requests: concurrent identical requests share one call. If the caller that made the call stops waiting (its deadline
//! passes, its client disconnects), the next waiting caller makes the call with its own future and its own deadline.
//! `moka::future::Cache::try_get_with` shares calls in the same way, but also stores each response in memory, in a second cache next to
//! this one.

mod service_cache;
mod store;
pub(crate) use service_cache::ServiceCache;
pub use store::{CacheTable, TableStats, cache_stats, clear_cache};

use querl_core::config::CacheConfig;
use querl_core::records::CallFailure;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;
use store::{Changes, Store, StoreError};
use tokio::sync::OnceCell;

/// Maximum size of the response cache and maximum age of its retrieval responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheLimits {
    /// Maximum size in bytes: the oldest entries beyond it are removed when the cache is opened.
    pub max_bytes: u64,
    /// Maximum age of retrieval responses; rewrites and judgements do not expire.
    pub retrieval_ttl: Duration,
}

impl Default for CacheLimits {
    fn default() -> Self {
        Self::of(&CacheConfig::default())
    }
}

impl CacheLimits {
    /// The limits of a configuration (`cache`).
    pub fn of(config: &CacheConfig) -> Self {
        let ttl_s = config.retrieval_ttl_hours * 3600.0;
        Self {
            max_bytes: config.max_mib.saturating_mul(1 << 20),
            retrieval_ttl: Duration::try_from_secs_f64(ttl_s).unwrap_or(Duration::MAX),
        }
    }
}

/// An open response cache. Dropping it writes all queued changes.
pub struct ResponseCache {
    path: PathBuf,
    store: Arc<Store>,
    is_broken: Arc<AtomicBool>,
    queue: Arc<WriteQueue>,
    writer: Option<JoinHandle<()>>,
}

impl ResponseCache {
    /// Opens or creates the cache at `path`. `None`, with a warning, if another process uses it or it is not writable. A damaged file is
    /// renamed and replaced by a new one.
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

    /// Opens the cache at `path` read-only. `None` if there is no file or, with a warning, if it cannot be read.
    pub fn open_for_reading(path: &Path) -> Option<Self> {
        let (store, queue) = (Arc::new(Store::open_for_reading(path)?), Arc::new(WriteQueue::default()));
        Some(Self { path: path.to_owned(), store, is_broken: Arc::default(), queue, writer: None })
    }

    /// The response stored under `key`; `None` if there is none or it is older than `max_age`.
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
                // A read-only cache is not moved aside.
                None if self.is_broken.swap(true, Ordering::SeqCst) => {}
                None => tracing::warn!("{}: the cache cannot be read ({problem})", self.path.display()),
            }
            None
        })
    }

    /// Stores a response, which is visible in this process immediately and written to disk soon after.
    pub(crate) fn put(&self, table: CacheTable, key: &str, response: Vec<u8>) {
        self.change(table, key, Some(response));
    }

    pub(crate) fn forget(&self, table: CacheTable, key: &str) {
        self.change(table, key, None);
    }

    fn change(&self, table: CacheTable, key: &str, response: Option<Vec<u8>>) {
        // Without a writer the queue would only grow.
        if self.writer.is_some() && !self.is_broken.load(Ordering::Relaxed) {
            self.queue.put(table, key, response);
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

/// Writes all queued changes in one transaction, which takes about as long as for one change.
fn write_all(store: &Store, queue: &WriteQueue, limits: CacheLimits, is_broken: &AtomicBool, path: &Path) {
    if let Err(problem) = store.prune(limits.max_bytes, limits.retrieval_ttl) {
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

/// Changes that are not on disk yet.
#[derive(Default)]
struct WriteQueue {
    state: Mutex<QueueState>,
    grown: Condvar,
}

#[derive(Default)]
struct QueueState {
    waiting: Changes,
    writing: Arc<Changes>,
    is_closed: bool,
}

impl WriteQueue {
    fn put(&self, table: CacheTable, key: &str, response: Option<Vec<u8>>) {
        self.state().waiting.insert((table, key.to_owned()), response);
        self.grown.notify_one();
    }

    /// The queued change of an entry: a new response, or `Some(None)` for its removal; `None` without a change.
    fn get(&self, table: CacheTable, key: &str) -> Option<Option<Vec<u8>>> {
        let entry = (table, key.to_owned());
        let state = self.state();
        state.waiting.get(&entry).or_else(|| state.writing.get(&entry)).cloned()
    }

    /// Waits for changes and takes all of them; those taken before must be on disk now. `None` once the queue is closed and empty.
    fn next(&self) -> Option<Arc<Changes>> {
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

    fn close(&self) {
        self.state().is_closed = true;
        self.grown.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A response or its failure. The first caller initialises it; if that caller is cancelled, the next one does.
type SharedOutcome = OnceCell<Result<Vec<u8>, CallFailure>>;
type RequestKey = (CacheTable, String);

/// The requests in flight of a run, so that concurrent identical requests share one call.
#[derive(Default)]
pub(crate) struct InFlightRequests(Mutex<HashMap<RequestKey, Waiters>>);

#[derive(Default)]
struct Waiters {
    n: usize,
    outcome: Arc<SharedOutcome>,
}

/// One caller of a request in flight. The entry is removed once it has a response or no caller is left.
struct InFlightRequest<'a> {
    in_flight: &'a InFlightRequests,
    key: RequestKey,
    outcome: Arc<SharedOutcome>,
}

impl InFlightRequests {
    fn join(&self, table: CacheTable, key: &str) -> InFlightRequest<'_> {
        let key = (table, key.to_owned());
        let mut entries = self.entries();
        let waiters = entries.entry(key.clone()).or_default();
        waiters.n += 1;
        InFlightRequest { in_flight: self, outcome: waiters.outcome.clone(), key }
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<RequestKey, Waiters>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl InFlightRequest<'_> {
    /// The outcome of `call`, or of the call of an earlier caller.
    async fn response(
        &self,
        call: impl Future<Output = Result<Vec<u8>, CallFailure>>,
    ) -> &Result<Vec<u8>, CallFailure> {
        self.outcome.get_or_init(|| call).await
    }
}

impl Drop for InFlightRequest<'_> {
    fn drop(&mut self) {
        let mut entries = self.in_flight.entries();
        // The entry may be a later one with the same key.
        if let Some(waiters) = entries.get_mut(&self.key).filter(|w| Arc::ptr_eq(&w.outcome, &self.outcome)) {
            waiters.n -= 1;
            if waiters.n == 0 || self.outcome.initialized() {
                entries.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests;

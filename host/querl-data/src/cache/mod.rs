//! Answers that were paid for, kept on disk: nobody is asked the same twice.
//!
//! One file (redb) with a table for rewrites, judgements and retrievals. Writes are made by a thread of their own, many at a
//! time; a kill loses the last few and damages none. Nothing here ever stops a run: where the file is in use, damaged or not
//! writable, this says so once, and calls are made as if there were no cache.

mod store;
mod wrap;

pub use store::{CacheTable, TableStats, cache_stats, clear_cache};
pub(crate) use wrap::{CachedJudge, CachedRetriever, CachedTeacher, Shelf};

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;
use store::{Change, Store};

/// An open cache. Dropping it writes what is left to write.
pub struct AnswerCache {
    path: PathBuf,
    store: std::sync::Arc<Store>,
    /// Set where reading or writing failed: the file is put aside, and nobody looks into it again.
    is_broken: std::sync::Arc<AtomicBool>,
    changes: Mutex<Option<Sender<Change>>>,
    writer: Option<JoinHandle<()>>,
}

impl AnswerCache {
    /// Opens the cache at `path`, which need not exist. `None` where it cannot be used, which is said as a warning: another
    /// process has it, or the place is not writable. A damaged file is put aside, and a new one begun.
    pub fn open(path: &Path) -> Option<Self> {
        let store = std::sync::Arc::new(Store::open(path)?);
        let is_broken = std::sync::Arc::new(AtomicBool::new(false));
        let (changes, inbox) = channel();
        let writer = {
            let (store, is_broken, path) = (store.clone(), is_broken.clone(), path.to_owned());
            std::thread::Builder::new()
                .name("cache".into())
                .spawn(move || write_all(&store, &inbox, &is_broken, &path))
                .ok()?
        };
        Some(Self { path: path.to_owned(), store, is_broken, changes: Mutex::new(Some(changes)), writer: Some(writer) })
    }

    /// The answer kept under `key`, unless it is older than `max_age`.
    pub(crate) fn get(&self, table: CacheTable, key: &str, max_age: Option<Duration>) -> Option<Vec<u8>> {
        if self.is_broken.load(Ordering::Relaxed) {
            return None;
        }
        self.store.get(table, key, max_age).unwrap_or_else(|problem| {
            give_up(&self.is_broken, &self.path, &problem);
            None
        })
    }

    /// Keeps an answer, a moment later.
    pub(crate) fn put(&self, table: CacheTable, key: &str, answer: Vec<u8>) {
        self.send(Change { table, key: key.to_owned(), answer: Some(answer) });
    }

    /// Forgets an answer that turned out to be of no use.
    pub(crate) fn forget(&self, table: CacheTable, key: &str) {
        self.send(Change { table, key: key.to_owned(), answer: None });
    }

    fn send(&self, change: Change) {
        let changes = self.changes.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(changes) = changes.as_ref() {
            // The writer ends before us only where the cache is broken.
            let _ = changes.send(change);
        }
    }
}

impl Drop for AnswerCache {
    fn drop(&mut self) {
        drop(self.changes.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take());
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

/// Writes what comes, all that is there at once: a write to disk takes about as long for many as for one.
fn write_all(store: &Store, inbox: &Receiver<Change>, is_broken: &AtomicBool, path: &Path) {
    while let Ok(first) = inbox.recv() {
        let changes: Vec<Change> = std::iter::once(first).chain(inbox.try_iter()).collect();
        if let Err(problem) = store.write(&changes) {
            return give_up(is_broken, path, &problem);
        }
    }
}

fn give_up(is_broken: &AtomicBool, path: &Path, problem: &str) {
    if is_broken.swap(true, Ordering::SeqCst) {
        return;
    }
    let aside = store::put_aside(path);
    tracing::warn!(
        "{}: the cache cannot be used any more ({problem}); {aside}, calls are made without it",
        path.display()
    );
}

#[cfg(test)]
mod tests;

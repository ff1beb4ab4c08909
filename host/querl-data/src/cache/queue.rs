//! Answers on their way to disk, found by who looks for them meanwhile.

use super::CacheTable;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Answers to keep, by table and key; `None` for those to forget.
pub(super) type Changes = HashMap<(CacheTable, String), Option<Vec<u8>>>;

/// What the writer has still to write.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    grown: Condvar,
}

#[derive(Default)]
struct State {
    waiting: Changes,
    /// The writer has these.
    writing: Arc<Changes>,
    is_closed: bool,
}

impl Queue {
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

    /// Nothing more comes.
    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.grown.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Keeps away: a question paid for again in the moment between its answer and the write to disk.
    #[test]
    fn answers_are_found_until_the_writer_says_that_they_are_on_disk() {
        let queue = Queue::default();
        let found = |key: &str| queue.get(CacheTable::Rewrites, key);
        queue.put(CacheTable::Rewrites, "a", Some(b"one".to_vec()));
        assert_eq!(found("a"), Some(Some(b"one".to_vec())));
        assert_eq!(queue.next().unwrap().len(), 1);
        assert_eq!(found("a"), Some(Some(b"one".to_vec())), "being written");
        queue.put(CacheTable::Rewrites, "a", None);
        assert_eq!(found("a"), Some(None), "the later change counts");
        queue.close();
        assert_eq!(queue.next().unwrap().len(), 1);
        assert!(queue.next().is_none());
        assert_eq!(found("a"), None);
    }
}

//! Who may call into the pool, and when.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;

/// Lets as many calls in as the pool has slots; the others wait, and are let in in the order in which they came.
#[derive(Debug)]
pub(crate) struct Slots {
    queue: Mutex<Queue>,
}

#[derive(Debug)]
struct Queue {
    n_free: u32,
    waiting: VecDeque<Arc<Waiter>>,
}

/// A thread that waits for a slot.
#[derive(Debug)]
struct Waiter {
    thread: Thread,
    has_slot: AtomicBool,
}

impl Slots {
    pub(crate) fn new(n_slots: u32) -> Self {
        Self { queue: Mutex::new(Queue { n_free: n_slots, waiting: VecDeque::new() }) }
    }

    /// Waits for a slot; dropping what it returns frees it.
    pub(crate) fn take(&self) -> Slot<'_> {
        let place = self.queue().join();
        if let Some(waiter) = place {
            while !waiter.has_slot.load(Ordering::Acquire) {
                std::thread::park();
            }
        }
        Slot(self)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    /// Takes a free slot, or a place at the end.
    fn join(&mut self) -> Option<Arc<Waiter>> {
        if self.n_free > 0 {
            self.n_free -= 1;
            return None;
        }
        let waiter = Arc::new(Waiter { thread: std::thread::current(), has_slot: AtomicBool::new(false) });
        self.waiting.push_back(waiter.clone());
        Some(waiter)
    }
}

/// A place in the pool.
#[derive(Debug)]
pub(crate) struct Slot<'a>(&'a Slots);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue();
        // Handed on, never put back while somebody waits: a thread that comes later cannot overtake.
        match queue.waiting.pop_front() {
            Some(next) => {
                next.has_slot.store(true, Ordering::Release);
                next.thread.unpark();
            }
            None => queue.n_free += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_threads_are_served_in_order() {
        let slots = Slots::new(1);
        let served = Mutex::new(Vec::new());
        let first = slots.take();
        std::thread::scope(|scope| {
            for n in 0..8 {
                scope.spawn({
                    let (slots, served) = (&slots, &served);
                    move || {
                        let _slot = slots.take();
                        served.lock().unwrap_or_else(PoisonError::into_inner).push(n);
                    }
                });
                while slots.queue().waiting.len() <= n {
                    std::thread::yield_now();
                }
            }
            drop(first);
        });
        assert_eq!(*served.lock().unwrap_or_else(PoisonError::into_inner), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(slots.queue().n_free, 1);
    }
}

//! What joins ranks outside of meetings, such as their cards' communicators, and how it ends: for all ranks at the same time.

use super::meeting::lock;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

/// How long a rank waits for the end of what joined it with others. NCCL's abort has been seen to wait for ever (NVIDIA/nccl issue
/// 1777): the failure that led to it is told all the same.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 30 });

/// One rank's end of something that joins it with others. Either call is made in a thread of its own, for all ranks at the same
/// time, since it may wait for the others' or for a card that waits for theirs.
pub(super) trait Link: Send + Sync {
    /// A rank has failed: ends what is on its way.
    fn abort(&self);
    /// All ranks have ended well: gives back what it holds.
    fn close(&self);
}

/// The links of all ranks of a job.
#[derive(Default)]
pub(super) struct Links {
    open: Mutex<Vec<Arc<dyn Link>>>,
    ending: Arc<Ending>,
}

/// How many are being ended.
#[derive(Default)]
struct Ending {
    n: Mutex<usize>,
    changed: Condvar,
}

/// One that is being ended; it has ended when this is dropped, also where its thread could not be made.
struct OfOne(Arc<Ending>);

impl Drop for OfOne {
    fn drop(&mut self) {
        *lock(&self.0.n) -= 1;
        self.0.changed.notify_all();
    }
}

impl Links {
    #[cfg(any(feature = "cuda", test))]
    pub(super) fn add(&self, link: Arc<dyn Link>) {
        lock(&self.open).push(link);
    }

    /// Begins to end all that are open, each in its own thread and none while a lock is held.
    pub(super) fn end(&self, end: fn(&dyn Link)) {
        let counted = |link| {
            *lock(&self.ending.n) += 1;
            (link, OfOne(self.ending.clone()))
        };
        // All are counted before the first ends, and before another rank that fails can find none open.
        let mut open = lock(&self.open);
        let links: Vec<_> = open.drain(..).map(counted).collect();
        drop(open);
        for (link, ending) in links {
            let work = move || {
                end(&*link);
                drop(link);
                drop(ending);
            };
            // A link whose thread cannot be made is dropped with the work, and ends by that.
            let _ = thread::Builder::new().name("end of a link".into()).spawn(work);
        }
    }

    /// Waits until none is being ended, or patience is.
    pub(super) fn wait(&self) {
        let n = lock(&self.ending.n);
        let _ = self.ending.changed.wait_timeout_while(n, PATIENCE, |n| *n > 0);
    }
}

//! Process groups whose ranks are threads: a rendezvous where each rank hands over a value and receives those of all, and the
//! communicators of their devices; and the threads themselves, started and joined together.

use super::{Ranks, RanksError};
use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::Duration;

/// Time that a failed rank waits for communicators to be aborted. NCCL's abort may hang (NVIDIA/nccl issue 1777); after this time the
/// failure is reported without it.
const ABORT_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 30 });

/// One rank's handle of a communicator between devices. Each method is called for all ranks at the same time, on a thread per rank, since
/// it may wait for the other ranks.
pub trait Communicator: Send + Sync {
    /// Aborts pending collective operations, after a rank has failed.
    fn abort(&self);
    /// Frees the communicator, after all ranks have finished.
    fn close(&self);
}

type Item = Arc<dyn Any + Send + Sync>;

/// All ranks of a job, in all process groups.
pub(super) struct World {
    failure: OnceLock<RanksError>,
    /// Ranks that have finished without failure. Other ranks must not wait for them.
    finished: Vec<AtomicBool>,
    groups: Mutex<Vec<Weak<ProcessGroup>>>,
    communicators: Mutex<Vec<Arc<dyn Communicator>>>,
    ending: Arc<Ending>,
}

#[derive(Default)]
struct Ending {
    n: Mutex<usize>,
    changed: Condvar,
}

/// Counts a communicator as being ended until the guard is dropped, even if its thread could not be started.
struct EndingGuard(Arc<Ending>);

impl Drop for EndingGuard {
    fn drop(&mut self) {
        *lock(&self.0.n) -= 1;
        self.0.changed.notify_all();
    }
}

impl World {
    pub(super) fn new(world_size: usize) -> Arc<Self> {
        let finished = (0..world_size).map(|_| AtomicBool::new(false)).collect();
        Arc::new(Self {
            failure: OnceLock::new(),
            finished,
            groups: Mutex::default(),
            communicators: Mutex::default(),
            ending: Arc::default(),
        })
    }

    /// Makes all pending and later calls of all ranks fail with `failure`. Returns true for the first failure, which is the one that all
    /// ranks receive.
    pub(super) fn fail(&self, failure: RanksError) -> bool {
        let is_first = self.failure.set(failure).is_ok();
        self.wake();
        self.end_communicators(|communicator| communicator.abort());
        is_first
    }

    /// Registers a communicator. It is aborted when a rank fails (immediately if one has failed), and closed when all ranks have finished.
    pub(super) fn register(&self, communicator: Arc<dyn Communicator>) {
        lock(&self.communicators).push(communicator);
        // A rank that failed before the registration did not abort this communicator.
        if self.failure.get().is_some() {
            self.end_communicators(|communicator| communicator.abort());
        }
    }

    /// Starts to end all communicators, each on its own thread and none while a lock is held.
    fn end_communicators(&self, end: fn(&dyn Communicator)) {
        let counted = |communicator| {
            *lock(&self.ending.n) += 1;
            (communicator, EndingGuard(self.ending.clone()))
        };
        // Count all communicators before the first one ends, and before another failing rank can find the list empty.
        let mut open = lock(&self.communicators);
        let communicators: Vec<_> = open.drain(..).map(counted).collect();
        drop(open);
        for (communicator, guard) in communicators {
            let work = move || {
                end(&*communicator);
                drop(communicator);
                drop(guard);
            };
            // If the thread cannot be started, the communicator is dropped with the closure.
            let _ = thread::Builder::new().name("end of a communicator".into()).spawn(work);
        }
    }

    /// Waits until no communicator is being ended, at most [`ABORT_TIMEOUT`].
    pub(super) fn wait_for_communicators(&self) {
        let n = lock(&self.ending.n);
        let _ = self.ending.changed.wait_timeout_while(n, ABORT_TIMEOUT, |n| *n > 0);
    }

    /// Closes all communicators, unless a rank has failed; called after the threads of all ranks have ended. A failed rank has waited until
    /// they were aborted.
    pub(super) fn close(&self) {
        if self.failure.get().is_none() {
            self.end_communicators(|communicator| communicator.close());
            self.wait_for_communicators();
        }
    }

    pub(super) fn finish(&self, rank: usize) {
        self.finished[rank].store(true, Ordering::SeqCst);
        self.wake();
    }

    pub(super) fn check(&self) -> Result<(), RanksError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    fn wake(&self) {
        for group in lock(&self.groups).iter().filter_map(Weak::upgrade) {
            // Take the lock: a rank that has checked the condition is then waiting for the notification.
            let _state = lock(&group.state);
            group.changed.notify_all();
        }
    }
}

/// Ranks that make the same collective calls in the same order.
pub(super) struct ProcessGroup {
    world: Arc<World>,
    pub(super) members: Vec<usize>,
    state: Mutex<Rendezvous>,
    changed: Condvar,
}

#[derive(Default)]
struct Rendezvous {
    round: u64,
    /// The first member to arrive, and its name of the operation.
    operation: Option<(usize, String)>,
    items: Vec<Option<Item>>,
    /// Items of the previous round, until all members have received them.
    result: Vec<Item>,
    n_to_receive: usize,
}

impl ProcessGroup {
    pub(super) fn new(world: &Arc<World>, members: Vec<usize>) -> Arc<Self> {
        let state = Rendezvous { items: vec![None; members.len()], ..Rendezvous::default() };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let group = Arc::new(Self { world: world.clone(), members, state, changed });
        let mut groups = lock(&world.groups);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(&group));
        group
    }

    pub(super) fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// All-gather of one item per member, in the order of the members.
    pub(super) fn exchange<T: Send + Sync + 'static>(
        &self,
        index: usize,
        operation: String,
        item: Arc<T>,
    ) -> Result<Vec<Arc<T>>, RanksError> {
        let all = self.rendezvous(index, operation.clone(), item)?;
        if let Some(other) = all.iter().position(|item| !item.is::<T>()) {
            return Err(self.differ(index, &operation, other, &format!("{operation}, with values of another type")));
        }
        let typed = all.into_iter().map(|item| item.downcast::<T>());
        Ok(typed.map(|item| item.expect("all items were found to be of this type")).collect())
    }

    fn rendezvous(&self, index: usize, operation: String, item: Item) -> Result<Vec<Item>, RanksError> {
        let mut state = lock(&self.state);
        // The previous round ends when all members have received its result.
        while state.n_to_receive > 0 {
            state = self.wait(state)?;
        }
        self.world.check()?;
        match &state.operation {
            Some((first, other)) if *other != operation => {
                let (first, other) = (*first, other.clone());
                drop(state);
                return Err(self.differ(index, &operation, first, &other));
            }
            Some(_) => {}
            None => state.operation = Some((index, operation)),
        }
        state.items[index] = Some(item);
        let round = state.round;
        if state.items.iter().all(Option::is_some) {
            let n_members = self.members.len();
            state.result = state.items.iter_mut().filter_map(Option::take).collect();
            (state.round, state.n_to_receive, state.operation) = (round + 1, n_members, None);
            self.changed.notify_all();
        }
        while state.round == round {
            state = self.wait(state)?;
        }
        state.n_to_receive -= 1;
        let result = if state.n_to_receive > 0 { state.result.clone() } else { std::mem::take(&mut state.result) };
        self.changed.notify_all();
        Ok(result)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, Rendezvous>) -> Result<MutexGuard<'a, Rendezvous>, RanksError> {
        self.world.check()?;
        let is_gone = |member: usize| self.world.finished[self.members[member]].load(Ordering::SeqCst);
        let gone = (0..self.members.len()).find(|&member| state.items[member].is_none() && is_gone(member));
        if let Some(member) = gone {
            drop(state);
            let message = "it finished while another rank waited for it; internal error, please report it".into();
            self.world.fail(RanksError::Failed { rank: self.members[member], message });
            self.world.check()?;
            return Ok(lock(&self.state));
        }
        Ok(self.changed.wait(state).unwrap_or_else(PoisonError::into_inner))
    }

    fn differ(&self, index: usize, operation: &str, other_index: usize, other: &str) -> RanksError {
        let [rank, other_rank] = [index, other_index].map(|index| self.members[index]);
        let (operation, other) = (operation.to_owned(), other.to_owned());
        let failure = RanksError::Differ { rank, operation, other_rank, other };
        self.world.fail(failure.clone());
        failure
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const STACK_BYTES: usize = 8 << 20;

/// How a rank failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum RankFailure<E> {
    /// The rank returned an error: its own, or the one that reports another rank's failure.
    #[error("rank {rank}: {error}")]
    Failed { rank: usize, error: E },
    /// The rank panicked, or its thread could not be started.
    #[error("rank {rank} panicked: {message}")]
    Panicked { rank: usize, message: String },
}

impl<E> RankFailure<E> {
    #[allow(missing_docs)]
    pub fn rank(&self) -> usize {
        match self {
            Self::Failed { rank, .. } | Self::Panicked { rank, .. } => *rank,
        }
    }
}

/// Runs `work` on `world_size` ranks, rank 0 in this thread, and returns the results of all in their order.
///
/// # Errors
/// The failures in the order in which they happened; those after the first may only report the first.
pub fn run_ranks<T: Send, E: Send + Display>(
    world_size: usize,
    work: impl Fn(Ranks) -> Result<T, E> + Sync,
) -> Result<Vec<T>, Vec<RankFailure<E>>> {
    let world = World::new(world_size);
    let group = ProcessGroup::new(&world, (0..world_size).collect());
    let failures = Mutex::new(Vec::new());
    let fail = |failure: RankFailure<E>, message: String| {
        let rank = failure.rank();
        lock(&failures).push(failure);
        world.fail(RanksError::Failed { rank, message });
        // A communicator may use memory that this thread owns.
        world.wait_for_communicators();
    };
    let run = |rank: usize| match catch_unwind(AssertUnwindSafe(|| work(Ranks::of(&group, rank)))) {
        Ok(Ok(value)) => {
            world.finish(rank);
            Some(value)
        }
        Ok(Err(error)) => {
            let message = error.to_string();
            fail(RankFailure::Failed { rank, error }, message);
            None
        }
        Err(panic) => {
            let message = panic_message(&*panic).to_owned();
            fail(RankFailure::Panicked { rank, message: message.clone() }, message);
            None
        }
    };
    let values: Option<Vec<T>> = thread::scope(|scope| {
        let run = &run;
        let start = |rank: usize| {
            let thread = thread::Builder::new().name(format!("rank {rank}")).stack_size(STACK_BYTES);
            let started = thread.spawn_scoped(scope, move || run(rank));
            started.map_err(|error| {
                let message = format!("no thread: {error}");
                fail(RankFailure::Panicked { rank, message: message.clone() }, message);
            })
        };
        let others: Vec<_> = (1..world_size).map(start).collect();
        let mut values = vec![run(0)];
        values.extend(others.into_iter().map(|thread| thread.ok().and_then(|thread| thread.join().ok()).flatten()));
        values.into_iter().collect()
    });
    world.close();
    let mut failures = failures.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    // A rank may report its failure long before it returns.
    if let Err(RanksError::Failed { rank: first, .. } | RanksError::Differ { rank: first, .. }) = world.check() {
        failures.sort_by_key(|failure| failure.rank() != first);
    }
    values.filter(|_| failures.is_empty()).ok_or(failures)
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

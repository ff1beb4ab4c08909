//! Ranks as threads: started together, joined together.

use super::process_group::{ProcessGroup, World, lock};
use super::{Ranks, RanksError};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;

/// Stack of a rank's thread: that of a main thread.
const STACK_BYTES: usize = 8 << 20;

/// How one rank failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum RankFailure<E> {
    /// With its own error, or with the one that reported another rank's.
    #[error("rank {rank}: {error}")]
    Failed { rank: usize, error: E },
    /// It panicked, or its thread could not be started.
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
/// The failures in the order in which they happened; those after the first may only report that it failed.
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
        // What a communicator uses may be in the memory of this thread.
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

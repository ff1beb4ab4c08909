//! Ranks as threads: begun together, ended together.

use super::meeting::{Meeting, Party, lock};
use super::{Ranks, RanksError};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;

/// Bytes of the stack of a rank's thread, as a main thread usually has: what runs there runs on either.
const STACK_BYTES: usize = 8 << 20;

/// How one rank failed.
#[derive(Debug, thiserror::Error)]
pub enum RankFailure<E> {
    /// By its own error, or by the one that told it of another rank's.
    #[error("rank {rank}: {error}")]
    Failed {
        /// Which, from 0.
        rank: usize,
        /// Why.
        error: E,
    },
    /// It panicked, or had no thread to run in.
    #[error("rank {rank} stopped by itself: {message}")]
    Panicked {
        /// Which, from 0.
        rank: usize,
        /// What it said.
        message: String,
    },
}

impl<E> RankFailure<E> {
    /// Which rank.
    pub fn rank(&self) -> usize {
        match self {
            Self::Failed { rank, .. } | Self::Panicked { rank, .. } => *rank,
        }
    }
}

/// Runs `work` once for each of `world_size` ranks, the first in this thread, and returns what each gave in their order.
///
/// # Errors
/// Ranks failed: how, in the order in which they did; what those after the first say may be no more than that it failed.
pub fn run_ranks<T: Send, E: Send + Display>(
    world_size: usize,
    work: impl Fn(Ranks) -> Result<T, E> + Sync,
) -> Result<Vec<T>, Vec<RankFailure<E>>> {
    let party = Party::new(world_size);
    let meeting = Meeting::new(&party, (0..world_size).collect());
    let failures = Mutex::new(Vec::new());
    let fail = |failure: RankFailure<E>, message: String| {
        let rank = failure.rank();
        lock(&failures).push(failure);
        party.fail(RanksError::Failed { rank, message });
        // What ends for this rank may be in its thread's own memory.
        party.wait_for_links();
    };
    let run = |rank: usize| match catch_unwind(AssertUnwindSafe(|| work(Ranks::of(&meeting, rank)))) {
        Ok(Ok(value)) => {
            party.end(rank);
            Some(value)
        }
        Ok(Err(error)) => {
            let message = error.to_string();
            fail(RankFailure::Failed { rank, error }, message);
            None
        }
        Err(panic) => {
            let message = words_of(&*panic).to_owned();
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
    party.finish();
    let mut failures = failures.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    // A rank tells of its failure when it finds it, which may be long before its work is at an end.
    if let Err(RanksError::Failed { rank: first, .. } | RanksError::Differ { rank: first, .. }) = party.check() {
        failures.sort_by_key(|failure| failure.rank() != first);
    }
    values.filter(|_| failures.is_empty()).ok_or(failures)
}

/// The words of a panic, which is whatever it was raised with.
fn words_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

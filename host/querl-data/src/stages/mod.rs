//! The data stages: rewrite, validate, convert. Each takes records in, gives records out in the same order, and takes what an
//! earlier run already did, so that only failed and missing rows are tried again.

mod convert;
mod rewrite;
mod validate;

pub use convert::{Converted, DroppedRow, convert};
pub use rewrite::rewrite;
pub use validate::validate;

use crate::error::DataError;
use crate::journal::Journal;
use futures::{Stream, StreamExt};
use querl_core::ports::Progress;
use querl_core::records::{CallFailure, Context, FailureKind, QueryRow};
use serde::Serialize;

/// When so many rows, the first to finish, all failed alike, the stage stops instead of failing every row.
const FIRST_ROWS: usize = 8;

fn context(row: &QueryRow) -> Context {
    Context { user_profile: row.user_profile.clone(), history_summary: row.history_summary.clone() }
}

/// Where results of a stage go while it runs.
struct Collector<'a, T> {
    records: Vec<Option<T>>,
    journal: &'a mut Journal,
    progress: &'a dyn Progress,
    n_done: usize,
    n_tried: usize,
    /// Earlier runs' included.
    n_succeeded: usize,
    n_succeeded_before: usize,
    /// The first failure of each kind, and how many there were.
    failures: Vec<(CallFailure, usize)>,
}

/// What came of a record: success, a failure, or `None` where there was nothing to do.
type Outcome<'a> = Option<Result<(), &'a CallFailure>>;

impl<'a, T: Serialize> Collector<'a, T> {
    /// `records` holds what earlier runs did, `None` where there is work to do.
    fn new(records: Vec<Option<T>>, journal: &'a mut Journal, progress: &'a dyn Progress) -> Self {
        let n_done = records.iter().flatten().count();
        Self {
            records,
            journal,
            progress,
            n_done,
            n_tried: 0,
            n_succeeded: 0,
            n_succeeded_before: 0,
            failures: Vec::new(),
        }
    }

    /// Takes results as they come.
    async fn collect(
        mut self,
        mut results: impl Stream<Item = (usize, Result<T, DataError>)> + Unpin,
        outcome: impl Fn(&T) -> Outcome<'_>,
    ) -> Result<Vec<T>, DataError> {
        let n_first = FIRST_ROWS.min(self.records.len() - self.n_done);
        self.n_succeeded_before = self.records.iter().flatten().filter(|record| is_success(outcome(record))).count();
        self.n_succeeded = self.n_succeeded_before;
        self.report();
        while let Some((index, result)) = results.next().await {
            let record = result?;
            self.journal.append(&record)?;
            self.count(outcome(&record));
            self.report();
            if let Some(error) = self.reason_to_stop(n_first) {
                return Err(error);
            }
            self.records[index] = Some(record);
        }
        match self.commonest_failure() {
            Some(error) if self.n_succeeded == 0 => Err(error),
            _ => Ok(self.records.into_iter().flatten().collect()),
        }
    }

    fn count(&mut self, outcome: Outcome<'_>) {
        self.n_done += 1;
        self.n_tried += 1;
        self.n_succeeded += usize::from(is_success(outcome));
        let Some(Err(failure)) = outcome else { return };
        match self.failures.iter_mut().find(|(first, _)| first.kind == failure.kind) {
            Some((_, n)) => *n += 1,
            None => self.failures.push((failure.clone(), 1)),
        }
    }

    /// A failure that all further calls would meet, as far as one can tell.
    fn reason_to_stop(&self, n_first: usize) -> Option<DataError> {
        if let Some((failure, _)) = self.failures.iter().find(|(failure, _)| failure.kind.is_fatal()) {
            return Some(DataError::Service(failure.clone()));
        }
        let [(failure, n_alike)] = self.failures.as_slice() else { return None };
        // Rows that failed before may fail again for a reason of their own, beside others that succeeded. A service that is
        // down has no such excuse.
        let may_be_theirs = self.n_succeeded_before > 0 && failure.kind != FailureKind::Unreachable;
        let all_alike = self.n_tried == n_first && *n_alike == n_first;
        if all_alike && !may_be_theirs { self.commonest_failure() } else { None }
    }

    fn commonest_failure(&self) -> Option<DataError> {
        // Of equals the first.
        let (failure, n_alike) = self.failures.iter().rev().max_by_key(|(_, n)| *n)?;
        Some(DataError::NoSuccess { n_failed: self.n_failed(), n_alike: *n_alike, failure: failure.clone() })
    }

    fn n_failed(&self) -> usize {
        self.failures.iter().map(|(_, n)| n).sum()
    }

    fn report(&self) {
        let note = if self.failures.is_empty() { String::new() } else { format!("{} failed", self.n_failed()) };
        self.progress.update(self.n_done as u64, self.records.len() as u64, &note);
    }
}

fn is_success(outcome: Outcome<'_>) -> bool {
    matches!(outcome, Some(Ok(())))
}

#[cfg(test)]
mod tests;

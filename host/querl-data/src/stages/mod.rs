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

/// When so many rows, the first to finish, all found the service unreachable, the stage stops instead of failing every row.
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
    n_failed: usize,
    n_unreachable: usize,
    n_tried: usize,
}

impl<'a, T: Serialize> Collector<'a, T> {
    /// `records` holds what earlier runs did, `None` where there is work to do.
    fn new(records: Vec<Option<T>>, journal: &'a mut Journal, progress: &'a dyn Progress) -> Self {
        let n_done = records.iter().flatten().count();
        Self { records, journal, progress, n_done, n_failed: 0, n_unreachable: 0, n_tried: 0 }
    }

    /// Takes results as they come. `failure` tells why a record is not what was hoped for.
    async fn collect(
        mut self,
        mut results: impl Stream<Item = (usize, Result<T, DataError>)> + Unpin,
        failure: impl Fn(&T) -> Option<&CallFailure>,
    ) -> Result<Vec<T>, DataError> {
        let n_to_do = self.records.len() - self.n_done;
        self.report();
        while let Some((index, result)) = results.next().await {
            let record = result?;
            self.journal.append(&record)?;
            self.n_tried += 1;
            self.n_done += 1;
            let fatal = failure(&record).and_then(|failure| self.count(failure, n_to_do));
            self.report();
            if let Some(failure) = fatal {
                return Err(DataError::Service(failure));
            }
            self.records[index] = Some(record);
        }
        Ok(self.records.into_iter().flatten().collect())
    }

    /// Counts a failure; gives it back where it is one that all further calls would meet.
    fn count(&mut self, failure: &CallFailure, n_to_do: usize) -> Option<CallFailure> {
        self.n_failed += 1;
        self.n_unreachable += usize::from(failure.kind == FailureKind::Unreachable);
        let nobody_there = self.n_unreachable == self.n_tried && self.n_tried >= FIRST_ROWS.min(n_to_do);
        (failure.kind.is_fatal() || nobody_there).then(|| failure.clone())
    }

    fn report(&self) {
        let note = if self.n_failed > 0 { format!("{} failed", self.n_failed) } else { String::new() };
        self.progress.update(self.n_done as u64, self.records.len() as u64, &note);
    }
}

#[cfg(test)]
mod tests;

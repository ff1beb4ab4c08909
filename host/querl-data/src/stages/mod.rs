//! The data stages: rewrite, validate, convert. Each reads rows, writes records in the same order, and reuses the records of earlier
//! runs, so that only failed and missing rows are tried again. No stage holds its rows in memory: it reads them once to find the
//! pending ones, once to make the calls, once to write the output.

mod convert;
mod local;
mod rewrite;
mod validate;

pub use convert::{Conversion, ConvertedRow, DroppedRow, convert};
pub use local::{LocalRewriteCollector, LocalRewriteStage};
pub use rewrite::{rewrite, rewrite_in_batch};
pub use validate::validate;

use crate::dataset::journal::{Journal, JournalRecord, RecordLocation};
use crate::dataset::rows::{RecordWriter, Rows, changed_meanwhile};
use crate::error::DataError;
use futures::StreamExt;
use querl_core::ports::Progress;
use querl_core::records::{CallFailure, Context, FailureKind, QueryRow};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// The stage stops if this many rows, the first to finish, all failed alike.
const FIRST_ROWS: usize = 8;

fn context(row: &QueryRow) -> Context {
    Context { user_profile: row.user_profile.clone(), history_summary: row.history_summary.clone() }
}

/// What came of a record: success, a failure, or `None` where there was nothing to do.
type Outcome<'a> = Option<Result<(), &'a CallFailure>>;

/// What a stage does with one row.
trait RowTask {
    type Row;
    type Record: JournalRecord;

    /// Finds an earlier answer to the row; `None` where there is nothing to ask.
    fn key(row: &Self::Row) -> Option<u64>;

    async fn call(&self, row: Self::Row) -> Result<Self::Record, DataError>;

    fn outcome(record: &Self::Record) -> Outcome<'_>;

    fn matches_row(record: &Self::Record, row: &Self::Row) -> bool;

    /// The row with the answer that was given to it, in this run or an earlier one.
    fn record(row: Self::Row, answered: Option<Self::Record>) -> Self::Record;
}

/// All rows of a stage with their records, before the output is written.
pub struct StageResults<'a, Row, Record> {
    rows: &'a dyn Rows<Row>,
    journal: Journal<Record>,
    places: Vec<RecordLocation>,
    key: fn(&Row) -> Option<u64>,
    matches_row: fn(&Record, &Row) -> bool,
    record: fn(Row, Option<Record>) -> Record,
}

impl<Row, Record: JournalRecord> StageResults<'_, Row, Record> {
    /// Writes the stage's output whole, in the order of the rows, then takes the journal away. `each` is shown every record.
    ///
    /// # Errors
    /// A file cannot be read or written, the rows are not those that were asked, or `each` says so; the journal is then still
    /// there.
    pub fn write(self, mut each: impl FnMut(&Record) -> Result<(), DataError>) -> Result<(), DataError> {
        let mut answers = self.journal.records()?;
        let mut output = RecordWriter::create(self.journal.output())?;
        let changed = || changed_meanwhile(self.rows.path());
        let mut places = self.places.iter();
        for row in self.rows.read()? {
            let (row, place) = (row?, *places.next().ok_or_else(changed)?);
            let answer = answers.at(place)?;
            let is_recorded = match &answer {
                Some(answer) => (self.matches_row)(answer, &row),
                None => (self.key)(&row).is_none(),
            };
            if !is_recorded {
                return Err(changed());
            }
            let record = (self.record)(row, answer);
            output.add(&record)?;
            each(&record)?;
        }
        if places.next().is_some() {
            return Err(changed());
        }
        output.commit()?;
        self.journal.remove()
    }
}

/// Calls the service for each row without a record of an earlier run. Each finished record is journalled at once.
async fn call_all<'a, W: RowTask>(
    task: &W,
    rows: &'a dyn Rows<W::Row>,
    journal: Journal<W::Record>,
    max_concurrent: usize,
    progress: &dyn Progress,
) -> Result<StageResults<'a, W::Row, W::Record>, DataError> {
    let mut collector = Collector::new(rows, journal, progress, W::key)?;
    let open: Vec<bool> = collector.places.iter().map(|place| *place == RecordLocation::PENDING).collect();
    let stopped = AtomicBool::new(false);
    let going_on = rows.read()?.enumerate().take_while(|_| !stopped.load(Ordering::Relaxed) && !progress.is_stopped());
    let to_ask = going_on.filter(|(index, _)| open.get(*index).copied().unwrap_or(true));
    let calls = to_ask.map(|(index, row)| async move {
        let asked = match row {
            Ok(row) => task.call(row).await,
            Err(error) => Err(error),
        };
        (index, asked)
    });
    let mut results = std::pin::pin!(futures::stream::iter(calls).buffer_unordered(max_concurrent.max(1)));
    collector.report();
    let mut reason: Option<DataError> = None;
    // After a reason to stop, calls in flight are awaited: they are paid for.
    while let Some((index, record)) = results.next().await {
        match record {
            // The call may not have been made; the next run tries the row again.
            Ok(record) if progress.is_stopped() && has_passing_failure::<W>(&record) => {}
            Ok(record) => collector.take(index, &record, W::outcome(&record))?,
            Err(error) => reason = reason.or(Some(error)),
        }
        reason = reason.or_else(|| collector.reason_to_stop());
        if reason.as_ref().is_some_and(is_silence) {
            break;
        }
        stopped.store(reason.is_some(), Ordering::Relaxed);
    }
    let (journal, places) = reason.map_or_else(|| collector.end(), Err)?;
    Ok(StageResults { rows, journal, places, key: W::key, matches_row: W::matches_row, record: W::record })
}

fn has_passing_failure<W: RowTask>(record: &W::Record) -> bool {
    matches!(W::outcome(record), Some(Err(failure)) if !failure.kind.is_fatal())
}

/// Whether calls in flight are not worth awaiting: the service does not respond.
fn is_silence(reason: &DataError) -> bool {
    match reason {
        DataError::Service(failure) => failure.kind == FailureKind::Down,
        DataError::NoSuccess { failure, .. } => failure.kind == FailureKind::Unreachable,
        _ => false,
    }
}

/// Where results of a stage go while it runs.
struct Collector<'a, T> {
    path: Option<&'a Path>,
    places: Vec<RecordLocation>,
    journal: Journal<T>,
    progress: &'a dyn Progress,
    n_done: usize,
    n_tried: usize,
    /// As many as are tried before all of them having failed alike ends the stage.
    n_first: usize,
    n_succeeded: usize,
    n_succeeded_before: usize,
    failures: Vec<(CallFailure, usize)>,
}

impl<'a, T: JournalRecord> Collector<'a, T> {
    fn new<Row>(
        rows: &'a dyn Rows<Row>,
        journal: Journal<T>,
        progress: &'a dyn Progress,
        key: fn(&Row) -> Option<u64>,
    ) -> Result<Self, DataError> {
        let mut places = Vec::new();
        for row in rows.read()? {
            places.push(match key(&row?) {
                Some(key) => journal.earlier(key).unwrap_or(RecordLocation::PENDING),
                None => RecordLocation::SKIPPED,
            });
        }
        let n_open = places.iter().filter(|place| **place == RecordLocation::PENDING).count();
        let n_succeeded = places.iter().filter(|place| place.is_recorded()).count();
        let (n_done, n_first) = (places.len() - n_open, FIRST_ROWS.min(n_open));
        let (path, n_succeeded_before, failures) = (rows.path(), n_succeeded, Vec::new());
        let n_tried = 0;
        Ok(Self {
            path,
            places,
            journal,
            progress,
            n_done,
            n_tried,
            n_first,
            n_succeeded,
            n_succeeded_before,
            failures,
        })
    }

    fn take(&mut self, index: usize, record: &T, outcome: Outcome<'_>) -> Result<(), DataError> {
        let place = self.journal.append(record)?;
        *self.places.get_mut(index).ok_or_else(|| changed_meanwhile(self.path))? = place;
        self.count(outcome);
        self.report();
        Ok(())
    }

    fn end(self) -> Result<(Journal<T>, Vec<RecordLocation>), DataError> {
        match self.commonest_failure() {
            _ if self.progress.is_stopped() && self.places.contains(&RecordLocation::PENDING) => {
                Err(DataError::Interrupted)
            }
            Some(error) if self.n_succeeded == 0 => Err(error),
            _ if self.places.contains(&RecordLocation::PENDING) => Err(changed_meanwhile(self.path)),
            _ => Ok((self.journal, self.places)),
        }
    }

    fn count(&mut self, outcome: Outcome<'_>) {
        self.n_done += 1;
        self.n_tried += 1;
        self.n_succeeded += usize::from(matches!(outcome, Some(Ok(()))));
        let Some(Err(failure)) = outcome else { return };
        match self.failures.iter_mut().find(|(first, _)| first.kind == failure.kind) {
            Some((_, n)) => *n += 1,
            None => self.failures.push((failure.clone(), 1)),
        }
    }

    fn reason_to_stop(&self) -> Option<DataError> {
        if let Some((failure, _)) = self.failures.iter().find(|(failure, _)| failure.kind.is_fatal()) {
            return Some(DataError::Service(failure.clone()));
        }
        let [(failure, n_alike)] = self.failures.as_slice() else { return None };
        // Where other rows succeeded before, rows may fail for reasons of their own; an unreachable service is no such reason.
        let may_be_theirs = self.n_succeeded_before > 0 && failure.kind != FailureKind::Unreachable;
        let all_alike = self.n_tried == self.n_first && *n_alike == self.n_first;
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
        self.progress.update(self.n_done as u64, self.places.len() as u64, &note);
    }
}

#[cfg(test)]
mod tests;

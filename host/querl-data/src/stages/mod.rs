//! The data stages: rewrite, validate, convert. Each reads rows, writes records in the same order, and reuses the records of earlier
//! runs, so that only failed and missing rows are tried again. No stage holds its rows in memory: it reads them once to find the
//! pending ones, once to make the calls, once to write the output. This file has the engine and stage validate.

mod convert;
mod dataset;
mod rewrite;

pub use convert::{Conversion, ConvertedRow, DroppedRow, convert, first_policy_prompt};
pub use dataset::dataset_rewrites;
pub use rewrite::{LocalRewriteCollector, LocalRewriteStage, rewrite, rewrite_in_batch, teacher_prompts};

use crate::dataset::records::{Journal, JournalRecord, RecordLocation, RecordWriter, Rows, changed_meanwhile};
use crate::error::DataError;
use crate::text::hash_of;
use futures::stream::{FuturesUnordered, StreamExt};
use querl_core::ports::{Progress, RetrievalRequest, Retriever};
use querl_core::records::{CallFailure, FailureKind, RewriteRecord, ValidatedRecord};
use std::path::Path;

/// Number of rows: the stage stops if the first rows to finish all failed with the same kind of failure, and no call in flight succeeds.
const FIRST_ROWS: usize = 8;

/// Outcome of a row: success, a failure, or `None` if there was nothing to do.
type Outcome<'a> = Option<Result<(), &'a CallFailure>>;

/// A record that a stage writes for each input row.
pub trait StageRecord: JournalRecord {
    /// Type of the stage's input rows.
    type Row;

    /// Key of the row's record in the journal; `None` if the stage has nothing to do for the row.
    fn row_key(row: &Self::Row) -> Option<u64>;

    /// Success or failure of the record; `None` if the stage had nothing to do for the row.
    fn outcome(&self) -> Outcome<'_>;

    /// True if this is the record of `row`.
    fn matches_row(&self, row: &Self::Row) -> bool;

    /// Makes the record of a row from the record of this or an earlier run.
    fn of(row: Self::Row, recorded: Option<Self>) -> Self;
}

/// All rows of a stage with the locations of their records, before the output is written.
pub struct StageResults<'a, Record: StageRecord> {
    rows: &'a dyn Rows<Record::Row>,
    journal: Journal<Record>,
    locations: Vec<RecordLocation>,
}

impl<Record: StageRecord> StageResults<'_, Record> {
    /// Writes the stage's output in the order of the rows and removes the journal. `each` is called with every record.
    ///
    /// # Errors
    /// A file cannot be read or written, the rows have changed, or `each` returned an error; the journal is kept in these cases.
    pub fn write(self, mut each: impl FnMut(&Record) -> Result<(), DataError>) -> Result<(), DataError> {
        let mut records = self.journal.records()?;
        let mut output = RecordWriter::create(self.journal.output())?;
        let changed = || changed_meanwhile(self.rows.path());
        let mut locations = self.locations.iter();
        for row in self.rows.read()? {
            let (row, location) = (row?, *locations.next().ok_or_else(changed)?);
            let recorded = records.at(location)?;
            let is_unchanged = match &recorded {
                Some(recorded) => recorded.matches_row(&row),
                None => Record::row_key(&row).is_none(),
            };
            if !is_unchanged {
                return Err(changed());
            }
            let record = Record::of(row, recorded);
            output.add(&record)?;
            each(&record)?;
        }
        if locations.next().is_some() {
            return Err(changed());
        }
        output.commit()?;
        self.journal.remove()
    }
}

/// Calls the service for each row without a record of an earlier run. Each finished record is written to the journal at once.
async fn call_all<'a, Record: StageRecord, F: Future<Output = Result<Record, DataError>>>(
    rows: &'a dyn Rows<Record::Row>,
    call: impl Fn(Record::Row) -> F,
    journal: Journal<Record>,
    max_concurrent: usize,
    progress: &dyn Progress,
) -> Result<StageResults<'a, Record>, DataError> {
    let mut collector = Collector::new(rows, journal, progress)?;
    let pending: Vec<bool> = collector.locations.iter().map(|location| *location == RecordLocation::PENDING).collect();
    let is_pending = |index: usize| pending.get(index).copied().unwrap_or(true);
    let mut rows_left = rows.read()?.enumerate().filter(|(index, _)| is_pending(*index)).fuse();
    let call = &call;
    let start = |(index, row): (usize, Result<Record::Row, DataError>)| async move {
        let record = match row {
            Ok(row) => call(row).await,
            Err(error) => Err(error),
        };
        (index, record)
    };
    let mut in_flight = FuturesUnordered::new();
    collector.report();
    loop {
        // After a reason to stop, calls in flight are awaited, because they are paid for.
        let continues = collector.error.is_none() && !collector.is_futile() && !progress.is_stopped();
        while continues && in_flight.len() < max_concurrent.max(1) {
            let Some(row) = rows_left.next() else { break };
            in_flight.push(start(row));
        }
        let Some((index, record)) = in_flight.next().await else { break };
        match record {
            // The call may not have been made; the next run tries the row again.
            Ok(record)
                if progress.is_stopped()
                    && matches!(record.outcome(), Some(Err(failure)) if !failure.kind.is_fatal()) => {}
            Ok(record) => {
                if let Err(error) = collector.take(index, &record) {
                    // Further records cannot be kept either.
                    collector.error.get_or_insert(error);
                    break;
                }
            }
            Err(error) => {
                collector.error.get_or_insert(error);
            }
        }
        if collector.is_service_down() {
            break;
        }
    }
    let (journal, locations) = collector.end()?;
    Ok(StageResults { rows, journal, locations })
}

/// False if no request was sent, because of the circuit breaker or the budget.
fn was_called(failure: &CallFailure) -> bool {
    !matches!(failure.kind, FailureKind::Down | FailureKind::OverBudget)
}

/// Collects the results of a running stage.
struct Collector<'a, T> {
    path: Option<&'a Path>,
    locations: Vec<RecordLocation>,
    journal: Journal<T>,
    progress: &'a dyn Progress,
    n_done: usize,
    n_tried: usize,
    /// The stage ends if this many rows were tried, all failed alike, and no call in flight succeeds.
    n_first: usize,
    n_succeeded: usize,
    n_succeeded_before: usize,
    /// Is not set after `error`.
    first_failed_alike: bool,
    /// The first error after which no call is made, whatever the calls in flight return.
    error: Option<DataError>,
    failures: Vec<(CallFailure, usize)>,
}

impl<'a, T: StageRecord> Collector<'a, T> {
    fn new(rows: &'a dyn Rows<T::Row>, journal: Journal<T>, progress: &'a dyn Progress) -> Result<Self, DataError> {
        let mut locations = Vec::new();
        for row in rows.read()? {
            locations.push(match T::row_key(&row?) {
                Some(key) => journal.earlier(key).unwrap_or(RecordLocation::PENDING),
                None => RecordLocation::SKIPPED,
            });
        }
        let n_pending = locations.iter().filter(|location| **location == RecordLocation::PENDING).count();
        let n_succeeded = locations.iter().filter(|location| location.is_recorded()).count();
        Ok(Self {
            path: rows.path(),
            n_done: locations.len() - n_pending,
            locations,
            journal,
            progress,
            n_tried: 0,
            n_first: FIRST_ROWS.min(n_pending),
            n_succeeded,
            n_succeeded_before: n_succeeded,
            first_failed_alike: false,
            error: None,
            failures: Vec::new(),
        })
    }

    fn take(&mut self, index: usize, record: &T) -> Result<(), DataError> {
        let location = self.journal.append(record)?;
        *self.locations.get_mut(index).ok_or_else(|| changed_meanwhile(self.path))? = location;
        self.count(record.outcome());
        self.report();
        Ok(())
    }

    /// The first reason for which the stage stopped, or its result.
    fn end(self) -> Result<(Journal<T>, Vec<RecordLocation>), DataError> {
        let is_incomplete = self.locations.contains(&RecordLocation::PENDING);
        let (is_futile, commonest) = (self.is_futile(), self.commonest_failure());
        match (self.error, commonest) {
            (_, Some(failure)) if is_futile => Err(failure),
            (Some(error), commonest) => Err(Self::with_failures_before_budget(error, commonest)),
            _ if self.progress.is_stopped() && is_incomplete => Err(DataError::Interrupted),
            (None, Some(failure)) if self.n_succeeded == 0 => Err(failure),
            _ if is_incomplete => Err(changed_meanwhile(self.path)),
            _ => Ok((self.journal, self.locations)),
        }
    }

    /// For a spent budget, names the failures that it may have been spent on.
    fn with_failures_before_budget(error: DataError, commonest: Option<DataError>) -> DataError {
        match (error, commonest) {
            (
                DataError::Service(CallFailure { kind: kind @ FailureKind::OverBudget, message }),
                Some(DataError::NoSuccess { n_failed, failure, .. }),
            ) if !message.contains(&failure.message) => {
                let message = format!("{message}; {n_failed} row(s) failed, most often: {failure}");
                DataError::Service(CallFailure { kind, message })
            }
            (error, _) => error,
        }
    }

    fn count(&mut self, outcome: Outcome<'_>) {
        // Rows that were not called are neither done nor failed.
        let is_tried = outcome.and_then(Result::err).is_none_or(was_called);
        self.n_done += usize::from(is_tried);
        self.n_tried += usize::from(is_tried);
        self.n_succeeded += usize::from(matches!(outcome, Some(Ok(()))));
        let Some(Err(failure)) = outcome else { return };
        match self.failures.iter_mut().find(|(first, _)| first.kind == failure.kind) {
            Some((_, n)) => *n += 1,
            None => self.failures.push((failure.clone(), 1)),
        }
        if failure.kind.is_fatal() {
            self.error.get_or_insert_with(|| DataError::Service(failure.clone()));
        }
        // If other rows succeeded before, these rows may fail individually, unless the service is unreachable.
        let may_be_their_fault = self.n_succeeded_before > 0 && failure.kind != FailureKind::Unreachable;
        let all_alike = matches!(self.failures.as_slice(), [(_, n_alike)] if *n_alike == self.n_first);
        let is_first = self.n_tried == self.n_first && self.error.is_none();
        self.first_failed_alike |= all_alike && is_first && !may_be_their_fault;
    }

    /// Changes while calls are in flight: a success shows that the service can answer.
    fn is_futile(&self) -> bool {
        self.first_failed_alike && self.n_succeeded == self.n_succeeded_before
    }

    /// True if calls in flight are not worth awaiting: the service does not respond.
    fn is_service_down(&self) -> bool {
        let is_down = self.failures.iter().any(|(failure, _)| failure.kind == FailureKind::Down);
        let is_first = |kind| self.failures.first().is_some_and(|(failure, _)| failure.kind == kind);
        is_down || (self.is_futile() && is_first(FailureKind::Unreachable))
    }

    fn commonest_failure(&self) -> Option<DataError> {
        // On ties, the first one.
        let called = self.failures.iter().rev().filter(|(failure, _)| was_called(failure));
        let (failure, n_alike) = called.max_by_key(|(_, n)| *n)?;
        Some(DataError::NoSuccess { n_failed: self.n_failed(), n_alike: *n_alike, failure: failure.clone() })
    }

    fn n_failed(&self) -> usize {
        self.failures.iter().filter(|(failure, _)| was_called(failure)).map(|(_, n)| n).sum()
    }

    fn report(&self) {
        let n_failed = self.n_failed();
        let note = if n_failed == 0 { String::new() } else { format!("{n_failed} failed") };
        self.progress.update(self.n_done as u64, self.locations.len() as u64, &note);
    }
}

/// Stage validate: retrieves passages for every rewrite. Rewrites that have hits in `journal` are skipped; failed ones are retried. A row
/// without a rewrite is copied. The result writes the stage's output, with one record per row in order.
///
/// # Errors
/// The service rejects the API key, the first rows all failed alike, no row succeeded, or the journal cannot be written. Finished
/// records are in the journal.
pub async fn validate<'a>(
    rewrites: &'a dyn Rows<RewriteRecord>,
    retriever: &dyn Retriever,
    journal: Journal<ValidatedRecord>,
    max_concurrent: usize,
    progress: &dyn Progress,
) -> Result<StageResults<'a, ValidatedRecord>, DataError> {
    let retrieve = |rewritten: RewriteRecord| async move {
        let retrieval = match &rewritten.rewrite {
            Ok(rewrite) => {
                let context = rewritten.query.context();
                let original_query = &rewritten.query.original_query;
                let request = RetrievalRequest { original_query, context: &context, rewritten_query: &rewrite.text };
                Some(retriever.retrieve(request).await)
            }
            Err(_) => None,
        };
        Ok(ValidatedRecord { rewritten, retrieval })
    };
    call_all(rewrites, retrieve, journal, max_concurrent, progress).await
}

impl JournalRecord for ValidatedRecord {
    fn key(&self) -> Option<u64> {
        matches!(self.retrieval, Some(Ok(_))).then(|| Self::row_key(&self.rewritten)).flatten()
    }
}

impl StageRecord for ValidatedRecord {
    type Row = RewriteRecord;

    fn row_key(row: &RewriteRecord) -> Option<u64> {
        row.rewrite.as_ref().ok().map(|rewrite| hash_of(&(&row.query.id, &rewrite.text)))
    }

    fn outcome(&self) -> Outcome<'_> {
        Some(self.retrieval.as_ref()?.as_ref().map(|_| ()))
    }

    fn matches_row(&self, row: &RewriteRecord) -> bool {
        let text = |record: &RewriteRecord| record.rewrite.as_ref().ok().map(|rewrite| rewrite.text.clone());
        self.rewritten.query.id == row.query.id && text(&self.rewritten) == text(row)
    }

    fn of(rewritten: RewriteRecord, recorded: Option<Self>) -> Self {
        Self { rewritten, retrieval: recorded.and_then(|record| record.retrieval) }
    }
}

#[cfg(test)]
mod tests;

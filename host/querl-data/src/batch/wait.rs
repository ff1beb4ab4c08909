//! Waits for the end of a batch: a day of questions, of which any may fail.

use super::note::Batch;
use super::{BatchTeacher, Handed};
use crate::calls::{Call, Charge};
use crate::error::DataError;
use querl_core::ports::Progress;
use querl_core::records::{CallFailure, FailureKind};
use serde_json::Value;
use std::time::{Duration, Instant, SystemTime};

/// How much is borne while a batch is waited for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// With a service that does not answer.
    pub(super) silence: Duration,
    /// Refusals in a row: a proxy may say what the service would not.
    pub(super) n_refusals: u32,
    /// With a batch, from its file's upload on. It should take a day, and its end a while.
    pub(super) age: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        let hour = Duration::from_secs(3600);
        Self { silence: hour, n_refusals: 3, age: 72 * hour }
    }
}

/// Questions in a row that nobody answered.
#[derive(Debug, Default)]
struct Unanswered {
    since: Option<Instant>,
    n_refused: u32,
}

impl Unanswered {
    /// Whether another question may help.
    fn is_bearable(&mut self, failure: &CallFailure, patience: Patience) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        match failure.kind {
            FailureKind::Unauthorized => false,
            FailureKind::Rejected | FailureKind::InvalidResponse => {
                self.n_refused += 1;
                self.n_refused < patience.n_refusals
            }
            // Refusals count in a row. `since` stays: a service that is in turn silent and of no use is not asked for ever.
            _ => {
                self.n_refused = 0;
                since.elapsed() < patience.silence
            }
        }
    }
}

impl BatchTeacher {
    /// What the service says of a batch at its end. `n_before` of `n_rows` are in batches that have ended.
    ///
    /// # Errors
    /// The batch failed, and is then no longer noted; nobody says what became of it; or it does not end.
    pub(super) async fn wait(
        &self,
        handed: &mut Handed<'_>,
        index: usize,
        (n_before, n_rows): (u64, u64),
        progress: &dyn Progress,
    ) -> Result<Value, DataError> {
        let batch = handed.note.batches[index].clone();
        let id = batch.batch_id.clone().unwrap_or_default();
        // What a service counts may be any number.
        let done = |n_done: u64| n_before.saturating_add(n_done).min(n_rows);
        let (mut unanswered, mut n_done) = (Unanswered::default(), 0);
        loop {
            let now = self.once.call(&Call::get(&format!("/batches/{id}")), Charge::FREE).await;
            let now = now.and_then(|answer| Ok((self.text(&answer.body, "status")?, answer.body)));
            match now {
                Ok((status, now)) => {
                    unanswered = Unanswered::default();
                    n_done = now.pointer("/request_counts/completed").and_then(Value::as_u64).unwrap_or(n_done);
                    progress.update(done(n_done), n_rows, &format!("batch {id} {status}"));
                    match status.as_str() {
                        "completed" | "expired" | "cancelled" => return Ok(now),
                        "failed" => return Err(failed(handed, index, &id, &now)),
                        _ => self.check_age(handed, &batch, &status)?,
                    }
                }
                Err(failure) => {
                    if !unanswered.is_bearable(&failure, self.patience) {
                        return Err(handed.stopped(&format!("what became of batch {id} is unknown: {failure}")));
                    }
                    tracing::debug!("{failure}; batch {id} is asked for again");
                    let note = format!("batch {id}: {}; asked again", failure.kind);
                    progress.update(done(n_done), n_rows, &note);
                }
            }
            tokio::time::sleep(self.poll).await;
        }
    }

    fn check_age(&self, handed: &Handed<'_>, batch: &Batch, status: &str) -> Result<(), DataError> {
        let uploaded = Duration::from_secs(batch.uploaded_at);
        let uploaded = SystemTime::UNIX_EPOCH.checked_add(uploaded).filter(|_| batch.uploaded_at > 0);
        let age = uploaded.and_then(|uploaded| uploaded.elapsed().ok()).unwrap_or_default();
        if age < self.patience.age {
            return Ok(());
        }
        let (id, hours) = (batch.batch_id.as_deref().unwrap_or_default(), age.as_secs() / 3600);
        Err(handed.stopped(&format!("batch {id} is `{status}` after {hours} hours; cancel it at the service")))
    }
}

/// Nothing of it is paid, and its rows are handed over anew by the next run.
fn failed(handed: &mut Handed<'_>, index: usize, id: &str, now: &Value) -> DataError {
    let said = now.pointer("/errors/data/0/message").and_then(Value::as_str).unwrap_or("no message");
    match handed.drop_batch(index) {
        Ok(()) => DataError::Batch { problem: format!("batch {id} failed: {said}"), kept: handed.kept() },
        Err(error) => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_end_the_wait_only_where_no_other_failure_is_between_them() {
        use FailureKind::{Rejected, Timeout};
        let bears = |kinds: &[FailureKind]| {
            let mut unanswered = Unanswered::default();
            let failure = |kind| CallFailure { kind, message: String::new() };
            kinds.iter().all(|kind| unanswered.is_bearable(&failure(*kind), Patience::default()))
        };
        assert!(bears(&[Rejected, Timeout, Rejected, Timeout, Rejected, Rejected]));
        assert!(!bears(&[Timeout, Rejected, Rejected, Rejected]));
    }
}

//! Has the service work on a file, once: a request whose answer was lost may have been taken all the same, and a second batch
//! over a file is paid for like the first.

use super::state::Batch;
use super::{BatchTeacher, Handed};
use crate::client::http::{Call, Charge};
use crate::error::DataError;
use querl_core::ports::Progress;
use querl_core::records::{CallFailure, FailureKind};
use serde_json::{Value, json};
use std::time::{Duration, Instant, SystemTime};

/// A service's list of batches shows a new one after a moment. Looked at so often, with pauses that double.
const N_LOOKS: u32 = 6;

/// Before a service that has too much to do is asked again, where it does not say when.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Of a page of the list; the most that OpenAI gives.
const PAGE: usize = 100;

/// A list that has more pages is taken for one that never ends.
const MOST_PAGES: usize = 10_000;

/// What became of a request to work on a file.
enum Begun {
    Batch(String),
    /// The service said no: it works on nothing.
    Refused(CallFailure),
    /// Perhaps it does.
    Unknown(CallFailure),
}

impl BatchTeacher {
    /// Sees to it that the service works on each file.
    ///
    /// # Errors
    /// It refuses to, what it does cannot be learnt, or the note cannot be written.
    pub(super) async fn begin_all(&self, handed: &mut Handed<'_>) -> Result<(), DataError> {
        for index in 0..handed.note.batches.len() {
            if handed.note.batches[index].batch_id.is_none() {
                self.begin(handed, index).await?;
            }
        }
        Ok(())
    }

    pub(super) async fn begin(&self, handed: &mut Handed<'_>, index: usize) -> Result<(), DataError> {
        let (mut n_left, mut failed) = (self.max_retries, None::<CallFailure>);
        loop {
            let batch = handed.note.batches[index].clone();
            if batch.n_unknown > 0
                && let Some(id) = self.look_again_for(&batch).await.map_err(|failure| handed.unlisted(&failure))?
            {
                return handed.change(index, |batch| batch.batch_id = Some(id));
            }
            if let Some(failure) = failed.take() {
                n_left = n_left.checked_sub(1).ok_or_else(|| handed.stopped(&failure.to_string()))?;
            }
            self.count_lost(handed, index)?;
            // Before it is sent: what a kill leaves is looked for.
            handed.change(index, |batch| batch.n_unknown += 1)?;
            failed = Some(match self.ask_to_begin(&batch).await {
                Begun::Batch(id) => return handed.change(index, |batch| batch.batch_id = Some(id)),
                Begun::Refused(failure) => {
                    handed.change(index, |batch| batch.n_unknown -= 1)?;
                    if failure.kind != FailureKind::RateLimited {
                        return Err(self.refused(handed, index, &failure));
                    }
                    tokio::time::sleep(self.poll.min(LONGEST_PAUSE)).await;
                    failure
                }
                Begun::Unknown(failure) => failure,
            });
        }
    }

    async fn ask_to_begin(&self, batch: &Batch) -> Begun {
        let body =
            json!({"input_file_id": batch.file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"});
        let failure = match self.once.call(&Call::post("/batches", &body), Charge::FREE).await {
            Ok(answer) => match self.text(&answer.body, "id") {
                Ok(id) => return Begun::Batch(id),
                Err(failure) => return Begun::Unknown(failure),
            },
            Err(failure) => failure,
        };
        match failure.kind {
            FailureKind::Unauthorized | FailureKind::RateLimited => Begun::Refused(failure),
            // 409 is one of them: the service may say no to a second one because it has the first.
            FailureKind::Rejected => match self.look_for(batch).await {
                Ok(Some(id)) => Begun::Batch(id),
                Ok(None) => Begun::Refused(failure),
                Err(_) => Begun::Unknown(failure),
            },
            _ => Begun::Unknown(failure),
        }
    }

    /// A file that the service refuses to work on, and surely never worked on, is of no more use.
    fn refused(&self, handed: &mut Handed<'_>, index: usize, failure: &CallFailure) -> DataError {
        if failure.kind == FailureKind::Rejected && handed.note.batches[index].n_unknown == 0 {
            if let Err(error) = handed.drop_batch(index) {
                return error;
            }
            return DataError::Batch { problem: failure.to_string(), kept: handed.kept() };
        }
        handed.stopped(&failure.to_string())
    }

    /// Puts on the account what a batch that nobody finds may cost, beside what the next one may.
    fn count_lost(&self, handed: &mut Handed<'_>, index: usize) -> Result<(), DataError> {
        let Batch { n_unknown, n_lost, most, .. } = handed.note.batches[index];
        if n_lost >= n_unknown {
            return Ok(());
        }
        self.account.count_lost(&self.provider, u64::from(n_unknown - n_lost), most);
        self.account.save()?;
        handed.change(index, |batch| batch.n_lost = n_unknown)?;
        handed.reserved[index] = None;
        handed.reserved[index] = Some(self.account.reserve_for_batch(most).map_err(DataError::Service)?);
        Ok(())
    }

    /// The batch over a file, if the service has one now or in a moment.
    async fn look_again_for(&self, batch: &Batch) -> Result<Option<String>, CallFailure> {
        let mut pause = self.poll.min(Duration::from_secs(1));
        for _ in 1..N_LOOKS {
            if let Some(id) = self.look_for(batch).await? {
                return Ok(Some(id));
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        self.look_for(batch).await
    }

    /// The batch over a file, if the service lists one.
    async fn look_for(&self, batch: &Batch) -> Result<Option<String>, CallFailure> {
        let mut path = format!("/batches?limit={PAGE}");
        for _ in 0..MOST_PAGES {
            let page = self.again.call(&Call::get(&path), Charge::FREE).await?.body;
            let listed = page["data"].as_array();
            let listed = listed
                .ok_or_else(|| self.failure(FailureKind::InvalidResponse, "the list of batches has no `data`"))?;
            let ours = listed.iter().filter(|one| one["input_file_id"] == *batch.file_id);
            // One that still works, or did, before one that never will.
            if let Some(ours) = ours.max_by_key(|one| one["status"] != "failed" && one["status"] != "cancelled") {
                return self.text(ours, "id").map(Some);
            }
            let is_older = |one: &Value| one["created_at"].as_u64().is_some_and(|at| at < batch.uploaded_at);
            let last = listed.last().and_then(|one| one["id"].as_str());
            match last.filter(|_| page["has_more"] == true && !listed.iter().all(is_older)) {
                Some(last) => path = format!("/batches?limit={PAGE}&after={last}"),
                None => return Ok(None),
            }
        }
        Err(self.failure(FailureKind::InvalidResponse, "the list of batches does not end"))
    }
}

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

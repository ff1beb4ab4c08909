//! Creates each batch once and polls it until it has ended. If the response to a creation request is lost, the service's list of batches
//! is searched before another request, since a second batch of the same file would be paid for again.

use super::{Batch, BatchTeacher, SubmittedBatches};
use crate::client::http::Call;
use crate::error::DataError;
use querl_core::ports::Progress;
use querl_core::records::{CallFailure, FailureKind};
use serde_json::{Value, json};
use std::time::{Duration, Instant, SystemTime};

/// Number of searches for a new batch in the list of batches, where it appears with a delay; the pauses double.
const LIST_ATTEMPTS: u32 = 6;

/// Maximum pause before another creation request after status 429.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Page size of the list, OpenAI's maximum.
const PAGE: usize = 100;

/// Maximum number of pages; a longer list is treated as endless.
const MAX_PAGES: usize = 10_000;

enum SubmitOutcome {
    Batch(String),
    Refused(CallFailure),
    Unknown(CallFailure),
}

impl BatchTeacher {
    /// Creates a batch for each uploaded file that has none.
    pub(super) async fn create_missing(&self, submitted: &mut SubmittedBatches<'_>) -> Result<(), DataError> {
        for index in 0..submitted.state.batches.len() {
            if submitted.state.batches[index].batch_id.is_none() {
                self.create_batch(submitted, index).await?;
            }
        }
        Ok(())
    }

    pub(super) async fn create_batch(
        &self,
        submitted: &mut SubmittedBatches<'_>,
        index: usize,
    ) -> Result<(), DataError> {
        let (mut n_left, mut failed) = (self.max_retries, None::<CallFailure>);
        loop {
            let batch = submitted.state.batches[index].clone();
            if batch.n_unknown > 0
                && let Some(id) =
                    self.find_batch_with_retries(&batch).await.map_err(|failure| submitted.list_failed(&failure))?
            {
                return submitted.change(index, |batch| batch.batch_id = Some(id));
            }
            if let Some(failure) = failed.take() {
                n_left = n_left.checked_sub(1).ok_or_else(|| submitted.stopped(&failure.to_string()))?;
            }
            self.count_lost(submitted, index)?;
            // Written before the request, so that after a kill the batch is searched for.
            submitted.change(index, |batch| batch.n_unknown += 1)?;
            failed = Some(match self.post_batch(&batch).await {
                SubmitOutcome::Batch(id) => return submitted.change(index, |batch| batch.batch_id = Some(id)),
                SubmitOutcome::Refused(failure) => {
                    submitted.change(index, |batch| batch.n_unknown -= 1)?;
                    if failure.kind != FailureKind::RateLimited {
                        return Err(self.refused(submitted, index, &failure));
                    }
                    tokio::time::sleep(self.poll.min(LONGEST_PAUSE)).await;
                    failure
                }
                SubmitOutcome::Unknown(failure) => failure,
            });
        }
    }

    async fn post_batch(&self, batch: &Batch) -> SubmitOutcome {
        let body =
            json!({"input_file_id": batch.file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"});
        let failure = match self.once.send(&Call::post("/batches", &body)).await {
            Ok(response) => match self.text(&response.body, "id") {
                Ok(id) => return SubmitOutcome::Batch(id),
                Err(failure) => return SubmitOutcome::Unknown(failure),
            },
            Err(failure) => failure,
        };
        match failure.kind {
            FailureKind::Unauthorized | FailureKind::RateLimited => SubmitOutcome::Refused(failure),
            // 409 is a rejection, too: the service may already have the batch.
            FailureKind::Rejected => match self.find_batch(batch).await {
                Ok(Some(id)) => SubmitOutcome::Batch(id),
                Ok(None) => SubmitOutcome::Refused(failure),
                Err(_) => SubmitOutcome::Unknown(failure),
            },
            _ => SubmitOutcome::Unknown(failure),
        }
    }

    /// Drops a file that the service rejects and never had a batch for.
    fn refused(&self, submitted: &mut SubmittedBatches<'_>, index: usize, failure: &CallFailure) -> DataError {
        if failure.kind == FailureKind::Rejected && submitted.state.batches[index].n_unknown == 0 {
            if let Err(error) = submitted.drop_batch(index) {
                return error;
            }
            return DataError::Batch { problem: failure.to_string(), remedy: submitted.remedy() };
        }
        submitted.stopped(&failure.to_string())
    }

    /// Counts the maximum cost of a batch that was not found as lost, and reserves that of the next.
    fn count_lost(&self, submitted: &mut SubmittedBatches<'_>, index: usize) -> Result<(), DataError> {
        let Batch { n_unknown, n_lost, max_cost, .. } = submitted.state.batches[index];
        if n_lost >= n_unknown {
            return Ok(());
        }
        self.tracker.count_lost(&self.provider, u64::from(n_unknown - n_lost), max_cost);
        self.tracker.save()?;
        submitted.change(index, |batch| batch.n_lost = n_unknown)?;
        submitted.reserved[index] = None;
        submitted.reserved[index] = Some(self.tracker.reserve_for_batch(max_cost).map_err(DataError::Service)?);
        Ok(())
    }

    async fn find_batch_with_retries(&self, batch: &Batch) -> Result<Option<String>, CallFailure> {
        let mut pause = self.poll.min(Duration::from_secs(1));
        for _ in 1..LIST_ATTEMPTS {
            if let Some(id) = self.find_batch(batch).await? {
                return Ok(Some(id));
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        self.find_batch(batch).await
    }

    async fn find_batch(&self, batch: &Batch) -> Result<Option<String>, CallFailure> {
        let mut path = format!("/batches?limit={PAGE}");
        for _ in 0..MAX_PAGES {
            let page = self.retrying.send(&Call::get(&path)).await?.body;
            let listed = page["data"].as_array();
            let listed = listed
                .ok_or_else(|| self.failure(FailureKind::InvalidResponse, "the list of batches has no `data`"))?;
            let ours = listed.iter().filter(|one| one["input_file_id"] == *batch.file_id);
            // Prefers a batch that can have responses to a failed one.
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

#[derive(Debug, Clone, Copy)]
pub(super) struct PollLimits {
    pub(super) silence: Duration,
    pub(super) n_refusals: u32,
    pub(super) age: Duration,
}

impl Default for PollLimits {
    fn default() -> Self {
        let hour = Duration::from_secs(3600);
        Self { silence: hour, n_refusals: 3, age: 72 * hour }
    }
}

/// Consecutive polls without a status.
#[derive(Debug, Default)]
struct FailedPolls {
    since: Option<Instant>,
    n_refused: u32,
}

impl FailedPolls {
    fn is_tolerable(&mut self, failure: &CallFailure, poll_limits: PollLimits) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        match failure.kind {
            FailureKind::Unauthorized => false,
            FailureKind::Rejected | FailureKind::InvalidResponse => {
                self.n_refused += 1;
                self.n_refused < poll_limits.n_refusals
            }
            // `since` is kept, so that alternating timeouts and rejections do not continue forever.
            _ => {
                self.n_refused = 0;
                since.elapsed() < poll_limits.silence
            }
        }
    }
}

impl BatchTeacher {
    /// Polls a batch until it has ended and returns its last status. For progress: `n_before` of `n_rows` rows are in batches that ended
    /// earlier.
    pub(super) async fn wait(
        &self,
        submitted: &mut SubmittedBatches<'_>,
        index: usize,
        (n_before, n_rows): (u64, u64),
        progress: &dyn Progress,
    ) -> Result<Value, DataError> {
        let batch = submitted.state.batches[index].clone();
        let id = batch.batch_id.clone().unwrap_or_default();
        // The counts of a service may be implausible.
        let done = |n_done: u64| n_before.saturating_add(n_done).min(n_rows);
        let (mut failed_polls, mut n_done) = (FailedPolls::default(), 0);
        loop {
            let now = self.once.send(&Call::get(&format!("/batches/{id}"))).await;
            let now = now.and_then(|response| Ok((self.text(&response.body, "status")?, response.body)));
            match now {
                Ok((status, now)) => {
                    failed_polls = FailedPolls::default();
                    n_done = now.pointer("/request_counts/completed").and_then(Value::as_u64).unwrap_or(n_done);
                    progress.update(done(n_done), n_rows, &format!("batch {id} {status}"));
                    match status.as_str() {
                        "completed" | "expired" | "cancelled" => return Ok(now),
                        "failed" => return Err(failed(submitted, index, &id, &now)),
                        _ => self.check_age(submitted, &batch, &status)?,
                    }
                }
                Err(failure) => {
                    if !failed_polls.is_tolerable(&failure, self.poll_limits) {
                        return Err(submitted.stopped(&format!("what became of batch {id} is unknown: {failure}")));
                    }
                    tracing::debug!("{failure}; batch {id} is polled again");
                    let note = format!("batch {id}: {}; polled again", failure.kind);
                    progress.update(done(n_done), n_rows, &note);
                }
            }
            tokio::time::sleep(self.poll).await;
        }
    }

    fn check_age(&self, submitted: &SubmittedBatches<'_>, batch: &Batch, status: &str) -> Result<(), DataError> {
        let uploaded = Duration::from_secs(batch.uploaded_at);
        let uploaded = SystemTime::UNIX_EPOCH.checked_add(uploaded).filter(|_| batch.uploaded_at > 0);
        let age = uploaded.and_then(|uploaded| uploaded.elapsed().ok()).unwrap_or_default();
        if age < self.poll_limits.age {
            return Ok(());
        }
        let (id, hours) = (batch.batch_id.as_deref().unwrap_or_default(), age.as_secs() / 3600);
        Err(submitted.stopped(&format!("batch {id} is `{status}` after {hours} hours; cancel it at the service")))
    }
}

fn failed(submitted: &mut SubmittedBatches<'_>, index: usize, id: &str, now: &Value) -> DataError {
    let message = now.pointer("/errors/data/0/message").and_then(Value::as_str).unwrap_or("no message");
    match submitted.drop_batch(index) {
        Ok(()) => DataError::Batch { problem: format!("batch {id} failed: {message}"), remedy: submitted.remedy() },
        Err(error) => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_consecutive_rejections_end_polling() {
        use FailureKind::{Rejected, Timeout};
        let tolerates = |kinds: &[FailureKind]| {
            let mut failed_polls = FailedPolls::default();
            let failure = |kind| CallFailure { kind, message: String::new() };
            kinds.iter().all(|kind| failed_polls.is_tolerable(&failure(*kind), PollLimits::default()))
        };
        assert!(tolerates(&[Rejected, Timeout, Rejected, Timeout, Rejected, Rejected]));
        assert!(!tolerates(&[Timeout, Rejected, Rejected, Rejected]));
    }
}

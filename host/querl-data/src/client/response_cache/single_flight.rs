//! Single-flight requests: concurrent identical requests share one call.
//!
//! If the caller that made the call stops waiting (its deadline passes, its client disconnects), the next waiting caller makes the
//! call with its own future and its own deadline. `moka::future::Cache::get_with` has the same rule, but brings eviction, a second
//! store next to the response cache and 20 crates for these 60 lines, and drops failures, which must reach every waiting caller.

use super::CacheTable;
use querl_core::records::CallFailure;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::OnceCell;

/// A response or its failure. The first caller initialises it; if that caller is cancelled, the next one does.
type Cell = OnceCell<Result<Vec<u8>, CallFailure>>;
type Key = (CacheTable, String);

/// All requests of a run in flight.
#[derive(Debug, Default)]
pub(crate) struct InFlightRequests(Mutex<HashMap<Key, Entry>>);

#[derive(Debug, Default)]
struct Entry {
    n_waiting: usize,
    cell: Arc<Cell>,
}

/// One caller of a request in flight. The entry is removed once it has a response or no caller is left.
pub(super) struct InFlightRequest<'a> {
    in_flight: &'a InFlightRequests,
    key: Key,
    cell: Arc<Cell>,
}

impl InFlightRequests {
    pub(super) fn join(&self, table: CacheTable, key: &str) -> InFlightRequest<'_> {
        let key = (table, key.to_owned());
        let mut entries = self.entries();
        let question = entries.entry(key.clone()).or_default();
        question.n_waiting += 1;
        InFlightRequest { in_flight: self, cell: question.cell.clone(), key }
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<Key, Entry>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl InFlightRequest<'_> {
    /// The outcome of `call`, or of the call of an earlier caller.
    pub(super) async fn answer(
        &self,
        call: impl Future<Output = Result<Vec<u8>, CallFailure>>,
    ) -> &Result<Vec<u8>, CallFailure> {
        self.cell.get_or_init(|| call).await
    }
}

impl Drop for InFlightRequest<'_> {
    fn drop(&mut self) {
        let mut entries = self.in_flight.entries();
        // The entry may be a later one with the same key.
        let Some(question) = entries.get_mut(&self.key).filter(|question| Arc::ptr_eq(&question.cell, &self.cell))
        else {
            return;
        };
        question.n_waiting -= 1;
        if question.n_waiting == 0 || self.cell.initialized() {
            entries.remove(&self.key);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use futures::future::{pending, ready};
    use querl_core::records::FailureKind;

    fn join(in_flight: &InFlightRequests) -> InFlightRequest<'_> {
        in_flight.join(CacheTable::Judgements, "a")
    }

    fn down() -> CallFailure {
        CallFailure { kind: FailureKind::Unreachable, message: "down".into() }
    }

    #[tokio::test]
    async fn one_is_asked_and_all_have_the_answer_or_the_failure() {
        let in_flight = InFlightRequests::default();
        for answer in [Ok(b"one".to_vec()), Err(down())] {
            let (first, second) = (join(&in_flight), join(&in_flight));
            assert_eq!(first.answer(ready(answer.clone())).await, &answer);
            assert_eq!(second.answer(async { unreachable!() }).await, &answer);
            drop((first, second));
        }
        assert!(in_flight.entries().is_empty());
    }

    /// Regression: a request that stays unanswered for others because its caller's deadline passed.
    #[tokio::test]
    async fn who_stops_waiting_leaves_the_question_to_the_next() {
        let in_flight = InFlightRequests::default();
        let (first, second) = (join(&in_flight), join(&in_flight));
        let mut given_up = Box::pin(first.answer(pending()));
        assert!(given_up.as_mut().now_or_never().is_none());
        let mut waiting = Box::pin(second.answer(ready(Ok(Vec::new()))));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(given_up);
        drop(first);
        assert_eq!(waiting.await, &Ok(Vec::new()));
        drop(second);
        assert!(in_flight.entries().is_empty());
    }

    #[tokio::test]
    async fn same_key_of_another_table_is_another_question() {
        let in_flight = InFlightRequests::default();
        let (first, second) = (join(&in_flight), in_flight.join(CacheTable::Rewrites, "a"));
        assert!(first.answer(pending()).now_or_never().is_none());
        assert!(second.answer(ready(Err(down()))).now_or_never().is_some());
    }
}

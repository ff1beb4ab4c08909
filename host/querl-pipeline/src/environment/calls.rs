//! Calls to retrieval and judge: concurrent up to a limit, each with a deadline, timed, and memoized for the length of a run.

use futures::StreamExt;
use querl_core::records::{CallFailure, Context, FailureKind, QueryRow};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum CallError {
    Failed(CallFailure),
    DeadlineExceeded(Duration),
}

impl CallError {
    /// The call's failure, if the call exceeded the deadline.
    pub(crate) fn deadline_failure(&self) -> Option<CallFailure> {
        matches!(self, Self::DeadlineExceeded(_)).then(|| self.clone().into_failure())
    }

    pub(crate) fn into_failure(self) -> CallFailure {
        match self {
            Self::Failed(failure) => failure,
            Self::DeadlineExceeded(deadline) => {
                let message = format!("no response within rl.episode_deadline_ms = {}", deadline.as_millis());
                CallFailure { kind: FailureKind::Timeout, message }
            }
        }
    }
}

/// Awaits `call` for at most the deadline.
pub(crate) async fn within<T>(
    deadline: Option<Duration>,
    call: impl Future<Output = Result<T, CallFailure>>,
) -> Result<T, CallError> {
    let Some(deadline) = deadline else { return call.await.map_err(CallError::Failed) };
    match querl_data::within_deadline(deadline, call).await {
        Some(answer) => answer.map_err(CallError::Failed),
        None => Err(CallError::DeadlineExceeded(deadline)),
    }
}

/// Runs `calls`, at most `n_at_once` concurrently. Returns the responses in order, and the wall-clock seconds of all calls together.
pub(crate) async fn all<F: Future>(calls: Vec<F>, n_at_once: usize) -> (Vec<F::Output>, f64) {
    // The body runs at the first poll, so that the clock starts with the calls.
    let started = Instant::now();
    // Unordered, so that a late call does not block the slots of finished calls.
    let numbered = calls.into_iter().enumerate().map(|(index, call)| async move { (index, call.await) });
    let mut answers: Vec<(usize, F::Output)> =
        futures::stream::iter(numbered).buffer_unordered(n_at_once.max(1)).collect().await;
    answers.sort_unstable_by_key(|(index, _)| *index);
    (answers.into_iter().map(|(_, answer)| answer).collect(), started.elapsed().as_secs_f64())
}

/// Maximum number of cached responses; a fuller cache is cleared at the next look-up.
const MAX_CACHED_RESPONSES: usize = 100_000;

/// Cache key of a call: a query, a rewrite, and the rewrite that it is compared with.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CallKey<'a> {
    pub query: &'a QueryRow,
    pub context: &'a Context,
    pub rewrite: &'a str,
    pub against: Option<&'a str>,
}

type Key = (String, String, Option<String>);

impl CallKey<'_> {
    fn key(&self) -> Key {
        (self.query.id.clone(), self.rewrite.to_owned(), self.against.map(str::to_owned))
    }
}

/// Cache of successful responses; failed calls are made again.
#[derive(Debug)]
pub(crate) struct CallCache<T> {
    known: Mutex<HashMap<Key, T>>,
}

impl<T> Default for CallCache<T> {
    fn default() -> Self {
        Self { known: Mutex::default() }
    }
}

#[derive(Debug)]
pub(crate) struct CacheLookup<'a, T> {
    slots: Vec<Slot<T>>,
    pub new: Vec<CallKey<'a>>,
}

#[derive(Debug)]
enum Slot<T> {
    Known(T),
    New(usize),
}

impl<T: Clone> CallCache<T> {
    /// Looks up calls in the cache, and lists those without a cached response, each once.
    pub(crate) fn look_up<'a>(&self, questions: &[CallKey<'a>]) -> CacheLookup<'a, T> {
        let mut known = self.known();
        if known.len() > MAX_CACHED_RESPONSES {
            known.clear();
        }
        let (mut new, mut place) = (Vec::new(), HashMap::new());
        let slot = |question: &CallKey<'a>| {
            let key = question.key();
            if let Some(answer) = known.get(&key) {
                return Slot::Known(answer.clone());
            }
            Slot::New(*place.entry(key).or_insert_with(|| {
                new.push(question.clone());
                new.len() - 1
            }))
        };
        let slots = questions.iter().map(slot).collect();
        CacheLookup { slots, new }
    }

    /// Combines cached responses with `answers`, the responses to the new calls, into one per call that was looked up, in order. Caches the
    /// successful ones.
    pub(crate) fn complete<F: Clone>(
        &self,
        looked_up: CacheLookup<'_, T>,
        answers: Vec<Result<T, F>>,
    ) -> Vec<Result<T, F>> {
        let CacheLookup { slots, new } = looked_up;
        let succeeded =
            new.iter().zip(&answers).filter_map(|(question, answer)| Some((question.key(), answer.as_ref().ok()?)));
        self.known().extend(succeeded.map(|(key, answer)| (key, answer.clone())));
        let answer = |slot| match slot {
            Slot::Known(answer) => Ok(answer),
            Slot::New(place) => answers[place].clone(),
        };
        slots.into_iter().map(answer).collect()
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Key, T>> {
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::testing::query;

    /// The first call ends after all others, with two calls in flight at a time.
    #[tokio::test]
    async fn a_late_call_does_not_block_the_others() {
        let done = tokio::sync::Semaphore::new(0);
        let call = |index: usize| {
            let done = &done;
            async move {
                match index {
                    0 => drop(done.acquire_many(10).await),
                    _ => done.add_permits(1),
                }
                index
            }
        };
        let calls = all((0..11).map(call).collect(), 2);
        let (answers, _) = tokio::time::timeout(Duration::from_secs(30), calls).await.expect("the others went by");
        assert_eq!(answers, (0..11).collect::<Vec<_>>());
    }

    fn answers_of(questions: &[CallKey<'_>]) -> Vec<Result<usize, &'static str>> {
        let answer = |question: &CallKey<'_>| match question.rewrite {
            "down" => Err("late"),
            rewrite => Ok(rewrite.len()),
        };
        questions.iter().map(answer).collect()
    }

    #[test]
    fn each_call_is_made_once_and_failures_are_retried() {
        let (memo, row, context) = (CallCache::default(), query("a"), Context::default());
        let questions = ["one", "down", "one", "three"].map(|rewrite| CallKey {
            query: &row,
            context: &context,
            rewrite,
            against: None,
        });
        let asked = |looked_up: &CacheLookup<'_, usize>| -> Vec<String> {
            looked_up.new.iter().map(|question| question.rewrite.to_owned()).collect()
        };
        let first = memo.look_up(&questions);
        assert_eq!(asked(&first), ["one", "down", "three"]);
        let new = answers_of(&first.new);
        assert_eq!(memo.complete(first, new), [Ok(3), Err("late"), Ok(3), Ok(5)]);
        let second = memo.look_up(&questions);
        assert_eq!(asked(&second), ["down"]);
        assert_eq!(memo.complete(second, vec![Ok::<_, &str>(9)]), [Ok(3), Ok(9), Ok(3), Ok(5)]);
    }
}

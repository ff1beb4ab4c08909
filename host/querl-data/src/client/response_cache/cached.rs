//! Teacher, judge and retriever behind the response cache, with single-flight requests.

use super::{CacheTable, InFlightRequests, ResponseCache};
use crate::client::context::ServiceContext;
use crate::client::deadline;
use crate::client::spend::SpendTracker;
use async_trait::async_trait;
use querl_core::fsx::digest_hex;
use querl_core::ports::{Judge, JudgeRequest, RetrievalRequest, Retriever, Teacher};
use querl_core::records::{CallFailure, Completion, FailureKind, Hit, Message, QueryRow};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The cached responses of one service with one set of parameters. Without a cache file only concurrent requests share a response.
pub(crate) struct ServiceCache {
    cache: Option<Arc<ResponseCache>>,
    in_flight: Arc<InFlightRequests>,
    account: Arc<SpendTracker>,
    table: CacheTable,
    provider: String,
    identity: String,
    max_age: Option<Duration>,
    fresh_since: Option<Instant>,
}

impl ServiceCache {
    /// For the responses of `provider`. `identity` is everything except the request that a response depends on.
    pub(crate) fn open(context: &ServiceContext, table: CacheTable, provider: &str, identity: &impl Serialize) -> Self {
        Self {
            cache: context.cache.clone(),
            in_flight: context.in_flight.clone(),
            account: context.account.clone(),
            table,
            provider: provider.to_owned(),
            identity: serde_json::to_string(identity).expect("settings have a JSON form"),
            max_age: (table == CacheTable::Retrievals).then_some(context.retrieval_ttl),
            fresh_since: context.fresh_since,
        }
    }

    fn key(&self, question: &impl Serialize) -> String {
        let question = serde_json::to_string(question).expect("texts have a JSON form");
        digest_hex(format!("{}\n{question}", self.identity).as_bytes())
    }

    fn get(&self, key: &str) -> Option<Vec<u8>> {
        // Time stamps have a resolution of one second.
        let fresh = self.fresh_since.map(|since| since.elapsed() + Duration::from_secs(1));
        let max_age = self.max_age.map(|most| fresh.map_or(most, |fresh| most.min(fresh)));
        self.cache.as_ref()?.get(self.table, key, max_age)
    }

    fn known<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let known = serde_json::from_slice(&self.get(key)?).ok()?;
        self.account.count_cached(&self.provider);
        Some(known)
    }

    fn put(&self, key: &str, answer: &impl Serialize) {
        if let (Some(cache), Ok(bytes)) = (&self.cache, serde_json::to_vec(answer)) {
            cache.put(self.table, key, bytes);
        }
    }

    /// The cached response, else that of an identical request in flight, else that of `call`.
    async fn ask<T: Serialize + DeserializeOwned>(
        &self,
        question: &impl Serialize,
        call: impl Future<Output = Result<T, CallFailure>>,
    ) -> Result<T, CallFailure> {
        let key = self.key(question);
        if let Some(known) = self.known(&key) {
            return Ok(known);
        }
        let mut own = None;
        let flight = self.in_flight.join(self.table, &key);
        // Waiting for another caller's request does not count against this caller's deadline.
        let waiting = deadline::queue_guard();
        let asked = async {
            drop(waiting);
            // An earlier caller may have cached it meanwhile.
            let answer = match self.known(&key) {
                Some(known) => known,
                None => call.await.inspect(|answer| self.put(&key, answer))?,
            };
            let bytes = serde_json::to_vec(&answer).map_err(unreadable)?;
            own = Some(answer);
            Ok(bytes)
        };
        let shared = flight.answer(asked).await;
        match (own, shared) {
            (Some(answer), _) => Ok(answer),
            (None, Err(failure)) => Err(failure.clone()),
            (None, Ok(bytes)) => {
                self.account.count_joined(&self.provider);
                serde_json::from_slice(bytes).map_err(unreadable)
            }
        }
    }

    fn forget(&self, question: &impl Serialize) {
        if let Some(cache) = &self.cache {
            cache.forget(self.table, &self.key(question));
        }
    }
}

fn unreadable(error: serde_json::Error) -> CallFailure {
    let message = format!("the answer has no form that can be kept: {error}");
    CallFailure { kind: FailureKind::InvalidResponse, message }
}

/// A teacher behind the cache.
pub(crate) struct CachedTeacher {
    pub(crate) inner: Arc<dyn Teacher>,
    pub(crate) service_cache: ServiceCache,
}

#[async_trait]
impl Teacher for CachedTeacher {
    async fn rewrite(&self, query: &QueryRow, messages: &[Message]) -> Result<Completion, CallFailure> {
        self.service_cache.ask(&messages, self.inner.rewrite(query, messages)).await
    }

    fn knows(&self, messages: &[Message]) -> bool {
        self.service_cache.get(&self.service_cache.key(&messages)).is_some()
    }

    fn forget(&self, messages: &[Message]) {
        self.service_cache.forget(&messages);
    }

    fn keep(&self, messages: &[Message], completion: &Completion) {
        self.service_cache.put(&self.service_cache.key(&messages), completion);
    }

    fn name(&self) -> &str {
        self.inner.name()
    }
}

/// A judge behind the cache.
pub(crate) struct CachedJudge {
    pub(crate) inner: Arc<dyn Judge>,
    pub(crate) service_cache: ServiceCache,
}

#[async_trait]
impl Judge for CachedJudge {
    async fn judge(&self, request: JudgeRequest<'_>) -> Result<Completion, CallFailure> {
        let messages = request.messages;
        self.service_cache.ask(&messages, self.inner.judge(request)).await
    }

    fn forget(&self, messages: &[Message]) {
        self.service_cache.forget(&messages);
    }

    fn name(&self) -> &str {
        self.inner.name()
    }
}

pub(crate) struct CachedRetriever {
    pub(crate) inner: Arc<dyn Retriever>,
    pub(crate) service_cache: ServiceCache,
}

#[async_trait]
impl Retriever for CachedRetriever {
    async fn retrieve(&self, request: RetrievalRequest<'_>) -> Result<Vec<Hit>, CallFailure> {
        let question = (request.original_query, request.context, request.rewritten_query);
        self.service_cache.ask(&question, self.inner.retrieve(request.clone())).await
    }

    fn name(&self) -> &str {
        self.inner.name()
    }
}

#[cfg(test)]
#[path = "cached_tests.rs"]
mod tests;

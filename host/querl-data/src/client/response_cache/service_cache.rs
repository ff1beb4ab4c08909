//! Response cache of one service, which also merges concurrent identical requests (single-flight).

use super::CacheTable;
use crate::client::{ServiceContext, queue_guard};
use querl_core::fsx::digest_hex;
use querl_core::records::{CallFailure, FailureKind};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

/// Cached responses of one service with one set of parameters. Without a cache file, only concurrent identical requests share a response.
pub(crate) struct ServiceCache {
    services: ServiceContext,
    table: CacheTable,
    provider: String,
    identity: String,
}

impl ServiceCache {
    /// Opens the cache for `provider`. `identity` is everything that a response depends on except the request.
    pub(crate) fn open(
        services: &ServiceContext,
        table: CacheTable,
        provider: &str,
        identity: &impl Serialize,
    ) -> Self {
        let identity = serde_json::to_string(identity).expect("settings have a JSON form");
        Self { services: services.clone(), table, provider: provider.to_owned(), identity }
    }

    fn key(&self, request: &impl Serialize) -> String {
        let request = serde_json::to_string(request).expect("texts have a JSON form");
        digest_hex(format!("{}\n{request}", self.identity).as_bytes())
    }

    fn get(&self, key: &str) -> Option<Vec<u8>> {
        let ServiceContext { retrieval_ttl, fresh_since, .. } = self.services;
        let max_age = (self.table == CacheTable::Retrievals).then(|| {
            // Time stamps have a resolution of one second.
            let fresh = fresh_since.map(|since| since.elapsed() + Duration::from_secs(1));
            fresh.map_or(retrieval_ttl, |fresh| retrieval_ttl.min(fresh))
        });
        self.services.cache.as_ref()?.get(self.table, key, max_age)
    }

    fn cached<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let cached = serde_json::from_slice(&self.get(key)?).ok()?;
        self.services.tracker.count_cached(&self.provider);
        Some(cached)
    }

    pub(crate) fn contains(&self, request: &impl Serialize) -> bool {
        self.get(&self.key(request)).is_some()
    }

    pub(crate) fn put(&self, request: &impl Serialize, response: &impl Serialize) {
        if let (Some(cache), Ok(bytes)) = (&self.services.cache, serde_json::to_vec(response)) {
            cache.put(self.table, &self.key(request), bytes);
        }
    }

    pub(crate) fn forget(&self, request: &impl Serialize) {
        if let Some(cache) = &self.services.cache {
            cache.forget(self.table, &self.key(request));
        }
    }

    /// Returns the cached response, the response of an identical request in flight, or that of `call`, in this order.
    pub(crate) async fn get_or_call<T: Serialize + DeserializeOwned>(
        &self,
        request: &impl Serialize,
        call: impl Future<Output = Result<T, CallFailure>>,
    ) -> Result<T, CallFailure> {
        let key = self.key(request);
        if let Some(cached) = self.cached(&key) {
            return Ok(cached);
        }
        let mut own = None;
        let in_flight = self.services.in_flight.join(self.table, &key);
        // Waiting for another caller's request does not count against this caller's deadline.
        let waiting = queue_guard();
        let call = async {
            drop(waiting);
            // An earlier caller may have cached it meanwhile.
            let response = match self.cached(&key) {
                Some(cached) => cached,
                None => call.await.inspect(|response| self.put(request, response))?,
            };
            let bytes = serde_json::to_vec(&response).map_err(unreadable)?;
            own = Some(response);
            Ok(bytes)
        };
        let shared = in_flight.response(call).await;
        match (own, shared) {
            (Some(response), _) => Ok(response),
            (None, Err(failure)) => Err(failure.clone()),
            (None, Ok(bytes)) => {
                self.services.tracker.count_joined(&self.provider);
                serde_json::from_slice(bytes).map_err(unreadable)
            }
        }
    }
}

fn unreadable(error: serde_json::Error) -> CallFailure {
    let message = format!("the answer has no form that can be kept: {error}");
    CallFailure { kind: FailureKind::InvalidResponse, message }
}

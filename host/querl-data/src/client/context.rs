//! The service context: HTTP settings, spend tracker and response cache that all external calls of a run share.

use crate::client::deadline::StopFlag;
use crate::client::response_cache::{InFlightRequests, ResponseCache};
use crate::client::spend::SpendTracker;
use querl_core::config::CallsConfig;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// HTTP settings, spend tracker, response cache and stop flag of external calls. One for a whole run.
#[derive(Clone, Default)]
pub struct ServiceContext {
    pub(crate) config: CallsConfig,
    pub(crate) account: Arc<SpendTracker>,
    pub(crate) cache: Option<Arc<ResponseCache>>,
    pub(crate) in_flight: Arc<InFlightRequests>,
    pub(crate) retrieval_ttl: Duration,
    pub(crate) fresh_since: Option<Instant>,
    pub(crate) stop: StopFlag,
}

impl ServiceContext {
    /// As the configuration says, with an account of its own and no cache.
    pub fn new(config: &CallsConfig) -> Self {
        Self { config: config.clone(), ..Self::default() }
    }

    /// With this account.
    #[must_use]
    pub fn with_account(self, account: Arc<SpendTracker>) -> Self {
        Self { account, ..self }
    }

    /// With this cache; retrieval responses expire after `retrieval_ttl`.
    #[must_use]
    pub fn with_cache(self, cache: Arc<ResponseCache>, retrieval_ttl: Duration) -> Self {
        Self { cache: Some(cache), retrieval_ttl, ..self }
    }

    /// Ignores retrieval responses cached before now, for a stage that is run again after a change of the knowledge base.
    #[must_use]
    pub fn with_fresh_retrievals(self) -> Self {
        Self { fresh_since: Some(Instant::now()), ..self }
    }

    /// No request is sent and none is retried once `stop` is set.
    #[must_use]
    pub fn until(self, stop: &'static AtomicBool) -> Self {
        Self { stop: StopFlag::new(stop), ..self }
    }

    pub(crate) fn reached_by(&self, config: CallsConfig) -> Self {
        Self { config, ..self.clone() }
    }

    /// What calls cost.
    pub fn account(&self) -> &Arc<SpendTracker> {
        &self.account
    }
}

impl std::fmt::Debug for ServiceContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServiceContext")
            .field("config", &self.config)
            .field("cache", &self.cache.is_some())
            .finish_non_exhaustive()
    }
}

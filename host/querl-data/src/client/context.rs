//! What all calls to outside services of one run share.

use crate::client::deadline::StopFlag;
use crate::client::response_cache::{InFlightRequests, ResponseCache};
use crate::client::spend::SpendTracker;
use querl_core::config::CallsConfig;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// How outside services are reached, what they cost, and what they said before. One for a whole run.
#[derive(Clone, Default)]
pub struct ServiceContext {
    pub(crate) config: CallsConfig,
    pub(crate) account: Arc<SpendTracker>,
    pub(crate) cache: Option<Arc<ResponseCache>>,
    /// What is being asked right now.
    pub(crate) in_flight: Arc<InFlightRequests>,
    /// How long what retrieval found is believed; a knowledge base changes.
    pub(crate) retrieval_ttl: Duration,
    /// Of what retrieval found, nothing that was kept before is believed.
    pub(crate) fresh_since: Option<Instant>,
    /// Once it is set nobody is called any more.
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

    /// With this cache, which believes what retrieval found for `retrieval_ttl`.
    #[must_use]
    pub fn with_cache(self, cache: Arc<ResponseCache>, retrieval_ttl: Duration) -> Self {
        Self { cache: Some(cache), retrieval_ttl, ..self }
    }

    /// What retrieval found before this moment is not believed: who has a stage done anew may have changed the knowledge base.
    #[must_use]
    pub fn with_fresh_retrievals(self) -> Self {
        Self { fresh_since: Some(Instant::now()), ..self }
    }

    /// Nobody is called any more once `stop` is set: a call that was not sent yet fails, and one that failed is not tried again.
    #[must_use]
    pub fn until(self, stop: &'static AtomicBool) -> Self {
        Self { stop: StopFlag::new(stop), ..self }
    }

    /// The same account and cache, reached in another way.
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
        f.debug_struct("Outside")
            .field("config", &self.config)
            .field("cache", &self.cache.is_some())
            .finish_non_exhaustive()
    }
}

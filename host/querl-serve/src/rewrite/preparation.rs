//! Limits on preparing requests: the prompt plugin and the tokenizer take CPU time and memory before a request is in the engine's queue.
//!
//! Each tenant has an equal share of the cores, at least one, so that the prompts of one tenant do not delay those of others.

use querl_core::serving::{Role, SubmitError, Tenant};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub(super) struct Preparation {
    n_cores: usize,
    max_waiting: usize,
    shares: Mutex<Shares>,
}

#[derive(Default)]
struct Shares {
    /// Number of tenants that the cores are shared by.
    n_tenants: usize,
    by_model: BTreeMap<(Role, String), Arc<Share>>,
}

/// The share of a tenant's released model or of its candidate: requests of a candidate must not delay those of clients.
struct Share {
    running: Arc<Semaphore>,
    waiting: Semaphore,
}

impl Preparation {
    /// `max_waiting`: maximum number of requests of one tenant that wait for a permit.
    pub(super) fn new(max_waiting: usize) -> Self {
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { n_cores, max_waiting: max_waiting.min(Semaphore::MAX_PERMITS), shares: Mutex::default() }
    }

    /// Waits for the permit to prepare a request of one of `n_tenants` tenants, in the order of the calls. It is held until the
    /// preparation has ended, also if the request has passed its deadline by then.
    ///
    /// # Errors
    /// Too many requests of the tenant are waiting.
    pub(super) async fn permit(&self, tenant: &Tenant, n_tenants: usize) -> Result<OwnedSemaphorePermit, SubmitError> {
        let share = self.share(tenant, n_tenants);
        if let Ok(permit) = share.running.clone().try_acquire_owned() {
            return Ok(permit);
        }
        let full =
            |_| SubmitError::QueueFull(format!("the queue is full ({} requests); retry later", self.max_waiting));
        let _place = share.waiting.try_acquire().map_err(full)?;
        // Never closed.
        share.running.clone().acquire_owned().await.map_err(|_| SubmitError::Ended)
    }

    fn share(&self, tenant: &Tenant, n_tenants: usize) -> Arc<Share> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        if shares.n_tenants != n_tenants {
            // Preparations in progress keep the permits of their old share.
            *shares = Shares { n_tenants, by_model: BTreeMap::new() };
        }
        let n_permits = (self.n_cores / n_tenants.max(1)).max(1);
        let share =
            || Share { running: Arc::new(Semaphore::new(n_permits)), waiting: Semaphore::new(self.max_waiting) };
        shares.by_model.entry((tenant.role, tenant.name.clone())).or_insert_with(|| Arc::new(share())).clone()
    }
}

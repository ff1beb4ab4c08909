//! Limits, API key and queue of the reward service, and the calls of its environment.

use super::metrics::RewardMetrics;
use crate::body::{BodyLimits, JsonFields, read_fields};
use crate::error::ErrorResponse;
use crate::key::ApiKey;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode};
use querl_core::ports::{EnvironmentError, RewardRange};
use querl_core::records::{CallFailure, EpisodeRecord, FailureKind};
use querl_core::scoring::{RewardRequest, RewardService};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Options of [`reward_router`](crate::reward_router).
#[derive(Clone)]
pub struct RewardOptions {
    /// Reward of a rejected response in request forms that carry only numbers, finite. `None`: the request is answered with 422.
    pub rejected_reward: Option<f64>,
    /// Maximum size of a request body in bytes.
    pub max_body_bytes: usize,
    /// Maximum number of responses in one request.
    pub max_responses: usize,
    /// Maximum number of requests scored at the same time, each on a thread of its own.
    pub max_concurrent: usize,
    /// Maximum number of requests in the queue; further ones are answered with 429.
    pub max_waiting: usize,
    /// Time limit for a whole request body to arrive.
    pub body_timeout: Duration,
    /// The key expected after `Authorization: Bearer`; `None` permits every client.
    pub api_key: Option<String>,
}

impl Default for RewardOptions {
    fn default() -> Self {
        Self {
            rejected_reward: None,
            max_body_bytes: 64 << 20,
            max_responses: 4096,
            max_concurrent: 8,
            max_waiting: 4096,
            body_timeout: Duration::from_secs(60),
            api_key: None,
        }
    }
}

pub(super) struct RewardServer {
    service: Arc<dyn RewardService>,
    pub(super) options: RewardOptions,
    key: Option<ApiKey>,
    running: Arc<Semaphore>,
    n_waiting: AtomicUsize,
    pub(super) metrics: RewardMetrics,
}

impl RewardServer {
    pub(super) fn new(service: Arc<dyn RewardService>, options: RewardOptions) -> Self {
        Self {
            service,
            key: options.api_key.as_deref().map(ApiKey::new),
            running: Arc::new(Semaphore::new(options.max_concurrent)),
            n_waiting: AtomicUsize::new(0),
            metrics: RewardMetrics::new().expect("metric names are valid and distinct"),
            options,
        }
    }

    pub(super) fn range(&self) -> RewardRange {
        self.service.range()
    }

    pub(super) fn has_key(&self, headers: &HeaderMap) -> bool {
        self.key.as_ref().is_none_or(|key| key.is_in(headers))
    }

    pub(super) fn metrics_text(&self) -> prometheus::Result<String> {
        let n_running = self.options.max_concurrent.saturating_sub(self.running.available_permits());
        self.metrics.to_text(n_running, self.n_waiting.load(Ordering::Relaxed))
    }

    /// Reads the body of a request. `expected` describes its form in error messages.
    pub(super) async fn read(&self, request: Request, expected: &str) -> Result<JsonFields, ErrorResponse> {
        let (max_bytes, timeout) = (self.options.max_body_bytes, self.options.body_timeout);
        read_fields(request, BodyLimits { max_bytes, timeout, expected }).await
    }

    pub(super) fn check_queue(&self) -> Result<(), ErrorResponse> {
        let is_waiting_full = self.n_waiting.load(Ordering::Relaxed) >= self.options.max_waiting;
        let is_full = self.running.available_permits() == 0 && is_waiting_full;
        if is_full { Err(self.queue_is_full()) } else { Ok(()) }
    }

    fn queue_is_full(&self) -> ErrorResponse {
        let what = format!("queue is full ({} requests); retry later", self.options.max_waiting);
        ErrorResponse::new(StatusCode::TOO_MANY_REQUESTS, what)
    }

    /// Scores responses: one record for each request, in order, whose numbers are finite.
    pub(super) async fn score(&self, requests: Vec<RewardRequest>) -> Result<Vec<EpisodeRecord>, ErrorResponse> {
        // OpenRLHF sends empty lists if it has more servers than queries.
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let n_requests = requests.len();
        let permit = self.permit().await?;
        let service = self.service.clone();
        let scoring = tokio::task::spawn_blocking(move || {
            // Held until the work ends, even if the client has disconnected.
            let _permit = permit;
            service.score(&requests)
        });
        let records = scoring.await.map_err(|_| failed("scoring panicked"))?.map_err(environment_error)?;
        if records.len() != n_requests {
            return Err(failed(&format!("{} records for {n_requests} responses", records.len())));
        }
        records.iter().try_for_each(check_finite)?;
        self.metrics.episodes(&records);
        Ok(records)
    }

    async fn permit(&self) -> Result<OwnedSemaphorePermit, ErrorResponse> {
        if let Ok(permit) = self.running.clone().try_acquire_owned() {
            return Ok(permit);
        }
        let waiting = WaitingRequest::new(&self.n_waiting);
        if waiting.number > self.options.max_waiting {
            return Err(self.queue_is_full());
        }
        let permit = self.running.clone().acquire_owned().await;
        permit.map_err(|_| ErrorResponse::unavailable("the server has ended"))
    }
}

/// A request in the queue, until it is dropped.
struct WaitingRequest<'a> {
    n_waiting: &'a AtomicUsize,
    /// Number of requests in the queue, this one included.
    number: usize,
}

impl<'a> WaitingRequest<'a> {
    fn new(n_waiting: &'a AtomicUsize) -> Self {
        Self { n_waiting, number: n_waiting.fetch_add(1, Ordering::Relaxed) + 1 }
    }
}

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        self.n_waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An error response without details, which are written only to the operator's log.
fn failed(problem: &str) -> ErrorResponse {
    tracing::error!("{problem}");
    ErrorResponse::internal("scoring failed; the server's log says why")
}

fn check_finite(record: &EpisodeRecord) -> Result<(), ErrorResponse> {
    let Ok(reward) = &record.outcome else { return Ok(()) };
    let is_finite = reward.total.is_finite() && reward.components.iter().all(|component| component.value.is_finite());
    if is_finite { Ok(()) } else { Err(failed(&format!("episode {}: the reward is NaN or Inf", record.episode.id))) }
}

fn environment_error(error: EnvironmentError) -> ErrorResponse {
    match error {
        EnvironmentError::Request(sentence) => ErrorResponse::value(sentence),
        EnvironmentError::Service(failure) => service_error(&failure),
        EnvironmentError::Plugin(fault) => failed(&fault.to_string()),
        EnvironmentError::Record(sentence) => failed(&sentence),
    }
}

fn service_error(failure: &CallFailure) -> ErrorResponse {
    use FailureKind::{Down, OverBudget, RateLimited, Timeout, Unreachable};
    tracing::error!("{failure}");
    let status = match failure.kind {
        Timeout | Unreachable | RateLimited | Down | OverBudget => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::BAD_GATEWAY,
    };
    let what = format!("a service that scoring needs failed ({}); the server's log says why", failure.kind);
    ErrorResponse::new(status, what)
}

//! Retry policy of calls to an endpoint (which failures are retried and when), circuit breaker and rate limits.

use crate::client::spend::Usage;
use governor::clock::Clock;
use governor::{DefaultDirectRateLimiter, Quota};
use querl_core::records::{CallFailure, FailureKind};
use reqwest::header::{HeaderMap, RETRY_AFTER};
use serde_json::Value;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime};

/// Maximum `Retry-After` for which a call waits; a longer one opens the circuit breaker.
pub(super) const MAX_RETRY_AFTER: Duration = Duration::from_secs(120);

pub(super) struct FailedAttempt {
    pub(super) failure: CallFailure,
    pub(super) retry: Retry,
    pub(super) charge: Charge,
}

impl FailedAttempt {
    /// The failure of a request that was sent but has no usable response, so that the service may have charged it.
    pub(super) fn lost(self) -> Self {
        Self { charge: Charge::Unknown, ..self }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Retry {
    Useless,
    Later,
    After(Duration),
}

/// An error that the body of a response with a success status reports.
#[derive(Debug, Clone)]
pub(crate) struct Refusal {
    pub(super) kind: FailureKind,
    pub(super) retry: Retry,
    pub(super) charge: Charge,
    pub(crate) what: String,
}

/// What a service charged for an attempt without a usable response.
#[derive(Debug, Clone, Copy)]
pub(super) enum Charge {
    Nothing,
    /// An unknown amount, at most the cost bound of the call.
    Unknown,
    Exactly(Usage),
}

impl Refusal {
    /// An error in the body, with the status that the body reports if any: handled like that HTTP status, otherwise like a server error.
    pub(crate) fn reported(status: Option<u16>, what: String) -> Self {
        let (kind, retry) = match status.filter(|status| (400..600).contains(status)) {
            Some(status) => of_status(status, None),
            None => (FailureKind::ServerError, Retry::Later),
        };
        Self { kind, retry, charge: Charge::Nothing, what }
    }

    pub(crate) fn aborted(what: String) -> Self {
        Self { kind: FailureKind::ServerError, retry: Retry::Later, charge: Charge::Unknown, what }
    }

    /// A response that lacks the content that its API requires; retried like a server error.
    pub(crate) fn unusable(what: String) -> Self {
        Self { kind: FailureKind::InvalidResponse, retry: Retry::Later, charge: Charge::Unknown, what }
    }

    /// A response that does not fit the configuration; not retried, since the next response would not fit either.
    pub(crate) fn misconfigured(what: String) -> Self {
        Self { retry: Retry::Useless, ..Self::unusable(what) }
    }

    /// The refusal, charged with the usage that the response reports.
    pub(crate) fn charged(self, usage: Usage) -> Self {
        Self { charge: Charge::Exactly(usage), ..self }
    }
}

impl From<String> for Refusal {
    fn from(what: String) -> Self {
        Self::unusable(what)
    }
}

/// Function that detects an error in the body of a response with a success status.
pub(crate) type Check<'a> = dyn Fn(&Value) -> Option<Refusal> + Send + Sync + 'a;

pub(super) fn of_status(status: u16, retry_after: Option<Duration>) -> (FailureKind, Retry) {
    let later = retry_after.map_or(Retry::Later, Retry::After);
    match status {
        // Without credit at the service every further call fails too.
        401..=403 => (FailureKind::Unauthorized, Retry::Useless),
        408 => (FailureKind::Timeout, later),
        // Conflict and Too Early may be caused by a concurrent request.
        409 | 425 => (FailureKind::Rejected, later),
        429 => (FailureKind::RateLimited, later),
        500.. => (FailureKind::ServerError, later),
        _ => (FailureKind::Rejected, Retry::Useless),
    }
}

pub(super) fn is_out_of_money(body: &str) -> bool {
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    ["/error/code", "/error/type"]
        .iter()
        .any(|path| body.pointer(path).is_some_and(|code| code == "insufficient_quota"))
}

/// True for HTTP gateway errors (502, 504): the service behind the gateway may have processed and charged the request.
pub(super) fn may_be_charged(status: u16) -> bool {
    matches!(status, 502 | 504)
}

/// The `Retry-After` header as a duration, from seconds or a date; 0 for a date in the past, `None` without a valid header.
pub(super) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    match text.parse() {
        Ok(seconds) if seconds > 0.0 => Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)),
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => Some(httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default()),
    }
}

/// Circuit breaker: opens after `limit` consecutive calls that failed in all their attempts, and stays open. The stage then stops and
/// keeps its finished rows; the next run starts with a closed breaker.
#[derive(Debug)]
pub(super) struct CircuitBreaker {
    limit: usize,
    in_a_row: AtomicUsize,
    opened: OnceLock<CallFailure>,
}

impl CircuitBreaker {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, in_a_row: AtomicUsize::new(0), opened: OnceLock::new() }
    }

    pub(super) fn opened(&self) -> Option<&CallFailure> {
        self.opened.get()
    }

    /// Opens the breaker immediately, after a long `Retry-After`.
    pub(super) fn open(&self, failure: &CallFailure) {
        if self.limit == 0 {
            return;
        }
        let message = format!("{}; run the command again after that", failure.message);
        let _ = self.opened.set(CallFailure { kind: FailureKind::Down, message });
    }

    pub(super) fn count<T>(&self, address: &str, outcome: &Result<T, CallFailure>) {
        let failure = match outcome {
            Ok(_) => return self.in_a_row.store(0, Ordering::Relaxed),
            Err(failure) => failure,
        };
        let is_without_usable_response = matches!(
            failure.kind,
            FailureKind::Timeout
                | FailureKind::Unreachable
                | FailureKind::RateLimited
                | FailureKind::ServerError
                | FailureKind::InvalidResponse
        );
        if !is_without_usable_response {
            return;
        }
        let n_failed = self.in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
        if self.limit > 0 && n_failed >= self.limit {
            let message = format!(
                "{address}: given up after {n_failed} calls in a row without an answer; run again once it is up; the last: {failure}"
            );
            let _ = self.opened.set(CallFailure { kind: FailureKind::Down, message });
        }
    }
}

/// Rate limiter: token buckets for request and token quotas, and the pause of a `Retry-After`. A bucket holds one second of its quota, so
/// that no minute exceeds the quota by more than a sixtieth.
#[derive(Debug, Default)]
pub(super) struct RateLimiter {
    requests: Option<TokenBucket>,
    tokens: Option<TokenBucket>,
    paused_until: Mutex<Option<Instant>>,
}

#[derive(Debug)]
struct TokenBucket {
    limiter: DefaultDirectRateLimiter,
    size: NonZeroU32,
    queue: tokio::sync::Mutex<()>,
}

impl TokenBucket {
    fn new(per_minute: Option<u32>) -> Option<Self> {
        let per_minute = NonZeroU32::new(per_minute?)?;
        let size = NonZeroU32::new(per_minute.get() / 60).unwrap_or(NonZeroU32::MIN);
        let limiter = governor::RateLimiter::direct(Quota::per_minute(per_minute).allow_burst(size));
        Some(Self { limiter, size, queue: tokio::sync::Mutex::new(()) })
    }

    async fn take(&self, n: u64) {
        let _guard = self.queue.lock().await;
        let mut n_left = n;
        while n_left > 0 {
            let n_now = NonZeroU32::new(n_left.min(u64::from(self.size.get())) as u32).unwrap_or(NonZeroU32::MIN);
            while let Ok(Err(not_until)) = self.limiter.check_n(n_now) {
                tokio::time::sleep(not_until.wait_time_from(self.limiter.clock().now())).await;
            }
            n_left -= u64::from(n_now.get());
        }
    }
}

impl RateLimiter {
    pub(super) fn new(requests_per_minute: Option<u32>, tokens_per_minute: Option<u32>) -> Self {
        let (requests, tokens) = (TokenBucket::new(requests_per_minute), TokenBucket::new(tokens_per_minute));
        Self { requests, tokens, paused_until: Mutex::default() }
    }

    /// Waits until the quotas allow a request of `n_tokens` tokens.
    pub(super) async fn acquire(&self, n_tokens: u64) {
        if let Some(requests) = &self.requests {
            requests.take(1).await;
        }
        if let Some(tokens) = &self.tokens {
            tokens.take(n_tokens).await;
        }
        while let Some(pause) = self.pause_left() {
            tokio::time::sleep(pause).await;
        }
    }

    pub(super) fn pause_all(&self, pause: Duration) {
        let until = Instant::now() + pause;
        let mut paused_until = self.paused_until.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *paused_until = Some(paused_until.map_or(until, |known| known.max(until)));
    }

    fn pause_left(&self) -> Option<Duration> {
        let paused_until = *self.paused_until.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        paused_until?.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }
}

/// Estimated number of tokens of a text: 1 per Chinese character, 1 per four other characters.
pub(crate) fn estimated_tokens(text: &str) -> u64 {
    let (n_wide, n_narrow) = text
        .chars()
        .fold((0, 0), |(wide, narrow), c| if c >= '\u{2e80}' { (wide + 1, narrow) } else { (wide, narrow + 1) });
    n_wide + u64::div_ceil(n_narrow, 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_transient_statuses_are_retried() {
        let retried = [408, 409, 425, 429, 500, 502, 503, 504, 529];
        let of = |status| of_status(status, None).1;
        assert!(retried.into_iter().all(|status| of(status) == Retry::Later));
        assert!([302, 400, 401, 402, 403, 404, 413, 422].into_iter().all(|status| of(status) == Retry::Useless));
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now = httpdate::parse_http_date("Sun, 01 Mar 2026 08:00:00 GMT").unwrap();
        let pause = |text: &str| {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, text.parse().unwrap())]);
            retry_after(&headers, now).map(|pause| pause.as_secs_f64())
        };
        assert_eq!(pause("7"), Some(7.0));
        assert_eq!(pause(" 0.5 "), Some(0.5));
        assert_eq!(pause("Sun, 01 Mar 2026 08:00:09 GMT"), Some(9.0));
        assert_eq!(pause("Sun, 01 Mar 2026 07:00:00 GMT"), Some(0.0));
        assert_eq!((pause("soon"), pause("-1")), (None, None));
        assert_eq!(pause("inf"), Some(Duration::MAX.as_secs_f64()));
    }

    fn failed(kind: FailureKind) -> Result<(), CallFailure> {
        Err(CallFailure { kind, message: "no".into() })
    }

    #[test]
    fn breaker_resets_on_success_and_ignores_rejections() {
        let breaker = CircuitBreaker::new(2);
        for outcome in [failed(FailureKind::Timeout), Ok(()), failed(FailureKind::Timeout)] {
            breaker.count("x", &outcome);
        }
        breaker.count("x", &failed(FailureKind::Rejected));
        assert_eq!(breaker.opened(), None);
        breaker.count("x", &failed(FailureKind::RateLimited));
        assert_eq!(breaker.opened().unwrap().kind, FailureKind::Down);
    }

    #[tokio::test]
    async fn request_rate_is_kept() {
        let rate_limiter = RateLimiter::new(Some(600), None);
        let started = Instant::now();
        for _ in 0..16 {
            rate_limiter.acquire(0).await;
        }
        // Ten at once, then one each tenth of a second.
        let taken = started.elapsed().as_secs_f64();
        assert!((0.55..2.0).contains(&taken), "{taken}");
    }

    #[tokio::test]
    async fn a_request_may_take_more_tokens_than_the_bucket_holds() {
        let rate_limiter = RateLimiter::new(None, Some(6000));
        let started = Instant::now();
        rate_limiter.acquire(160).await;
        let taken = started.elapsed().as_secs_f64();
        assert!((0.55..2.0).contains(&taken), "{taken}");
    }

    #[tokio::test]
    async fn a_pause_applies_to_all_requests() {
        let rate_limiter = RateLimiter::new(None, None);
        rate_limiter.pause_all(Duration::from_millis(200));
        rate_limiter.pause_all(Duration::from_millis(1));
        let started = Instant::now();
        rate_limiter.acquire(0).await;
        assert!(started.elapsed() >= Duration::from_millis(195));
    }

    #[test]
    fn tokens_are_estimated_by_script() {
        assert_eq!((estimated_tokens("鱼油怎么吃"), estimated_tokens("fish oil"), estimated_tokens("")), (5, 2, 0));
    }
}

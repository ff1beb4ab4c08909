//! Which failures are worth another try, and when.

use querl_core::records::{CallFailure, FailureKind};
use reqwest::header::{HeaderMap, RETRY_AFTER};
use serde_json::Value;
use std::time::{Duration, SystemTime};

/// A longer `Retry-After` opens the circuit breaker.
pub(super) const MAX_RETRY_AFTER: Duration = Duration::from_secs(120);

pub(super) struct FailedAttempt {
    pub(super) failure: CallFailure,
    pub(super) retry: Retry,
    /// The request was sent without a usable response: it may have been charged.
    pub(super) is_lost: bool,
}

impl FailedAttempt {
    pub(super) fn lost(self) -> Self {
        Self { is_lost: true, ..self }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Retry {
    Useless,
    Later,
    After(Duration),
}

/// What is wrong with a body that came with a status of success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(super) kind: FailureKind,
    pub(super) retry: Retry,
    pub(super) is_lost: bool,
    pub(super) what: String,
}

impl Refusal {
    /// A failure that the body tells, with its status where it tells one: as the same status of HTTP, else the service's own failure.
    pub(crate) fn reported(status: Option<u16>, what: String) -> Self {
        let (kind, retry) = match status.filter(|status| (400..600).contains(status)) {
            Some(status) => of_status(status, None),
            None => (FailureKind::ServerError, Retry::Later),
        };
        Self { kind, retry, is_lost: false, what }
    }

    pub(crate) fn aborted(what: String) -> Self {
        Self { kind: FailureKind::ServerError, retry: Retry::Later, is_lost: true, what }
    }
}

/// Looks for a refusal in a body.
pub(crate) type Check<'a> = dyn Fn(&Value) -> Option<Refusal> + Send + Sync + 'a;

pub(super) fn of_status(status: u16, asked: Option<Duration>) -> (FailureKind, Retry) {
    let later = asked.map_or(Retry::Later, Retry::After);
    match status {
        // Without credit at the service every further call fails too.
        401..=403 => (FailureKind::Unauthorized, Retry::Useless),
        408 => (FailureKind::Timeout, later),
        // Conflict and Too Early: another request was in the way, the same one may pass a moment later.
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
        .any(|path| body.pointer(path).is_some_and(|said| said == "insufficient_quota"))
}

/// True for a gateway's error after which the service behind it may still have worked on the request.
pub(super) fn may_be_charged(status: u16) -> bool {
    matches!(status, 502 | 504)
}

/// The pause that a server asks for: seconds, or a date. A date that has passed asks for none.
pub(super) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    match text.parse() {
        Ok(seconds) if seconds > 0.0 => Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)),
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => Some(httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_told_apart() {
        let retried = [408, 409, 425, 429, 500, 502, 503, 504, 529];
        let of = |status| of_status(status, None).1;
        assert!(retried.into_iter().all(|status| of(status) == Retry::Later));
        assert!([302, 400, 401, 402, 403, 404, 413, 422].into_iter().all(|status| of(status) == Retry::Useless));
    }

    #[test]
    fn pauses_are_read_as_seconds_and_as_dates() {
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
}

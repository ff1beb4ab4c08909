//! Which failures are worth another try, and when.

use querl_core::records::{CallFailure, FailureKind};
use reqwest::StatusCode;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use std::time::{Duration, SystemTime};

/// A server that asks for a longer pause than this is not waited for.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(120);

/// One failed try.
pub(super) struct FailedTry {
    pub(super) failure: CallFailure,
    pub(super) retry: Retry,
    /// The request went out and its answer never came, or is of no use: it may have been charged.
    pub(super) is_lost: bool,
}

impl FailedTry {
    pub(super) fn lost(self) -> Self {
        Self { is_lost: true, ..self }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Retry {
    /// The next try would meet the same.
    Useless,
    /// After a pause of our own.
    Later,
    /// After the pause that the server asked for.
    After(Duration),
}

/// What an answer other than success means.
pub(super) fn of_status(status: StatusCode, asked: Option<Duration>) -> (FailureKind, Retry) {
    let later = asked.map_or(Retry::Later, Retry::After);
    match status.as_u16() {
        401 | 403 => (FailureKind::Unauthorized, Retry::Useless),
        408 => (FailureKind::Timeout, later),
        // Conflict and Too Early: another request was in the way, the same one may pass a moment later.
        409 | 425 => (FailureKind::Rejected, later),
        429 => (FailureKind::RateLimited, later),
        500.. => (FailureKind::ServerError, later),
        _ => (FailureKind::Rejected, Retry::Useless),
    }
}

/// The pause that a server asks for: seconds, or a date. A date that has passed asks for none.
pub(super) fn asked_pause(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    match text.parse() {
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
        let of = |status| of_status(StatusCode::from_u16(status).unwrap(), None).1;
        assert!(retried.into_iter().all(|status| of(status) == Retry::Later));
        assert!([302, 400, 401, 403, 404, 413, 422].into_iter().all(|status| of(status) == Retry::Useless));
    }

    #[test]
    fn pauses_are_read_as_seconds_and_as_dates() {
        let now = httpdate::parse_http_date("Sun, 01 Mar 2026 08:00:00 GMT").unwrap();
        let pause = |text: &str| {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, text.parse().unwrap())]);
            asked_pause(&headers, now).map(|pause| pause.as_secs_f64())
        };
        assert_eq!(pause("7"), Some(7.0));
        assert_eq!(pause(" 0.5 "), Some(0.5));
        assert_eq!(pause("Sun, 01 Mar 2026 08:00:09 GMT"), Some(9.0));
        assert_eq!(pause("Sun, 01 Mar 2026 07:00:00 GMT"), Some(0.0));
        assert_eq!((pause("soon"), pause("-1")), (None, None));
    }
}

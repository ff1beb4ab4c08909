//! Calls to outside services: bounded in number, limited in time, tried again where that can help, and failing with a sentence
//! that holds no secret.

use crate::error::DataError;
use backon::{ExponentialBuilder, Retryable};
use querl_core::records::{CallFailure, FailureKind};
use reqwest::header::RETRY_AFTER;
use reqwest::{Client, Response, StatusCode, Url};
use serde_json::Value;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// A server that asks for a longer pause than this is not waited for.
const LONGEST_PAUSE: Duration = Duration::from_secs(120);
/// No answer to a rewrite or a search is anywhere near this size.
const MAX_BODY_BYTES: usize = 8 << 20;
const MAX_CONNECT_TIME: Duration = Duration::from_secs(10);
/// How much of a server's words goes into a message.
const EXCERPT_CHARS: usize = 300;

/// A key that no message shows.
#[derive(Clone)]
pub(crate) struct Secret(String);

impl Secret {
    /// The key in an environment variable; `None` where `variable` is empty, for services that want no key.
    ///
    /// # Errors
    /// The variable is not set.
    pub(crate) fn from_env(section: &str, variable: &str) -> Result<Option<Self>, DataError> {
        if variable.is_empty() {
            return Ok(None);
        }
        match std::env::var(variable) {
            Ok(value) if !value.trim().is_empty() => Ok(Some(Self(value.trim().to_owned()))),
            _ => Err(DataError::setting(
                format!("{section}.api_key_env"),
                format!(
                    "names the environment variable `{variable}`, which is not set; export it, or name none (\"\") for a service without keys"
                ),
            )),
        }
    }

    #[cfg(test)]
    pub(crate) fn new(key: &str) -> Self {
        Self(key.to_owned())
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[key]")
    }
}

/// Limits on the calls to one service.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallLimits {
    /// Calls under way at once.
    pub(crate) max_concurrent: usize,
    /// For one try.
    pub(crate) timeout: Duration,
    /// Tries after the first.
    pub(crate) max_retries: usize,
    /// Pause before the second try; later ones double, with jitter.
    pub(crate) first_pause: Duration,
}

impl CallLimits {
    pub(crate) fn new(max_concurrent: usize, timeout_s: f64, max_retries: usize) -> Self {
        // `from_secs_f64` panics on what the configuration's own check should have refused.
        let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::from_secs(60));
        Self { max_concurrent: max_concurrent.max(1), timeout, max_retries, first_pause: Duration::from_millis(500) }
    }
}

/// Calls one address of a service.
#[derive(Debug)]
pub(crate) struct Caller {
    client: Client,
    url: Url,
    key: Option<Secret>,
    limits: CallLimits,
    slots: Semaphore,
}

/// An answer and how long its last try took.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) body: Value,
    pub(crate) latency_ms: f64,
}

/// One failed try.
struct FailedTry {
    failure: CallFailure,
    retry: Retry,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Retry {
    Useless,
    Later,
    After(Duration),
}

impl Caller {
    /// A caller of `url`, which `setting` names in the configuration.
    ///
    /// # Errors
    /// The address is not one of HTTP, or no client can be made on this machine.
    pub(crate) fn new(setting: &str, url: &str, key: Option<Secret>, limits: CallLimits) -> Result<Self, DataError> {
        let parsed = Url::parse(url).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let url =
            parsed.ok_or_else(|| DataError::setting(setting, "is not an http or https address; write it in full"))?;
        // Fails where a provider is installed already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder()
            .timeout(limits.timeout)
            .connect_timeout(limits.timeout.min(MAX_CONNECT_TIME))
            .build()
            .map_err(|error| DataError::setting(setting, format!("cannot be called from this machine: {error}")))?;
        Ok(Self { client, url, key, limits, slots: Semaphore::new(limits.max_concurrent) })
    }

    /// Sends a JSON body and reads a JSON answer.
    ///
    /// # Errors
    /// What the last try met. Timeouts, broken connections, 429 and 5xx are tried again; a pause that the server asks for in
    /// `Retry-After` is kept.
    pub(crate) async fn post(&self, body: &Value) -> Result<Answer, CallFailure> {
        // The slot is held during pauses too: a service that asks for fewer calls gets fewer.
        let _slot = self.slots.acquire().await.expect("the semaphore is never closed");
        let pauses = ExponentialBuilder::default()
            .with_min_delay(self.limits.first_pause)
            .with_max_delay(Duration::from_secs(30))
            .with_max_times(self.limits.max_retries)
            .with_jitter();
        (|| self.try_post(body))
            .retry(pauses)
            .when(|failed: &FailedTry| failed.retry != Retry::Useless)
            .adjust(|failed: &FailedTry, pause| match failed.retry {
                Retry::After(asked) if asked > LONGEST_PAUSE => None,
                Retry::After(asked) => pause.map(|pause| pause.max(asked)),
                _ => pause,
            })
            .notify(|failed: &FailedTry, pause| tracing::debug!(?pause, "{}; trying again", failed.failure))
            .await
            .map_err(|failed| failed.failure)
    }

    async fn try_post(&self, body: &Value) -> Result<Answer, FailedTry> {
        let started = Instant::now();
        let mut request = self.client.post(self.url.clone()).json(body);
        if let Some(Secret(key)) = &self.key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await.map_err(|error| self.broken(&error))?;
        let status = response.status();
        let pause = asked_pause(&response);
        let text = self.read(response).await?;
        if !status.is_success() {
            return Err(self.refused(status, pause, &text));
        }
        let latency_ms = started.elapsed().as_secs_f64() * 1000.0;
        let invalid = |error| {
            self.failed(FailureKind::InvalidResponse, Retry::Useless, format!("the answer is not JSON: {error}"))
        };
        let body = serde_json::from_str(&text).map_err(invalid)?;
        Ok(Answer { body, latency_ms })
    }

    async fn read(&self, mut response: Response) -> Result<String, FailedTry> {
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.broken(&error))? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() > MAX_BODY_BYTES {
                let message = format!("the answer is longer than {MAX_BODY_BYTES} bytes");
                return Err(self.failed(FailureKind::InvalidResponse, Retry::Useless, message));
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn broken(&self, error: &reqwest::Error) -> FailedTry {
        let (kind, what) = if error.is_timeout() && !error.is_connect() {
            (FailureKind::Timeout, format!("no answer within {} s", self.limits.timeout.as_secs_f64()))
        } else {
            (FailureKind::Unreachable, innermost(error))
        };
        self.failed(kind, Retry::Later, what)
    }

    fn refused(&self, status: StatusCode, pause: Option<Duration>, body: &str) -> FailedTry {
        let (kind, retry) = match status.as_u16() {
            401 | 403 => (FailureKind::Unauthorized, Retry::Useless),
            429 => (FailureKind::RateLimited, pause.map_or(Retry::Later, Retry::After)),
            500.. => (FailureKind::ServerError, pause.map_or(Retry::Later, Retry::After)),
            _ => (FailureKind::Rejected, Retry::Useless),
        };
        // The key goes first: what is cut in its middle would not be found any more.
        self.failed(kind, retry, format!("answered {status}: {}", server_message(&self.without_key(body))))
    }

    fn failed(&self, kind: FailureKind, retry: Retry, what: String) -> FailedTry {
        FailedTry { failure: self.failure(kind, &what), retry }
    }

    /// A failure of this service, with the key taken out of the message.
    pub(crate) fn failure(&self, kind: FailureKind, what: &str) -> CallFailure {
        CallFailure { kind, message: self.without_key(&format!("POST {}: {what}", shown_address(&self.url))) }
    }

    fn without_key(&self, text: &str) -> String {
        match &self.key {
            Some(Secret(key)) => text.replace(key.as_str(), "[key]"),
            None => text.to_owned(),
        }
    }
}

/// The address without user, password and query, which may hold keys.
fn shown_address(url: &Url) -> String {
    let port = url.port().map_or_else(String::new, |port| format!(":{port}"));
    format!("{}://{}{port}{}", url.scheme(), url.host_str().unwrap_or_default(), url.path())
}

fn asked_pause(response: &Response) -> Option<Duration> {
    let text = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    text.trim().parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
}

/// What the server says for itself: the message of an OpenAI-style error, else the start of the body.
fn server_message(body: &str) -> String {
    let parsed: Option<Value> = serde_json::from_str(body).ok();
    let said = parsed.as_ref().and_then(|body| {
        ["/error/message", "/error", "/message", "/detail", "/msg"].iter().find_map(|path| body.pointer(path)?.as_str())
    });
    let text = said.unwrap_or(body).split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(EXCERPT_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None if text.is_empty() => "no message".into(),
        None => text,
    }
}

/// The cause at the bottom says it best: `Connection refused`.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

#[cfg(test)]
#[path = "calls_tests.rs"]
mod tests;

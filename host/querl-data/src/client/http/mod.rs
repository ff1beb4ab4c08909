//! HTTP client for external services: limits on concurrency, rate and time, retries with backoff, a circuit breaker, and error messages
//! without API keys.

mod file_transfer;
mod retry;
mod secret;
pub(crate) use file_transfer::FileTransfer;
pub(crate) use retry::{Check, Refusal, estimated_tokens};
pub(crate) use secret::Secret;

use crate::client::spend::{CallSpend, SpendTracker};
use crate::client::{ServiceContext, StopFlag, queued};
use crate::error::DataError;
use backon::{ExponentialBuilder, Retryable};
use querl_core::config::CallsConfig;
use querl_core::fsx::read_bounded;
use querl_core::records::{CallFailure, FailureKind};
use reqwest::header::{AUTHORIZATION, HeaderValue};
use reqwest::{Certificate, Client, Method, NoProxy, Proxy, RequestBuilder, Response, Url, redirect};
use retry::{
    Charge, CircuitBreaker, FailedAttempt, MAX_RETRY_AFTER, RateLimiter, Retry, is_out_of_money, may_be_charged,
    of_status, retry_after,
};
use serde_json::Value;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::Semaphore;

/// Longest excerpt of a response in a message.
const EXCERPT_CHARS: usize = 300;
/// Maximum number of bytes of an error response that are read.
const REFUSAL_BYTES: usize = 64 << 10;
/// Maximum size of `calls.ca_file`; the certificates of all public authorities have 0.2 MB.
const MAX_CERTIFICATE_BYTES: u64 = 16 << 20;

#[derive(Debug, Clone, Copy)]
pub(crate) struct CallLimits {
    pub(crate) max_concurrent: usize,
    pub(crate) timeout: Duration,
    pub(crate) max_retries: usize,
    pub(crate) first_pause: Duration,
    /// Quota of requests per minute, retries included; `None` for no quota.
    pub(crate) requests_per_minute: Option<u32>,
    /// Quota of tokens per minute, estimated from prompts and maximum response lengths; `None` for no quota.
    pub(crate) tokens_per_minute: Option<u32>,
}

impl CallLimits {
    pub(crate) fn new(max_concurrent: usize, timeout_s: f64, max_retries: usize) -> Self {
        Self {
            max_concurrent: max_concurrent.max(1),
            timeout: seconds(timeout_s),
            max_retries,
            first_pause: Duration::from_millis(500),
            requests_per_minute: None,
            tokens_per_minute: None,
        }
    }

    pub(crate) fn per_minute(self, requests: Option<u32>, tokens: Option<u32>) -> Self {
        Self { requests_per_minute: requests, tokens_per_minute: tokens, ..self }
    }
}

/// HTTP client of one URL of a service.
#[derive(Debug)]
pub(crate) struct Caller {
    client: Client,
    url: Url,
    key: Option<Secret>,
    authorization: Option<HeaderValue>,
    limits: CallLimits,
    max_response_bytes: usize,
    read_timeout: Duration,
    slots: Semaphore,
    rate_limiter: RateLimiter,
    breaker: CircuitBreaker,
    tracker: Arc<SpendTracker>,
    stop: StopFlag,
    provider: String,
}

/// JSON response of a call, the latency of its last attempt, and its spend.
#[derive(Debug)]
pub(crate) struct ServiceResponse {
    pub(crate) body: Value,
    pub(crate) latency_ms: f64,
    pub(crate) call_spend: CallSpend,
}

/// An HTTP request, sent once per attempt.
#[derive(Debug, Clone)]
pub(crate) struct Call<'a> {
    method: Method,
    /// Appended to the caller's URL; empty for the URL itself.
    path: String,
    sent: Option<&'a Value>,
    answer: AnswerForm,
}

/// Accepted forms of a successful response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AnswerForm {
    Json,
    /// JSON, or plain text as a JSON string.
    Text,
}

impl<'a> Call<'a> {
    pub(crate) fn post(path: &str, body: &'a Value) -> Self {
        Self { method: Method::POST, path: path.to_owned(), sent: Some(body), answer: AnswerForm::Json }
    }

    pub(crate) fn get(path: &str) -> Self {
        Self { method: Method::GET, path: path.to_owned(), sent: None, answer: AnswerForm::Json }
    }

    /// The call, with plain text accepted as response in addition to JSON.
    pub(crate) fn or_text(self) -> Self {
        Self { answer: AnswerForm::Text, ..self }
    }
}

/// Upper bounds of the tokens and the cost of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CostBound {
    pub(crate) n_tokens: u64,
    pub(crate) max_cost: f64,
}

impl CostBound {
    /// The bounds of a call that is free of charge.
    pub(crate) const FREE: Self = Self { n_tokens: 0, max_cost: 0.0 };
}

impl Caller {
    /// Opens a client of `url`; `setting` is the configuration key of the URL.
    pub(crate) fn new(
        setting: &str,
        url: &str,
        key: Option<Secret>,
        limits: CallLimits,
        services: &ServiceContext,
    ) -> Result<Self, DataError> {
        let parsed = Url::parse(url).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let url =
            parsed.ok_or_else(|| DataError::setting(setting, "is not an http or https address; write it in full"))?;
        let config = &services.config;
        let provider = setting.rsplit_once('.').map_or(setting, |(section, _)| section).to_owned();
        let unsent = |_| {
            DataError::setting(format!("{provider}.api_key_env"), "gives a key with characters that cannot be sent")
        };
        let authorization = key.as_ref().map(Secret::header).transpose().map_err(unsent)?;
        Ok(Self {
            client: new_client(setting, &limits, config)?,
            url,
            key,
            authorization,
            limits,
            max_response_bytes: config.max_response_mib.saturating_mul(1 << 20),
            read_timeout: seconds(config.read_timeout_s),
            slots: Semaphore::new(limits.max_concurrent),
            rate_limiter: RateLimiter::new(limits.requests_per_minute, limits.tokens_per_minute),
            breaker: CircuitBreaker::new(config.breaker_failures),
            tracker: services.tracker.clone(),
            stop: services.stop,
            provider,
        })
    }

    pub(crate) fn named(self, provider: &str) -> Self {
        Self { provider: provider.to_owned(), ..self }
    }

    #[cfg(test)]
    pub(crate) async fn post(&self, body: &Value) -> Result<ServiceResponse, CallFailure> {
        self.send(&Call::post("", body)).await
    }

    /// Sends a request that is free of charge and returns its JSON response.
    pub(crate) async fn send(&self, call: &Call<'_>) -> Result<ServiceResponse, CallFailure> {
        self.call(call, CostBound::FREE, &|_| None).await
    }

    /// Sends a request that costs at most `bound`; `check` detects errors in responses with a success status.
    pub(crate) async fn call(
        &self,
        call: &Call<'_>,
        bound: CostBound,
        check: &Check<'_>,
    ) -> Result<ServiceResponse, CallFailure> {
        // The slot is held during retry pauses, so that a busy service gets fewer calls.
        let slot = self.before_stop(queued(self.slots.acquire())).await?;
        let _slot = slot.expect("the semaphore is never closed");
        if let Some(down) = self.breaker.opened() {
            return Err(down.clone());
        }
        let call_spend = Mutex::new(CallSpend::new(&self.tracker, &self.provider));
        let outcome = self.retried(|| self.try_call(call, bound, check, &call_spend)).await;
        // The outcome of an interrupted call does not describe the service.
        if !self.stop.is_set() {
            self.breaker.count(&shown_address(&self.url), &outcome);
        }
        let mut call_spend = call_spend.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        match outcome {
            Ok((body, latency_ms)) => Ok(ServiceResponse { body, latency_ms, call_spend }),
            Err(failure) => {
                call_spend.failed();
                Err(failure)
            }
        }
    }

    async fn retried<T, F: Future<Output = Result<T, FailedAttempt>>>(
        &self,
        try_once: impl FnMut() -> F,
    ) -> Result<T, CallFailure> {
        let stop = self.stop;
        let pauses = ExponentialBuilder::default()
            .with_min_delay(self.limits.first_pause)
            .with_max_delay(Duration::from_secs(30))
            .with_max_times(self.limits.max_retries)
            .with_jitter();
        try_once
            .retry(pauses)
            .when(|failed: &FailedAttempt| {
                failed.retry != Retry::Useless && self.breaker.opened().is_none() && !self.stop.is_set()
            })
            .adjust(|failed: &FailedAttempt, pause| match failed.retry {
                Retry::After(wait) if wait > MAX_RETRY_AFTER => None,
                // Adds the backoff's jitter.
                Retry::After(wait) => pause.map(|pause| pause.max(wait + pause.min(wait / 8))),
                _ => pause,
            })
            // The stop flag ends a pause early; the next attempt fails at once.
            .sleep(move |pause| stop.pause(pause))
            .notify(|failed: &FailedAttempt, pause| tracing::debug!(?pause, "{}; trying again", failed.failure))
            .await
            .map_err(|failed| {
                if matches!(failed.retry, Retry::After(wait) if wait > MAX_RETRY_AFTER) {
                    self.breaker.open(&failed.failure);
                }
                failed.failure
            })
    }

    async fn try_call(
        &self,
        call: &Call<'_>,
        bound: CostBound,
        check: &Check<'_>,
        call_spend: &Mutex<CallSpend>,
    ) -> Result<(Value, f64), FailedAttempt> {
        let unpaid = |failure| FailedAttempt { failure, retry: Retry::Useless, charge: Charge::Nothing };
        let reserved =
            self.before_stop(queued(self.tracker.reserve(&self.provider, bound.max_cost))).await.map_err(unpaid)?;
        lock(call_spend).covered_by(reserved.map_err(unpaid)?);
        self.before_stop(queued(self.rate_limiter.acquire(bound.n_tokens))).await.map_err(unpaid)?;
        lock(call_spend).sent();
        let outcome = self.exchange(call).await.and_then(|response| match check(&response.0) {
            Some(Refusal { kind, retry, charge, what }) => {
                Err(FailedAttempt { charge, ..self.failed(call, kind, retry, what) })
            }
            None => Ok(response),
        });
        if let Err(failed) = &outcome
            && !matches!(failed.charge, Charge::Nothing)
        {
            self.tracker.note_unusable(&failed.failure);
        }
        let mut call_spend = lock(call_spend);
        match outcome.as_ref().map_err(|failed| failed.charge) {
            Ok(_) => call_spend.answered(),
            Err(Charge::Nothing) => call_spend.refused(),
            Err(Charge::Unknown) => call_spend.lost(),
            Err(Charge::Exactly(usage)) => call_spend.unusable(usage),
        }
        outcome
    }

    /// The result of `wait`, or a failure once the stop flag is set.
    async fn before_stop<T>(&self, wait: impl Future<Output = T>) -> Result<T, CallFailure> {
        let done = self.stop.before(wait).await;
        done.ok_or_else(|| self.failure(FailureKind::Timeout, "not sent: interrupted"))
    }

    async fn exchange(&self, call: &Call<'_>) -> Result<(Value, f64), FailedAttempt> {
        let started = Instant::now();
        let mut response = self.request(call).send().await.map_err(|error| self.broken(call, &error))?;
        if !response.status().is_success() {
            return Err(self.refused(call, response).await);
        }
        let bytes = self.read(call, &mut response, self.max_response_bytes).await.map_err(|(_, failed)| failed)?;
        let latency_ms = started.elapsed().as_secs_f64() * 1000.0;
        Ok((self.parse(call, bytes)?, latency_ms))
    }

    fn request(&self, call: &Call<'_>) -> RequestBuilder {
        let url = match call.path.as_str() {
            "" => self.url.to_string(),
            path => format!("{}{path}", self.url.as_str().trim_end_matches('/')),
        };
        let mut request = self.client.request(call.method.clone(), url);
        if let Some(body) = call.sent {
            request = request.json(body);
        }
        match &self.authorization {
            Some(authorization) => request.header(AUTHORIZATION, authorization.clone()),
            None => request,
        }
    }

    async fn read(
        &self,
        call: &Call<'_>,
        response: &mut Response,
        most_bytes: usize,
    ) -> Result<Vec<u8>, (Vec<u8>, FailedAttempt)> {
        let mut bytes = Vec::new();
        loop {
            let failed = match tokio::time::timeout(self.read_timeout, response.chunk()).await {
                Ok(Ok(None)) => return Ok(bytes),
                Ok(Ok(Some(chunk))) if bytes.len() + chunk.len() <= most_bytes => {
                    bytes.extend_from_slice(&chunk);
                    continue;
                }
                Ok(Ok(Some(_))) => {
                    let most = self.max_response_bytes >> 20;
                    let message = format!("the answer is longer than calls.max_response_mib = {most}");
                    self.failed(call, FailureKind::InvalidResponse, Retry::Useless, message).lost()
                }
                Ok(Err(error)) => self.broken(call, &error),
                Err(_) => {
                    let message = format!(
                        "not a byte within calls.read_timeout_s = {}, in the middle of an answer",
                        self.read_timeout.as_secs_f64()
                    );
                    self.failed(call, FailureKind::Timeout, Retry::Later, message).lost()
                }
            };
            return Err((bytes, failed));
        }
    }

    fn parse(&self, call: &Call<'_>, bytes: Vec<u8>) -> Result<Value, FailedAttempt> {
        // Lossy decoding would change the text.
        let text = String::from_utf8(bytes).map_err(|error| {
            let (at, is_cut) = (error.utf8_error().valid_up_to(), error.utf8_error().error_len().is_none());
            let message = match is_cut {
                true => "the answer ends in the middle of a character".to_owned(),
                false => format!("the answer is not UTF-8 from byte {at} on; let the service answer in UTF-8"),
            };
            self.failed(call, FailureKind::InvalidResponse, Retry::Later, message).lost()
        })?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let parsed: Result<Value, serde_json::Error> = match (serde_json::from_str(text), call.answer) {
            (Err(_), AnswerForm::Text) => Ok(Value::String(text.to_owned())),
            (parsed, _) => parsed,
        };
        let mut body = parsed.map_err(|error| {
            let message = format!("the answer is not JSON: {error}");
            self.failed(call, FailureKind::InvalidResponse, Retry::Later, message).lost()
        })?;
        if let Some(key) = &self.key {
            key.hide_in_value(&mut body);
        }
        Ok(body)
    }

    fn broken(&self, call: &Call<'_>, error: &reqwest::Error) -> FailedAttempt {
        let (kind, what) = match error.is_timeout() && !error.is_connect() {
            true => (FailureKind::Timeout, format!("no answer within {} s", self.limits.timeout.as_secs_f64())),
            false => (FailureKind::Unreachable, connection_problem(error)),
        };
        // Without a connection nothing was charged.
        let failed = self.failed(call, kind, Retry::Later, what);
        if error.is_connect() { failed } else { failed.lost() }
    }

    /// The failure for an HTTP error status, independent of the body. A truncated body is quoted as far as it was read.
    async fn refused(&self, call: &Call<'_>, mut response: Response) -> FailedAttempt {
        let (status, pause) = (response.status(), retry_after(response.headers(), SystemTime::now()));
        let body = self.read(call, &mut response, REFUSAL_BYTES).await.unwrap_or_else(|(read, _)| read);
        let body = &String::from_utf8_lossy(&body);
        let (kind, retry) = match is_out_of_money(body) {
            true => (FailureKind::Unauthorized, Retry::Useless),
            false => of_status(status.as_u16(), pause),
        };
        // The key is redacted before the text is shortened, which could cut the key in two.
        let mut what = format!("answered {status}: {}", server_message(&self.without_key(body)));
        match retry {
            Retry::After(wait) if wait > MAX_RETRY_AFTER => {
                what = format!("{what}; the service asks to wait {:.0} s", wait.as_secs_f64().min(1e9));
            }
            Retry::After(wait) => self.rate_limiter.pause_all(wait),
            Retry::Later | Retry::Useless => {}
        }
        let failed = self.failed(call, kind, retry, what);
        if may_be_charged(status.as_u16()) { failed.lost() } else { failed }
    }

    fn failed(&self, call: &Call<'_>, kind: FailureKind, retry: Retry, what: String) -> FailedAttempt {
        let (method, mut address) = (&call.method, shown_address(&self.url));
        if !call.path.is_empty() {
            address.truncate(address.trim_end_matches('/').len());
        }
        let message = self.without_key(&format!("{method} {address}{}: {what}", call.path));
        FailedAttempt { failure: CallFailure { kind, message }, retry, charge: Charge::Nothing }
    }

    pub(crate) fn failure(&self, kind: FailureKind, what: &str) -> CallFailure {
        CallFailure { kind, message: self.without_key(&format!("POST {}: {what}", shown_address(&self.url))) }
    }

    fn without_key(&self, text: &str) -> String {
        self.key.as_ref().map_or_else(|| text.to_owned(), |key| key.hide_in(text))
    }
}

fn lock(call_spend: &Mutex<CallSpend>) -> MutexGuard<'_, CallSpend> {
    call_spend.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn shown_address(url: &Url) -> String {
    let port = url.port().map_or_else(String::new, |port| format!(":{port}"));
    format!("{}://{}{port}{}", url.scheme(), url.host_str().unwrap_or_default(), url.path())
}

pub(crate) fn server_message(body: &str) -> String {
    let parsed: Option<Value> = serde_json::from_str(body).ok();
    let message = parsed.as_ref().and_then(|body| {
        ["/error/message", "/error", "/message", "/detail", "/msg"].iter().find_map(|path| body.pointer(path)?.as_str())
    });
    let text = message.unwrap_or(body).split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(EXCERPT_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None if text.is_empty() => "no message".into(),
        None => text,
    }
}

/// The innermost cause of an error, such as `Connection refused`, which the `Display` of a reqwest error leaves out.
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

/// The innermost cause of an error as in [`root_cause`], or a sentence with the remedy if it is a TLS error that rustls reports as debug
/// text.
fn connection_problem(error: &dyn std::error::Error) -> String {
    let cause = root_cause(error);
    let explained = [
        (
            "UnknownIssuer",
            "no known CA signed the server's certificate; write a PEM file of the CA that did, or of the self-signed certificate itself, in \
             calls.ca_file",
        ),
        (
            "CaUsedAsEndEntity",
            "the server's own certificate is a CA certificate; give the server one with basicConstraints CA:FALSE, and write a PEM file of \
             its CA, or of itself if it is self-signed, in calls.ca_file",
        ),
        (
            "InvalidContentType",
            "the server does not speak TLS on this port; write http:// in place of https://, or another port",
        ),
    ];
    let explanation = explained.into_iter().find(|(name, _)| cause.contains(name));
    explanation.map_or(cause, |(_, explanation)| explanation.to_owned())
}

fn new_client(setting: &str, limits: &CallLimits, config: &CallsConfig) -> Result<Client, DataError> {
    // Fails if a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let connect = seconds(config.connect_timeout_s).min(limits.timeout);
    let mut builder = Client::builder()
        .timeout(limits.timeout)
        .connect_timeout(connect)
        // A redirected POST would become a GET without its body; the redirect is reported instead.
        .redirect(redirect::Policy::none());
    if let Some(address) = &config.proxy {
        let proxy = Proxy::all(address)
            .map_err(|error| DataError::setting("calls.proxy", format!("cannot be used: {error}")))?;
        builder = builder.proxy(proxy.no_proxy(NoProxy::from_env()));
    }
    if let Some(path) = &config.ca_file {
        let unusable =
            |problem: String| DataError::setting("calls.ca_file", format!("is `{}`, {problem}", path.display()));
        let bytes = read_bounded(path, MAX_CERTIFICATE_BYTES)
            .map_err(|error| unusable(format!("which cannot be read: {error}")))?;
        let certificates = Certificate::from_pem_bundle(&bytes).ok().filter(|found| !found.is_empty());
        let certificates = certificates.ok_or_else(|| unusable("which holds no certificate in PEM form".into()))?;
        builder = builder.tls_certs_merge(certificates);
    }
    builder.build().map_err(|error| {
        DataError::setting(setting, format!("cannot be called: the HTTP client cannot be created: {error}"))
    })
}

/// Does not panic, unlike `from_secs_f64`; the configuration's check rejects such values.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(60))
}

#[cfg(test)]
mod tests;

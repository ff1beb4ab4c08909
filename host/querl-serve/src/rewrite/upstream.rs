//! The retrieval service behind the proxy: its address, requests to it and its responses.

use super::failure_log::FailureLog;
use crate::error::ErrorResponse;
use crate::general_rag::GENERAL_RAG_ROUTE;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::Response;
use querl_data::{RagPassage, rag_passages, root_cause};
use reqwest::redirect::Policy;
use reqwest::{Client, RequestBuilder};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Minimum interval between log lines about failures of one kind.
const FAILURE_INTERVAL: Duration = Duration::from_secs(60);
const FAILED: &str = "request failed";
const SERVER_ERROR: &str = "server error";
const CLIENT_ERROR: &str = "request rejected";
const INVALID_REQUEST: &str = "invalid request";
const TOO_LARGE: &str = "response too large";
const UNREADABLE: &str = "unreadable response";
const WITHOUT_TEXT: &str = "passages without a text are left out";

const RETRIEVAL_ROUTE: &str = "/retrieval";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Shorter than the 5 s after which uvicorn closes idle connections, the shortest among common servers.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Maximum size of a response, far above that of its passages.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// Headers of one connection (RFC 9110, 7.6.1), and those that the HTTP library sets.
const NOT_FORWARDED: [&str; 11] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "expect",
    "host",
    "content-length",
];

/// A client of the upstream retrieval service, with pooled connections.
#[derive(Debug, Clone)]
pub struct Upstream {
    /// URL of the route.
    url: String,
    is_dify: bool,
    timeout: Duration,
    client: Client,
    failures: Arc<FailureLog>,
}

impl Upstream {
    /// A client of a retrieval service. `url`: a service with the `general_rag` interface, with or without the path of its route,
    /// or a Dify external knowledge API, whose path ends in `/retrieval`. `timeout`: time limit of one response.
    ///
    /// # Errors
    /// A sentence: it is not an HTTP address, or cannot be called from this machine.
    pub fn new(url: &str, timeout: Duration) -> Result<Self, String> {
        let expected = "expected one such as http://127.0.0.1:9000";
        let parsed =
            reqwest::Url::parse(url).map_err(|error| format!("`{url}` is not an address ({error}); {expected}"))?;
        if !["http", "https"].contains(&parsed.scheme()) || !parsed.has_host() {
            return Err(format!("`{url}` is not an address that begins with http:// or https://; {expected}"));
        }
        // Fails if a provider is already installed.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder()
            .timeout(timeout)
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            // Redirects are passed to the client.
            .redirect(Policy::none());
        let client = client.build().map_err(|error| format!("`{url}` cannot be called from this machine: {error}"))?;
        let url = url.trim_end_matches('/');
        let is_dify = url.ends_with(RETRIEVAL_ROUTE);
        let route = if is_dify || url.ends_with(GENERAL_RAG_ROUTE) { "" } else { GENERAL_RAG_ROUTE };
        let failures = Arc::new(FailureLog::new(FAILURE_INTERVAL));
        Ok(Self { url: format!("{url}{route}"), is_dify, timeout, client, failures })
    }

    pub(super) fn is_dify(&self) -> bool {
        self.is_dify
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sends a body to the service, with the forwarded headers and the query string of the client's request.
    pub(super) async fn send(
        &self,
        uri: &Uri,
        headers: &HeaderMap,
        body: impl Into<reqwest::Body>,
    ) -> Result<UpstreamResponse, ErrorResponse> {
        let query = uri.query().map_or(String::new(), |query| format!("?{query}"));
        let request = self.client.post(format!("{}{query}", self.url)).headers(forwarded(headers)).body(body);
        let failed = |status, what: &str| ErrorResponse::new(status, format!("the retrieval service {what}"));
        match receive(request).await {
            Ok(response) => {
                self.failures.note_success(&self.url, FAILED, "responds again");
                self.log_status(response.status);
                if response.body.len() > MAX_RESPONSE_BYTES {
                    self.failures.warn(&self.url, TOO_LARGE, "more than 64 MiB");
                    return Err(failed(StatusCode::BAD_GATEWAY, "responded with more than 64 MiB"));
                }
                Ok(response)
            }
            Err(error) => {
                // The address and the cause are written only to the operator's log.
                let (status, what, cause) = self.failure(error);
                self.failures.warn(&self.url, FAILED, &cause);
                Err(failed(status, what))
            }
        }
    }

    /// Logs an error status. The body is not logged: it may quote the query.
    fn log_status(&self, status: StatusCode) {
        if status.is_server_error() {
            self.failures.warn(&self.url, SERVER_ERROR, &format!("status {status}"));
        } else {
            self.failures.note_success(&self.url, SERVER_ERROR, "responds without a status of 5xx again");
        }
        if status.is_client_error() {
            self.log_rejection(status);
        }
    }

    /// Logs a 4xx status, at level info if it is about the content of one request.
    fn log_rejection(&self, status: StatusCode) {
        let what = format!("status {status}");
        match status.as_u16() {
            400 | 413 | 414 | 415 | 422 | 431 => self.failures.note(&self.url, INVALID_REQUEST, &what),
            _ => self.failures.warn(&self.url, CLIENT_ERROR, &what),
        }
    }

    /// Status and message of the response to the client, and the cause for the log.
    fn failure(&self, error: reqwest::Error) -> (StatusCode, &'static str, String) {
        let late = "did not respond in time";
        match (error.is_timeout(), error.is_connect()) {
            (true, true) => {
                let cause = format!("no connection within {} s", CONNECT_TIMEOUT.as_secs());
                (StatusCode::GATEWAY_TIMEOUT, late, cause)
            }
            (true, false) => {
                let cause = format!("no response within {} s", self.timeout.as_secs_f64());
                (StatusCode::GATEWAY_TIMEOUT, late, cause)
            }
            (false, is_connect) => {
                let what = match is_connect {
                    true => "cannot be reached; the server's log says why",
                    false => "sent no complete HTTP response; the server's log says why",
                };
                (StatusCode::BAD_GATEWAY, what, root_cause(&error.without_url()))
            }
        }
    }

    /// The passages of a `general_rag` response as records of Dify, with the limits of Dify's request applied, which the service
    /// may have ignored.
    ///
    /// # Errors
    /// The service's own error, or that its response is unreadable.
    pub(super) fn records(
        &self,
        response: &UpstreamResponse,
        top_k: Option<u64>,
        score_threshold: Option<f64>,
    ) -> Result<Value, ErrorResponse> {
        let body: Value = serde_json::from_slice(&response.body).unwrap_or_default();
        // Services with this API may report the status only in the body.
        let stated = body["status"].as_u64().and_then(|status| StatusCode::from_u16(status.try_into().ok()?).ok());
        let status = if response.status.is_success() { stated.unwrap_or(response.status) } else { response.status };
        match rag_passages(&body) {
            Ok((passages, n_without_text)) if status.is_success() => {
                self.failures.note_success(&self.url, UNREADABLE, "responds with passages again");
                if n_without_text > 0 {
                    self.failures.warn(&self.url, WITHOUT_TEXT, &n_without_text.to_string());
                }
                let is_below = |score: f64| score_threshold.is_some_and(|threshold| score < threshold);
                let passages = passages.into_iter().filter(|passage| !passage.score.is_some_and(is_below));
                let n_most = top_k.and_then(|top_k| usize::try_from(top_k).ok()).unwrap_or(usize::MAX);
                Ok(json!({"records": passages.take(n_most).map(record).collect::<Vec<_>>()}))
            }
            _ if status.is_client_error() => {
                if response.status.is_success() {
                    self.log_rejection(status);
                }
                let message = body["msg"].as_str().unwrap_or("the retrieval service rejected the request");
                Err(ErrorResponse::new(status, message))
            }
            unreadable => {
                // `send` has logged an error status, but not a redirect.
                if !response.status.is_server_error() {
                    let what = format!("status {status} and no readable passages");
                    self.failures.warn(&self.url, UNREADABLE, &what);
                }
                if let Err(problem) = unreadable {
                    // It quotes the response, which may quote the query.
                    tracing::debug!("{}: {UNREADABLE}: {problem}", self.url);
                }
                let what = "the retrieval service failed; the server's log says how";
                Err(ErrorResponse::new(StatusCode::BAD_GATEWAY, what))
            }
        }
    }
}

/// Sends the request and reads the body up to the size limit.
async fn receive(request: RequestBuilder) -> reqwest::Result<UpstreamResponse> {
    let mut response = request.send().await?;
    let mut body = Vec::new();
    while body.len() <= MAX_RESPONSE_BYTES
        && let Some(chunk) = response.chunk().await?
    {
        body.extend_from_slice(&chunk);
    }
    Ok(UpstreamResponse { status: response.status(), headers: forwarded(response.headers()), body })
}

pub(super) struct UpstreamResponse {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

/// Headers without those of a single connection.
fn forwarded(headers: &HeaderMap) -> HeaderMap {
    let connection: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(',').map(|name| name.trim().to_ascii_lowercase()))
        .collect();
    let is_forwarded = |name: &str| !NOT_FORWARDED.contains(&name) && !connection.iter().any(|listed| listed == name);
    let headers = headers.iter().filter(|(name, _)| is_forwarded(name.as_str()));
    headers.map(|(name, value)| (name.clone(), value.clone())).collect()
}

impl UpstreamResponse {
    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    pub(super) fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.body));
        (*response.status_mut(), *response.headers_mut()) = (self.status, self.headers);
        response
    }
}

/// Converts a passage to Dify's record; `metadata` has the other fields of the service.
fn record(passage: RagPassage) -> Value {
    let RagPassage { id, text, score, others: mut metadata } = passage;
    let title = metadata.remove("title").filter(|title| !title.is_null());
    let title = title.map_or(id, |title| title.as_str().map_or_else(|| title.to_string(), str::to_owned));
    json!({"content": text, "score": score.unwrap_or(0.0), "title": title, "metadata": metadata})
}

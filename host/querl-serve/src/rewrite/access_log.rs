//! The access log: one JSON line for each rewrite and each other request, without texts and keys.

use super::metrics;
use super::service::{RewriteResult, RewriteService};
use super::traces::{AccessEntry, RequestSpan};
use anyhow::Context;
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use chrono::{SecondsFormat, Utc};
use serde_json::json;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Status of a request whose client disconnected before the response, as in nginx.
const CLIENT_CLOSED: u16 = 499;

/// The access log file, opened for appending, or none; each line is written by one call.
pub(super) struct AccessLog(Option<Mutex<File>>);

impl AccessLog {
    pub(super) fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let open = |path: &Path| {
            let file = OpenOptions::new().append(true).create(true).open(path);
            file.map(Mutex::new).with_context(|| format!("{}: the access log cannot be opened", path.display()))
        };
        Ok(Self(path.map(open).transpose()?))
    }

    fn write(&self, lines: &str) {
        if let Some(file) = &self.0
            && let Err(error) = file.lock().unwrap_or_else(PoisonError::into_inner).write_all(lines.as_bytes())
        {
            tracing::warn!("the access log cannot be written: {error}");
        }
    }
}

impl AccessEntry {
    pub(super) fn new(id: Option<String>, result: &RewriteResult) -> Self {
        Self {
            id,
            tenant: result.tenant.clone(),
            version: result.generated.version.clone(),
            fallback: result.fallback,
            is_cached: result.is_cached,
            n_prompt_tokens: result.generated.n_prompt_tokens,
            n_tokens: result.generated.n_tokens,
            phases: result.phases,
        }
    }
}

#[derive(Default)]
struct Outcome {
    status: Option<u16>,
    tenant: Option<String>,
    entries: Vec<AccessEntry>,
}

/// State of a request in progress. It is counted and logged when its last holder drops it: once the response is made or its
/// client has left.
pub(super) struct RequestRecord {
    service: Arc<RewriteService>,
    id: String,
    method: Method,
    route: &'static str,
    started: Instant,
    outcome: Mutex<Outcome>,
    /// The request's trace span; `None` without tracing.
    pub(super) span: Option<RequestSpan>,
}

impl RequestRecord {
    pub(super) fn new(service: Arc<RewriteService>, request: &Request) -> Self {
        let (id, route, method) = (service.new_id(), metrics::route_of(request.uri().path()), request.method().clone());
        let traces = service.options.traces.as_ref();
        let span = traces.and_then(|traces| traces.request(&method, route, &id, request.headers()));
        Self { service, id, method, route, started: Instant::now(), outcome: Mutex::default(), span }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn note_status(&self, status: StatusCode) {
        self.change(|outcome| outcome.status = Some(status.as_u16()));
    }

    /// Notes that the client has left before the end of its streamed response.
    pub(super) fn note_closed(&self) {
        self.change(|outcome| outcome.status = Some(CLIENT_CLOSED));
    }

    pub(super) fn note_tenant(&self, tenant: &str) {
        self.change(|outcome| outcome.tenant = Some(tenant.to_owned()));
    }

    pub(super) fn add(&self, entry: AccessEntry) {
        if let Some(span) = &self.span {
            span.add(&entry);
        }
        self.change(|outcome| outcome.entries.push(entry));
    }

    fn change(&self, change: impl FnOnce(&mut Outcome)) {
        change(&mut self.outcome.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// One line per generation, or one for a request without generations.
    fn lines(&self, outcome: &Outcome) -> String {
        let time = Utc::now().to_rfc3339_opts(SecondsFormat::Millis, true);
        let latency_ms = milliseconds(self.started.elapsed());
        let line = |entry: Option<&AccessEntry>| {
            let line = json!({
                "time": time,
                "id": entry.and_then(|entry| entry.id.as_ref()).unwrap_or(&self.id),
                "method": self.method.as_str(),
                "route": self.route,
                "status": outcome.status.unwrap_or(CLIENT_CLOSED),
                "latency_ms": latency_ms,
                "tenant": entry.map(|entry| &entry.tenant).or(outcome.tenant.as_ref()),
                "version": entry.map(|entry| &entry.version),
                "fallback": entry.and_then(|entry| entry.fallback),
                "cached": entry.map(|entry| entry.is_cached),
                "prompt_tokens": entry.map(|entry| entry.n_prompt_tokens),
                "tokens": entry.map(|entry| entry.n_tokens),
            });
            format!("{line}\n")
        };
        match outcome.entries.as_slice() {
            [] => line(None),
            entries => entries.iter().map(|entry| line(Some(entry))).collect(),
        }
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        let outcome = std::mem::take(self.outcome.get_mut().unwrap_or_else(PoisonError::into_inner));
        let status = outcome.status.unwrap_or(CLIENT_CLOSED);
        self.service.metrics.request(self.route, status, self.started.elapsed());
        if let Some(span) = &self.span {
            span.end(status);
        }
        if self.service.access_log.0.is_some() {
            self.service.access_log.write(&self.lines(&outcome));
        }
    }
}

/// A duration in milliseconds, rounded down to a microsecond, for responses and log lines.
pub(super) fn milliseconds(time: std::time::Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

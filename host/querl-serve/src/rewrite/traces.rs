//! OpenTelemetry traces by OTLP/HTTP (protobuf), configured by the standard environment variables alone.
//!
//! A request that generates has a span, continued from the client's `traceparent`, with children `queue`, `prefill` and `decode` for each
//! generation and `upstream` for a forwarded request, whose `traceparent` the upstream service gets. Spans have no texts and no keys. They are
//! sent in batches by a thread of the SDK, from a queue with a bound.

use super::metrics;
use axum::http::{HeaderMap, Method, StatusCode};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span as _, SpanBuilder, SpanKind, Status, TraceContextExt, Tracer, TracerProvider};
use opentelemetry::{Context, Key, KeyValue};
use opentelemetry_http::{HeaderExtractor, HeaderInjector};
use opentelemetry_otlp::SpanExporter as OtlpExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, SpanData, SpanExporter};
use querl_core::serving::Generation;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// Default of `service.name`, without `OTEL_SERVICE_NAME`.
const SERVICE_NAME: &str = "querl";
/// Time for the last spans to be sent when the server stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// The OpenTelemetry exporter to which the spans of requests are sent.
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Traces {
    /// Traces if `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set, and neither `OTEL_SDK_DISABLED`
    /// nor `OTEL_TRACES_EXPORTER=none`; otherwise `None`. Headers, timeout, sampler, resource and batches are set by the other
    /// variables of the specification.
    ///
    /// # Errors
    /// A sentence: a variable has a value that cannot be used.
    pub fn from_env() -> Result<Option<Self>, String> {
        let value = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let is = |name: &str, expected: &str| value(name).is_some_and(|value| value.eq_ignore_ascii_case(expected));
        let endpoint = |name: &'static str| value(name).map(|value| (name, value));
        let endpoint = endpoint("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").or(endpoint("OTEL_EXPORTER_OTLP_ENDPOINT"));
        let Some((name, url)) =
            endpoint.filter(|_| !is("OTEL_SDK_DISABLED", "true") && !is("OTEL_TRACES_EXPORTER", "none"))
        else {
            return Ok(None);
        };
        if !reqwest::Url::parse(&url).is_ok_and(|url| ["http", "https"].contains(&url.scheme()) && url.has_host()) {
            return Err(format!("{name} is `{url}`; expected http://HOST:PORT or https://HOST"));
        }
        for name in ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"] {
            if let Some(protocol) = value(name).filter(|protocol| protocol != "http/protobuf") {
                return Err(format!("{name} is `{protocol}`; expected http/protobuf"));
            }
        }
        // Fails if a provider is already installed.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let exporter = OtlpExporter::builder().with_http().build();
        let exporter = exporter.map_err(|error| format!("traces cannot be sent: {error}"))?;
        let exporter = ReportingExporter { exporter, has_failed: AtomicBool::new(false) };
        let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource()).build();
        Ok(Some(Self { tracer: provider.tracer(env!("CARGO_PKG_NAME")), provider }))
    }

    /// Starts the span of a request; `None` if its route does not generate text.
    pub(super) fn request(
        &self,
        method: &Method,
        route: &'static str,
        id: &str,
        headers: &HeaderMap,
    ) -> Option<RequestSpan> {
        if !metrics::TIMED_ROUTES.contains(&route) {
            return None;
        }
        let client = TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
        let attributes = [
            KeyValue::new("http.request.method", method.to_string()),
            KeyValue::new("http.route", route),
            KeyValue::new("querl.request_id", id.to_owned()),
        ];
        let span = self.tracer.span_builder(format!("{method} {route}")).with_kind(SpanKind::Server);
        let span = span.with_attributes(attributes).start_with_context(&self.tracer, &client);
        Some(RequestSpan { tracer: self.tracer.clone(), context: client.with_span(span) })
    }

    /// Sends the spans that are still queued, for a bounded time.
    pub(super) fn shutdown(&self) {
        // The exporter reports its own errors.
        let _ = self.provider.shutdown_with_timeout(SHUTDOWN_TIMEOUT);
    }
}

/// The resource of the environment, with a name of the service.
fn resource() -> Resource {
    let of_env = Resource::builder().build();
    let name = of_env.get(&Key::from_static_str("service.name")).map(|name| name.to_string());
    match name.is_none_or(|name| name.starts_with("unknown_service")) {
        true => Resource::builder().with_service_name(SERVICE_NAME).build(),
        false => of_env,
    }
}

/// An exporter that reports once if the collector does not accept spans.
#[derive(Debug)]
struct ReportingExporter {
    exporter: OtlpExporter,
    has_failed: AtomicBool,
}

impl SpanExporter for ReportingExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let n_spans = batch.len();
        let sent = self.exporter.export(batch).await;
        let had_failed = self.has_failed.swap(sent.is_err(), Ordering::Relaxed);
        if let (Err(error), false) = (sent, had_failed) {
            tracing::warn!("{n_spans} spans were not sent, and are dropped: {error}");
        }
        Ok(())
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// Durations in queue, prefill and decoding of a generation that has just ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Phases {
    ended: SystemTime,
    queued: Duration,
    prefill: Duration,
    decode: Duration,
}

impl Phases {
    pub(super) fn of(generation: &Generation) -> Self {
        let Generation { queued, prefill, decode, .. } = *generation;
        Self { ended: SystemTime::now(), queued, prefill, decode }
    }
}

/// Data of one generation, for the access log and the trace span.
#[derive(Debug, Clone, Default)]
pub(super) struct AccessEntry {
    /// Id of the query; `None` if it is that of the request.
    pub(super) id: Option<String>,
    pub(super) tenant: String,
    pub(super) version: String,
    pub(super) fallback: Option<&'static str>,
    pub(super) is_cached: bool,
    pub(super) n_prompt_tokens: usize,
    pub(super) n_tokens: usize,
    /// Durations of the generation; `None` if nothing was generated.
    pub(super) phases: Option<Phases>,
}

/// The trace span of a request in progress.
pub(super) struct RequestSpan {
    tracer: SdkTracer,
    context: Context,
}

impl RequestSpan {
    /// Adds child spans for the phases of a generation, or the reason of a fallback.
    pub(super) fn add(&self, entry: &AccessEntry) {
        let attributes = || {
            [
                KeyValue::new("querl.tenant", entry.tenant.clone()),
                KeyValue::new("querl.version", entry.version.clone()),
                KeyValue::new("querl.cached", entry.is_cached),
            ]
        };
        self.context.span().set_attributes(attributes());
        if let Some(reason) = entry.fallback {
            self.context.span().set_attribute(KeyValue::new("querl.fallback", reason));
        }
        let Some(Phases { ended, queued, prefill, decode }) = entry.phases else { return };
        let mut start = ended.checked_sub(queued + prefill + decode).unwrap_or(ended);
        let id = entry.id.clone().map(|id| KeyValue::new("querl.request_id", id));
        let tokens = |name: &'static str, n_tokens: usize| Some(KeyValue::new(name, n_tokens as i64));
        let phases = [
            ("queue", queued, None),
            ("prefill", prefill, tokens("querl.prompt_tokens", entry.n_prompt_tokens)),
            ("decode", decode, tokens("querl.tokens", entry.n_tokens)),
        ];
        for (name, time, n_tokens) in phases {
            let end = start + time;
            let span = self.child(name, SpanKind::Internal).with_start_time(start);
            let attributes = attributes().into_iter().chain(id.clone()).chain(n_tokens);
            span.with_attributes(attributes).start_with_context(&self.tracer, &self.context).end_with_timestamp(end);
            start = end;
        }
    }

    fn child(&self, name: &'static str, kind: SpanKind) -> SpanBuilder {
        self.tracer.span_builder(name).with_kind(kind)
    }

    /// Starts a child span for a request to the upstream service.
    pub(super) fn upstream(&self) -> UpstreamSpan {
        let span = self.child("upstream", SpanKind::Client).start_with_context(&self.tracer, &self.context);
        UpstreamSpan(self.context.with_span(span))
    }

    /// Ends the span with the HTTP status of the response.
    pub(super) fn end(&self, status: u16) {
        end(&self.context, status);
    }
}

/// The trace span of a request to the upstream service; it also ends when it is dropped.
pub(super) struct UpstreamSpan(Context);

impl UpstreamSpan {
    /// `headers` with this span as the parent (`traceparent`), for the request to the upstream service.
    pub(super) fn headers(&self, headers: &HeaderMap) -> HeaderMap {
        let mut headers = headers.clone();
        TraceContextPropagator::new().inject_context(&self.0, &mut HeaderInjector(&mut headers));
        headers
    }

    pub(super) fn end(&self, status: StatusCode) {
        end(&self.0, status.as_u16());
    }
}

fn end(context: &Context, status: u16) {
    let span = context.span();
    span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
    if status >= 500 {
        span.set_status(Status::error(""));
    }
    span.end();
}

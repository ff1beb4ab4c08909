//! Metrics of the style service, in Prometheus' text format.

use super::classifier::ClassifiedText;
use crate::metrics::registered;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder,
};
use std::time::Duration;

/// Upper bounds in seconds: from one short text to longer than any client waits.
const SECONDS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];
const TEXTS: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];

/// Paths that are counted by name; the first three have a histogram of durations.
const ROUTES: [&str; 9] =
    ["/predict", "/classify", "/v1/classify", "/health", "/ready", "/info", "/metrics", "/openapi.json", "/docs"];

/// The route label of a path. Unknown paths share one, so that clients cannot create label values without bound.
pub(super) fn route_of(path: &str) -> &'static str {
    ROUTES.into_iter().find(|route| *route == path).unwrap_or("other")
}

pub(super) struct StyleMetrics {
    registry: Registry,
    requests: IntCounterVec,
    durations: HistogramVec,
    batch_texts: Histogram,
    batch_seconds: Histogram,
    batched_requests: IntCounter,
    texts: IntCounter,
    shortened: IntCounter,
    tokens: IntCounter,
    ready: IntGauge,
    waiting: IntGauge,
}

impl StyleMetrics {
    pub(super) fn new() -> prometheus::Result<Self> {
        let registry = Registry::new_custom(Some("querl_style".into()), None)?;
        let counter = |name: &str, help: &str| registered(&registry, IntCounter::new(name, help)?);
        let gauge = |name: &str, help: &str| registered(&registry, IntGauge::new(name, help)?);
        let histogram = |name: &str, help: &str, bounds: &[f64]| {
            registered(&registry, Histogram::with_opts(HistogramOpts::new(name, help).buckets(bounds.to_vec()))?)
        };
        let by_status = Opts::new("requests_total", "Responses by route and status.");
        let durations = HistogramOpts::new("request_duration_seconds", "Time from a request's head to its response.");
        let metrics = Self {
            requests: registered(&registry, IntCounterVec::new(by_status, &["route", "status"])?)?,
            durations: registered(&registry, HistogramVec::new(durations.buckets(SECONDS.to_vec()), &["route"])?)?,
            batch_texts: histogram("batch_texts", "Texts of one batch.", &TEXTS)?,
            batch_seconds: histogram("batch_duration_seconds", "Time of the model for one batch.", &SECONDS)?,
            batched_requests: counter("batched_requests_total", "Requests that were classified.")?,
            texts: counter("texts_total", "Texts that were classified.")?,
            shortened: counter("texts_shortened_total", "Texts that were shortened to the maximum length.")?,
            tokens: counter("tokens_total", "Tokens that were classified.")?,
            ready: gauge("ready", "1 once the model is loaded.")?,
            waiting: gauge("waiting_texts", "Texts that are queued or being classified.")?,
            registry,
        };
        for route in &ROUTES[..3] {
            metrics.durations.with_label_values(&[route]);
            // Created now, so that the counter has HELP and TYPE before the first request.
            metrics.requests.with_label_values(&[route, "200"]);
        }
        Ok(metrics)
    }

    pub(super) fn request(&self, route: &'static str, status: &str, elapsed: Duration) {
        self.requests.with_label_values(&[route, status]).inc();
        if ROUTES[..3].contains(&route) {
            self.durations.with_label_values(&[route]).observe(elapsed.as_secs_f64());
        }
    }

    pub(super) fn batch(&self, n_requests: usize, n_texts: usize, elapsed: Duration) {
        self.batched_requests.inc_by(n_requests as u64);
        self.batch_texts.observe(n_texts as f64);
        self.batch_seconds.observe(elapsed.as_secs_f64());
    }

    pub(super) fn texts(&self, classified: &[ClassifiedText]) {
        self.texts.inc_by(classified.len() as u64);
        self.tokens.inc_by(classified.iter().map(|text| text.n_tokens as u64).sum());
        self.shortened.inc_by(classified.iter().filter(|text| text.n_left_out > 0).count() as u64);
    }

    /// The metrics in Prometheus' text format. `n_waiting` is `None` until the model is loaded.
    pub(super) fn to_text(&self, n_waiting: Option<usize>) -> prometheus::Result<String> {
        self.ready.set(i64::from(n_waiting.is_some()));
        self.waiting.set(n_waiting.unwrap_or_default() as i64);
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

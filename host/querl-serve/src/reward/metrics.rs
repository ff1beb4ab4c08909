//! Metrics of the reward service, in Prometheus' text format.

use crate::metrics::registered;
use prometheus::{HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder};
use querl_core::records::EpisodeRecord;
use std::time::Duration;

/// Upper bounds in seconds: from one response without services to a batch that a judge reads.
const SECONDS: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 120.0];

/// Paths that are counted by name.
const ROUTES: [&str; 12] = [
    "/v1/score",
    "/openrlhf",
    "/slime",
    "/slime/dict",
    "/verify",
    "/seed_session",
    "/aggregate_metrics",
    "/reverify_mode",
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
];
/// The first routes, which score and have a histogram of durations.
const N_SCORING: usize = 5;

/// The route label of a path. Unknown paths share one, so that clients cannot create label values without bound.
pub(super) fn route_of(path: &str) -> &'static str {
    let of_rollout = path.strip_prefix("/ng-rollout/").and_then(|rest| rest.find('/').map(|start| &rest[start..]));
    let path = of_rollout.unwrap_or(path);
    ROUTES.into_iter().find(|route| *route == path).unwrap_or("other")
}

pub(super) struct RewardMetrics {
    registry: Registry,
    requests: IntCounterVec,
    durations: HistogramVec,
    scored: IntCounter,
    rejected: IntCounterVec,
    running: IntGauge,
    waiting: IntGauge,
}

impl RewardMetrics {
    pub(super) fn new() -> prometheus::Result<Self> {
        let registry = Registry::new_custom(Some("querl_reward".into()), None)?;
        let by_status = Opts::new("requests_total", "Responses by route and status.");
        let durations = HistogramOpts::new("request_duration_seconds", "Time from a request's head to its response.");
        let scored = IntCounter::new("episodes_scored_total", "Episodes that have a score.")?;
        let by_code = Opts::new("episodes_rejected_total", "Episodes that were rejected, by code.");
        let running = IntGauge::new("running_requests", "Requests that are being scored.")?;
        let waiting = IntGauge::new("waiting_requests", "Requests in the queue.")?;
        let metrics = Self {
            requests: registered(&registry, IntCounterVec::new(by_status, &["route", "status"])?)?,
            durations: registered(&registry, HistogramVec::new(durations.buckets(SECONDS.to_vec()), &["route"])?)?,
            scored: registered(&registry, scored)?,
            rejected: registered(&registry, IntCounterVec::new(by_code, &["code"])?)?,
            running: registered(&registry, running)?,
            waiting: registered(&registry, waiting)?,
            registry,
        };
        for route in &ROUTES[..N_SCORING] {
            metrics.durations.with_label_values(&[route]);
            // Created now, so that the counter has HELP and TYPE before the first request.
            metrics.requests.with_label_values(&[route, "200"]);
        }
        Ok(metrics)
    }

    pub(super) fn request(&self, route: &'static str, status: &str, elapsed: Duration) {
        self.requests.with_label_values(&[route, status]).inc();
        if ROUTES[..N_SCORING].contains(&route) {
            self.durations.with_label_values(&[route]).observe(elapsed.as_secs_f64());
        }
    }

    pub(super) fn episodes(&self, records: &[EpisodeRecord]) {
        for record in records {
            match &record.outcome {
                Ok(_) => self.scored.inc(),
                Err(rejection) => self.rejected.with_label_values(&[rejection.code.as_str()]).inc(),
            }
        }
    }

    pub(super) fn to_text(&self, n_running: usize, n_waiting: usize) -> prometheus::Result<String> {
        self.running.set(n_running as i64);
        self.waiting.set(n_waiting as i64);
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

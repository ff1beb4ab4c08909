//! Metrics of the rewriting service, in Prometheus' text format.

use super::version_metrics::VersionMetrics;
use crate::metrics::registered;
use prometheus::{
    Gauge, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder,
};
use querl_core::serving::{EngineState, Generation, Rewriter, Tenant};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Upper bounds in seconds: from a rewrite of the cache to longer than any client waits.
const SECONDS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.9, 1.5, 3.0, 10.0];

/// Paths that are counted by name.
const ROUTES: [&str; 14] = [
    "/v1/rewrite",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/feedback",
    "/api/chat/general_rag",
    "/retrieval",
    "/admin/tenants",
    "/admin/releases",
    "/releases",
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
    "/docs",
];
/// Routes that have a histogram of durations.
pub(super) const TIMED_ROUTES: [&str; 4] =
    ["/v1/rewrite", "/v1/chat/completions", "/api/chat/general_rag", "/retrieval"];
const PHASES: [&str; 4] = ["queue", "prefill", "decode", "total"];
/// Codes of `GenerationFailure`, and those of the service.
const FALLBACKS: [&str; 7] =
    ["timeout", "plugin_fault", "no_rewrite", "model_failed", "removed", "queue_full", "input"];

/// The route label of a path. Unknown paths share one, so that clients cannot create label values without bound.
pub(super) fn route_of(path: &str) -> &'static str {
    let is_below = |route: &str| path.strip_prefix(route).is_some_and(|rest| rest.starts_with('/'));
    let has_names = |route: &str| ["/admin/tenants", "/v1/models"].contains(&route);
    let is_route = |route: &&str| path == *route || (has_names(route) && is_below(route));
    ROUTES.into_iter().find(is_route).unwrap_or("other")
}

pub(super) struct RewriteMetrics {
    registry: Registry,
    requests: IntCounterVec,
    request_seconds: HistogramVec,
    phases: HistogramVec,
    fallbacks: IntCounterVec,
    cache_hits: IntCounterVec,
    cache_misses: IntCounterVec,
    prompt_tokens: IntCounterVec,
    tokens: IntCounterVec,
    ready: IntGauge,
    tenants: IntGauge,
    waiting: IntGauge,
    running: IntGauge,
    mean_batch_size: Gauge,
    kv_cache_bytes: IntGauge,
    decode_steps: IntCounter,
    decode_sequences: IntCounter,
    prefill_tokens: IntCounter,
    prefix_cached_tokens: IntCounter,
    pub(super) versions: VersionMetrics,
    pub(super) request_log_lines: IntCounter,
    pub(super) request_log_dropped: IntCounterVec,
    pub(super) request_log_redacted: IntCounterVec,
    /// Held while the engine's totals are added.
    totals: Mutex<()>,
}

impl RewriteMetrics {
    pub(super) fn new() -> prometheus::Result<Self> {
        let registry = Registry::new_custom(Some("querl_rewrite".into()), None)?;
        let counters = |name: &str, help: &str, labels: &[&str]| {
            registered(&registry, IntCounterVec::new(Opts::new(name, help), labels)?)
        };
        let histograms = |name: &str, help: &str, labels: &[&str]| {
            registered(&registry, HistogramVec::new(HistogramOpts::new(name, help).buckets(SECONDS.to_vec()), labels)?)
        };
        let counter = |name: &str, help: &str| registered(&registry, IntCounter::new(name, help)?);
        let gauge = |name: &str, help: &str| registered(&registry, IntGauge::new(name, help)?);
        Ok(Self {
            requests: counters("requests_total", "Responses by route and status.", &["route", "status"])?,
            request_seconds: histograms(
                "request_duration_seconds",
                "Time from a request's head to the end of its response.",
                &["route"],
            )?,
            phases: histograms(
                "phase_duration_seconds",
                "Time of generated responses by tenant and phase: queue, prefill, decode, total.",
                &["tenant", "phase"],
            )?,
            fallbacks: counters("fallbacks_total", "Queries returned unchanged, by reason.", &["tenant", "reason"])?,
            cache_hits: counters("cache_hits_total", "Rewrites of the cache.", &["tenant"])?,
            cache_misses: counters("cache_misses_total", "Queries that were not in the cache.", &["tenant"])?,
            prompt_tokens: counters("prompt_tokens_total", "Tokens of prompts.", &["tenant"])?,
            tokens: counters("generated_tokens_total", "Tokens of responses.", &["tenant"])?,
            ready: gauge("ready", "1 once the models are loaded.")?,
            tenants: gauge("tenants", "Tenants that are served.")?,
            waiting: gauge("waiting_requests", "Requests in the queue that a client waits for.")?,
            running: gauge("running_requests", "Requests in the running batch.")?,
            mean_batch_size: registered(
                &registry,
                Gauge::new("mean_batch_size", "Sequences of a decode step, since the start.")?,
            )?,
            kv_cache_bytes: gauge("kv_cache_bytes", "Bytes of the KV cache in use.")?,
            decode_steps: counter("decode_steps_total", "Decode steps.")?,
            decode_sequences: counter("decode_step_sequences_total", "Sequences of all decode steps.")?,
            prefill_tokens: counter("engine_prompt_tokens_total", "Tokens of prompts, of all tenants.")?,
            prefix_cached_tokens: counter("prefix_cached_tokens_total", "Those found in the prefix cache.")?,
            versions: VersionMetrics::new(counters, histograms)?,
            request_log_lines: counter("request_log_lines_total", "Lines written to the request log.")?,
            request_log_dropped: counters(
                "request_log_dropped_total",
                "Lines that are not in the request log, by reason.",
                &["reason"],
            )?,
            request_log_redacted: counters(
                "request_log_redacted_total",
                "Requests logged without their texts, by reason.",
                &["reason"],
            )?,
            totals: Mutex::default(),
            registry,
        })
    }

    pub(super) fn request(&self, route: &'static str, status: u16, elapsed: Duration) {
        self.requests.with_label_values(&[route, &status.to_string()]).inc();
        if TIMED_ROUTES.contains(&route) {
            self.request_seconds.with_label_values(&[route]).observe(elapsed.as_secs_f64());
        }
    }

    /// Adds the token counts and durations of a generated response.
    pub(super) fn generated(&self, tenant: &str, generation: &Generation, total: Duration) {
        let Generation { queued, prefill, decode, .. } = *generation;
        for (phase, time) in PHASES.into_iter().zip([queued, prefill, decode, total]) {
            self.phases.with_label_values(&[tenant, phase]).observe(time.as_secs_f64());
        }
        self.prompt_tokens.with_label_values(&[tenant]).inc_by(generation.n_prompt_tokens as u64);
        self.tokens.with_label_values(&[tenant]).inc_by(generation.n_tokens as u64);
    }

    pub(super) fn fallback(&self, tenant: &str, reason: &'static str) {
        self.fallbacks.with_label_values(&[tenant, reason]).inc();
    }

    pub(super) fn cache(&self, tenant: &str, n_hits: u64, n_misses: u64) {
        self.cache_hits.with_label_values(&[tenant]).inc_by(n_hits);
        self.cache_misses.with_label_values(&[tenant]).inc_by(n_misses);
    }

    /// The metrics in Prometheus' text format. `rewriter` is `None` until the models are loaded.
    pub(super) fn to_text(&self, rewriter: Option<&dyn Rewriter>) -> prometheus::Result<String> {
        let served = rewriter.map(Rewriter::tenants).unwrap_or_default();
        self.remove_all_but(&served);
        self.tenants.set(served.len() as i64);
        self.ready.set(i64::from(rewriter.is_some_and(Rewriter::is_alive)));
        let state = rewriter.map(Rewriter::state).unwrap_or_default();
        let EngineState { n_waiting, n_running, n_steps, n_step_sequences, kv_cache_bytes, .. } = state;
        self.waiting.set(n_waiting as i64);
        self.running.set(n_running as i64);
        self.kv_cache_bytes.set(kv_cache_bytes as i64);
        self.mean_batch_size.set(if n_steps == 0 { 0.0 } else { n_step_sequences as f64 / n_steps as f64 });
        let totals = [
            (&self.decode_steps, n_steps),
            (&self.decode_sequences, n_step_sequences),
            (&self.prefill_tokens, state.n_prompt_tokens),
            (&self.prefix_cached_tokens, state.n_cached_tokens),
        ];
        let adding = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        for (counter, total) in totals {
            counter.inc_by(total.saturating_sub(counter.get()));
        }
        drop(adding);
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }

    /// Removes the label values of tenants that are no longer served.
    fn remove_all_but(&self, served: &[Tenant]) {
        let families = self.registry.gather();
        let labels = families.iter().flat_map(|family| family.get_metric()).flat_map(|metric| metric.get_label());
        let labelled: BTreeSet<&str> =
            labels.filter(|label| label.name() == "tenant").map(|label| label.value()).collect();
        for tenant in labelled.into_iter().filter(|&name| served.iter().all(|tenant| tenant.name != name)) {
            // A tenant may have had no fallback for a reason, or no response at all.
            for phase in PHASES {
                let _ = self.phases.remove_label_values(&[tenant, phase]);
            }
            for reason in FALLBACKS {
                let _ = self.fallbacks.remove_label_values(&[tenant, reason]);
            }
            for counters in [&self.cache_hits, &self.cache_misses, &self.prompt_tokens, &self.tokens] {
                let _ = counters.remove_label_values(&[tenant]);
            }
            self.versions.remove(tenant);
        }
    }
}

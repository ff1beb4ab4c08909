//! Prometheus metrics of tenants with a candidate, by role of the model (current or candidate).

use prometheus::{HistogramVec, IntCounterVec};
use querl_core::serving::Role;
use std::time::Duration;

/// Results of a shadow rewrite.
const SHADOW_RESULTS: [&str; 4] = ["equal", "different", "failed", "skipped"];
/// Limits that end a candidate.
const LIMITS: [&str; 3] = ["errors", "fallbacks", "latency"];

pub(super) struct VersionMetrics {
    requests: IntCounterVec,
    errors: IntCounterVec,
    fallbacks: IntCounterVec,
    seconds: HistogramVec,
    shadows: IntCounterVec,
    returns: IntCounterVec,
}

impl VersionMetrics {
    /// Registers the metrics: `counters` and `histograms` each register one by name, help text and label names.
    pub(super) fn new(
        counters: impl Fn(&str, &str, &[&str]) -> prometheus::Result<IntCounterVec>,
        histograms: impl Fn(&str, &str, &[&str]) -> prometheus::Result<HistogramVec>,
    ) -> prometheus::Result<Self> {
        let by_role = ["tenant", "role"];
        Ok(Self {
            requests: counters("version_requests_total", "Requests of tenants with a candidate, by role.", &by_role)?,
            errors: counters("version_errors_total", "Those whose model or plugin failed.", &by_role)?,
            fallbacks: counters("version_fallbacks_total", "Those without a rewrite, for any reason.", &by_role)?,
            seconds: histograms(
                "version_duration_seconds",
                "Time of their rewrites, without those of the cache.",
                &by_role,
            )?,
            shadows: counters("shadow_rewrites_total", "Shadow rewrites by result.", &["tenant", "result"])?,
            returns: counters(
                "automatic_returns_total",
                "Candidates that were ended by a limit: errors, fallbacks or latency.",
                &["tenant", "limit"],
            )?,
        })
    }

    pub(super) fn request(&self, tenant: &str, role: Role, time: Option<Duration>) {
        self.requests.with_label_values(&[tenant, role.name()]).inc();
        if let Some(time) = time {
            self.seconds.with_label_values(&[tenant, role.name()]).observe(time.as_secs_f64());
        }
    }

    pub(super) fn error(&self, tenant: &str, role: Role) {
        self.errors.with_label_values(&[tenant, role.name()]).inc();
    }

    pub(super) fn fallback(&self, tenant: &str, role: Role) {
        self.fallbacks.with_label_values(&[tenant, role.name()]).inc();
    }

    pub(super) fn shadow(&self, tenant: &str, result: &'static str) {
        self.shadows.with_label_values(&[tenant, result]).inc();
    }

    pub(super) fn automatic_return(&self, tenant: &str, limit: &'static str) {
        self.returns.with_label_values(&[tenant, limit]).inc();
    }

    /// Removes the metrics of a tenant.
    pub(super) fn remove(&self, tenant: &str) {
        for role in Role::ALL {
            let labels = [tenant, role.name()];
            for counters in [&self.requests, &self.errors, &self.fallbacks] {
                let _ = counters.remove_label_values(&labels);
            }
            let _ = self.seconds.remove_label_values(&labels);
        }
        for result in SHADOW_RESULTS {
            let _ = self.shadows.remove_label_values(&[tenant, result]);
        }
        for limit in LIMITS {
            let _ = self.returns.remove_label_values(&[tenant, limit]);
        }
    }
}

//! What a monitoring system reads, in Prometheus' text format.

use super::ClassifiedText;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Upper bounds in seconds: from a pass over one short text to what nobody waits for.
const SECONDS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];
const TEXTS: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];

/// The paths that are counted by name; all others are one.
const ROUTES: [&str; 9] =
    ["/predict", "/classify", "/v1/classify", "/health", "/ready", "/info", "/metrics", "/openapi.json", "/docs"];

/// The name under which a path is counted: what strangers ask for must not become series without end.
pub(super) fn route_of(path: &str) -> &'static str {
    ROUTES.into_iter().find(|route| *route == path).unwrap_or("other")
}

/// A histogram of fixed bounds.
struct Histogram<const N: usize> {
    bounds: [f64; N],
    /// Of each bound what is above the one before and not above it; the last is above all.
    counts: Vec<AtomicU64>,
    sum: AtomicU64,
}

impl<const N: usize> Histogram<N> {
    fn new(bounds: [f64; N]) -> Self {
        Self { bounds, counts: (0..=N).map(|_| AtomicU64::new(0)).collect(), sum: AtomicU64::new(0) }
    }

    fn observe(&self, value: f64) {
        let place = self.bounds.iter().position(|bound| value <= *bound).unwrap_or(N);
        self.counts[place].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add((value * 1e6) as u64, Ordering::Relaxed);
    }

    fn write(&self, text: &mut String, name: &str, labels: &str) {
        let comma = if labels.is_empty() { "" } else { "," };
        let mut total = 0;
        for (index, count) in self.counts.iter().enumerate() {
            total += count.load(Ordering::Relaxed);
            let bound = self.bounds.get(index).map_or("+Inf".to_owned(), f64::to_string);
            let _ = writeln!(text, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {total}");
        }
        let braces = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let sum = self.sum.load(Ordering::Relaxed) as f64 / 1e6;
        let _ = writeln!(text, "{name}_sum{braces} {sum}\n{name}_count{braces} {total}");
    }
}

pub(super) struct StyleMetrics {
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    durations: BTreeMap<&'static str, Histogram<12>>,
    batch_texts: Histogram<8>,
    batch_seconds: Histogram<12>,
    n_batched_requests: AtomicU64,
    n_texts: AtomicU64,
    n_shortened: AtomicU64,
    n_tokens: AtomicU64,
}

impl Default for StyleMetrics {
    fn default() -> Self {
        Self {
            requests: Mutex::default(),
            durations: ROUTES[..3].iter().map(|route| (*route, Histogram::new(SECONDS))).collect(),
            batch_texts: Histogram::new(TEXTS),
            batch_seconds: Histogram::new(SECONDS),
            n_batched_requests: AtomicU64::new(0),
            n_texts: AtomicU64::new(0),
            n_shortened: AtomicU64::new(0),
            n_tokens: AtomicU64::new(0),
        }
    }
}

impl StyleMetrics {
    pub(super) fn request(&self, route: &'static str, status: u16, elapsed: Duration) {
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner).entry((route, status)).or_default() += 1;
        if let Some(durations) = self.durations.get(route) {
            durations.observe(elapsed.as_secs_f64());
        }
    }

    /// One go of the model.
    pub(super) fn batch(&self, n_requests: usize, n_texts: usize, elapsed: Duration) {
        self.n_batched_requests.fetch_add(n_requests as u64, Ordering::Relaxed);
        self.batch_texts.observe(n_texts as f64);
        self.batch_seconds.observe(elapsed.as_secs_f64());
    }

    pub(super) fn texts(&self, found: &[ClassifiedText]) {
        let n_tokens: usize = found.iter().map(|text| text.n_tokens).sum();
        let n_shortened = found.iter().filter(|text| text.n_left_out > 0).count();
        self.n_texts.fetch_add(found.len() as u64, Ordering::Relaxed);
        self.n_tokens.fetch_add(n_tokens as u64, Ordering::Relaxed);
        self.n_shortened.fetch_add(n_shortened as u64, Ordering::Relaxed);
    }

    /// All of it. `n_waiting`: texts that wait; `None` while there is no model.
    pub(super) fn text(&self, n_waiting: Option<usize>) -> String {
        let mut text = String::new();
        let head = |text: &mut String, name: &str, kind: &str, help: &str| {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        };
        head(&mut text, "querl_style_requests_total", "counter", "Answers by route and status.");
        for ((route, status), n) in self.requests.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = writeln!(text, "querl_style_requests_total{{route=\"{route}\",status=\"{status}\"}} {n}");
        }
        let name = "querl_style_request_duration_seconds";
        head(&mut text, name, "histogram", "Time from the head of a request to its answer.");
        self.durations.iter().for_each(|(route, found)| found.write(&mut text, name, &format!("route=\"{route}\"")));
        head(&mut text, "querl_style_batch_texts", "histogram", "Texts that were classified in one go.");
        self.batch_texts.write(&mut text, "querl_style_batch_texts", "");
        head(&mut text, "querl_style_batch_duration_seconds", "histogram", "Time of the model for one go.");
        self.batch_seconds.write(&mut text, "querl_style_batch_duration_seconds", "");
        let counters = [
            ("querl_style_batched_requests_total", &self.n_batched_requests, "Requests that were classified."),
            ("querl_style_texts_total", &self.n_texts, "Texts that were classified."),
            ("querl_style_texts_shortened_total", &self.n_shortened, "Of them those that were too long."),
            ("querl_style_tokens_total", &self.n_tokens, "Tokens that were looked at."),
        ];
        for (name, value, help) in counters {
            head(&mut text, name, "counter", help);
            let _ = writeln!(text, "{name} {}", value.load(Ordering::Relaxed));
        }
        head(&mut text, "querl_style_ready", "gauge", "1 once the model is loaded.");
        let _ = writeln!(text, "querl_style_ready {}", u8::from(n_waiting.is_some()));
        head(&mut text, "querl_style_waiting_texts", "gauge", "Texts that wait or are looked at.");
        let _ = writeln!(text, "querl_style_waiting_texts {}", n_waiting.unwrap_or_default());
        text
    }
}

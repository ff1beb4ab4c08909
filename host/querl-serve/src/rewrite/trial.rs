//! The trial of one candidate model: which requests it answers, how it compares with the current model, and when it has failed.

use querl_core::fsx::digest_hex;
use querl_core::serving::{Candidate, CandidateMode, Role, Tenant};
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Limits above which a candidate is ended. Shares and latencies are those of the candidate's last 1000 requests, and of the
/// current model's requests in the same span of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateLimits {
    /// Minimum number of requests of the candidate and of the current model before limits apply; for latency, of generated
    /// rewrites.
    pub min_requests: usize,
    /// Maximum excess of the candidate's share of model or plugin failures over that of the current model.
    pub max_errors: f64,
    /// Maximum excess of the candidate's share of fallbacks (queries without a rewrite) over that of the current model.
    pub max_fallbacks: f64,
    /// Maximum ratio of the candidate's 95% quantile of latency to that of the current model. Differences below 50 ms are
    /// accepted, and so are up to 5 percentage points more rewrites above that limit.
    pub max_latency_ratio: f64,
}

impl CandidateLimits {
    /// Default limits of `querl serve rewrite`.
    pub const DEFAULT: Self = Self { min_requests: 100, max_errors: 0.02, max_fallbacks: 0.05, max_latency_ratio: 1.5 };
}

/// Maximum number of the candidate's latest requests that are compared.
const WINDOW: usize = 1000;
/// Maximum number of the current model's latest requests for the same span of time: twice the expected number after [`stride`], because
/// users differ in their number of requests.
const CURRENT_WINDOW: usize = 2 * CURRENT_PER_CANDIDATE * WINDOW;
/// Maximum mean number of requests of the current model that are compared per request of the candidate.
const CURRENT_PER_CANDIDATE: usize = 10;
/// Minimum difference of latencies; smaller ones are not noticed by users, and occur by chance with short rewrites.
const MIN_LATENCY_DIFFERENCE_MS: f64 = 50.0;
/// Minimum difference of the shares of slow rewrites. If about 5% of the rewrites of both models are slow, as after an outage, a single one
/// changes the 95% quantile considerably.
const MIN_SLOW_SHARE_DIFFERENCE: f64 = 0.05;
/// Reasons of fallbacks that are failures of model or plugin.
const ERRORS: [&str; 2] = ["model_failed", "plugin_fault"];

/// Result of one request in a trial.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    /// Latency of a generated rewrite; `None` for other results, such as a rewrite from the cache.
    pub(super) latency: Option<Duration>,
    /// Reason of a fallback; `None` for a rewrite.
    pub(super) fallback: Option<&'static str>,
}

impl Sample {
    /// Result of a request whose query the plugin rejected or faulted at, or whose prompt is too long.
    pub(super) const PLUGIN_FAULT: Self = Self { latency: None, fallback: Some("plugin_fault") };

    pub(super) fn is_error(&self) -> bool {
        self.fallback.is_some_and(|reason| ERRORS.contains(&reason))
    }
}

/// The requests of one model since the start of the trial.
#[derive(Debug, Default)]
struct ModelStatistics {
    n_requests: u64,
    n_cached: u64,
    n_errors: u64,
    fallbacks: BTreeMap<&'static str, u64>,
    /// The latest requests, each with its index among the requests of both models.
    window: VecDeque<(u64, Sample)>,
}

impl ModelStatistics {
    fn count(&mut self, sample: Sample) {
        self.n_requests += 1;
        self.n_errors += u64::from(sample.is_error());
        if let Some(reason) = sample.fallback {
            *self.fallbacks.entry(reason).or_default() += 1;
        }
    }

    fn push(&mut self, index: u64, sample: Sample, capacity: usize) {
        if self.window.len() == capacity {
            self.window.pop_front();
        }
        self.window.push_back((index, sample));
    }

    /// The index from which the window has all requests: 0 if it is not full.
    fn start(&self, capacity: usize) -> u64 {
        let first = self.window.front().filter(|_| self.window.len() == capacity);
        first.map_or(0, |(index, _)| *index)
    }

    fn since(&self, start: u64) -> WindowSummary {
        let from = self.window.partition_point(|(index, _)| *index < start);
        let samples = self.window.range(from..).map(|(_, sample)| sample);
        let mut summary = WindowSummary::default();
        for sample in samples {
            summary.n_requests += 1;
            summary.n_errors += usize::from(sample.is_error());
            summary.n_fallbacks += usize::from(sample.fallback.is_some());
            summary.latencies.extend(sample.latency);
        }
        summary
    }

    fn to_json(&self, version: &str, source: &str, mut window: WindowSummary) -> Value {
        let round = |ms: Option<f64>| ms.map(|ms| (ms * 1e3).round() / 1e3);
        json!({
            "version": version, "source": source, "requests": self.n_requests, "cached": self.n_cached, "errors": self.n_errors,
            "fallbacks": self.fallbacks,
            "latency_ms": {"p50": round(window.latency(0.5)), "p95": round(window.latency(0.95))},
            "window": {
                "requests": window.n_requests, "error_share": window.share(window.n_errors),
                "fallback_share": window.share(window.n_fallbacks),
            },
        })
    }
}

/// The requests of one model in the span of time that is compared.
#[derive(Debug, Default)]
struct WindowSummary {
    n_requests: usize,
    n_errors: usize,
    n_fallbacks: usize,
    /// Latencies of generated rewrites.
    latencies: Vec<Duration>,
}

impl WindowSummary {
    fn share(&self, n: usize) -> f64 {
        n as f64 / self.n_requests.max(1) as f64
    }

    /// A quantile of the latencies in milliseconds, by nearest rank.
    fn latency(&mut self, quantile: f64) -> Option<f64> {
        let index = ((self.latencies.len() as f64 * quantile).ceil() as usize).checked_sub(1)?;
        let (_, time, _) = self.latencies.select_nth_unstable(index);
        Some(time.as_secs_f64() * 1e3)
    }

    /// The share of generated rewrites that took longer, in milliseconds.
    fn share_above(&self, latency: f64) -> f64 {
        let n = self.latencies.iter().filter(|time| time.as_secs_f64() * 1e3 > latency).count();
        n as f64 / self.latencies.len().max(1) as f64
    }
}

#[derive(Debug, Default)]
struct Statistics {
    /// Number of requests of both models.
    n_requests: u64,
    current: ModelStatistics,
    candidate: ModelStatistics,
    n_equal: u64,
    n_different: u64,
    n_skipped: u64,
}

impl Statistics {
    fn of(&mut self, role: Role) -> &mut ModelStatistics {
        match role {
            Role::Current => &mut self.current,
            Role::Candidate => &mut self.candidate,
        }
    }

    /// Adds a request; of the current model, only one of `stride` requests.
    fn add(&mut self, role: Role, sample: Sample, stride: u64) {
        let index = self.n_requests;
        self.n_requests += 1;
        match role {
            Role::Current if !self.current.n_requests.is_multiple_of(stride) => {}
            Role::Current => self.current.push(index, sample, CURRENT_WINDOW),
            Role::Candidate => self.candidate.push(index, sample, WINDOW),
        }
        self.of(role).count(sample);
    }

    /// Summaries of current model and candidate over the span of time that both windows cover.
    fn windows(&self) -> [WindowSummary; 2] {
        let start = self.current.start(CURRENT_WINDOW).max(self.candidate.start(WINDOW));
        [self.current.since(start), self.candidate.since(start)]
    }
}

/// One of this many requests of the current model is compared: for a small canary all of them would need a large window.
fn stride(mode: CandidateMode) -> u64 {
    match mode {
        CandidateMode::Canary(share) => ((1.0 - share) / (CURRENT_PER_CANDIDATE as f64 * share)).ceil().max(1.0) as u64,
        CandidateMode::Shadow => 1,
    }
}

/// A candidate in comparison with the current model of its tenant.
pub(super) struct Trial {
    pub(super) candidate: Candidate,
    /// The candidate's model.
    pub(super) model: Tenant,
    current: Tenant,
    statistics: Mutex<Statistics>,
    is_ended: AtomicBool,
}

impl Trial {
    pub(super) fn new(candidate: Candidate, model: Tenant, current: Tenant) -> Self {
        Self { candidate, model, current, statistics: Mutex::default(), is_ended: AtomicBool::new(false) }
    }

    /// True if this is the trial of the same candidate against the same version of the current model.
    pub(super) fn is_of(&self, candidate: &Candidate, current: &Tenant) -> bool {
        self.candidate == *candidate && self.current.version == current.version
    }

    /// Chooses the model that answers a request. Requests of one user, or of one query without a user, always get the same model;
    /// if the canary share grows, users of the candidate keep it.
    pub(super) fn role(&self, user: Option<&str>, query: &str) -> Role {
        let CandidateMode::Canary(share) = self.candidate.mode else { return Role::Current };
        let key = user.map_or(("query", query), |user| ("user", user));
        let key = format!("{} {} {} {}", self.model.name, self.model.version, key.0, key.1);
        let number = u64::from_str_radix(&digest_hex(key.as_bytes())[..13], 16).unwrap_or(u64::MAX);
        // 13 hexadecimal digits are 52 bits, which a f64 represents.
        if (number as f64) < share * (1_u64 << 52) as f64 { Role::Candidate } else { Role::Current }
    }

    pub(super) fn add(&self, role: Role, sample: Sample) {
        self.statistics().add(role, sample, stride(self.candidate.mode));
    }

    /// Counts a rewrite from the cache, as a success: the shares among new queries alone would depend on what the cache of each
    /// model contains.
    pub(super) fn add_cached(&self, role: Role) {
        let mut statistics = self.statistics();
        statistics.add(role, Sample { latency: None, fallback: None }, stride(self.candidate.mode));
        statistics.of(role).n_cached += 1;
    }

    /// True if a rewrite that has taken `latency` is slower than 95% of those of the current model.
    pub(super) fn is_slow(&self, latency: Duration, limits: &CandidateLimits) -> bool {
        let [mut current, _] = self.statistics().windows();
        current.latencies.len() >= limits.min_requests
            && current.latency(0.95).is_some_and(|most| latency.as_secs_f64() * 1e3 > most)
    }

    pub(super) fn add_comparison(&self, is_equal: bool) {
        let mut statistics = self.statistics();
        statistics.n_equal += u64::from(is_equal);
        statistics.n_different += u64::from(!is_equal);
    }

    pub(super) fn add_skipped(&self) {
        self.statistics().n_skipped += 1;
    }

    /// The name of the limit that the candidate exceeds, and the reason as a sentence. Reported once: later calls return `None`.
    pub(super) fn exceeded(&self, limits: &CandidateLimits) -> Option<(&'static str, String)> {
        let found = exceeded(&self.statistics(), limits)?;
        (!self.is_ended.swap(true, Ordering::SeqCst)).then_some(found)
    }

    /// True if the candidate was ended because it exceeded a limit.
    pub(super) fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::SeqCst)
    }

    pub(super) fn to_json(&self) -> Value {
        let statistics = self.statistics();
        let Statistics { current, candidate, n_equal, n_different, n_skipped, .. } = &*statistics;
        let [current_window, candidate_window] = statistics.windows();
        let (mode, share) = match self.candidate.mode {
            CandidateMode::Canary(share) => ("canary", Some(share)),
            CandidateMode::Shadow => ("shadow", None),
        };
        let n_compared = n_equal + n_different;
        let equal_share = (n_compared > 0).then(|| *n_equal as f64 / n_compared as f64);
        json!({
            "mode": mode, "share": share,
            "current": current.to_json(&self.current.version, &self.current.source, current_window),
            "candidate": candidate.to_json(&self.model.version, &self.model.source, candidate_window),
            "shadow": {"compared": n_compared, "equal": n_equal, "equal_share": equal_share, "skipped": n_skipped},
        })
    }

    fn statistics(&self) -> MutexGuard<'_, Statistics> {
        self.statistics.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn exceeded(statistics: &Statistics, limits: &CandidateLimits) -> Option<(&'static str, String)> {
    let [mut current, mut candidate] = statistics.windows();
    let n = candidate.n_requests;
    if n.min(current.n_requests) < limits.min_requests {
        return None;
    }
    let shares = |of: fn(&WindowSummary) -> usize| (candidate.share(of(&candidate)), current.share(of(&current)));
    let by_share = [
        ("errors", shares(|window| window.n_errors), limits.max_errors),
        ("fallbacks", shares(|window| window.n_fallbacks), limits.max_fallbacks),
    ];
    for (limit, (of_candidate, of_current), most) in by_share {
        if of_candidate - of_current > most {
            let [of_candidate, of_current, most] = [of_candidate, of_current, most].map(|share| 100.0 * share);
            let reason = format!(
                "{limit}: {of_candidate:.1}% of {n} requests, {of_current:.1}% of the current model's; at most {most:.1} points more are allowed"
            );
            return Some((limit, reason));
        }
    }
    if candidate.latencies.len().min(current.latencies.len()) < limits.min_requests {
        return None;
    }
    let (of_candidate, of_current) = (candidate.latency(0.95)?, current.latency(0.95)?);
    let most = (limits.max_latency_ratio * of_current).max(of_current + MIN_LATENCY_DIFFERENCE_MS);
    let difference = candidate.share_above(most) - current.share_above(most);
    (of_candidate > most && difference > MIN_SLOW_SHARE_DIFFERENCE).then(|| {
        let reason = format!(
            "latency: 95% within {of_candidate:.0} ms, of the current model within {of_current:.0} ms; at most {most:.0} ms are allowed"
        );
        ("latency", reason)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: CandidateLimits =
        CandidateLimits { min_requests: 20, max_errors: 0.02, max_fallbacks: 0.05, max_latency_ratio: 1.5 };

    fn trial(mode: CandidateMode) -> Trial {
        let model = |role, version: &str| {
            let (name, version, source) = ("shop".into(), version.into(), String::new());
            Tenant { name, role, version, source, created_at: 0, loaded_at: 0, api_key: None }
        };
        let candidate = Candidate { tenant: "shop".into(), id: 1, mode };
        Trial::new(candidate, model(Role::Candidate, "new"), model(Role::Current, "old"))
    }

    fn add(trial: &Trial, role: Role, n: usize, latency_ms: u64, fallback: Option<&'static str>) {
        let latency = Some(Duration::from_millis(latency_ms));
        (0..n).for_each(|_| trial.add(role, Sample { latency, fallback }));
    }

    #[test]
    fn a_share_of_the_users_has_the_candidate_for_every_query() {
        let roles = |share, n: usize| -> Vec<bool> {
            let trial = trial(CandidateMode::Canary(share));
            (0..n).map(|user| trial.role(Some(&format!("user {user}")), "any") == Role::Candidate).collect()
        };
        let (tenth, half) = (roles(0.1, 4000), roles(0.5, 4000));
        let count = |chosen: &[bool]| chosen.iter().filter(|chosen| **chosen).count();
        // 0.1 and 0.5 of 4000, three standard deviations.
        assert!((343..=457).contains(&count(&tenth)) && (1905..=2095).contains(&count(&half)), "{}", count(&tenth));
        assert!(tenth.iter().zip(&half).all(|(tenth, half)| *half || !tenth), "a larger share keeps its users");
        assert_eq!(count(&roles(1.0, 100)), 100);
        let one = trial(CandidateMode::Canary(0.5));
        assert!((0..50).all(|query| one.role(Some("ana"), &query.to_string()) == one.role(Some("ana"), "")));
        assert!((0..50).any(|query| one.role(None, &query.to_string()) != one.role(None, "")), "else by query");
        assert!((0..50).all(|user| trial(CandidateMode::Shadow).role(Some(&user.to_string()), "") == Role::Current));
    }

    #[test]
    fn a_candidate_ends_by_more_errors_fallbacks_or_latency_than_the_current_model() {
        let cases =
            [("errors", 10, Some("model_failed"), 1), ("fallbacks", 10, Some("timeout"), 2), ("latency", 400, None, 2)];
        for (limit, latency_ms, fallback, n_failed) in cases {
            let trial = trial(CandidateMode::Canary(0.5));
            add(&trial, Role::Current, 20, 100, None);
            add(&trial, Role::Candidate, 19 - n_failed, 10, None);
            add(&trial, Role::Candidate, n_failed, latency_ms, fallback);
            assert_eq!(trial.exceeded(&LIMITS), None, "{limit}: too few requests");
            add(&trial, Role::Candidate, 1, 10, None);
            let (found, reason) = trial.exceeded(&LIMITS).unwrap();
            assert!(found == limit && reason.starts_with(limit), "{limit}: {reason}");
            assert!(trial.is_ended() && trial.exceeded(&LIMITS).is_none(), "once");
        }
    }

    #[test]
    fn what_the_current_model_does_too_does_not_end_a_candidate() {
        for (share, n_current) in [(0.5, 1), (0.05, 19)] {
            let trial = trial(CandidateMode::Canary(share));
            // An outage of both models, followed by more requests than the candidate's window has. 30 ms instead of 10 ms is not a
            // noticeable difference.
            for (n, fallback) in [(100, None), (50, Some("timeout")), (50, Some("plugin_fault")), (1100, None)] {
                let latency_ms = |usual| if fallback.is_some() { 2000 } else { usual };
                for _ in 0..n {
                    for _ in 0..n_current {
                        add(&trial, Role::Current, 1, latency_ms(10), fallback);
                    }
                    assert_eq!(trial.exceeded(&LIMITS), None, "share {share}");
                    add(&trial, Role::Candidate, 1, latency_ms(30), fallback);
                    assert_eq!(trial.exceeded(&LIMITS), None, "share {share}");
                }
            }
        }
    }

    #[test]
    fn a_failure_after_many_good_requests_is_noticed() {
        for (share, n_current) in [(0.5, 1), (0.002, 499)] {
            let trial = trial(CandidateMode::Canary(share));
            for n in 0..1200 {
                add(&trial, Role::Current, n_current, 10, None);
                add(&trial, Role::Candidate, 1, 10, (n >= 1100).then_some("no_rewrite"));
            }
            assert_eq!(trial.exceeded(&LIMITS).unwrap().0, "fallbacks", "share {share}");
        }
    }

    #[test]
    fn a_candidate_is_not_compared_with_a_few_requests_of_the_current_model() {
        let trial = trial(CandidateMode::Canary(0.5));
        add(&trial, Role::Candidate, 100, 10, Some("model_failed"));
        add(&trial, Role::Current, 19, 10, None);
        assert_eq!(trial.exceeded(&LIMITS), None);
        add(&trial, Role::Current, 1, 10, None);
        assert_eq!(trial.exceeded(&LIMITS).unwrap().0, "errors");
    }

    #[test]
    fn a_rewrite_of_the_cache_is_a_success_without_a_latency() {
        let trial = trial(CandidateMode::Canary(0.5));
        add(&trial, Role::Current, 40, 10, None);
        add(&trial, Role::Candidate, 1, 2000, Some("no_rewrite"));
        (0..39).for_each(|_| trial.add_cached(Role::Candidate));
        assert_eq!(trial.exceeded(&LIMITS), None, "1 of 40 fallbacks, and one latency");
        let candidate = trial.to_json()["candidate"].take();
        assert_eq!(candidate["window"], json!({"requests": 40, "error_share": 0.0, "fallback_share": 0.025}));
        assert_eq!((&candidate["cached"], &candidate["latency_ms"]["p95"]), (&json!(39), &json!(2000.0)));
        let ms = Duration::from_millis;
        assert!(trial.is_slow(ms(11), &LIMITS) && !trial.is_slow(ms(10), &LIMITS));
    }
}

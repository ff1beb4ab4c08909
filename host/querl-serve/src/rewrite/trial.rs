//! The trial of one candidate: which requests it gets, how it compares with the current model, and when it has failed.

use querl_core::fsx::digest_hex;
use querl_core::serving::{Candidate, CandidateMode, Role, Tenant};
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Limits above which a candidate is ended. Shares and latencies are those of the last 1000 generated rewrites of each model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateLimits {
    /// Rewrites of the candidate, and for latency also of the current model, before limits apply.
    pub min_requests: usize,
    /// Share of failures of model or plugin, above that of the current model.
    pub max_errors: f64,
    /// Share of queries without a rewrite, above that of the current model.
    pub max_fallbacks: f64,
    /// 95% quantile of the latency relative to that of the current model; differences below 50 ms are accepted.
    pub max_latency_ratio: f64,
}

impl Default for CandidateLimits {
    fn default() -> Self {
        Self { min_requests: 100, max_errors: 0.02, max_fallbacks: 0.05, max_latency_ratio: 1.5 }
    }
}

/// Requests that shares and quantiles are of.
const WINDOW: usize = 1000;
/// Differences of latencies that no user notices, and short rewrites have by chance.
const MIN_LATENCY_DIFFERENCE_MS: f64 = 50.0;
/// Reasons of fallbacks that are failures of model or plugin.
const ERRORS: [&str; 2] = ["model_failed", "plugin_fault"];

/// What came of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    /// `None` where it is not that of a generated rewrite.
    pub(super) latency: Option<Duration>,
    /// Why there was no rewrite.
    pub(super) fallback: Option<&'static str>,
}

impl Sample {
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
    /// The last ones that were not cached.
    window: VecDeque<Sample>,
}

impl ModelStatistics {
    fn add(&mut self, sample: Sample) {
        self.n_requests += 1;
        self.n_errors += u64::from(sample.is_error());
        if let Some(reason) = sample.fallback {
            *self.fallbacks.entry(reason).or_default() += 1;
        }
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back(sample);
    }

    fn share(&self, counts: impl Fn(&Sample) -> bool) -> f64 {
        let n = self.window.iter().filter(|sample| counts(sample)).count();
        n as f64 / self.window.len().max(1) as f64
    }

    /// In milliseconds, by the nearest rank.
    fn latency(&self, quantile: f64) -> Option<f64> {
        let mut times: Vec<Duration> = self.window.iter().filter_map(|sample| sample.latency).collect();
        let index = ((times.len() as f64 * quantile).ceil() as usize).checked_sub(1)?;
        let (_, time, _) = times.select_nth_unstable(index);
        Some(time.as_secs_f64() * 1e3)
    }

    fn to_json(&self, version: &str, source: &str) -> Value {
        let round = |ms: Option<f64>| ms.map(|ms| (ms * 1e3).round() / 1e3);
        json!({
            "version": version, "source": source, "requests": self.n_requests, "cached": self.n_cached, "errors": self.n_errors,
            "fallbacks": self.fallbacks, "latency_ms": {"p50": round(self.latency(0.5)), "p95": round(self.latency(0.95))},
        })
    }
}

#[derive(Debug, Default)]
struct Statistics {
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
}

/// A candidate with its current model.
pub(super) struct Trial {
    pub(super) candidate: Candidate,
    /// The candidate's model.
    pub(super) model: Tenant,
    /// The current model.
    current: Tenant,
    statistics: Mutex<Statistics>,
    is_ended: AtomicBool,
}

impl Trial {
    pub(super) fn new(candidate: Candidate, model: Tenant, current: Tenant) -> Self {
        Self { candidate, model, current, statistics: Mutex::default(), is_ended: AtomicBool::new(false) }
    }

    /// Whether this is the trial of these models already.
    pub(super) fn is_of(&self, candidate: &Candidate, current: &Tenant) -> bool {
        self.candidate == *candidate && self.current.version == current.version
    }

    /// The model that answers a request: a user's requests, else those of one query, are always answered by the same one. A larger share
    /// keeps the users of a smaller one.
    pub(super) fn role(&self, user: Option<&str>, query: &str) -> Role {
        let CandidateMode::Canary(share) = self.candidate.mode else { return Role::Current };
        let key = user.map_or(("query", query), |user| ("user", user));
        let key = format!("{} {} {} {}", self.model.name, self.model.version, key.0, key.1);
        let number = u64::from_str_radix(&digest_hex(key.as_bytes())[..13], 16).unwrap_or(u64::MAX);
        // 13 hexadecimal digits are 52 bits, which a f64 represents.
        if (number as f64) < share * (1_u64 << 52) as f64 { Role::Candidate } else { Role::Current }
    }

    pub(super) fn add(&self, role: Role, sample: Sample) {
        self.statistics().of(role).add(sample);
    }

    /// A rewrite of the cache says nothing about a model.
    pub(super) fn add_cached(&self, role: Role) {
        let mut statistics = self.statistics();
        let of_role = statistics.of(role);
        of_role.n_requests += 1;
        of_role.n_cached += 1;
    }

    pub(super) fn add_comparison(&self, is_equal: bool) {
        let mut statistics = self.statistics();
        statistics.n_equal += u64::from(is_equal);
        statistics.n_different += u64::from(!is_equal);
    }

    pub(super) fn add_skipped(&self) {
        self.statistics().n_skipped += 1;
    }

    /// The limit that the candidate exceeds, and the reason as a sentence. Once: later calls return `None`.
    pub(super) fn exceeded(&self, limits: &CandidateLimits) -> Option<(&'static str, String)> {
        let found = exceeded(&self.statistics(), limits)?;
        (!self.is_ended.swap(true, Ordering::SeqCst)).then_some(found)
    }

    /// Whether a limit has ended it.
    pub(super) fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::SeqCst)
    }

    pub(super) fn to_json(&self) -> Value {
        let statistics = self.statistics();
        let Statistics { current, candidate, n_equal, n_different, n_skipped } = &*statistics;
        let (mode, share) = match self.candidate.mode {
            CandidateMode::Canary(share) => ("canary", Some(share)),
            CandidateMode::Shadow => ("shadow", None),
        };
        let n_compared = n_equal + n_different;
        let equal_share = (n_compared > 0).then(|| *n_equal as f64 / n_compared as f64);
        json!({
            "mode": mode, "share": share,
            "current": current.to_json(&self.current.version, &self.current.source),
            "candidate": candidate.to_json(&self.model.version, &self.model.source),
            "shadow": {"compared": n_compared, "equal": n_equal, "equal_share": equal_share, "skipped": n_skipped},
        })
    }

    fn statistics(&self) -> MutexGuard<'_, Statistics> {
        self.statistics.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn exceeded(statistics: &Statistics, limits: &CandidateLimits) -> Option<(&'static str, String)> {
    let Statistics { current, candidate, .. } = statistics;
    let n = candidate.window.len();
    if n < limits.min_requests {
        return None;
    }
    let shares = |counts: fn(&Sample) -> bool| (candidate.share(counts), current.share(counts));
    let by_share = [
        ("errors", shares(Sample::is_error), limits.max_errors),
        ("fallbacks", shares(|sample| sample.fallback.is_some()), limits.max_fallbacks),
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
    if current.window.len() < limits.min_requests {
        return None;
    }
    let (of_candidate, of_current) = (candidate.latency(0.95)?, current.latency(0.95)?);
    let most = (limits.max_latency_ratio * of_current).max(of_current + MIN_LATENCY_DIFFERENCE_MS);
    (of_candidate > most).then(|| {
        let reason = format!(
            "latency: 95% within {of_candidate:.0} ms, of the current model within {of_current:.0} ms; at most {most:.0} ms are allowed"
        );
        ("latency", reason)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const LIMITS: CandidateLimits =
        CandidateLimits { min_requests: 20, max_errors: 0.02, max_fallbacks: 0.05, max_latency_ratio: 1.5 };

    fn trial(mode: CandidateMode) -> Trial {
        let model = |role, version: &str| Tenant {
            name: "shop".into(),
            role,
            version: version.into(),
            source: String::new(),
            loaded_at: 0,
            api_key: None,
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
        let trial = trial(CandidateMode::Canary(0.5));
        for role in Role::ALL {
            add(&trial, role, 50, 2000, Some("timeout"));
            add(&trial, role, 50, 20, Some("plugin_fault"));
        }
        // 30 ms instead of 10 are no difference to a user.
        add(&trial, Role::Current, 2000, 10, None);
        add(&trial, Role::Candidate, 2000, 30, None);
        assert_eq!(trial.exceeded(&LIMITS), None);
    }

    #[test]
    fn a_failure_after_many_good_requests_is_noticed() {
        let trial = trial(CandidateMode::Shadow);
        add(&trial, Role::Candidate, 100_000, 10, None);
        add(&trial, Role::Candidate, 60, 10, Some("no_rewrite"));
        assert_eq!(trial.exceeded(&LIMITS).unwrap().0, "fallbacks");
    }
}

//! Candidates of tenants: canary and shadow requests, their limits, and the releases that name them.
//!
//! `GET /admin/releases` compares each candidate with its current model, `POST /admin/releases` reads the releases again, and `/releases` is a
//! page that shows the comparison.

use super::cache::CachedRewrite;
use super::service::{Audience, RewriteResult, RewriteService};
use super::trial::{CandidateLimits, Sample, Trial};
use crate::error::{ErrorForm, ErrorResponse, json_response};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use querl_core::records::Context;
use querl_core::serving::{CandidateMode, ReleaseSource, Rewriter, Role, SubmitError, Tenant};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Instant;
use tokio::sync::Semaphore;

/// Maximum number of concurrent shadow rewrites; further ones are skipped.
const MAX_SHADOWS: usize = 4;

pub(super) struct Candidates {
    limits: CandidateLimits,
    source: OnceLock<Arc<dyn ReleaseSource>>,
    trials: RwLock<BTreeMap<String, Arc<Trial>>>,
    /// The last trial of each tenant that a limit has ended, and the reason.
    ended: Mutex<BTreeMap<String, (Arc<Trial>, String)>>,
    shadows: Arc<Semaphore>,
}

/// The model that answers a request: the current one or the candidate.
pub(super) struct Route {
    pub(super) model: Tenant,
    /// The trial, if the tenant has a candidate.
    trial: Option<Arc<Trial>>,
}

impl Route {
    /// Counts the result of a chat completion for the candidate's trial, without its latency, which depends on the length of the
    /// client's messages. Not counted for a shadow candidate, which does not answer them.
    pub(super) fn add(&self, service: &Arc<RewriteService>, fallback: Option<&'static str>) {
        if let Some(trial) = self.trial.as_ref().filter(|trial| trial.candidate.mode != CandidateMode::Shadow) {
            service.add_sample(trial, self.model.role, Sample { latency: None, fallback });
        }
    }
}

impl Candidates {
    pub(super) fn new(limits: CandidateLimits) -> Self {
        let shadows = Arc::new(Semaphore::new(MAX_SHADOWS));
        Self { limits, source: OnceLock::new(), trials: RwLock::default(), ended: Mutex::default(), shadows }
    }

    /// Chooses the current model or the candidate of the tenant for a request.
    pub(super) fn route(&self, tenant: &Tenant, user: Option<&str>, query: &str) -> Route {
        let trial = self.trial(&tenant.name);
        let role = trial.as_ref().map_or(Role::Current, |trial| trial.role(user, query));
        let model = match (&trial, role) {
            (Some(trial), Role::Candidate) => trial.model.clone(),
            _ => tenant.clone(),
        };
        Route { model, trial }
    }

    fn trial(&self, tenant: &str) -> Option<Arc<Trial>> {
        let trials = self.trials.read().unwrap_or_else(PoisonError::into_inner);
        trials.get(tenant).filter(|trial| !trial.is_ended()).cloned()
    }
}

impl RewriteService {
    /// Sets where releases are read from. Later calls have no effect.
    pub fn set_releases(&self, source: Arc<dyn ReleaseSource>) {
        let _ = self.candidates.source.set(source);
    }

    /// Reads the releases again and loads and removes models accordingly. Takes as long as loading models, and must not be called
    /// on a thread of the async runtime. Returns a sentence for each tenant that is not served as the releases say.
    ///
    /// # Errors
    /// A sentence: there are no releases, or they cannot be read; everything is served as before.
    pub fn reload_releases(&self) -> Result<Vec<String>, String> {
        let rewriter = self.rewriter.get().ok_or("the models are being loaded; retry in a moment")?;
        self.load_releases(rewriter.as_ref())
    }

    /// Like [`Self::reload_releases`], before the service is ready.
    ///
    /// # Errors
    /// A sentence: there are no releases, or they cannot be read.
    pub fn load_releases(&self, rewriter: &dyn Rewriter) -> Result<Vec<String>, String> {
        let without = "this server follows no releases; start it with --releases DIR";
        let source = self.candidates.source.get().ok_or(without)?;
        let _one_at_a_time = self.loading.blocking_lock();
        let before = rewriter.models(Role::Current);
        let mut reloaded = source.reload()?;
        let (currents, models) = (rewriter.models(Role::Current), rewriter.models(Role::Candidate));
        for Tenant { name, version, source, .. } in &currents {
            if !before.iter().any(|tenant| tenant.name == *name && tenant.version == *version) {
                tracing::info!("tenant {name}: version {version} of {source} is served");
            }
        }
        let mut trials = BTreeMap::new();
        for candidate in reloaded.candidates {
            let of_name = |tenants: &[Tenant]| tenants.iter().find(|tenant| tenant.name == candidate.tenant).cloned();
            let (Some(current), Some(model)) = (of_name(&currents), of_name(&models)) else { continue };
            let known = self.candidates.trial(&candidate.tenant).filter(|trial| trial.is_of(&candidate, &current));
            // Not locked while the end of the candidate is written.
            let ended =
                self.candidates.ended.lock().unwrap_or_else(PoisonError::into_inner).get(&candidate.tenant).cloned();
            if let Some((_, reason)) = ended.filter(|(trial, _)| trial.candidate.id == candidate.id) {
                // The end could not be recorded earlier.
                reloaded.problems.extend(source.end_candidate(&candidate, &reason).err());
                rewriter.remove(&candidate.tenant, Role::Candidate);
                continue;
            }
            let new = || {
                let mode = match candidate.mode {
                    CandidateMode::Canary(share) => format!("with a share of {share}"),
                    CandidateMode::Shadow => "in shadow".to_owned(),
                };
                tracing::info!("tenant {}: candidate {} of {} {mode}", model.name, model.version, model.source);
                Arc::new(Trial::new(candidate.clone(), model, current))
            };
            trials.insert(candidate.tenant.clone(), known.unwrap_or_else(new));
        }
        // Writing the log may block, so it happens without the lock.
        let mut running = self.candidates.trials.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *running, trials.clone());
        drop(running);
        let is_running =
            |name: &String, trial: &Arc<Trial>| trials.get(name).is_some_and(|running| Arc::ptr_eq(running, trial));
        for (name, trial) in before.iter().filter(|(name, trial)| !trial.is_ended() && !is_running(name, trial)) {
            tracing::info!("tenant {name}: candidate {} ended", trial.model.version);
        }
        Ok(reloaded.problems)
    }

    /// Rewrites a query by the current model or the candidate of its tenant; falls back to the query itself.
    ///
    /// # Errors
    /// The query is not queued, for another reason than its tenant's plugin.
    pub(super) async fn rewrite(
        self: &Arc<Self>,
        tenant: &Tenant,
        user: Option<&str>,
        query: &str,
        context: Context,
        deadline: Instant,
    ) -> Result<RewriteResult, SubmitError> {
        let Route { model, trial } = self.candidates.route(tenant, user, query);
        let Some(trial) = trial else {
            return self.rewrite_by(tenant, query, context, deadline, &Audience::Client).await;
        };
        if model.role == Role::Candidate {
            match self.rewrite_in_trial(&trial, &model, query, context.clone(), deadline).await {
                Ok(result) => {
                    self.add_result(&trial, Role::Candidate, &result);
                    return Ok(result);
                }
                Err(error @ (SubmitError::QueueFull(_) | SubmitError::Ended)) => return Err(error),
                // The candidate was removed, or its prompt is too long: the current model responds.
                Err(error) => {
                    let result = self.rewrite_by(tenant, query, context, deadline, &Audience::Client).await?;
                    if error != SubmitError::UnknownTenant {
                        self.add_sample(&trial, Role::Candidate, Sample::PLUGIN_FAULT);
                    }
                    return Ok(result);
                }
            }
        }
        let result = self.rewrite_in_trial(&trial, tenant, query, context.clone(), deadline).await?;
        self.add_result(&trial, Role::Current, &result);
        if trial.candidate.mode == CandidateMode::Shadow {
            self.start_shadow(trial, query, context, result.fallback.is_none().then(|| result.generated.clone()));
        }
        Ok(result)
    }

    /// As [`Self::rewrite_by`], for a client that may disconnect before the end.
    async fn rewrite_in_trial(
        self: &Arc<Self>,
        trial: &Arc<Trial>,
        model: &Tenant,
        query: &str,
        context: Context,
        deadline: Instant,
    ) -> Result<RewriteResult, SubmitError> {
        let unfinished = UnfinishedRewrite { service: self, trial, role: model.role, started: Instant::now() };
        let rewritten = self.rewrite_by(model, query, context, deadline, &Audience::Client).await;
        std::mem::forget(unfinished);
        rewritten
    }

    /// Computes the candidate's rewrite, if no client is waiting in the queue, and compares it with the current model's.
    fn start_shadow(
        self: &Arc<Self>,
        trial: Arc<Trial>,
        query: &str,
        context: Context,
        current: Option<CachedRewrite>,
    ) {
        let has_room =
            self.rewriter.get().is_some_and(|rewriter| rewriter.state().n_waiting == 0 && !rewriter.is_full());
        let permit = has_room.then(|| self.candidates.shadows.clone().try_acquire_owned().ok()).flatten();
        let skipped = |trial: &Trial, service: &Self| {
            trial.add_skipped();
            service.metrics.versions.shadow(&trial.model.name, "skipped");
        };
        let Some(permit) = permit else { return skipped(&trial, self) };
        let (service, query) = (self.clone(), query.to_owned());
        tokio::spawn(async move {
            let (_permit, is_cancelled) = (permit, Arc::new(AtomicBool::new(false)));
            let deadline = Instant::now() + service.options.deadline;
            let audience = Audience::Shadow(is_cancelled.clone());
            let rewritten = service.rewrite_by(&trial.model, &query, context, deadline, &audience).await;
            let name = &trial.model.name;
            match rewritten {
                _ if is_cancelled.load(Ordering::Relaxed) => skipped(&trial, &service),
                Err(SubmitError::QueueFull(_) | SubmitError::Ended | SubmitError::UnknownTenant) => {
                    skipped(&trial, &service);
                }
                Ok(result) => {
                    service.add_result(&trial, Role::Candidate, &result);
                    if result.fallback.is_some() {
                        return service.metrics.versions.shadow(name, "failed");
                    }
                    // A fallback of the current model counts as a different rewrite.
                    let is_equal = current.is_some_and(|current| current.text == result.generated.text);
                    trial.add_comparison(is_equal);
                    service.metrics.versions.shadow(name, if is_equal { "equal" } else { "different" });
                }
                Err(_) => {
                    service.add_sample(&trial, Role::Candidate, Sample::PLUGIN_FAULT);
                    service.metrics.versions.shadow(name, "failed");
                }
            }
        });
    }

    fn add_result(self: &Arc<Self>, trial: &Arc<Trial>, role: Role, result: &RewriteResult) {
        if result.is_cached {
            trial.add_cached(role);
            return self.metrics.versions.request(&trial.model.name, role, None);
        }
        // Not counted if the client's deadline is shorter than most rewrites of the current model take, because then a timeout says nothing
        // about the model.
        if result.fallback == Some("timeout")
            && result.latency < self.options.deadline.mul_f64(0.9)
            && !trial.is_slow(result.latency, &self.candidates.limits)
        {
            return;
        }
        self.add_sample(trial, role, Sample { latency: Some(result.latency), fallback: result.fallback });
    }

    /// Counts a request, and ends a candidate that exceeds a limit.
    fn add_sample(self: &Arc<Self>, trial: &Arc<Trial>, role: Role, sample: Sample) {
        let (tenant, metrics) = (&trial.model.name, &self.metrics.versions);
        metrics.request(tenant, role, sample.latency);
        if sample.fallback.is_some() {
            metrics.fallback(tenant, role);
        }
        if sample.is_error() {
            metrics.error(tenant, role);
        }
        trial.add(role, sample);
        // Only for the candidate's requests, because a comparison iterates over the current model's window.
        let exceeded = (role == Role::Candidate).then(|| trial.exceeded(&self.candidates.limits)).flatten();
        if let Some((limit, reason)) = exceeded {
            metrics.automatic_return(tenant, limit);
            self.end_candidate(trial.clone(), reason);
        }
    }

    /// Immediately returns to the current model, records that, and frees the candidate.
    fn end_candidate(self: &Arc<Self>, trial: Arc<Trial>, reason: String) {
        let (tenant, version) = (trial.model.name.clone(), &trial.model.version);
        tracing::warn!("tenant {tenant}: candidate {version} ended, the current model answers all requests: {reason}");
        let ended = (trial.clone(), reason.clone());
        self.candidates.ended.lock().unwrap_or_else(PoisonError::into_inner).insert(tenant.clone(), ended);
        let service = self.clone();
        tokio::task::spawn_blocking(move || {
            let source = service.candidates.source.get();
            if let Some(Err(problem)) = source.map(|source| source.end_candidate(&trial.candidate, &reason)) {
                tracing::error!(
                    "tenant {tenant}: the end of its candidate is not in the history, and is recorded with the next reload: {problem}"
                );
            }
            let _one_at_a_time = service.loading.blocking_lock();
            // The releases may have another candidate in the meantime.
            let mut trials = service.candidates.trials.write().unwrap_or_else(PoisonError::into_inner);
            trials.retain(|_, other| other.candidate.tenant != tenant || other.candidate.id != trial.candidate.id);
            let has_other = trials.contains_key(&tenant);
            drop(trials);
            if let Some(rewriter) = service.rewriter.get().filter(|_| !has_other) {
                rewriter.remove(&tenant, Role::Candidate);
            }
        });
    }

    /// The body of `/admin/releases`.
    fn comparison(&self, problems: Option<Vec<String>>) -> Result<Value, ErrorResponse> {
        let rewriter = self.rewriter()?;
        let ended = self.candidates.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let tenant = |current: &Tenant| {
            let Tenant { name, version, source, loaded_at, .. } = current;
            let returned =
                ended.get(name).map(|(trial, reason)| json!({"reason": reason, "comparison": trial.to_json()}));
            json!({
                "tenant": name, "version": version, "source": source, "loaded_at": loaded_at,
                "candidate": self.candidates.trial(name).map(|trial| trial.to_json()),
                "automatic_return": returned,
            })
        };
        let tenants: Vec<Value> = rewriter.tenants().iter().map(tenant).collect();
        let CandidateLimits { min_requests, max_errors, max_fallbacks, max_latency_ratio } = self.candidates.limits;
        let limits = json!({
            "min_requests": min_requests, "max_errors": max_errors, "max_fallbacks": max_fallbacks,
            "max_latency_ratio": max_latency_ratio,
        });
        let follows_releases = self.candidates.source.get().is_some();
        let mut body = json!({"tenants": tenants, "limits": limits, "follows_releases": follows_releases});
        if let Some(problems) = problems {
            body["problems"] = json!(problems);
        }
        Ok(body)
    }
}

/// A rewrite that a client waits for. If the client disconnects after most rewrites of the current model would have ended, the time so far
/// is counted, because otherwise latencies would include only fast rewrites.
struct UnfinishedRewrite<'r> {
    service: &'r Arc<RewriteService>,
    trial: &'r Arc<Trial>,
    role: Role,
    started: Instant,
}

impl Drop for UnfinishedRewrite<'_> {
    fn drop(&mut self) {
        let latency = self.started.elapsed();
        if self.trial.is_slow(latency, &self.service.candidates.limits) {
            self.service.add_sample(self.trial, self.role, Sample { latency: Some(latency), fallback: None });
        }
    }
}

/// The route `GET /admin/releases`.
pub(super) async fn list(State(service): State<Arc<RewriteService>>) -> Response {
    json_response(service.comparison(None), ErrorForm::OpenAi)
}

/// The route `POST /admin/releases`. The releases are read and loaded even if the client leaves.
pub(super) async fn reload(State(service): State<Arc<RewriteService>>) -> Response {
    let reloading = service.clone();
    let reloaded = tokio::task::spawn_blocking(move || reloading.reload_releases()).await;
    let panicked = |_| ErrorResponse::internal("loading panicked; the server's log says why");
    let body = reloaded.map_err(panicked).and_then(|reloaded| reloaded.map_err(ErrorResponse::value));
    let body = body.and_then(|problems| {
        problems.iter().for_each(|problem| tracing::warn!("{problem}"));
        service.comparison(Some(problems))
    });
    json_response(body, ErrorForm::OpenAi)
}

/// Rejects loading or removing a tenant by hand if the service follows releases, which would then not match what is served.
pub(super) fn check_not_followed(service: &RewriteService) -> Result<(), ErrorResponse> {
    let what = "this server serves what its releases say; use `querl release promote` and `rollback`";
    match service.candidates.source.get() {
        Some(_) => Err(ErrorResponse::new(StatusCode::CONFLICT, what)),
        None => Ok(()),
    }
}

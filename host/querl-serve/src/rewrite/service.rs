//! The rewriting service without its routes: tenants and their keys, rewrites with their fallbacks, and the state of a request.

use super::access_log::{AccessLog, RequestRecord, milliseconds};
use super::cache::{CachedRewrite, RewriteCache};
use super::candidates::Candidates;
use super::failure_log::FailureLog;
use super::metrics::RewriteMetrics;
use super::preparation::Preparation;
use super::request_log::{LoggedQuery, RequestLog, RequestLogOptions, now};
use super::traces::{Phases, Traces};
use super::trial::CandidateLimits;
use super::upstream::Upstream;
use crate::body::{BodyLimits, JsonFields, read_body};
use crate::connections::{ConnectionHandle, RequestSlot};
use crate::error::ErrorResponse;
use crate::key::{ApiKey, unauthorized};
use crate::server::ServerLimits;
use axum::body::Bytes;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri};
use axum::response::Response;
use querl_core::records::Context;
use querl_core::serving::{
    EventSink, Generation, GenerationEvent, GenerationFailure, GenerationTask, Rewriter, SubmitError, Tenant,
};
use querl_core::text::nearest;
use querl_data::{LoggedRewrite, RequestLogLine};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout_at;

/// Suffix of the name of the model that rewrites, after the tenant's name.
pub(super) const REWRITE_SUFFIX: &str = "/rewrite";

/// Minimum interval between log lines about failures of a tenant with the same reason.
const FAILURE_INTERVAL: Duration = Duration::from_secs(1);

/// Limits and keys of a rewriting service.
pub struct RewriteOptions {
    /// Maximum size of a request body.
    pub max_body_bytes: usize,
    /// Maximum number of queries of one request.
    pub max_queries: usize,
    /// Maximum number of requests of one tenant that wait until their prompt is built and tokenized; further ones are refused, as
    /// if the engine's queue were full.
    pub max_preparing: usize,
    /// Time limit for a whole body to arrive.
    pub body_timeout: Duration,
    /// Time limit of a rewrite, time in the queue included; after it the query itself is returned. A request may set a shorter
    /// one.
    pub deadline: Duration,
    /// Time limit of a chat completion, the response to a client's own messages.
    pub chat_timeout: Duration,
    /// Maximum number of rewrites in the cache for identical requests; 0 disables it.
    pub max_cached_rewrites: usize,
    /// Key of tenants without one of their own; `None` permits every client.
    pub api_key: Option<String>,
    /// Key of the admin routes; `None` disables them.
    pub admin_key: Option<String>,
    /// The retrieval service to which `/api/chat/general_rag` and `/retrieval` forward requests; `None` if there is none.
    pub upstream: Option<Upstream>,
    /// Path of the access log: one JSON line for each rewrite and each other request. `None` for no access log.
    pub access_log: Option<PathBuf>,
    /// Limits above which a canary or shadow candidate is ended.
    pub candidate_limits: CandidateLimits,
    /// Options of the request log (queries and rewrites); `None` for no request log.
    pub request_log: Option<RequestLogOptions>,
    /// OpenTelemetry traces; `None` for none.
    pub traces: Option<Traces>,
    /// Limits of connections.
    pub server: ServerLimits,
}

/// The rewriting service. It answers requests before its models are loaded, with 503.
pub struct RewriteService {
    pub(super) options: RewriteOptions,
    pub(super) admin_key: Option<ApiKey>,
    pub(super) rewriter: OnceLock<Arc<dyn Rewriter>>,
    pub(super) candidates: Candidates,
    preparation: Preparation,
    cache: RewriteCache,
    pub(super) metrics: RewriteMetrics,
    pub(super) access_log: AccessLog,
    pub(super) failures: FailureLog,
    pub(super) request_log: Option<RequestLog>,
    /// Held while a tenant is loaded, so that only one is loaded at a time: models are large.
    pub(super) loading: tokio::sync::Mutex<()>,
    n_requests: AtomicU64,
}

impl RewriteService {
    /// A service without models, which are passed to [`set_ready`](Self::set_ready) later.
    ///
    /// # Errors
    /// The access log or the request log cannot be opened.
    pub fn new(mut options: RewriteOptions) -> anyhow::Result<Arc<Self>> {
        let metrics = RewriteMetrics::new().expect("metric names are valid and distinct");
        let request_log = options.request_log.take().map(|log| RequestLog::open(log, &metrics)).transpose()?;
        Ok(Arc::new(Self {
            admin_key: options.admin_key.as_deref().map(ApiKey::new),
            rewriter: OnceLock::new(),
            candidates: Candidates::new(options.candidate_limits),
            preparation: Preparation::new(options.max_preparing),
            cache: RewriteCache::new(options.max_cached_rewrites),
            metrics,
            access_log: AccessLog::open(options.access_log.as_deref())?,
            failures: FailureLog::new(FAILURE_INTERVAL),
            request_log,
            loading: tokio::sync::Mutex::default(),
            n_requests: AtomicU64::new(0),
            options,
        }))
    }

    /// Marks the models as loaded. Later calls have no effect.
    pub fn set_ready(&self, rewriter: Arc<dyn Rewriter>) {
        let _ = self.rewriter.set(rewriter);
    }

    pub(super) fn rewriter(&self) -> Result<&Arc<dyn Rewriter>, ErrorResponse> {
        let missing = || ErrorResponse::unavailable("the models are being loaded; retry in a moment");
        let loaded = self.rewriter.get().ok_or_else(missing)?;
        if loaded.is_alive() { Ok(loaded) } else { Err(rejected(SubmitError::Ended)) }
    }

    /// Queues a generation task, which is cancelled when the receiver is dropped.
    pub(super) async fn submit(
        &self,
        tenant: &Tenant,
        task: GenerationTask,
        audience: &Audience,
    ) -> Result<UnboundedReceiver<GenerationEvent>, SubmitError> {
        let arrived_at = Instant::now();
        let rewriter = self.rewriter.get().ok_or(SubmitError::Ended)?.clone();
        let check_room = || match rewriter.is_full() {
            true => Err(SubmitError::QueueFull("the queue is full; retry later".into())),
            false => Ok(()),
        };
        check_room()?;
        let permit = self.preparation.permit(tenant, rewriter.n_tenants()).await?;
        check_room()?;
        let (sender, receiver) = unbounded_channel();
        let (tenant, failed) = (tenant.clone(), sender.clone());
        let events: Box<dyn EventSink> = match audience {
            Audience::Client => Box::new(EventSender(sender)),
            Audience::Shadow(is_cancelled) => {
                Box::new(ShadowSender { sender, rewriter: rewriter.clone(), is_cancelled: is_cancelled.clone() })
            }
        };
        // The prompt plugin and tokenizing would block a thread of the async runtime.
        let submitting = tokio::task::spawn_blocking(move || {
            // Not returned before this thread has ended: its time and memory are used also after the deadline of the request.
            let _permit = permit;
            rewriter.submit(&tenant, task, arrived_at, events)
        });
        match submitting.await {
            Ok(submitted) => submitted?,
            Err(panicked) => {
                let failure = GenerationFailure { code: "model_failed", message: panicked.to_string() };
                let _ = failed.send(GenerationEvent::Done(Err(failure)));
            }
        }
        Ok(receiver)
    }

    /// Rewrites a query by one model; falls back to the query itself. Rewrites that no client waits for (shadow requests) are not
    /// counted.
    ///
    /// # Errors
    /// The query is not queued, for another reason than its tenant's plugin.
    pub(super) async fn rewrite_by(
        &self,
        tenant: &Tenant,
        query: &str,
        context: Context,
        deadline: Instant,
        audience: &Audience,
    ) -> Result<RewriteResult, SubmitError> {
        let started = Instant::now();
        let key = RewriteCache::key(tenant, query, &context);
        let metrics = matches!(audience, Audience::Client).then_some(&self.metrics);
        let count = |count: &dyn Fn(&RewriteMetrics)| metrics.into_iter().for_each(count);
        let result = |generated: CachedRewrite, queued, fallback| RewriteResult {
            tenant: tenant.name.clone(),
            latency: started.elapsed(),
            queued,
            phases: None,
            is_cached: false,
            fallback,
            generated,
        };
        if let Some(found) = self.cache.get(&key) {
            count(&|metrics| metrics.cache(&tenant.name, 1, 0));
            return Ok(RewriteResult { is_cached: true, ..result(found, Some(Duration::ZERO), None) });
        }
        count(&|metrics| metrics.cache(&tenant.name, 0, 1));
        let task = GenerationTask::Rewrite { query: query.to_owned(), context };
        let generating =
            async { Ok::<_, SubmitError>(finished(&mut self.submit(tenant, task, audience).await?).await) };
        let (reason, message) = match timeout_at(deadline.into(), generating).await {
            Ok(Ok(Ok(generation))) => {
                count(&|metrics| metrics.generated(&tenant.name, &generation, started.elapsed()));
                let (queued, phases) = (Some(generation.queued), Some(Phases::of(&generation)));
                let generated = CachedRewrite::from(generation);
                self.cache.put(key, &tenant.version, &generated);
                return Ok(RewriteResult { phases, ..result(generated, queued, None) });
            }
            Ok(Ok(Err(failure))) => (failure.code, failure.message),
            Ok(Err(SubmitError::Plugin(message))) => ("plugin_fault", message),
            Ok(Err(rejected)) => return Err(rejected),
            Err(_) => ("timeout", format!("no rewrite within {:?}", started.elapsed())),
        };
        count(&|metrics| {
            self.failures.warn(&format!("tenant {}", tenant.name), reason, &message);
            metrics.fallback(&tenant.name, reason);
        });
        Ok(result(CachedRewrite::raw(query, &tenant.version), None, Some(reason)))
    }

    /// The tenant that a request names in the field `param`, among those that its API key permits. The name may be left out if
    /// the key permits only one.
    ///
    /// # Errors
    /// There is no such tenant for this client. A client learns the names of no tenant whose key it does not have.
    pub(super) fn tenant(&self, call: &Call, param: &'static str, name: Option<&str>) -> Result<Tenant, ErrorResponse> {
        let named = name.and_then(|name| call.rewriter.tenant(name));
        if let Some(tenant) = named.filter(|tenant| self.permits(tenant, &call.headers)) {
            call.record.note_tenant(&tenant.name);
            return Ok(tenant);
        }
        let PermittedTenants { mut tenants, has_others } = self.permitted(call.rewriter.as_ref(), &call.headers)?;
        match name {
            None if tenants.len() == 1 => {
                call.record.note_tenant(&tenants[0].name);
                Ok(tenants.remove(0))
            }
            Some(name) => {
                let scope = if has_others { "with this key" } else { "here" };
                Err(unknown_tenant(param, name, scope, &tenants))
            }
            None => Err(ErrorResponse::field(param, format!("`{param}` is missing; expected the name of a tenant"))),
        }
    }

    /// The tenants that a client may use by its API key.
    ///
    /// # Errors
    /// Only tenants with other keys are served.
    pub(super) fn check_permitted(&self, headers: &HeaderMap) -> Result<PermittedTenants, ErrorResponse> {
        self.permitted(self.rewriter()?.as_ref(), headers)
    }

    fn permitted(&self, rewriter: &dyn Rewriter, headers: &HeaderMap) -> Result<PermittedTenants, ErrorResponse> {
        let (tenants, others): (Vec<_>, Vec<_>) =
            rewriter.tenants().into_iter().partition(|tenant| self.permits(tenant, headers));
        match tenants.is_empty() && !others.is_empty() {
            true => Err(unauthorized(headers)),
            false => Ok(PermittedTenants { tenants, has_others: !others.is_empty() }),
        }
    }

    fn permits(&self, tenant: &Tenant, headers: &HeaderMap) -> bool {
        let key = tenant.api_key.as_ref().or(self.options.api_key.as_ref());
        key.is_none_or(|key| ApiKey::new(key).is_in(headers))
    }

    pub(super) fn new_id(&self) -> String {
        let number = self.n_requests.fetch_add(1, Ordering::Relaxed);
        format!("{:x}-{number:x}", since_epoch().as_nanos())
    }
}

/// The tenants that a client may use, sorted by name.
pub(super) struct PermittedTenants {
    pub(super) tenants: Vec<Tenant>,
    /// True if further tenants are served, whose key the client does not have.
    pub(super) has_others: bool,
}

pub(super) fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Maximum number of suggested names in a message.
const MAX_SUGGESTIONS: usize = 3;
/// Maximum number of models in a message about an unknown one.
const MAX_LISTED_MODELS: usize = 5;

pub(super) fn unknown_tenant(param: &'static str, name: &str, scope: &str, permitted: &[Tenant]) -> ErrorResponse {
    let short: String = name.chars().take(64).collect();
    // `TENANT/rewrite` is a separate model.
    let suffix = if param == "model" && short.contains('/') { REWRITE_SUFFIX } else { "" };
    let names: Vec<String> = permitted.iter().map(|tenant| format!("{}{suffix}", tenant.name)).collect();
    let near = nearest(&short, names.iter().map(String::as_str)).into_iter().take(MAX_SUGGESTIONS);
    let near: Vec<String> = near.map(|name| format!("`{name}`")).collect();
    let mut what = format!("{param} `{short}` is not served {scope}");
    if !near.is_empty() {
        what += &format!("; did you mean {}?", near.join(" or "));
    } else if param == "model" && !permitted.is_empty() {
        // As `GET /v1/models` lists them.
        let models =
            permitted.iter().flat_map(|Tenant { name, .. }| ["", REWRITE_SUFFIX].map(|end| format!("`{name}{end}`")));
        let more = if 2 * permitted.len() > MAX_LISTED_MODELS { ", ..." } else { "" };
        what += &format!("; served: {}{more}", models.take(MAX_LISTED_MODELS).collect::<Vec<_>>().join(", "));
    }
    let code = if param == "model" { "model_not_found" } else { "tenant_not_found" };
    ErrorResponse { code: Some(code), param: Some(param), ..ErrorResponse::not_found(what) }
}

/// The error response for a task that was not queued.
pub(super) fn rejected(error: SubmitError) -> ErrorResponse {
    match error {
        SubmitError::UnknownTenant => ErrorResponse::not_found("the tenant is no longer served"),
        SubmitError::QueueFull(message) => ErrorResponse::new(StatusCode::TOO_MANY_REQUESTS, message),
        SubmitError::Input(message) => {
            ErrorResponse { code: Some("context_length_exceeded"), ..ErrorResponse::value(message) }
        }
        SubmitError::Plugin(message) => {
            tracing::warn!("{message}");
            model_failed()
        }
        SubmitError::Ended => {
            ErrorResponse::unavailable("the model has ended, and the server with it; its log says why")
        }
    }
}

pub(super) fn model_failed() -> ErrorResponse {
    ErrorResponse::internal("the model failed; the server's log says why")
}

/// Waits for the last event of a task. `Err` if the generation ended without a response.
pub(super) async fn finished(events: &mut UnboundedReceiver<GenerationEvent>) -> Result<Generation, GenerationFailure> {
    while let Some(event) = events.recv().await {
        if let GenerationEvent::Done(done) = event {
            return done;
        }
    }
    Err(GenerationFailure { code: "model_failed", message: "the model has ended without a response".into() })
}

/// Event sink that sends to a channel.
struct EventSender(UnboundedSender<GenerationEvent>);

impl EventSink for EventSender {
    fn send(&self, event: GenerationEvent) {
        // The client may have left.
        let _ = self.0.send(event);
    }

    fn is_open(&self) -> bool {
        !self.0.is_closed()
    }
}

/// Who needs a response: a client or a shadow comparison.
pub(super) enum Audience {
    Client,
    /// A shadow comparison. The request is cancelled, and the flag set, if requests of clients wait for room in the running
    /// batch.
    Shadow(Arc<AtomicBool>),
}

/// Event sink of a shadow request.
struct ShadowSender {
    sender: UnboundedSender<GenerationEvent>,
    rewriter: Arc<dyn Rewriter>,
    is_cancelled: Arc<AtomicBool>,
}

impl EventSink for ShadowSender {
    fn send(&self, event: GenerationEvent) {
        let _ = self.sender.send(event);
    }

    fn is_open(&self) -> bool {
        if self.rewriter.state().n_waiting > 0 {
            self.is_cancelled.store(true, Ordering::Relaxed);
        }
        !self.sender.is_closed() && !self.is_cancelled.load(Ordering::Relaxed)
    }

    fn is_shadow(&self) -> bool {
        true
    }
}

/// A rewrite, or the query itself as a fallback.
pub(super) struct RewriteResult {
    pub(super) tenant: String,
    pub(super) generated: CachedRewrite,
    pub(super) latency: Duration,
    /// [`Generation::queued`]; zero for a rewrite from the cache, `None` for a fallback.
    pub(super) queued: Option<Duration>,
    /// Durations of prefill and decoding; `None` for a fallback and for a rewrite from the cache.
    pub(super) phases: Option<Phases>,
    pub(super) is_cached: bool,
    /// Reason of the fallback; `None` for a rewrite.
    pub(super) fallback: Option<&'static str>,
}

const FALLBACK_HEADER: HeaderName = HeaderName::from_static("x-querl-fallback");

/// Adds the header `x-querl-fallback` to a response whose protocol has no field for the reason of a fallback.
pub(super) fn with_fallback(mut response: Response, fallback: Option<&'static str>) -> Response {
    if let Some(code) = fallback {
        response.headers_mut().insert(FALLBACK_HEADER, HeaderValue::from_static(code));
    }
    response
}

/// A request whose body has arrived completely.
pub(super) struct Call {
    pub(super) service: Arc<RewriteService>,
    pub(super) rewriter: Arc<dyn Rewriter>,
    pub(super) record: Arc<RequestRecord>,
    pub(super) uri: Uri,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) fields: JsonFields,
    pub(super) started: Instant,
    pub(super) slot: RequestSlot,
}

impl Call {
    pub(super) async fn read(
        service: Arc<RewriteService>,
        record: Arc<RequestRecord>,
        connection: &ConnectionHandle,
        request: Request,
    ) -> Result<Self, ErrorResponse> {
        let rewriter = service.rewriter()?.clone();
        let RewriteOptions { max_body_bytes: max_bytes, body_timeout: timeout, .. } = service.options;
        let limits = BodyLimits { max_bytes, timeout, expected: "a JSON object" };
        let (uri, headers) = (request.uri().clone(), request.headers().clone());
        let body = read_body(request, limits).await?;
        let fields = JsonFields::parse(&body, limits.expected)?;
        let slot = connection.begin_request()?;
        Ok(Self { service, rewriter, record, uri, headers, body, fields, started: Instant::now(), slot })
    }

    /// Adds a rewrite or a fallback to the request log, if there is one.
    pub(super) fn log_rewrite(&self, query: &LoggedQuery<'_>, result: &RewriteResult) {
        let Some(log) = &self.service.request_log else { return };
        log.send(RequestLogLine::Rewrite(LoggedRewrite {
            time: now(),
            id: query.id.unwrap_or_else(|| self.record.id()).to_owned(),
            tenant: result.tenant.clone(),
            version: result.generated.version.clone(),
            query: Some(query.query.to_owned()),
            user_profile: Some(query.context.user_profile.clone()),
            history: Some(query.context.history_summary.clone()),
            rewrite: Some(result.generated.text.clone()),
            fallback: result.fallback.map(str::to_owned),
            cached: result.is_cached,
            latency_ms: milliseconds(result.latency),
            user: query.user.map(|user| log.user_hash(&result.tenant, user)),
            redacted: None,
        }));
    }

    pub(super) fn deadline(&self) -> Instant {
        self.started + self.service.options.deadline
    }
}

//! Rewrites of queries over HTTP, for many tenants.
//!
//! | request | form |
//! |---|---|
//! | `POST /v1/rewrite` | `{query, tenant, user_profile?, history?, deadline_ms?}`, or `{queries: [...]}` of such objects |
//! | `POST /v1/chat/completions`, `GET /v1/models` | OpenAI; the model is `TENANT`, or `TENANT/rewrite` for a rewrite by the tenant's own prompts |
//! | `POST /api/chat/general_rag` | fills `rewritten_query` and forwards the request to the upstream service |
//! | `POST /retrieval` | external knowledge of Dify, by the upstream service; `knowledge_id` is `TENANT` or `TENANT:KB_NAME` |
//! | `GET`, `POST /admin/tenants`, `DELETE /admin/tenants/NAME` | lists, loads and removes tenants |
//! | `GET /health`, `/ready`, `/metrics`, `/openapi.json`, `/docs` | |
//!
//! Where there is no rewrite in time, or none at all, the query itself is returned and the response names the reason: `fallback` of
//! `/v1/rewrite`, the header `x-querl-fallback` of other routes. An error response has the form of its route's clients: 400 not JSON, 401 key
//! missing or wrong, 403 no admin key configured, 404 tenant or route unknown, 405 another method, 408 body not received in time, 413 body
//! too large, 415 not declared as JSON, 422 value missing, wrong or too long for the model, 429 queue full or too many requests of one
//! address, 500 model failed, 502 upstream not reachable, 503 not loaded yet or too many requests, 504 response or upstream too slow.

mod access_log;
mod admin;
mod cache;
mod chat;
mod metrics;
mod openapi;
mod protocol;
mod proxy;

pub use proxy::Upstream;

use crate::body::{BodyLimits, JsonFields, read_body};
use crate::connections::{ConnectionHandle, RequestSlot};
use crate::error::{ErrorForm, ErrorResponse};
use crate::general_rag::GENERAL_RAG_ROUTE;
use crate::key::{ApiKey, unauthorized};
use crate::server::{ServerLimits, run_with_worker};
use access_log::{AccessLog, RequestRecord};
use anyhow::Context as _;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Extension, Json, Router};
use cache::{CachedRewrite, RewriteCache};
use metrics::RewriteMetrics;
use querl_core::records::Context;
use querl_core::serving::{
    EventSink, Generation, GenerationEvent, GenerationFailure, GenerationTask, Rewriter, SubmitError, Tenant,
};
use serde_json::json;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout_at;

/// Limits and keys of a rewriting service.
pub struct RewriteOptions {
    /// Maximum size of a request body.
    pub max_body_bytes: usize,
    /// Maximum number of queries of one request.
    pub max_queries: usize,
    /// Time limit for a whole body to arrive.
    pub body_timeout: Duration,
    /// Time limit of a rewrite, time in the queue included; then the query itself is returned. Requests may shorten it.
    pub deadline: Duration,
    /// Time limit of a response to the client's own messages; also of the requests in progress when the server stops.
    pub chat_timeout: Duration,
    /// Rewrites that are kept for identical requests; 0 for none.
    pub max_cached_rewrites: usize,
    /// Key of tenants without one of their own; `None` permits every client.
    pub api_key: Option<String>,
    /// Key of the admin routes; `None` disables them.
    pub admin_key: Option<String>,
    /// The retrieval service behind `/api/chat/general_rag` and `/retrieval`.
    pub upstream: Option<Upstream>,
    /// A file to which one JSON line is appended for each rewrite and each other request.
    pub access_log: Option<PathBuf>,
    /// Limits of connections.
    pub server: ServerLimits,
}

/// The service; its models are loaded while it already answers.
pub struct RewriteService {
    options: RewriteOptions,
    admin_key: Option<ApiKey>,
    rewriter: OnceLock<Arc<dyn Rewriter>>,
    cache: RewriteCache,
    metrics: RewriteMetrics,
    access_log: AccessLog,
    http: reqwest::Client,
    /// Held while a tenant is loaded, since models are large.
    loading: tokio::sync::Mutex<()>,
    n_requests: AtomicU64,
}

impl RewriteService {
    /// A service whose models are not loaded yet.
    ///
    /// # Errors
    /// The access log cannot be opened, or there is no TLS for the upstream service.
    pub fn new(options: RewriteOptions) -> anyhow::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            admin_key: options.admin_key.as_deref().map(ApiKey::new),
            rewriter: OnceLock::new(),
            cache: RewriteCache::new(options.max_cached_rewrites),
            metrics: RewriteMetrics::new().expect("metric names are valid and distinct"),
            access_log: AccessLog::open(options.access_log.as_deref())?,
            http: proxy::client().context("no client for the upstream service")?,
            loading: tokio::sync::Mutex::default(),
            n_requests: AtomicU64::new(0),
            options,
        }))
    }

    /// Marks the models as loaded. Later calls have no effect.
    pub fn set_ready(&self, rewriter: Arc<dyn Rewriter>) {
        let _ = self.rewriter.set(rewriter);
    }

    /// The service's routes.
    pub fn router(self: &Arc<Self>) -> Router {
        let admin = Router::new()
            .route("/admin/tenants", get(admin::list).merge(route(ErrorForm::OpenAi, admin::load)))
            .route("/admin/tenants/{name}", delete(admin::remove))
            .layer(from_fn_with_state(self.clone(), admin::check_key));
        let app = Router::new()
            .route("/v1/rewrite", route(ErrorForm::OpenAi, protocol::rewrite))
            .route("/v1/chat/completions", route(ErrorForm::OpenAi, chat::completions))
            .route("/v1/models", get(chat::models))
            .route(GENERAL_RAG_ROUTE, route(ErrorForm::GeneralRag, proxy::general_rag))
            .route("/retrieval", route(ErrorForm::Dify, proxy::retrieval))
            .route("/health", get(|| async { Json(json!({"status": "ok"})) }))
            .route("/ready", get(ready))
            .route("/metrics", get(prometheus))
            .route("/openapi.json", get(|| async { Json(openapi::document()) }))
            .route("/docs", get(|| async { Html(openapi::page()) }))
            .merge(admin)
            .fallback(unknown_route)
            .method_not_allowed_fallback(wrong_method)
            .layer(DefaultBodyLimit::max(self.options.max_body_bytes));
        app.layer(from_fn_with_state(self.clone(), record)).with_state(self.clone())
    }

    /// Binds `addr`, calls `on_bound`, and serves until `is_stopped`. `work` runs on a thread of its own: it loads the models, passes them to
    /// [`set_ready`](Self::set_ready) and computes. The address is bound first, so that clients get 503 until then.
    ///
    /// # Errors
    /// The address cannot be bound, `on_bound` failed, or `work` ended: while requests may arrive it has no reason to.
    pub fn run(
        self: Arc<Self>,
        addr: SocketAddr,
        on_bound: impl FnOnce(SocketAddr) -> std::io::Result<()>,
        work: impl FnOnce(Arc<Self>) -> anyhow::Result<()> + Send + 'static,
        is_stopped: impl Fn() -> bool + Send + 'static,
    ) -> anyhow::Result<()> {
        let drain_timeout = self.options.chat_timeout.max(self.options.deadline);
        let limits = ServerLimits { drain_timeout, ..self.options.server };
        let router = self.router();
        run_with_worker(addr, router, limits, on_bound, ("rewriter", move || work(self)), is_stopped)
    }

    fn rewriter(&self) -> Result<&Arc<dyn Rewriter>, ErrorResponse> {
        let loaded = self.rewriter.get();
        let loaded =
            loaded.ok_or_else(|| ErrorResponse::unavailable("the models are being loaded; retry in a moment"))?;
        if loaded.is_alive() { Ok(loaded) } else { Err(rejected(SubmitError::Ended)) }
    }

    /// Queues a task. The task is cancelled when the receiver is dropped.
    async fn submit(
        &self,
        tenant: &Tenant,
        task: GenerationTask,
    ) -> Result<UnboundedReceiver<GenerationEvent>, SubmitError> {
        let rewriter = self.rewriter.get().ok_or(SubmitError::Ended)?.clone();
        if rewriter.is_full() {
            return Err(SubmitError::QueueFull("the queue is full; retry later".into()));
        }
        let (sender, receiver) = unbounded_channel();
        let (name, failed) = (tenant.name.clone(), sender.clone());
        // The prompt plugin and tokenizing would block a thread of the async runtime.
        let submitting =
            tokio::task::spawn_blocking(move || rewriter.submit(&name, task, Box::new(EventSender(sender))));
        match submitting.await {
            Ok(submitted) => submitted?,
            Err(panicked) => {
                let failure = GenerationFailure { code: "model_failed", message: panicked.to_string() };
                let _ = failed.send(GenerationEvent::Done(Err(failure)));
            }
        }
        Ok(receiver)
    }

    /// The rewrite of a query, or a fallback to the query itself.
    ///
    /// # Errors
    /// The query is not queued, for another reason than its tenant's plugin.
    async fn rewrite(
        &self,
        tenant: &Tenant,
        query: &str,
        context: Context,
        deadline: Instant,
    ) -> Result<RewriteResult, SubmitError> {
        let started = Instant::now();
        let key = RewriteCache::key(tenant, query, &context);
        let result = |generated: CachedRewrite, queued, fallback| RewriteResult {
            tenant: tenant.name.clone(),
            latency: started.elapsed(),
            queued,
            is_cached: false,
            fallback,
            generated,
        };
        if let Some(found) = self.cache.get(&key) {
            self.metrics.cache(&tenant.name, 1, 0);
            return Ok(RewriteResult { is_cached: true, ..result(found, Some(Duration::ZERO), None) });
        }
        self.metrics.cache(&tenant.name, 0, 1);
        let task = GenerationTask::Rewrite { query: query.to_owned(), context };
        let generating = async { Ok::<_, SubmitError>(finished(&mut self.submit(tenant, task).await?).await) };
        let (reason, message) = match timeout_at(deadline.into(), generating).await {
            Ok(Ok(Ok(generation))) => {
                self.metrics.generated(&tenant.name, &generation, started.elapsed());
                let queued = Some(generation.queued);
                let generated = CachedRewrite::from(generation);
                self.cache.put(key, &tenant.version, &generated);
                return Ok(result(generated, queued, None));
            }
            Ok(Ok(Err(failure))) => (failure.code, failure.message),
            Ok(Err(SubmitError::Plugin(message))) => ("plugin_fault", message),
            Ok(Err(rejected)) => return Err(rejected),
            Err(_) => ("timeout", format!("no rewrite within {:?}", started.elapsed())),
        };
        tracing::warn!("tenant {}: {reason}: {message}", tenant.name);
        self.metrics.fallback(&tenant.name, reason);
        Ok(result(CachedRewrite::raw(query, &tenant.version), None, Some(reason)))
    }

    /// The tenant that a request names in the field `param`, among those that its key permits. The name may be left out where it permits one.
    ///
    /// # Errors
    /// There is no such tenant for this client. A client learns the names of no tenant whose key it does not have.
    fn tenant(&self, call: &Call, param: &'static str, name: Option<&str>) -> Result<Tenant, ErrorResponse> {
        let named = call.rewriter.tenants().into_iter().find(|tenant| Some(tenant.name.as_str()) == name);
        if let Some(tenant) = named.filter(|tenant| self.permits(tenant, &call.headers)) {
            call.record.note_tenant(&tenant.name);
            return Ok(tenant);
        }
        let PermittedTenants { mut tenants, has_others } = self.permitted(call.rewriter.as_ref(), &call.headers);
        match name {
            None if tenants.len() == 1 => {
                call.record.note_tenant(&tenants[0].name);
                Ok(tenants.remove(0))
            }
            _ if has_others && tenants.is_empty() => Err(unauthorized(&call.headers)),
            Some(name) => {
                let scope = if has_others { "with this key" } else { "here" };
                Err(unknown_tenant(param, name, scope, &tenants))
            }
            None => {
                let what = format!("`{param}` is missing; expected the name of a tenant");
                Err(ErrorResponse { param: Some(param), ..ErrorResponse::value(what) })
            }
        }
    }

    fn permitted(&self, rewriter: &dyn Rewriter, headers: &HeaderMap) -> PermittedTenants {
        let (tenants, others): (Vec<_>, Vec<_>) =
            rewriter.tenants().into_iter().partition(|tenant| self.permits(tenant, headers));
        PermittedTenants { tenants, has_others: !others.is_empty() }
    }

    fn permits(&self, tenant: &Tenant, headers: &HeaderMap) -> bool {
        let key = tenant.api_key.as_ref().or(self.options.api_key.as_ref());
        key.is_none_or(|key| ApiKey::new(key).is_in(headers))
    }

    fn new_id(&self) -> String {
        let number = self.n_requests.fetch_add(1, Ordering::Relaxed);
        format!("{:x}-{number:x}", since_epoch().as_nanos())
    }
}

/// The tenants that a client may use, sorted by name.
struct PermittedTenants {
    tenants: Vec<Tenant>,
    /// Others are served, whose key the client does not have.
    has_others: bool,
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Most names that a message suggests.
const MAX_SUGGESTIONS: usize = 3;

fn unknown_tenant(param: &'static str, name: &str, scope: &str, permitted: &[Tenant]) -> ErrorResponse {
    // As for keys of a configuration.
    const ALIKE: f64 = 0.75;
    let short: String = name.chars().take(64).collect();
    let similarity = |tenant: &Tenant| (strsim::jaro_winkler(&short, &tenant.name), format!("`{}`", tenant.name));
    let mut near: Vec<(f64, String)> = permitted.iter().map(similarity).filter(|(alike, _)| *alike >= ALIKE).collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    let near: Vec<String> = near.into_iter().take(MAX_SUGGESTIONS).map(|(_, name)| name).collect();
    let mut what = format!("{param} `{short}` is not served {scope}");
    if !near.is_empty() {
        what += &format!("; did you mean {}?", near.join(" or "));
    }
    let code = if param == "model" { "model_not_found" } else { "tenant_not_found" };
    ErrorResponse { code: Some(code), param: Some(param), ..ErrorResponse::new(StatusCode::NOT_FOUND, what) }
}

/// The response to a task that is not queued.
fn rejected(error: SubmitError) -> ErrorResponse {
    match error {
        SubmitError::UnknownTenant => ErrorResponse::new(StatusCode::NOT_FOUND, "the tenant is no longer served"),
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

fn model_failed() -> ErrorResponse {
    ErrorResponse::new(StatusCode::INTERNAL_SERVER_ERROR, "the model failed; the server's log says why")
}

/// The last event of a task.
async fn finished(events: &mut UnboundedReceiver<GenerationEvent>) -> Result<Generation, GenerationFailure> {
    while let Some(event) = events.recv().await {
        if let GenerationEvent::Done(done) = event {
            return done;
        }
    }
    Err(GenerationFailure { code: "model_failed", message: "the model has ended without a response".into() })
}

/// Where a task's events go.
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

/// A rewrite, or a fallback to the query.
struct RewriteResult {
    tenant: String,
    generated: CachedRewrite,
    latency: Duration,
    /// `None` for a fallback.
    queued: Option<Duration>,
    is_cached: bool,
    /// Why this is the query itself.
    fallback: Option<&'static str>,
}

const FALLBACK_HEADER: HeaderName = HeaderName::from_static("x-querl-fallback");
const REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// Marks the response of a protocol without a field for it.
fn with_fallback(mut response: Response, fallback: Option<&'static str>) -> Response {
    if let Some(code) = fallback {
        response.headers_mut().insert(FALLBACK_HEADER, HeaderValue::from_static(code));
    }
    response
}

/// A request whose body has arrived.
struct Call {
    service: Arc<RewriteService>,
    rewriter: Arc<dyn Rewriter>,
    record: Arc<RequestRecord>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
    /// The fields of the body.
    fields: JsonFields,
    started: Instant,
    slot: RequestSlot,
}

impl Call {
    async fn read(
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

    fn deadline(&self) -> Instant {
        self.started + self.service.options.deadline
    }
}

/// A POST route with a JSON body; errors have the form of the route's clients.
fn route<F>(
    form: ErrorForm,
    handler: impl Fn(Call) -> F + Clone + Send + Sync + 'static,
) -> MethodRouter<Arc<RewriteService>>
where
    F: Future<Output = Result<Response, ErrorResponse>> + Send,
{
    post(
        async move |State(service): State<Arc<RewriteService>>,
                    Extension(record): Extension<Arc<RequestRecord>>,
                    Extension(connection): Extension<ConnectionHandle>,
                    request: Request| {
            let response = async { handler(Call::read(service, record, &connection, request).await?).await };
            response.await.unwrap_or_else(|error: ErrorResponse| error.into_body(form))
        },
    )
}

async fn ready(
    State(service): State<Arc<RewriteService>>,
    Extension(connection): Extension<ConnectionHandle>,
) -> Response {
    let check = || match service.rewriter()?.is_full() {
        true => Err(ErrorResponse::unavailable("the queue is full; retry later")),
        false => Ok(connection.check_requests()?),
    };
    match check() {
        Ok(()) => Json(json!({"status": "ready"})).into_response(),
        Err(error) => error.into_body(ErrorForm::OpenAi),
    }
}

async fn prometheus(State(service): State<Arc<RewriteService>>) -> Response {
    match service.metrics.to_text(service.rewriter.get().map(AsRef::as_ref)) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
        Err(error) => {
            ErrorResponse::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_body(ErrorForm::OpenAi)
        }
    }
}

async fn unknown_route(uri: Uri) -> Response {
    let what = format!("there is nothing at `{}`; use /v1/rewrite, or read /docs", uri.path());
    ErrorResponse::new(StatusCode::NOT_FOUND, what).into_body(ErrorForm::OpenAi)
}

async fn wrong_method(method: Method, uri: Uri) -> Response {
    let what = format!("method {method} is not allowed at `{}`; read /docs", uri.path());
    ErrorResponse::new(StatusCode::METHOD_NOT_ALLOWED, what).into_body(ErrorForm::OpenAi)
}

/// Counts and logs each request, also one whose client leaves before its response.
async fn record(State(service): State<Arc<RewriteService>>, mut request: Request, next: Next) -> Response {
    let record = Arc::new(RequestRecord::new(service, request.method(), request.uri().path()));
    request.extensions_mut().insert(record.clone());
    let mut response = next.run(request).await;
    record.note_status(response.status());
    if let Ok(id) = HeaderValue::from_str(record.id()) {
        response.headers_mut().insert(REQUEST_ID_HEADER, id);
    }
    response
}

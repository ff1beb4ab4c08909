//! Rewrites of queries over HTTP, for many tenants.
//!
//! | request | form |
//! |---|---|
//! | `POST /v1/rewrite` | `{query, tenant, user_profile?, history?, deadline_ms?}`, or `{queries: [...]}` of such objects |
//! | `POST /v1/chat/completions`, `GET /v1/models`, `GET /v1/models/MODEL` | OpenAI; the model is `TENANT`, or `TENANT/rewrite` for a rewrite by the tenant's own prompts |
//! | `POST /api/chat/general_rag` | fills `rewritten_query` and forwards the request to the upstream service |
//! | `POST /retrieval` | external knowledge of Dify, by the upstream service; `knowledge_id` is `TENANT` or `TENANT:KB_NAME` |
//! | `POST /v1/feedback` | `{id, tenant?, clicked?, useful?, score?, passage?}`: appended to the request log |
//! | `GET`, `POST /admin/tenants`, `DELETE /admin/tenants/NAME` | lists, loads and removes tenants |
//! | `GET`, `POST /admin/releases`, `GET /releases` | compares candidates with current models, and reads the releases again; the same as a page |
//! | `GET /health`, `/ready`, `/metrics`, `/openapi.json`, `/docs` | |
//!
//! Where there is no rewrite in time, or none at all, the query itself is returned and the response names the reason: `fallback` of
//! `/v1/rewrite`, the header `x-querl-fallback` of other routes. An error response has the form of its route's clients: 400 not JSON, 401 key
//! missing or wrong (Dify: 403), 403 no admin key configured, 404 tenant or route unknown, 405 another method, 408 body not received in
//! time, 413 body too large, 415 not declared as JSON, 422 value missing, wrong or too long for the model, 429 queue full or too many
//! requests of one address, 500 model failed, 502 upstream not reachable or unreadable, 503 not loaded yet or too many requests,
//! 504 response or upstream too slow.

mod access_log;
mod admin;
mod cache;
mod candidates;
mod chat;
mod failure_log;
mod feedback;
mod metrics;
mod notify;
mod openapi;
mod preparation;
mod protocol;
mod proxy;
mod request_log;
mod service;
mod traces;
mod trial;
mod upstream;
mod version_metrics;

pub use notify::{check_server, reload_server};
pub use request_log::RequestLogOptions;
pub use service::{RewriteOptions, RewriteService};
pub use traces::Traces;
pub use trial::CandidateLimits;
pub use upstream::Upstream;

use crate::connections::ConnectionHandle;
use crate::error::{ErrorForm, ErrorResponse, json_response};
use crate::general_rag::GENERAL_RAG_ROUTE;
use crate::metrics::metrics_response;
use crate::server::{ServerLimits, run_with_worker};
use access_log::RequestRecord;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, Response};
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Extension, Json, Router};
use serde_json::json;
use service::Call;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tracing::Instrument;

const REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");

impl RewriteService {
    /// A router with the routes of the service.
    pub fn router(self: &Arc<Self>) -> Router {
        let admin = Router::new()
            .route("/admin/tenants", get(admin::list).merge(route(ErrorForm::OpenAi, admin::load)))
            .route("/admin/tenants/{name}", delete(admin::remove))
            .route("/admin/releases", get(candidates::list).post(candidates::reload))
            .layer(from_fn_with_state(self.clone(), admin::check_key));
        let retrieval = route(ErrorForm::Dify, proxy::retrieval);
        let app = Router::new()
            .route("/v1/rewrite", route(ErrorForm::OpenAi, protocol::rewrite))
            .route("/v1/chat/completions", route(ErrorForm::OpenAi, chat::completions))
            .route("/v1/models", get(chat::models))
            .route("/v1/models/{*model}", get(chat::model))
            .route("/v1/feedback", route(ErrorForm::OpenAi, feedback::feedback))
            .route(GENERAL_RAG_ROUTE, route(ErrorForm::GeneralRag, proxy::general_rag))
            .route("/retrieval", retrieval.route_layer(from_fn_with_state(self.clone(), proxy::check_access)))
            .route("/health", get(|| async { Json(json!({"status": "ok"})) }))
            .route("/ready", get(ready))
            .route("/metrics", get(prometheus))
            .route("/openapi.json", get(|| async { Json(openapi::document()) }))
            .route("/releases", get(|| async { Html(include_str!("rewrite/releases.html")) }))
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
        let retrieval = self.options.upstream.as_ref().map_or(Duration::ZERO, Upstream::timeout);
        let drain_timeout = self.options.chat_timeout.max(self.options.deadline + retrieval);
        let limits = ServerLimits { drain_timeout, ..self.options.server };
        let (router, service) = (self.router(), self.clone());
        let served = run_with_worker(addr, router, limits, on_bound, ("rewriter", move || work(service)), is_stopped);
        if let Some(log) = &self.request_log {
            log.flush();
        }
        if let Some(traces) = &self.options.traces {
            traces.shutdown();
        }
        served
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
                    connection: ConnectionHandle,
                    request: Request| {
            let response = async { handler(Call::read(service, record, &connection, request).await?).await };
            response.await.unwrap_or_else(|error: ErrorResponse| error.into_body(form))
        },
    )
}

async fn ready(State(service): State<Arc<RewriteService>>, connection: ConnectionHandle) -> Response {
    let check = || match service.rewriter()?.is_full() {
        true => Err(ErrorResponse::unavailable("the queue is full; retry later")),
        false => Ok(connection.check_requests()?),
    };
    json_response(check().map(|()| json!({"status": "ready"})), ErrorForm::OpenAi)
}

async fn prometheus(State(service): State<Arc<RewriteService>>) -> Response {
    metrics_response(service.metrics.to_text(service.rewriter.get().map(AsRef::as_ref)), ErrorForm::OpenAi)
}

async fn unknown_route(uri: Uri) -> Response {
    let path = uri.path();
    // Requests of OpenAI clients whose base URL lacks `/v1`, or has it twice, or ends with a route.
    let is_of_openai = ["/completions", "/models", "/embeddings", "/responses"]
        .iter()
        .any(|route| path.ends_with(route) && path != format!("/v1{route}"));
    let remedy = match is_of_openai {
        true => "the base URL of an OpenAI client is the server's address and `/v1`, such as http://127.0.0.1:8000/v1",
        false => "use /v1/rewrite, or read /docs",
    };
    let what = format!("there is nothing at `{path}`; {remedy}");
    ErrorResponse::not_found(what).into_body(ErrorForm::OpenAi)
}

async fn wrong_method(method: Method, uri: Uri) -> Response {
    let path = uri.path();
    let is_post = method == Method::GET && !path.starts_with("/admin/");
    let remedy = if is_post { "use POST, and read /docs" } else { "read /docs" };
    let what = format!("method {method} is not allowed at `{path}`; {remedy}");
    ErrorResponse::new(StatusCode::METHOD_NOT_ALLOWED, what).into_body(ErrorForm::OpenAi)
}

/// Counts and logs each request, also if the client disconnects before the response.
async fn record(State(service): State<Arc<RewriteService>>, mut request: Request, next: Next) -> Response {
    let record = Arc::new(RequestRecord::new(service, &request));
    request.extensions_mut().insert(record.clone());
    // Log lines about this request have its id, as in the access log.
    let mut response = next.run(request).instrument(tracing::error_span!("request", id = %record.id())).await;
    record.note_status(response.status());
    if let Ok(id) = HeaderValue::from_str(record.id()) {
        response.headers_mut().insert(REQUEST_ID_HEADER, id);
    }
    response
}

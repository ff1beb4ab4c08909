//! The `general_rag` interface over retrieval back ends of this process.
//!
//! `POST /api/chat/general_rag {query, tenant_id, kb_name = "default", top_k = 5, score_threshold = 0.5, history?, rewritten_query?,
//! user_profile?}` is answered by `{status: 200, msg, data: {user_profile, history_summary, rewritten_query, recall: [{id, content,
//! reranker_score, score, rank}]}}`. An error response has `status` in HTTP and body, and a sentence in `msg`: 400 not JSON, 404 tenant
//! or knowledge base not served here, 401 key missing or wrong, 405 another method, 408 body not received in time, 413 body too large,
//! 415 not declared as JSON, 422 value missing, out of range or too long, 429 too many requests of one address, 500 search failed, 503
//! too many requests or search too slow. Nothing is rewritten here: without `rewritten_query`, `query` is looked up.

use crate::body::{BodyLimits, JsonFields, read_fields};
use crate::connections::ConnectionHandle;
use crate::error::{ErrorForm, ErrorResponse, json_response};
use crate::key::{ApiKey, unauthorized};
use crate::server::ServeError;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{Method, StatusCode, Uri};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use querl_core::ports::RetrievalRequest;
use querl_core::records::{CallFailure, Context, FailureKind, Hit};
use querl_data::{RetrievalBackend, RetrievalLimits};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Path of the `general_rag` route.
pub const GENERAL_RAG_ROUTE: &str = "/api/chat/general_rag";
/// Four texts of [`MAX_TEXT_CHARS`] with every character escaped as in `\u9c7c`, and their keys.
const MAX_BODY_BYTES: usize = 256 << 10;
/// Maximum length of a text: far above that of a query with its history.
const MAX_TEXT_CHARS: usize = 8192;
/// Time limit for a whole body to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// The same maximum as for `retrieval.top_k`.
const MAX_TOP_K: u64 = 1000;

const DEFAULT_KB_NAME: &str = "default";
const DEFAULT_TOP_K: u64 = 5;
const DEFAULT_SCORE_THRESHOLD: f64 = 0.5;
const EXPECTED_BODY: &str = "{\"query\": ..., \"tenant_id\": ...}";

/// A knowledge base that is served, with its retrieval back end.
pub struct KnowledgeBase {
    /// The `tenant_id` of requests to this knowledge base.
    pub tenant: String,
    /// The `kb_name` of requests to this knowledge base.
    pub kb_name: String,
    /// Retrieval back end that finds the passages.
    pub search: Arc<dyn RetrievalBackend>,
    /// Time limit of a response, time in the queue included.
    pub timeout: Duration,
}

type Bases = BTreeMap<(String, String), KnowledgeBase>;

struct RagService {
    bases: Bases,
    key: Option<ApiKey>,
}

/// A router with the `general_rag` routes of the knowledge bases, `GET /health` and `GET /ready`. Searches require `api_key`, if
/// it is set.
///
/// # Errors
/// Two of them have the same tenant and name.
pub fn general_rag(knowledge_bases: Vec<KnowledgeBase>, api_key: Option<&str>) -> Result<Router, ServeError> {
    let mut bases = Bases::new();
    for base in knowledge_bases {
        if let Some(KnowledgeBase { tenant, kb_name, .. }) =
            bases.insert((base.tenant.clone(), base.kb_name.clone()), base)
        {
            return Err(ServeError::Twice { tenant, kb_name });
        }
    }
    let app = Router::new()
        .route(GENERAL_RAG_ROUTE, post(answer))
        .route("/health", get(|| async { Json(json!({"status": 200})) }))
        .route("/ready", get(ready))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES));
    Ok(app.with_state(Arc::new(RagService { bases, key: api_key.map(ApiKey::new) })))
}

/// A request. Unknown keys are ignored, as other services with this API do.
#[derive(Debug)]
struct RagRequest {
    query: String,
    tenant_id: String,
    kb_name: String,
    top_k: u64,
    score_threshold: f64,
    /// A text, a list of texts, or a list of messages with `content`.
    history: Value,
    rewritten_query: Option<String>,
    user_profile: Option<String>,
}

impl RagRequest {
    fn new(mut fields: JsonFields) -> Result<Self, ErrorResponse> {
        let text = "a text";
        Ok(Self {
            query: fields.take_required("query", text)?,
            tenant_id: fields.take_required("tenant_id", text)?,
            kb_name: fields.take("kb_name", text)?.unwrap_or_else(|| DEFAULT_KB_NAME.into()),
            top_k: fields.take("top_k", "an integer from 1 to 1000")?.unwrap_or(DEFAULT_TOP_K),
            score_threshold: fields.take("score_threshold", "a number from 0 to 1")?.unwrap_or(DEFAULT_SCORE_THRESHOLD),
            history: fields.take("history", "a text, a list of texts, or a list of messages")?.unwrap_or_default(),
            rewritten_query: fields.take("rewritten_query", text)?,
            user_profile: fields.take("user_profile", text)?,
        })
    }

    fn limits(&self) -> Result<RetrievalLimits, ErrorResponse> {
        let wrong = |what: String| Err(ErrorResponse::value(what));
        if self.query.trim().is_empty() {
            return wrong("`query` is empty".into());
        }
        if !(1..=MAX_TOP_K).contains(&self.top_k) {
            return wrong(format!("`top_k` is {}; expected 1 to {MAX_TOP_K}", self.top_k));
        }
        if !(0.0..=1.0).contains(&self.score_threshold) {
            return wrong(format!("`score_threshold` is {}; expected 0 to 1", self.score_threshold));
        }
        Ok(RetrievalLimits { top_k: self.top_k as usize, score_threshold: self.score_threshold })
    }
}

async fn ready(connection: ConnectionHandle) -> Response {
    let ready = connection.check_requests().map(|()| json!({"status": 200}));
    json_response(ready.map_err(ErrorResponse::from), ErrorForm::GeneralRag)
}

async fn unknown_route(uri: Uri) -> Response {
    let what = format!("there is nothing at `{}`; use {GENERAL_RAG_ROUTE}", uri.path());
    ErrorResponse::not_found(what).into_body(ErrorForm::GeneralRag)
}

async fn wrong_method(method: Method) -> Response {
    let what = format!("method {method} is not allowed; {GENERAL_RAG_ROUTE} takes POST, /health and /ready take GET");
    ErrorResponse::new(StatusCode::METHOD_NOT_ALLOWED, what).into_body(ErrorForm::GeneralRag)
}

async fn answer(State(service): State<Arc<RagService>>, connection: ConnectionHandle, request: Request) -> Response {
    let response = async {
        if service.key.as_ref().is_some_and(|key| !key.is_in(request.headers())) {
            return Err(unauthorized(request.headers()));
        }
        let limits = BodyLimits { max_bytes: MAX_BODY_BYTES, timeout: BODY_TIMEOUT, expected: EXPECTED_BODY };
        let request = RagRequest::new(read_fields(request, limits).await?)?;
        let _slot = connection.begin_request()?;
        serve_one(&service.bases, request).await
    };
    json_response(response.await, ErrorForm::GeneralRag)
}

async fn serve_one(bases: &Bases, request: RagRequest) -> Result<Value, ErrorResponse> {
    let base = find(bases, &request)?;
    let limits = request.limits()?;
    let rewritten_query = request.rewritten_query.filter(|text| !text.trim().is_empty());
    let rewritten_query = rewritten_query.unwrap_or_else(|| request.query.clone());
    let context = Context {
        user_profile: request.user_profile.unwrap_or_default(),
        history_summary: history_text(&request.history)?,
    };
    let texts = [("query", &request.query), ("rewritten_query", &rewritten_query)];
    let others = [("user_profile", &context.user_profile), ("history", &context.history_summary)];
    texts.into_iter().chain(others).try_for_each(|(name, text)| check_length(name, text))?;
    let retrieval_request =
        RetrievalRequest { original_query: &request.query, context: &context, rewritten_query: &rewritten_query };
    // Addresses and paths are written only to the operator's log.
    let late = || {
        tracing::warn!("tenant {}, {}: no answer within {:?}", request.tenant_id, request.kb_name, base.timeout);
        ErrorResponse::unavailable(format!("no response within {:?}; retry later", base.timeout))
    };
    let failed = |failure: CallFailure| {
        // The retrieval backend has a separate time limit, which may pass first.
        if failure.kind == FailureKind::Timeout {
            return late();
        }
        tracing::warn!("{failure}");
        ErrorResponse::internal("the search failed; the server's log says why")
    };
    let found = tokio::time::timeout(base.timeout, base.search.search(&retrieval_request, limits)).await;
    let hits = found.map_err(|_| late())?.map_err(failed)?;
    Ok(json!({
        "status": 200,
        "msg": "success",
        "data": {
            "user_profile": context.user_profile,
            "history_summary": context.history_summary,
            "rewritten_query": rewritten_query,
            "recall": hits.iter().map(entry).collect::<Vec<_>>(),
        },
    }))
}

/// The knowledge base of a request. The message is the same for an unknown tenant and an unknown name, so that clients do not learn which
/// tenants are served.
fn find<'a>(bases: &'a Bases, request: &RagRequest) -> Result<&'a KnowledgeBase, ErrorResponse> {
    bases.get(&(request.tenant_id.clone(), request.kb_name.clone())).ok_or_else(|| {
        let what = format!("tenant_id `{}` with kb_name `{}` is not served here", request.tenant_id, request.kb_name);
        ErrorResponse::not_found(what)
    })
}

fn check_length(name: &str, text: &str) -> Result<(), ErrorResponse> {
    match text.chars().nth(MAX_TEXT_CHARS) {
        Some(_) => Err(ErrorResponse::value(format!("`{name}` is longer than {MAX_TEXT_CHARS} characters"))),
        None => Ok(()),
    }
}

/// The history of a request as one text: a line for each item of a list.
pub(crate) fn history_text(history: &Value) -> Result<String, ErrorResponse> {
    let part = |part: &Value| part.as_str().or_else(|| part.get("content")?.as_str()).map(str::to_owned);
    let text = match history {
        Value::Null => Some(String::new()),
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(part).collect::<Option<Vec<String>>>().map(|parts| parts.join("\n")),
        _ => None,
    };
    text.ok_or_else(|| {
        ErrorResponse::value("`history` is neither a text nor a list of texts or of messages with `content`")
    })
}

fn entry(hit: &Hit) -> Value {
    json!({
        "id": hit.id,
        "content": hit.text,
        "reranker_score": hit.reranker_score,
        "score": hit.retrieval_score,
        "rank": hit.rank,
    })
}

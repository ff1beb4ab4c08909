//! The `general_rag` interface over searches of this process.
//!
//! `POST /api/chat/general_rag {query, tenant_id, kb_name = "default", top_k = 5, score_threshold = 0.5, history?, rewritten_query?,
//! user_profile?}` is answered by `{status: 200, msg, data: {user_profile, history_summary, rewritten_query, recall: [{id, content,
//! reranker_score, score, rank}]}}`. A request that cannot be served has the HTTP status of its `status`, and a sentence in `msg`:
//! 400 for what is no JSON, 404 for a tenant or knowledge base that is not served here, 408 for a body that does not come, 413 for one
//! that is too large, 415 for one that does not say it is JSON, 422 for a value that is missing, out of range or too long, 500 where the
//! search failed, 503 where it takes too long. Nothing is rewritten here: without `rewritten_query`, `query` itself is looked up.

use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use querl_core::ports::RetrievalRequest;
use querl_core::records::{CallFailure, Context, FailureKind, Hit};
use querl_data::{RetrievalBackend, RetrievalLimits};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The interface's path.
pub const GENERAL_RAG_ROUTE: &str = "/api/chat/general_rag";
/// Four texts of [`MAX_TEXT_CHARS`] with every character escaped as in `\u9c7c`, and the names around them.
const MAX_BODY_BYTES: usize = 256 << 10;
/// A query with its history is nowhere near this length.
const MAX_TEXT_CHARS: usize = 8192;
/// For a body to come, whole.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// As in a configuration (`retrieval.top_k`).
const MAX_TOP_K: u64 = 1000;

/// One knowledge base, and who may ask it.
pub struct KnowledgeBase {
    /// The `tenant_id` of its requests.
    pub tenant: String,
    /// The `kb_name` of its requests.
    pub kb_name: String,
    /// What finds its passages.
    pub search: Arc<dyn RetrievalBackend>,
    /// For one answer, waiting for others' included.
    pub timeout: Duration,
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Requests could not tell two knowledge bases apart.
    #[error("tenant `{tenant}` has two knowledge bases named `{kb_name}`; give each its own `retrieval.kb_name`")]
    Twice {
        /// Whose.
        tenant: String,
        /// The name.
        kb_name: String,
    },
}

/// Tenant and name of each knowledge base.
type Bases = BTreeMap<String, BTreeMap<String, Base>>;

struct Base {
    search: Arc<dyn RetrievalBackend>,
    timeout: Duration,
}

/// The `general_rag` routes of some knowledge bases, and `GET /health`.
///
/// # Errors
/// Two of them have the same tenant and name.
pub fn general_rag(knowledge_bases: Vec<KnowledgeBase>) -> Result<Router, ServeError> {
    let mut bases = Bases::new();
    for KnowledgeBase { tenant, kb_name, search, timeout } in knowledge_bases {
        let base = Base { search, timeout };
        if bases.entry(tenant.clone()).or_default().insert(kb_name.clone(), base).is_some() {
            return Err(ServeError::Twice { tenant, kb_name });
        }
    }
    let app = Router::new()
        .route(GENERAL_RAG_ROUTE, post(answer))
        .route("/health", get(|| async { Json(json!({"status": 200})) }))
        .fallback(|| async {
            Refusal(StatusCode::NOT_FOUND, format!("there is nothing here; ask {GENERAL_RAG_ROUTE}"))
        })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES));
    Ok(app.with_state(Arc::new(bases)))
}

/// A request, as sent. Keys that are not known are passed over, as services of this interface do.
#[derive(Debug, Deserialize)]
struct RagRequest {
    query: String,
    tenant_id: String,
    #[serde(default = "default_kb_name")]
    kb_name: String,
    #[serde(default = "default_top_k")]
    top_k: u64,
    #[serde(default = "default_score_threshold")]
    score_threshold: f64,
    /// A text, a list of texts, or a list of messages with `content`.
    #[serde(default)]
    history: Value,
    #[serde(default)]
    rewritten_query: Option<String>,
    #[serde(default)]
    user_profile: Option<String>,
}

fn default_kb_name() -> String {
    "default".into()
}

fn default_top_k() -> u64 {
    5
}

fn default_score_threshold() -> f64 {
    0.5
}

/// A request that was not served, in words.
struct Refusal(StatusCode, String);

async fn answer(State(bases): State<Arc<Bases>>, request: Request) -> Response {
    let served = match read(request).await {
        Ok(request) => serve_one(&bases, request).await,
        Err(refusal) => Err(refusal),
    };
    served.map_or_else(IntoResponse::into_response, |answer| Json(answer).into_response())
}

async fn read(request: Request) -> Result<RagRequest, Refusal> {
    let body = tokio::time::timeout(BODY_TIMEOUT, Json::<RagRequest>::from_request(request, &())).await;
    let late = |_| Refusal(StatusCode::REQUEST_TIMEOUT, format!("the body did not come within {BODY_TIMEOUT:?}"));
    let Json(request) = body.map_err(late)?.map_err(|rejection| Refusal(rejection.status(), rejection.body_text()))?;
    Ok(request)
}

async fn serve_one(bases: &Bases, request: RagRequest) -> Result<Value, Refusal> {
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
    let question =
        RetrievalRequest { original_query: &request.query, context: &context, rewritten_query: &rewritten_query };
    // What failed, with addresses and paths, is for who runs the server.
    let late = || {
        tracing::warn!("tenant {}, {}: no answer within {:?}", request.tenant_id, request.kb_name, base.timeout);
        Refusal(StatusCode::SERVICE_UNAVAILABLE, format!("no answer within {:?}; ask again later", base.timeout))
    };
    let failed = |failure: CallFailure| {
        // The search keeps time as well, and may be the first to find that it is over.
        if failure.kind == FailureKind::Timeout {
            return late();
        }
        tracing::warn!("{failure}");
        Refusal(StatusCode::INTERNAL_SERVER_ERROR, "the search failed; the server's log says why".into())
    };
    let found = tokio::time::timeout(base.timeout, base.search.search(&question, limits)).await;
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

/// What answers for the request's tenant and knowledge base. What else is served is nobody's business but its owner's: whether the
/// tenant or the knowledge base is unknown is not said.
fn find<'a>(bases: &'a Bases, request: &RagRequest) -> Result<&'a Base, Refusal> {
    let found = bases.get(&request.tenant_id).and_then(|of_tenant| of_tenant.get(&request.kb_name));
    found.ok_or_else(|| {
        let what = format!("tenant_id `{}` with kb_name `{}` is not served here", request.tenant_id, request.kb_name);
        Refusal(StatusCode::NOT_FOUND, what)
    })
}

fn check_length(name: &str, text: &str) -> Result<(), Refusal> {
    match text.chars().nth(MAX_TEXT_CHARS) {
        Some(_) => {
            let what = format!("`{name}` is longer than {MAX_TEXT_CHARS} characters");
            Err(Refusal(StatusCode::UNPROCESSABLE_ENTITY, what))
        }
        None => Ok(()),
    }
}

impl RagRequest {
    fn limits(&self) -> Result<RetrievalLimits, Refusal> {
        let wrong = |what: String| Err(Refusal(StatusCode::UNPROCESSABLE_ENTITY, what));
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

/// A history in one text, a line for each part of a list.
fn history_text(history: &Value) -> Result<String, Refusal> {
    let part = |part: &Value| part.as_str().or_else(|| part.get("content")?.as_str()).map(str::to_owned);
    let text = match history {
        Value::Null => Some(String::new()),
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(part).collect::<Option<Vec<String>>>().map(|parts| parts.join("\n")),
        _ => None,
    };
    text.ok_or_else(|| {
        let what = "`history` is neither a text nor a list of texts or of messages with `content`";
        Refusal(StatusCode::UNPROCESSABLE_ENTITY, what.into())
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

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(status, msg) = self;
        (status, Json(json!({"status": status.as_u16(), "msg": msg, "data": null}))).into_response()
    }
}

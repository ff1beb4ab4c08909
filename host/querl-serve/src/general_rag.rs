//! The `general_rag` interface over searches of this process.
//!
//! `POST /api/chat/general_rag {query, tenant_id, kb_name = "default", top_k = 5, score_threshold = 0.5, history?, rewritten_query?,
//! user_profile?}` is answered by `{status: 200, msg, data: {user_profile, history_summary, rewritten_query, recall: [{id, content,
//! reranker_score, score, rank}]}}`. A request that cannot be served has the HTTP status of its `status`, and a sentence in `msg`:
//! 404 for a tenant or knowledge base that is not served here, 422 for a value that is missing or out of range, 500 where the
//! search failed. Nothing is rewritten here: without `rewritten_query`, `query` itself is looked up.

use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use querl_core::ports::RetrievalRequest;
use querl_core::records::{Context, Hit};
use querl_data::{Search, SearchLimits};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The interface's path.
pub const GENERAL_RAG_ROUTE: &str = "/api/chat/general_rag";
/// A query with its history is nowhere near this size.
const MAX_BODY_BYTES: usize = 1 << 20;
/// As in a configuration (`retrieval.top_k`).
const MAX_TOP_K: u64 = 1000;

/// One knowledge base, and who may ask it.
pub struct KnowledgeBase {
    /// The `tenant_id` of its requests.
    pub tenant: String,
    /// The `kb_name` of its requests.
    pub kb_name: String,
    /// What finds its passages.
    pub search: Arc<dyn Search>,
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
type Bases = BTreeMap<String, BTreeMap<String, Arc<dyn Search>>>;

/// The interface over some knowledge bases, with `GET /health` beside it.
///
/// # Errors
/// Two of them have the same tenant and name.
pub fn general_rag(knowledge_bases: Vec<KnowledgeBase>) -> Result<Router, ServeError> {
    let mut bases = Bases::new();
    for KnowledgeBase { tenant, kb_name, search } in knowledge_bases {
        if bases.entry(tenant.clone()).or_default().insert(kb_name.clone(), search).is_some() {
            return Err(ServeError::Twice { tenant, kb_name });
        }
    }
    let app = Router::new()
        .route(GENERAL_RAG_ROUTE, post(answer))
        .route("/health", get(|| async { Json(json!({"status": 200})) }))
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

async fn answer(State(bases): State<Arc<Bases>>, body: Result<Json<RagRequest>, JsonRejection>) -> Response {
    let served = match body {
        Ok(Json(request)) => serve_one(&bases, request).await,
        Err(rejection) => Err(Refusal(rejection.status(), rejection.body_text())),
    };
    served.map_or_else(IntoResponse::into_response, |answer| Json(answer).into_response())
}

async fn serve_one(bases: &Bases, request: RagRequest) -> Result<Value, Refusal> {
    let search = find(bases, &request)?;
    let limits = request.limits()?;
    let rewritten_query = request.rewritten_query.filter(|text| !text.trim().is_empty());
    let rewritten_query = rewritten_query.unwrap_or_else(|| request.query.clone());
    let context = Context {
        user_profile: request.user_profile.unwrap_or_default(),
        history_summary: history_text(&request.history)?,
    };
    let question =
        RetrievalRequest { original_query: &request.query, context: &context, rewritten_query: &rewritten_query };
    let failed = |failure: querl_core::records::CallFailure| {
        tracing::warn!("{failure}");
        Refusal(StatusCode::INTERNAL_SERVER_ERROR, failure.to_string())
    };
    let hits = search.search(&question, limits).await.map_err(failed)?;
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

/// The search of the request's tenant and knowledge base. What else is served is nobody's business but its owner's.
fn find<'a>(bases: &'a Bases, request: &RagRequest) -> Result<&'a Arc<dyn Search>, Refusal> {
    let unknown = |what: String| Refusal(StatusCode::NOT_FOUND, what);
    let of_tenant = bases
        .get(&request.tenant_id)
        .ok_or_else(|| unknown(format!("tenant_id `{}` is not served here", request.tenant_id)))?;
    of_tenant.get(&request.kb_name).ok_or_else(|| {
        unknown(format!("tenant `{}` has no knowledge base `{}` here", request.tenant_id, request.kb_name))
    })
}

impl RagRequest {
    fn limits(&self) -> Result<SearchLimits, Refusal> {
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
        Ok(SearchLimits { top_k: self.top_k as usize, score_threshold: self.score_threshold })
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

//! Retrieval by a service that speaks `general_rag`: `POST {query, rewritten_query, tenant_id, kb_name, top_k, score_threshold}`.
//!
//! Services of this kind differ in small ways, so reading is tolerant: numbers may come as text, `recall` may hold a marker
//! (`lack of knowledge`) instead of passages, or be missing where `status` says that all went well. An entry without a reranker
//! score is a failure, not a score of 0; so is a `status` other than those known to mean success.

use crate::calls::{CallLimits, Caller};
use crate::error::DataError;
use async_trait::async_trait;
use querl_core::config::RetrievalConfig;
use querl_core::ports::{RetrievalRequest, Retriever};
use querl_core::records::{CallFailure, FailureKind, Hit};
use serde_json::{Value, json};

/// What a service answers in place of passages when it has none to offer.
const NOTHING_FOUND: [&str; 2] = ["lack of knowledge", "no knowledge required"];
/// What `status` may be, as lower-case text, where a service succeeded.
const SUCCESS: [&str; 5] = ["200", "0", "ok", "success", "true"];

/// A `general_rag` service.
#[derive(Debug)]
pub(crate) struct GeneralRag {
    caller: Caller,
    tenant: String,
    kb_name: String,
    top_k: usize,
    score_threshold: f64,
}

impl GeneralRag {
    /// The service that the configuration names.
    ///
    /// # Errors
    /// `retrieval.url` is not set or not an address.
    pub(crate) fn open(config: &RetrievalConfig, tenant: &str) -> Result<Self, DataError> {
        let url = config.url.as_deref().ok_or_else(|| {
            DataError::setting(
                "retrieval.url",
                "is not set; retrieval of kind `http` needs the address of a general_rag route",
            )
        })?;
        let limits = CallLimits::new(config.max_concurrent, config.timeout_s, config.max_retries);
        Ok(Self {
            caller: Caller::new("retrieval.url", url, None, limits)?,
            tenant: tenant.to_owned(),
            kb_name: config.kb_name.clone(),
            top_k: config.top_k,
            score_threshold: config.score_threshold,
        })
    }

    fn body(&self, request: &RetrievalRequest<'_>) -> Value {
        let mut body = json!({
            "query": request.original_query,
            "rewritten_query": request.rewritten_query,
            "tenant_id": self.tenant,
            "kb_name": self.kb_name,
            "top_k": self.top_k,
            "score_threshold": self.score_threshold,
        });
        if !request.context.history_summary.is_empty() {
            body["history"] = json!(request.context.history_summary);
        }
        body
    }

    /// Best first, within `top_k`, none below the threshold, whatever the service left in.
    fn hits(&self, body: &Value) -> Result<Vec<Hit>, String> {
        let entries = match body.pointer("/data/recall").unwrap_or(&Value::Null) {
            Value::Null if succeeded(body) == Some(true) => &[],
            Value::Null => return Err(format!("the answer has neither `data.recall` nor `status`: {}", excerpt(body))),
            Value::String(text) if is_marker(text) => &[],
            Value::Array(entries) => entries.as_slice(),
            other => return Err(format!("`data.recall` is neither a list nor a known marker: {}", excerpt(other))),
        };
        let passages = entries.iter().enumerate().filter(|(_, entry)| !entry.as_str().is_some_and(is_marker));
        let mut hits = passages.map(|(index, entry)| hit(index, entry)).collect::<Result<Vec<Hit>, String>>()?;
        hits.retain(|hit| hit.reranker_score >= self.score_threshold);
        hits.sort_by(|a, b| b.reranker_score.total_cmp(&a.reranker_score));
        hits.truncate(self.top_k);
        for (hit, rank) in hits.iter_mut().zip(1..) {
            hit.rank = rank;
        }
        Ok(hits)
    }
}

#[async_trait]
impl Retriever for GeneralRag {
    async fn retrieve(&self, request: RetrievalRequest<'_>) -> Result<Vec<Hit>, CallFailure> {
        let answer = self.caller.post(&self.body(&request)).await?;
        if succeeded(&answer.body) == Some(false) {
            let what = format!("answered with status {}: {}", excerpt(&answer.body["status"]), excerpt(&answer.body));
            return Err(self.caller.failure(FailureKind::ServerError, &what));
        }
        self.hits(&answer.body).map_err(|what| self.caller.failure(FailureKind::InvalidResponse, &what))
    }

    fn name(&self) -> &str {
        "general_rag"
    }
}

fn hit(index: usize, entry: &Value) -> Result<Hit, String> {
    let place = format!("`data.recall[{index}]`");
    let score = entry.get("reranker_score").ok_or_else(|| format!("{place} has no `reranker_score`"))?;
    let reranker_score = number(score).filter(|score| (0.0..=1.0).contains(score));
    let reranker_score =
        reranker_score.ok_or_else(|| format!("{place}: `reranker_score` is {}; expected 0 to 1", excerpt(score)))?;
    let first = |names: &[&str]| names.iter().find_map(|name| entry.pointer(name).filter(|value| !value.is_null()));
    Ok(Hit {
        id: first(&["/id", "/doc_id", "/document_id", "/metadata/id"]).map(plain).unwrap_or_default(),
        text: first(&["/text", "/content", "/page_content"]).map(plain).unwrap_or_default(),
        reranker_score,
        retrieval_score: first(&["/score", "/similarity"]).and_then(number),
        rank: 0,
    })
}

fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.trim().parse().ok()).filter(|number| number.is_finite())
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn is_marker(text: &str) -> bool {
    let text = text.trim().to_lowercase();
    text.is_empty() || NOTHING_FOUND.contains(&text.as_str())
}

/// Whether `status` says success; `None` where there is no status.
fn succeeded(body: &Value) -> Option<bool> {
    let status = body.get("status").filter(|status| !status.is_null())?;
    Some(SUCCESS.contains(&plain(status).trim().to_lowercase().as_str()))
}

fn excerpt(value: &Value) -> String {
    let text: String = value.to_string().chars().take(120).collect();
    format!("`{text}`")
}

#[cfg(test)]
#[path = "general_rag_tests.rs"]
mod tests;

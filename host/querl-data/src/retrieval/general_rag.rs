//! Retrieval by a service that speaks `general_rag`: `POST {query, rewritten_query, tenant_id, kb_name, top_k, score_threshold}`,
//! with `history` and `user_profile` where they are not empty.
//!
//! Services of this kind differ in small ways, so reading is tolerant: numbers may come as text, `recall` may be a list written
//! as text, hold a marker (`lack of knowledge`) instead of passages, or be missing where `status` says that all went well. Where
//! no entry has a `reranker_score`, another score that all have stands in for it; entries that alone lack it are left out. What
//! cannot be understood is a failure, not a score of 0; so is a `status` other than those known to mean success.

use crate::client::context::ServiceContext;
use crate::client::http::{CallLimits, Caller, CostBound, Refusal, Secret};
use crate::error::DataError;
use crate::retrieval::json::{excerpt, first, number, plain};
use crate::retrieval::search::{RetrievalBackend, RetrievalLimits, ServiceScores};
use async_trait::async_trait;
use querl_core::config::{HistoryForm, RetrievalConfig};
use querl_core::ports::RetrievalRequest;
use querl_core::records::{CallFailure, FailureKind, Hit};
use serde_json::{Value, json};
use std::borrow::Cow;

/// What a service answers in place of passages when it has none to offer, in lower case with spaces.
const NOTHING_FOUND: [&str; 2] = ["lack of knowledge", "no knowledge required"];
/// What `status` may be, as lower-case text, where a service succeeded.
const SUCCESS: [&str; 5] = ["200", "0", "ok", "success", "true"];
/// Where an entry's score is, the first one that is there.
const SCORES: [&str; 5] = ["/reranker_score", "/rerank_score", "/relevance_score", "/score", "/similarity"];
const IDS: [&str; 5] = ["/id", "/doc_id", "/document_id", "/metadata/id", "/metadata/doc_id"];
const TEXTS: [&str; 4] = ["/text", "/content", "/page_content", "/chunk"];

/// A `general_rag` service.
#[derive(Debug)]
pub(crate) struct GeneralRag {
    caller: Caller,
    tenant: String,
    kb_name: String,
    history: HistoryForm,
    scores: ServiceScores,
}

impl GeneralRag {
    /// The service that the configuration names.
    pub(crate) fn open(config: &RetrievalConfig, tenant: &str, services: &ServiceContext) -> Result<Self, DataError> {
        Ok(Self {
            caller: service_caller(config, services)?,
            tenant: tenant.to_owned(),
            kb_name: config.kb_name.clone(),
            history: config.history,
            scores: ServiceScores::of(config),
        })
    }

    fn body(&self, request: &RetrievalRequest<'_>, limits: RetrievalLimits) -> Value {
        let mut body = json!({
            "query": request.original_query,
            "rewritten_query": request.rewritten_query,
            "tenant_id": self.tenant,
            "kb_name": self.kb_name,
            "top_k": limits.top_k,
            "score_threshold": limits.score_threshold,
        });
        let (history, profile) = (&request.context.history_summary, &request.context.user_profile);
        if !history.is_empty() {
            match self.history {
                HistoryForm::Text => body["history"] = json!(history),
                HistoryForm::List => body["history"] = json!([{"role": "user", "content": history}]),
                HistoryForm::None => {}
            }
        }
        if !profile.is_empty() {
            body["user_profile"] = json!(profile);
        }
        body
    }
}

/// The caller of the service at `retrieval.url`.
pub(crate) fn service_caller(config: &RetrievalConfig, services: &ServiceContext) -> Result<Caller, DataError> {
    let missing =
        || DataError::setting("retrieval.url", "is not set; retrieval of kind `http` needs a service's address");
    let url = config.url.as_deref().ok_or_else(missing)?;
    let limits = CallLimits::new(config.max_concurrent, config.timeout_s, config.max_retries)
        .per_minute(config.requests_per_minute, None);
    let key = Secret::open("retrieval", config.api_key_file.as_deref(), &config.api_key_env)?;
    let key = key.map(|key| key.sent_as(config.auth.of(config.service)));
    Caller::new("retrieval.url", url, key, limits, services)
}

#[async_trait]
impl RetrievalBackend for GeneralRag {
    async fn search(&self, request: &RetrievalRequest<'_>, limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure> {
        let answer = self.caller.post_checked(&self.body(request, limits), CostBound::FREE, &refusal).await?;
        let hits =
            hits(&answer.body, self.scores).map_err(|what| self.caller.failure(FailureKind::InvalidResponse, &what))?;
        // Whatever the service left in.
        Ok(limits.apply(hits))
    }

    fn name(&self) -> &str {
        "general_rag"
    }
}

fn hits(body: &Value, scores: ServiceScores) -> Result<Vec<Hit>, String> {
    let entries = entries(body)?;
    let passages = || entries.iter().enumerate().filter(|(_, entry)| !says_nothing_found(entry));
    if scores == ServiceScores::Replaced {
        // The service's own score is the first one then, by whichever name.
        let found = |entry| Hit { retrieval_score: first(entry, &SCORES).and_then(number), ..unscored(entry) };
        return Ok(passages().map(|(_, entry)| found(entry)).collect());
    }
    let Some(score) = SCORES.iter().find(|score| passages().any(|(_, entry)| is_there(entry, score))) else {
        return match passages().next() {
            Some((index, _)) => Err(format!("`data.recall[{index}]` has no `reranker_score`, nor has any other")),
            None => Ok(Vec::new()),
        };
    };
    // Passages that the service did not rank cannot be ranked here.
    passages().filter(|(_, entry)| is_there(entry, score)).map(|(index, entry)| hit(index, entry, score)).collect()
}

fn entries(body: &Value) -> Result<Cow<'_, [Value]>, String> {
    let recall = body.pointer("/data/recall");
    match recall.unwrap_or(&Value::Null) {
        // Other fields, such as a total of 0, do not matter.
        Value::Null if recall.is_some() && succeeded(body) == Some(true) => Ok(Cow::default()),
        Value::Null if succeeded(body) == Some(true) => match odd(body) {
            Some(what) => Err(format!("the answer has no `data.recall`, but {what}: {}", excerpt(body))),
            None => Ok(Cow::default()),
        },
        Value::Null => Err(format!("the answer has neither `data.recall` nor `status`: {}", excerpt(body))),
        Value::String(text) if is_marker(text) => Ok(Cow::default()),
        Value::Array(entries) => Ok(Cow::Borrowed(entries)),
        other => {
            let written = other.as_str().and_then(|text| serde_json::from_str(text).ok());
            written
                .map(Cow::Owned)
                .ok_or_else(|| format!("`data.recall` is neither a list nor a known marker: {}", excerpt(other)))
        }
    }
}

fn hit(index: usize, entry: &Value, score: &str) -> Result<Hit, String> {
    let found = entry.pointer(score).unwrap_or(&Value::Null);
    let reranker_score = number(found).filter(|score| (0.0..=1.0).contains(score));
    let reranker_score = reranker_score
        .ok_or_else(|| format!("`data.recall[{index}]`: `{}` is {}; expected 0 to 1", &score[1..], excerpt(found)))?;
    Ok(Hit { reranker_score, ..unscored(entry) })
}

fn unscored(entry: &Value) -> Hit {
    Hit {
        id: first(entry, &IDS).map(plain).unwrap_or_default(),
        text: first(entry, &TEXTS).map(plain).unwrap_or_default(),
        reranker_score: 0.0,
        retrieval_score: first(entry, &["/score", "/similarity"]).and_then(number),
        rank: 0,
    }
}

fn is_there(entry: &Value, pointer: &str) -> bool {
    entry.pointer(pointer).is_some_and(|value| !value.is_null())
}

fn says_nothing_found(entry: &Value) -> bool {
    let scored = SCORES.iter().any(|score| is_there(entry, score));
    let text = entry.as_str().or_else(|| first(entry, &TEXTS).filter(|_| !scored)?.as_str());
    text.is_some_and(is_marker)
}

fn is_marker(text: &str) -> bool {
    let text = text.trim().to_lowercase().replace(['_', '-'], " ");
    text.is_empty() || NOTHING_FOUND.contains(&text.as_str())
}

/// What an answer without passages has in their place; `None` where it says no more than that nothing was found.
fn odd(body: &Value) -> Option<String> {
    let data = body.get("data").filter(|data| !data.is_null());
    if let Some(data) = data {
        let named = data.as_object().map(|data| data.keys().cloned().collect::<Vec<_>>());
        let named = named.unwrap_or_else(|| vec![plain(data)]);
        return (!named.is_empty()).then(|| format!("`data` with `{}`", named.join("`, `")));
    }
    let words = ["/error", "/message", "/msg"].map(|pointer| first(body, &[pointer]).map(plain).unwrap_or_default());
    let said = words.into_iter().find(|words| !says_all_is_well(words))?;
    Some(format!("`{said}`"))
}

fn says_all_is_well(words: &str) -> bool {
    let words = words.trim().trim_end_matches(['.', '!', '。', '！']).to_lowercase();
    let ends_well = ["成功", "完成", "success", "successful", "successfully"].iter().any(|end| words.ends_with(end));
    let found_nothing = ["no result", "no match", "no hit", "0 result", "没有找到", "未找到", "无结果", "无匹配"];
    let fails = ["不成功", "未成功", "unsuccess", "not success"].iter().any(|fails| words.contains(fails));
    SUCCESS.contains(&words.as_str())
        || is_marker(&words)
        || (ends_well && !fails)
        || found_nothing.iter().any(|start| words.starts_with(start))
}

/// A failure that the body tells. A status of three digits is one of HTTP; any other the next try may not meet.
fn refusal(body: &Value) -> Option<Refusal> {
    if succeeded(body) != Some(false) {
        return None;
    }
    let status = number(&body["status"]).map(|status| status as u16);
    let what = format!("answered with status {}: {}", excerpt(&body["status"]), excerpt(body));
    Some(Refusal::reported(status, what))
}

/// Whether `status` says success; `None` where there is no status.
fn succeeded(body: &Value) -> Option<bool> {
    let status = body.get("status").filter(|status| !status.is_null())?;
    Some(SUCCESS.contains(&plain(status).trim().to_lowercase().as_str()))
}

#[cfg(test)]
#[path = "general_rag_tests.rs"]
mod tests;

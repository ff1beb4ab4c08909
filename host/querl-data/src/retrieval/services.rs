//! Retrieval by HTTP services: `general_rag`, and services with other APIs through a mapping.
//!
//! `general_rag` is `POST {query, rewritten_query, tenant_id, kb_name, top_k, score_threshold}`, with `history` and `user_profile` unless
//! empty. Services differ in small ways, so reading is tolerant: numbers may be text, `recall` may be a list written as text, contain a
//! marker (`lack of knowledge`) instead of passages, or be missing if `status` means success. If no entry has a `reranker_score`, another
//! score that an entry has is used; entries without it are left out. Anything else is a failure, not a score of 0; so is a `status`
//! other than those known to mean success.

use crate::client::ServiceContext;
use crate::client::http::{Call, CallLimits, Caller, Refusal, Secret};
use crate::error::DataError;
use crate::retrieval::embedding::QueryEmbedding;
use crate::retrieval::mapping::{Mapping, RequestValues, excerpt, first, number, plain};
use crate::retrieval::pricing::CallCharge;
use crate::retrieval::{LocalModels, RetrievalBackend, RetrievalLimits, ServiceScores};
use async_trait::async_trait;
use querl_core::config::{HistoryForm, RetrievalConfig, ServiceKind, ServicePrice};
use querl_core::ports::RetrievalRequest;
use querl_core::records::{CallFailure, FailureKind, Hit};
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// Markers of services in place of passages if nothing was found, in lower case with spaces.
const NOTHING_FOUND: [&str; 2] = ["lack of knowledge", "no knowledge required"];
/// Values of `status` that mean success, as lower-case text.
const SUCCESS: [&str; 5] = ["200", "0", "ok", "success", "true"];
/// JSON pointers to the score of an entry; the first one with a value is used.
const SCORES: [&str; 5] = ["/reranker_score", "/rerank_score", "/relevance_score", "/score", "/similarity"];
const IDS: [&str; 5] = ["/id", "/doc_id", "/document_id", "/metadata/id", "/metadata/doc_id"];
const TEXTS: [&str; 4] = ["/text", "/content", "/page_content", "/chunk"];

#[derive(Debug)]
pub(crate) struct GeneralRag {
    service: PricedService,
    tenant: String,
    kb_name: String,
    history: HistoryForm,
    scores: ServiceScores,
}

impl GeneralRag {
    pub(crate) fn open(config: &RetrievalConfig, tenant: &str, services: &ServiceContext) -> Result<Self, DataError> {
        Ok(Self {
            service: PricedService::open(config, services)?,
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

/// The service at `retrieval.url`.
#[derive(Debug)]
struct PricedService {
    caller: Caller,
    price: ServicePrice,
}

impl PricedService {
    fn open(config: &RetrievalConfig, services: &ServiceContext) -> Result<Self, DataError> {
        let missing =
            || DataError::setting("retrieval.url", "is not set; retrieval of kind `http` needs a service's address");
        let url = config.url.as_deref().ok_or_else(missing)?;
        let limits = CallLimits::new(config.max_concurrent, config.timeout_s, config.max_retries)
            .per_minute(config.requests_per_minute, None);
        let key = Secret::open(services, "retrieval", config.api_key_file.as_deref(), &config.api_key_env)?;
        let key = key.map(|key| key.sent_as(config.auth.of(config.service)));
        let caller = Caller::new("retrieval.url", url, key, limits, services)?;
        Ok(Self { caller, price: config.price() })
    }

    /// The passages that `read` finds in the response to `body`. A response without the expected fields is requested again.
    async fn search(
        &self,
        body: &Value,
        refusal: impl Fn(&Value) -> Option<Refusal> + Send + Sync,
        read: impl Fn(&Value) -> Result<Vec<Hit>, Refusal> + Send + Sync,
    ) -> Result<Vec<Hit>, CallFailure> {
        let (price, charged) = (Some(self.price), CallCharge::ONE_CALL);
        let unusable = |response: &Value| read(response).err().map(|found| found.charged(charged.usage(price)));
        let check = |response: &Value| refusal(response).or_else(|| unusable(response));
        let mut response = self.caller.call(&Call::post("", body), charged.bound(price), &check).await?;
        response.call_spend.charged(charged.usage(price));
        read(&response.body).map_err(|found| self.caller.failure(FailureKind::InvalidResponse, &found.what))
    }
}

#[async_trait]
impl RetrievalBackend for GeneralRag {
    async fn search(&self, request: &RetrievalRequest<'_>, limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure> {
        let body = self.body(request, limits);
        let hits = self.service.search(&body, refusal, |response| hits(response, self.scores)).await?;
        // The service may have ignored the limits.
        Ok(limits.apply(hits))
    }

    fn name(&self) -> &str {
        "general_rag"
    }
}

fn hits(body: &Value, scores: ServiceScores) -> Result<Vec<Hit>, Refusal> {
    let entries = entries(body)?;
    let passages = || entries.iter().enumerate().filter(|(_, entry)| !is_nothing_found(entry));
    if scores == ServiceScores::Replaced {
        let found = |entry| Hit { retrieval_score: first(entry, &SCORES).and_then(number), ..unscored(entry) };
        return Ok(passages().map(|(_, entry)| found(entry)).collect());
    }
    let Some(score) = SCORES.iter().find(|score| passages().any(|(_, entry)| has(entry, score))) else {
        return match passages().next() {
            Some((index, _)) => {
                let what = format!("`data.recall[{index}]` has no `reranker_score`, nor has any other");
                Err(Refusal::unusable(what))
            }
            None => Ok(Vec::new()),
        };
    };
    // Passages without a score are left out.
    passages().filter(|(_, entry)| has(entry, score)).map(|(index, entry)| hit(index, entry, score)).collect()
}

/// A passage of a `general_rag` response, used by `querl serve rewrite` to answer clients of another API (Dify).
#[derive(Debug, Clone, PartialEq)]
pub struct RagPassage {
    /// Id of the passage; empty if it has none.
    pub id: String,
    /// Text of the passage, not blank.
    pub text: String,
    /// Score of the passage by the reranker, otherwise by retrieval (the same field for all passages of a response); `None` without
    /// scores.
    pub score: Option<f64>,
    /// The other fields of the passage, without those of text and score.
    pub others: Map<String, Value>,
}

/// The passages of a `general_rag` response in its order, and the number of passages that were left out for lack of text.
///
/// # Errors
/// The response has no readable list of passages, or no passage with a text; the error is a sentence that says so.
pub fn rag_passages(body: &Value) -> Result<(Vec<RagPassage>, usize), String> {
    if succeeded(body) == Some(false) {
        return Err(format!("answered with status {}", excerpt(&body["status"])));
    }
    let entries = entries(body)?;
    let found: Vec<&Value> = entries.iter().filter(|entry| !is_nothing_found(entry)).collect();
    // The same pointer for all passages, because other fields have other scales.
    let score =
        SCORES.into_iter().find(|score| found.iter().any(|entry| entry.pointer(score).and_then(number).is_some()));
    let passages: Vec<RagPassage> = found.iter().filter_map(|entry| rag_passage(entry, score)).collect();
    let n_without_text = found.len() - passages.len();
    if passages.is_empty() && n_without_text > 0 {
        return Err(format!("no passage has `{}`: {}", TEXTS.map(|text| &text[1..]).join("`, `"), excerpt(found[0])));
    }
    Ok((passages, n_without_text))
}

fn rag_passage(entry: &Value, score: Option<&str>) -> Option<RagPassage> {
    let mut others = entry.as_object()?.clone();
    // Texts and scores are fields of the passage itself.
    let mut take = |pointer: &str| others.remove(&pointer[1..]);
    let is_text = |pointer: &&str| first(entry, &[*pointer]).is_some_and(|text| !plain(text).trim().is_empty());
    let text = plain(&take(TEXTS.into_iter().find(is_text)?)?);
    let score = score.and_then(|pointer| number(&take(pointer)?));
    Some(RagPassage { id: first(entry, &IDS).map(plain).unwrap_or_default(), text, score, others })
}

fn entries(body: &Value) -> Result<Cow<'_, [Value]>, String> {
    let recall = body.pointer("/data/recall");
    match recall.unwrap_or(&Value::Null) {
        Value::Null if recall.is_some() && succeeded(body) == Some(true) => Ok(Cow::default()),
        Value::Null if succeeded(body) == Some(true) => match unexpected_content(body) {
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

fn hit(index: usize, entry: &Value, score: &str) -> Result<Hit, Refusal> {
    let found = entry.pointer(score).unwrap_or(&Value::Null);
    let what = || format!("`data.recall[{index}]`: `{}` is {}; expected 0 to 1", &score[1..], excerpt(found));
    match number(found) {
        Some(reranker_score) if (0.0..=1.0).contains(&reranker_score) => Ok(Hit { reranker_score, ..unscored(entry) }),
        // The service has another scale.
        Some(_) => Err(Refusal::misconfigured(what())),
        None => Err(Refusal::unusable(what())),
    }
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

fn has(entry: &Value, pointer: &str) -> bool {
    entry.pointer(pointer).is_some_and(|value| !value.is_null())
}

fn is_nothing_found(entry: &Value) -> bool {
    let scored = SCORES.iter().any(|score| has(entry, score));
    let text = entry.as_str().or_else(|| first(entry, &TEXTS).filter(|_| !scored)?.as_str());
    text.is_some_and(is_marker)
}

fn is_marker(text: &str) -> bool {
    let text = text.trim().to_lowercase().replace(['_', '-'], " ");
    text.is_empty() || NOTHING_FOUND.contains(&text.as_str())
}

/// Unexpected content of a response without passages; `None` if it only reports that nothing was found.
fn unexpected_content(body: &Value) -> Option<String> {
    let data = body.get("data").filter(|data| !data.is_null());
    if let Some(data) = data {
        let named = data.as_object().map(|data| data.keys().cloned().collect::<Vec<_>>());
        let named = named.unwrap_or_else(|| vec![plain(data)]);
        return (!named.is_empty()).then(|| format!("`data` with `{}`", named.join("`, `")));
    }
    let words = ["/error", "/message", "/msg"].map(|pointer| first(body, &[pointer]).map(plain).unwrap_or_default());
    let message = words.into_iter().find(|words| !is_success_message(words))?;
    Some(format!("`{message}`"))
}

fn is_success_message(words: &str) -> bool {
    let words = words.trim().trim_end_matches(['.', '!', '。', '！']).to_lowercase();
    let ends_well = ["成功", "完成", "success", "successful", "successfully"].iter().any(|end| words.ends_with(end));
    let found_nothing = ["no result", "no match", "no hit", "0 result", "没有找到", "未找到", "无结果", "无匹配"];
    let fails = ["不成功", "未成功", "unsuccess", "not success"].iter().any(|fails| words.contains(fails));
    SUCCESS.contains(&words.as_str())
        || is_marker(&words)
        || (ends_well && !fails)
        || found_nothing.iter().any(|start| words.starts_with(start))
}

/// A failure reported in the body. A status of three digits is treated as an HTTP status; others are retried.
fn refusal(body: &Value) -> Option<Refusal> {
    if succeeded(body) != Some(false) {
        return None;
    }
    let status = number(&body["status"]).map(|status| status as u16);
    let what = format!("answered with status {}: {}", excerpt(&body["status"]), excerpt(body));
    Some(Refusal::reported(status, what))
}

/// True if `status` means success; `None` without a status.
fn succeeded(body: &Value) -> Option<bool> {
    let status = body.get("status").filter(|status| !status.is_null())?;
    Some(SUCCESS.contains(&plain(status).trim().to_lowercase().as_str()))
}

/// A retrieval service whose API is described by a [`Mapping`].
pub(crate) struct MappedService {
    service: PricedService,
    mapping: Mapping,
    embedding: Option<QueryEmbedding>,
    kind: ServiceKind,
    tenant: String,
    kb_name: String,
    scores: ServiceScores,
}

impl MappedService {
    pub(crate) fn open(
        config: &RetrievalConfig,
        tenant: &str,
        models: &LocalModels,
        services: &ServiceContext,
    ) -> Result<Self, DataError> {
        let (mapping, scores) = (Mapping::resolve(config)?, ServiceScores::of(config));
        if scores == ServiceScores::Required && !mapping.has_scores() {
            let problem = "is not set, and the service sends none that is known; set it, or retrieval.rerank";
            return Err(DataError::setting("retrieval.mapping.score", problem));
        }
        let embedding = match mapping.wants_embedding() {
            true => {
                let problem = "has `{{embedding}}`, which retrieval.embedding makes; set its kind";
                let missing = || DataError::setting("retrieval.mapping.request", problem);
                Some(QueryEmbedding::open(&config.embedding, models, services)?.ok_or_else(missing)?)
            }
            false => None,
        };
        Ok(Self {
            service: PricedService::open(config, services)?,
            mapping,
            embedding,
            kind: config.service,
            tenant: tenant.to_owned(),
            kb_name: config.kb_name.clone(),
            scores,
        })
    }
}

#[async_trait]
impl RetrievalBackend for MappedService {
    async fn search(&self, request: &RetrievalRequest<'_>, limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure> {
        let embedding = match &self.embedding {
            Some(embedding) => Some(embedding.query(request.rewritten_query).await?),
            None => None,
        };
        let values = RequestValues { tenant: &self.tenant, kb_name: &self.kb_name, embedding: embedding.as_deref() };
        let refusal =
            |response: &Value| self.mapping.failure(response).map(|(status, what)| Refusal::reported(status, what));
        let body = self.mapping.body(&values, request, limits);
        let hits = self.service.search(&body, refusal, |response| self.mapping.hits(response, self.scores)).await?;
        Ok(match self.scores {
            ServiceScores::Required => limits.apply(hits),
            // Without usable scores, the order of the service is kept.
            ServiceScores::Replaced => hits.into_iter().take(limits.top_k).collect(),
        })
    }

    fn name(&self) -> &str {
        match self.kind {
            ServiceKind::GeneralRag => "general_rag",
            ServiceKind::Dify => "dify",
            ServiceKind::Ragflow => "ragflow",
            ServiceKind::Chatchat | ServiceKind::Chatchat02 => "chatchat",
            ServiceKind::Elasticsearch => "elasticsearch",
            ServiceKind::Qdrant => "qdrant",
            ServiceKind::Custom => "custom service",
        }
    }
}

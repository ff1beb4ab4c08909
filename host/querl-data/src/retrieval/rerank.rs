//! Rerankers (services, or cross-encoders in this process) score retrieved passages against the original query in its context. The
//! rewrite is not an input, so that nothing in it can raise a score.

use crate::client::ServiceContext;
use crate::client::http::{Call, CallLimits, Caller, Refusal, Secret, estimated_tokens};
use crate::client::response_cache::{CacheTable, ServiceCache};
use crate::error::DataError;
use crate::retrieval::embedding::LocalModelCalls;
use crate::retrieval::mapping::{excerpt, fill_text, number, placeholders};
use crate::retrieval::pricing::{CallCharge, max_tokens};
use crate::retrieval::{LocalModels, RetrievalBackend, RetrievalLimits};
use async_trait::async_trait;
use futures::future::try_join_all;
use querl_core::config::{RerankConfig, RerankKind, RerankScores, RetrievalConfig, RetrievalKind};
use querl_core::ports::{PairScorer, RetrievalRequest};
use querl_core::records::{CallFailure, FailureKind, Hit, logistic};
use serde_json::{Value, json};
use std::sync::Arc;

const PLACEHOLDERS: [&str; 3] = ["query", "history", "user_profile"];

/// Keys of requests that `retrieval.rerank.extra` must not set.
const OWN_KEYS: [&str; 8] =
    ["query", "texts", "truncate", "raw_scores", "model", "documents", "top_n", "return_documents"];

/// A retrieval backend whose hits are scored again by a reranker.
pub(crate) struct RerankedBackend {
    inner: Arc<dyn RetrievalBackend>,
    scorer: RerankScorer,
    query: String,
    n_candidates: usize,
    name: String,
}

/// Source of relevance scores.
enum RerankScorer {
    Service(Box<RerankService>),
    Local { model: Arc<dyn PairScorer>, batch_size: usize, calls: LocalModelCalls },
}

struct RerankService {
    caller: Caller,
    config: RerankConfig,
    extra: Value,
    /// Cache of the scores for the embedded index, whose results are not cached themselves.
    cache: Option<ServiceCache>,
}

impl RerankedBackend {
    /// Wraps `inner` with the configured reranker.
    pub(crate) fn open(
        retrieval: &RetrievalConfig,
        inner: Arc<dyn RetrievalBackend>,
        models: &LocalModels,
        services: &ServiceContext,
    ) -> Result<Self, DataError> {
        let config = &retrieval.rerank;
        let query = Value::String(config.query.clone());
        if let Some(name) = placeholders(&query).into_iter().find(|name| !PLACEHOLDERS.contains(name)) {
            let known = PLACEHOLDERS.join(", ");
            let problem = format!("has `{{{{{name}}}}}`, which stands for nothing; known are {known}");
            return Err(DataError::setting("retrieval.rerank.query", problem));
        }
        let name = format!("{} + {}", inner.name(), kind_name(config.kind));
        let scorer = match (config.kind, &models.scorer) {
            (RerankKind::Local, Some(model)) => RerankScorer::Local {
                model: model.clone(),
                batch_size: config.batch_size.max(1),
                calls: LocalModelCalls::new("cross-encoder", config.max_concurrent, config.timeout_s),
            },
            (RerankKind::Local, None) => return Err(DataError::setting("retrieval.rerank.path", "was not opened")),
            _ => RerankScorer::Service(Box::new(RerankService::open(retrieval, services)?)),
        };
        let n_candidates = config.n_candidates.max(retrieval.top_k);
        Ok(Self { inner, scorer, query: config.query.clone(), n_candidates, name })
    }

    fn query(&self, request: &RetrievalRequest<'_>) -> String {
        let filled = fill_text(&self.query, &|name| match name {
            "query" => json!(request.original_query),
            "history" => json!(request.context.history_summary),
            _ => json!(request.context.user_profile),
        });
        filled.trim().to_owned()
    }
}

#[async_trait]
impl RetrievalBackend for RerankedBackend {
    async fn search(&self, request: &RetrievalRequest<'_>, limits: RetrievalLimits) -> Result<Vec<Hit>, CallFailure> {
        // No threshold on the first-stage score. The number of candidates limits the number of hits.
        let wide = RetrievalLimits { top_k: self.n_candidates, score_threshold: 0.0 };
        let mut hits = self.inner.search(request, wide).await?;
        if hits.is_empty() {
            return Ok(hits);
        }
        if hits.iter().all(|hit| hit.text.trim().is_empty()) {
            let message =
                format!("{}: passages have no text to be scored; check retrieval.mapping.text", self.inner.name());
            return Err(CallFailure { kind: FailureKind::InvalidResponse, message });
        }
        let scores = {
            let texts: Vec<&str> = hits.iter().map(|hit| hit.text.as_str()).collect();
            self.scorer.scores(self.query(request), &texts).await?
        };
        for (hit, score) in hits.iter_mut().zip(scores) {
            hit.reranker_score = score;
        }
        Ok(limits.apply(hits))
    }

    fn name(&self) -> &str {
        &self.name
    }
}

fn kind_name(kind: RerankKind) -> &'static str {
    match kind {
        RerankKind::None => "no reranker",
        RerankKind::Tei => "tei",
        RerankKind::Cohere => "cohere",
        RerankKind::Local => "cross-encoder",
    }
}

impl RerankScorer {
    /// One score per text, 0 to 1, in order.
    async fn scores(&self, query: String, texts: &[&str]) -> Result<Vec<f64>, CallFailure> {
        match self {
            Self::Service(service) => service.scores(&query, texts).await,
            Self::Local { model, batch_size, calls } => {
                let failed = |what: String| CallFailure {
                    kind: FailureKind::InvalidResponse,
                    message: format!("cross-encoder: {what}"),
                };
                let mut scores = Vec::with_capacity(texts.len());
                // Sequential, so that a cancelled call stops after one batch.
                for texts in texts.chunks(*batch_size) {
                    let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
                    let (model, query) = (model.clone(), query.clone());
                    let of_batch = move || model.scores(&query, &texts.iter().map(String::as_str).collect::<Vec<_>>());
                    scores.extend(calls.run(of_batch).await?);
                }
                let odd = scores.iter().find(|score| !(0.0..=1.0).contains(*score));
                match odd {
                    None if scores.len() == texts.len() => Ok(scores),
                    None => Err(failed(format!("{} scores of {} texts", scores.len(), texts.len()))),
                    Some(odd) => Err(failed(format!("the score {odd}; its weights are damaged, or overflow"))),
                }
            }
        }
    }
}

impl RerankService {
    fn open(retrieval: &RetrievalConfig, services: &ServiceContext) -> Result<Self, DataError> {
        let config = &retrieval.rerank;
        let setting = "retrieval.rerank.url";
        let url =
            config.url.as_deref().ok_or_else(|| DataError::setting(setting, "is not set; a reranker needs it"))?;
        let key = Secret::open(services, "retrieval.rerank", config.api_key_file.as_deref(), &config.api_key_env)?;
        let limits = CallLimits::new(config.max_concurrent, config.timeout_s, config.max_retries)
            .per_minute(config.requests_per_minute, None);
        let extra = serde_json::to_value(&config.extra)
            .map_err(|error| DataError::setting("retrieval.rerank.extra", format!("has no JSON form: {error}")))?;
        let own = |key: &&String| OWN_KEYS.contains(&key.as_str());
        if let Some(key) = extra.as_object().and_then(|extra| extra.keys().find(own)) {
            let problem = format!("has `{key}`, which the interface's request has already; leave it out");
            return Err(DataError::setting("retrieval.rerank.extra", problem));
        }
        let cache = (retrieval.kind == RetrievalKind::Embedded).then(|| {
            let identity = (url, config.scores);
            ServiceCache::open(services, CacheTable::Retrievals, "retrieval.rerank", &identity)
        });
        Ok(Self { caller: Caller::new(setting, url, key, limits, services)?, config: config.clone(), extra, cache })
    }

    /// One score per text, 0 to 1, in order.
    async fn scores(&self, query: &str, texts: &[&str]) -> Result<Vec<f64>, CallFailure> {
        let batches = texts.chunks(self.config.batch_size.max(1)).map(|batch| self.batch(query, batch));
        Ok(try_join_all(batches).await?.concat())
    }

    async fn batch(&self, query: &str, texts: &[&str]) -> Result<Vec<f64>, CallFailure> {
        let body = self.body(query, texts);
        let call = self.call(query, texts, &body);
        match &self.cache {
            Some(cache) => cache.get_or_call(&body, call).await,
            None => call.await,
        }
    }

    async fn call(&self, query: &str, texts: &[&str], body: &Value) -> Result<Vec<f64>, CallFailure> {
        let price = self.config.price();
        let estimate = self.charge(texts, |text| estimated_tokens(query) + estimated_tokens(text));
        let max_charge = self.charge(texts, |text| max_tokens(query.len() + text.len()));
        let check = |response: &Value| self.read(response, texts.len()).err();
        let mut response = self.caller.call(&Call::post("", body), max_charge.bound(price), &check).await?;
        response.call_spend.charged(CallCharge::stated(&response.body, estimate, max_charge).usage(price));
        let scores = self.read(&response.body, texts.len());
        scores.map_err(|refusal| self.caller.failure(FailureKind::InvalidResponse, &refusal.what))
    }

    /// The charge for texts that have `n_tokens` tokens, each with the query: services count it once per passage.
    fn charge(&self, texts: &[&str], n_tokens: impl Fn(&str) -> u64) -> CallCharge {
        let n_tokens = texts.iter().map(|text| n_tokens(text));
        let n_chunks = n_tokens.clone().map(|n_tokens| n_tokens.div_ceil(500).max(1)).sum();
        let n_calls = self.config.n_charged_calls(n_chunks);
        CallCharge { n_calls, n_tokens: n_tokens.sum(), is_estimated: true }
    }

    fn body(&self, query: &str, texts: &[&str]) -> Value {
        let raw_scores = self.config.scores == RerankScores::Logit;
        let mut body = match self.config.kind {
            RerankKind::Tei => json!({"query": query, "texts": texts, "truncate": true, "raw_scores": raw_scores}),
            _ => json!({"model": self.config.model, "query": query, "documents": texts, "top_n": texts.len()}),
        };
        if let (Some(body), Some(extra)) = (body.as_object_mut(), self.extra.as_object()) {
            body.extend(extra.clone());
        }
        body
    }

    fn read(&self, response: &Value, n_texts: usize) -> Result<Vec<f64>, Refusal> {
        let entries = response.as_array().or_else(|| response.get("results")?.as_array());
        let entries = entries.ok_or_else(|| format!("no list of scores in the answer: {}", excerpt(response)))?;
        let mut scores = vec![None; n_texts];
        for entry in entries {
            let index = entry.get("index").and_then(Value::as_u64).map(|index| index as usize);
            let slot = index.and_then(|index| scores.get_mut(index));
            let slot = slot.ok_or_else(|| format!("a score of no text that was sent: {}", excerpt(entry)))?;
            if slot.is_some() {
                return Err(Refusal::unusable(format!("two scores of one text: {}", excerpt(entry))));
            }
            let sent = entry.get("relevance_score").or_else(|| entry.get("score")).unwrap_or(&Value::Null);
            *slot = Some(self.unit(sent)?);
        }
        let found: Option<Vec<f64>> = scores.iter().copied().collect();
        let what = || format!("scores of {} of {n_texts} texts", scores.iter().flatten().count());
        found.ok_or_else(|| Refusal::unusable(what()))
    }

    fn unit(&self, sent: &Value) -> Result<f64, Refusal> {
        let found = number(sent);
        let unit = found.map(|number| match self.config.scores {
            RerankScores::Unit => number,
            RerankScores::Logit => logistic(number),
        });
        unit.filter(|unit| (0.0..=1.0).contains(unit)).ok_or_else(|| {
            let what = format!("the score {}; expected 0 to 1, or retrieval.rerank.scores = \"logit\"", excerpt(sent));
            if found.is_some() { Refusal::misconfigured(what) } else { Refusal::unusable(what) }
        })
    }
}

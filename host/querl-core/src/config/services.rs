//! External calls, the response cache, retrieval services and their mapping, embedding models and rerankers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

section! {
    /// Settings of all external calls.
    CallsConfig {
        /// Connect timeout in seconds.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
        connect_timeout_s: f64 = 10.0,
        /// Read timeout in seconds: longest pause within an answer; `timeout_s` of the service limits the whole call.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
        read_timeout_s: f64 = 60.0,
        /// Maximum size of an answer in MiB.
        #[schemars(range(min = 1, max = 1024))]
        max_response_mib: usize = 8,
        /// Circuit breaker: the stage stops after this many consecutive failed calls to a service (each with its retries); 0 disables it.
        breaker_failures: usize = 20,
        /// Proxy for all services, `http://` or `https://`; by default `HTTP_PROXY` and `HTTPS_PROXY` of the environment. `NO_PROXY` holds for both.
        proxy: Option<String> = None,
        /// PEM file of certificates to trust in addition to the system's.
        ca_file: Option<PathBuf> = None,
    }
}

section! {
    /// The response cache.
    CacheConfig {
        /// Whether answers of external services are cached on disk.
        enabled: bool = true,
        /// File of the cache; by default `answers.redb` in the user's cache folder, for all runs.
        path: Option<PathBuf> = None,
        /// Lifetime of cached retrieval results in hours; 0 disables caching of them.
        #[schemars(range(min = 0.0, max = 1_000_000.0))]
        retrieval_ttl_hours: f64 = 24.0,
        /// Maximum size in MiB; the oldest entries above it are evicted when a run starts.
        #[schemars(range(min = 1, max = 1_048_576))]
        max_mib: u64 = 4096,
    }
}

/// API of a retrieval service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ServiceKind {
    /// `POST /api/chat/general_rag`.
    #[default]
    GeneralRag,
    /// Dify's external knowledge interface, `POST /retrieval`.
    Dify,
    /// RAGFlow, `POST /api/v1/retrieval`.
    Ragflow,
    /// Langchain-Chatchat 0.3, `POST /knowledge_base/search_docs`: sends no scores, so it needs `[retrieval.rerank]`.
    Chatchat,
    /// Langchain-Chatchat 0.2, the same route: sends distances.
    #[serde(rename = "chatchat_0.2")]
    Chatchat02,
    /// Elasticsearch and OpenSearch, `POST /INDEX/_search`.
    Elasticsearch,
    /// Qdrant, `POST /collections/NAME/points/query`.
    Qdrant,
    /// Any service, by the mapping in `[retrieval.mapping]`.
    Custom,
}

/// How a key goes into the `Authorization` header.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AuthScheme {
    /// As the service wants it: `api_key` for Elasticsearch, `bearer` for the others.
    #[default]
    Auto,
    /// `Bearer KEY`.
    Bearer,
    /// `ApiKey KEY`, with the encoded key that Elasticsearch gives out.
    ApiKey,
    /// `Basic ...`, where the key is `USER:PASSWORD`, as OpenSearch wants it.
    Basic,
}

impl AuthScheme {
    /// The scheme for `service`: resolves `auto`.
    pub fn of(self, service: ServiceKind) -> Self {
        match (self, service) {
            (Self::Auto, ServiceKind::Elasticsearch) => Self::ApiKey,
            (Self::Auto, _) => Self::Bearer,
            (scheme, _) => scheme,
        }
    }
}

impl ServiceKind {
    /// Whether passages come with a score.
    pub fn has_scores(self) -> bool {
        self != Self::Chatchat
    }

    /// Whether answers have a status field in addition to the HTTP status.
    pub fn has_status(self) -> bool {
        matches!(self, Self::GeneralRag | Self::Ragflow | Self::Elasticsearch | Self::Qdrant)
    }

    /// Whether requests contain a query vector.
    pub fn wants_vector(self) -> bool {
        self == Self::Qdrant
    }

    /// Maximum number of passages per request.
    pub fn most_passages(self) -> Option<usize> {
        // RAGFlow reranks this many candidates; a larger page is rejected or empty.
        (self == Self::Ragflow).then_some(64)
    }
}

/// Whether higher or lower scores of a service are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScoreOrder {
    /// Higher scores are better: a similarity.
    HigherIsBetter,
    /// Lower scores are better: a distance.
    LowerIsBetter,
}

/// Request and response mapping of a retrieval service. Unset keys are as in the built-in mapping of `retrieval.service`.
///
/// A JSON pointer is a path such as `/data/chunks`; of several the first that leads anywhere is taken. Those of `id`, `title`,
/// `text` and `score` begin at an entry of the list.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MappingConfig {
    /// Body of a request, in which `{{query}}`, `{{rewritten_query}}` and others stand for values.
    #[schemars(with = "Option<BTreeMap<String, serde_json::Value>>")]
    pub request: Option<BTreeMap<String, toml::Value>>,
    /// JSON pointers to the list of passages; `""` is the whole answer.
    pub list: Option<Vec<String>>,
    /// JSON pointers to a passage's id.
    pub id: Option<Vec<String>>,
    /// JSON pointers to a passage's title, which is put before its text.
    pub title: Option<Vec<String>>,
    /// JSON pointers to a passage's text.
    pub text: Option<Vec<String>>,
    /// JSON pointers to a passage's score.
    pub score: Option<Vec<String>>,
    /// Whether higher or lower scores are better.
    #[schemars(with = "ScoreOrder")]
    pub score_order: Option<ScoreOrder>,
    /// The service's scores that become 0 and 1 (with `lower_is_better`, 1 and 0).
    pub score_range: Option<[f64; 2]>,
    /// For scores without an upper end, instead of `score_range`: the one that becomes 0.5, others by `score / (score + score_half)`.
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    pub score_half: Option<f64>,
    /// The lowest and the highest `service_threshold` that the service takes; one beyond them is sent as the nearest.
    pub threshold_range: Option<[f64; 2]>,
    /// The lowest and the highest `service_top_k` that the service accepts; one beyond them is sent as the nearest, and surplus passages
    /// are dropped.
    pub top_k_range: Option<[usize; 2]>,
    /// JSON pointers to the status field of a response; unset if only the HTTP status shows success.
    pub status: Option<Vec<String>>,
    /// Values of the `status` fields that mean success, as text.
    pub success: Option<Vec<String>>,
}

/// Prices of a service.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServicePrice {
    /// Price of one call.
    pub per_call: f64,
    /// Price of one token.
    pub per_token: f64,
}

impl ServicePrice {
    /// The price of a service that is free of charge.
    pub const FREE: Self = Self { per_call: 0.0, per_token: 0.0 };

    fn new(per_thousand_calls: Option<f64>, per_million_tokens: Option<f64>) -> Option<Self> {
        per_thousand_calls.or(per_million_tokens)?;
        let (calls, tokens) = (per_thousand_calls.unwrap_or(0.0), per_million_tokens.unwrap_or(0.0));
        Some(Self { per_call: calls / 1e3, per_token: tokens / 1e6 })
    }

    /// The price of a retrieval service; free unless a price is set.
    pub(super) fn of_retrieval(per_thousand_calls: Option<f64>) -> Self {
        Self::new(per_thousand_calls, None).unwrap_or(Self::FREE)
    }

    /// Cost of `n_calls` calls with `n_tokens` tokens in total.
    pub fn cost(self, n_calls: f64, n_tokens: f64) -> f64 {
        n_calls * self.per_call + n_tokens * self.per_token
    }
}

/// Kind of embedding model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EmbeddingKind {
    /// No embedding model.
    #[default]
    None,
    /// A service with OpenAI's interface: `POST /v1/embeddings`.
    Openai,
    /// A BERT-type model in this process.
    Local,
}

section! {
    /// An embedding model: makes the vector of a rewritten query where a service wants one; with a local model, the embedded index finds
    /// passages by their vectors, too.
    EmbeddingConfig {
        /// Kind of embedding model.
        kind: EmbeddingKind = EmbeddingKind::None,
        /// `local`: a Hugging Face directory (BERT or XLM-RoBERTa, such as those named `bge`).
        path: Option<PathBuf> = None,
        /// `openai`: the full address of the route.
        url: Option<String> = None,
        /// `openai`: name of the model at the endpoint.
        model: Option<String> = None,
        /// Environment variable that holds the key; empty for a service without keys.
        api_key_env: String = String::new(),
        /// File that holds the key and nothing else; used instead of the environment variable.
        api_key_file: Option<PathBuf> = None,
        /// Prefix of a query, as the model's card says; passages have none. Unset, that of a local model
        /// (`config_sentence_transformers.json`).
        query_prefix: Option<String> = None,
        /// `local`: tokens of a text, those of the frame included; the rest is cut off. Unset, the model's own, 512 at most; memory grows by the square.
        #[schemars(range(min = 8, max = 131_072))]
        max_length: Option<usize> = None,
        /// Maximum number of concurrent calls; with a local model at most the number of CPU cores.
        #[schemars(range(min = 1, max = 1024))]
        max_concurrent: usize = 16,
        /// Maximum number of attempts per minute.
        #[schemars(range(min = 1))]
        requests_per_minute: Option<u32> = None,
        /// Timeout of one call in seconds.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
        timeout_s: f64 = 30.0,
        /// Maximum number of retries.
        #[schemars(range(max = 100))]
        max_retries: usize = 3,
        /// `openai`: price of a million tokens.
        #[schemars(range(min = 0.0))]
        price_prompt_per_million: Option<f64> = None,
    }
}

impl EmbeddingConfig {
    /// Price of the embedding service; `None` if it is not set.
    pub fn price(&self) -> Option<ServicePrice> {
        ServicePrice::new(None, self.price_prompt_per_million)
    }
}

/// Kind of reranker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RerankKind {
    /// No reranker.
    #[default]
    None,
    /// Text Embeddings Inference, `POST /rerank`.
    Tei,
    /// Cohere's interface, which vLLM, Jina and others speak: `POST /v1/rerank`.
    Cohere,
    /// A BERT-type cross-encoder in this process.
    Local,
}

/// Range of a reranker's scores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RerankScores {
    /// Scores from 0 to 1.
    #[default]
    Unit,
    /// Logits, mapped to 0 to 1 by the logistic function.
    Logit,
}

section! {
    /// A reranker: rescores retrieved passages against the original query, never the rewrite.
    RerankConfig {
        /// Kind of reranker.
        kind: RerankKind = RerankKind::None,
        /// `local`: a Hugging Face directory (BERT or XLM-RoBERTa with one label, such as those named `bge-reranker`).
        path: Option<PathBuf> = None,
        /// `tei`, `cohere`: the full address of the route.
        url: Option<String> = None,
        /// `cohere`: name of the model at the endpoint.
        model: Option<String> = None,
        /// Environment variable that holds the key; empty for a service without keys.
        api_key_env: String = String::new(),
        /// File that holds the key and nothing else; used instead of the environment variable.
        api_key_file: Option<PathBuf> = None,
        /// Number of retrieved passages to rerank; at least `retrieval.top_k`.
        #[schemars(range(min = 1, max = 1000))]
        n_candidates: usize = 20,
        /// What passages are scored against: `{{query}}`, `{{history}}` and `{{user_profile}}` stand for what a row has. The question first:
        /// where query and passage are more than a model takes, both are cut at their ends.
        query: String = "{{query}} {{history}}".into(),
        /// `tei`, `cohere`: additional fields of each request, such as `truncate_prompt_tokens = -1` for vLLM.
        #[schemars(with = "Option<BTreeMap<String, serde_json::Value>>")]
        extra: Option<BTreeMap<String, toml::Value>> = None,
        /// `local`: tokens of a query with a passage, those of the frame included; the rest is cut off. Unset, the model's own, 512 at most; memory grows by the square.
        #[schemars(range(min = 8, max = 131_072))]
        max_length: Option<usize> = None,
        /// Range of the service's scores: `unit` is 0 to 1, `logit` any number.
        scores: RerankScores = RerankScores::Unit,
        /// Number of passages per call or per batch of a local model.
        #[schemars(range(min = 1, max = 1000))]
        batch_size: usize = 32,
        /// Maximum number of concurrent calls; with a local model at most the number of CPU cores.
        #[schemars(range(min = 1, max = 1024))]
        max_concurrent: usize = 16,
        /// Maximum number of attempts per minute.
        #[schemars(range(min = 1))]
        requests_per_minute: Option<u32> = None,
        /// Timeout of one call in seconds.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
        timeout_s: f64 = 30.0,
        /// Maximum number of retries.
        #[schemars(range(max = 100))]
        max_retries: usize = 3,
        /// `tei`, `cohere`: price of a million tokens of queries and passages.
        #[schemars(range(min = 0.0))]
        price_prompt_per_million: Option<f64> = None,
        /// `tei`, `cohere`: price of a thousand calls; with `cohere` of a thousand searches, each of up to 100 passages of up to 500 tokens.
        #[schemars(range(min = 0.0))]
        price_per_thousand_calls: Option<f64> = None,
    }
}

impl RerankConfig {
    /// True if an external reranking service is called.
    pub fn is_service(&self) -> bool {
        matches!(self.kind, RerankKind::Tei | RerankKind::Cohere)
    }

    /// Price of the reranking service; `None` if it is not set. Text Embeddings Inference, which users run themselves, is free by
    /// default.
    pub fn price(&self) -> Option<ServicePrice> {
        let default = (self.kind == RerankKind::Tei).then_some(ServicePrice::FREE);
        ServicePrice::new(self.price_per_thousand_calls, self.price_prompt_per_million).or(default)
    }

    /// Number of calls charged for one request whose passages have `n_chunks` chunks of up to 500 tokens.
    ///
    /// Source: Cohere's pricing, "a single search unit is one query with up to 100 documents"; longer documents are split.
    pub fn n_charged_calls(&self, n_chunks: u64) -> u64 {
        if self.kind == RerankKind::Cohere { n_chunks.div_ceil(100).max(1) } else { 1 }
    }
}

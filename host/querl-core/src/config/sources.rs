//! Teacher, judge, their endpoints, and retrieval.

use super::services::{
    AuthScheme, EmbeddingConfig, EmbeddingKind, MappingConfig, RerankConfig, ServiceKind, ServicePrice,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Kind of teacher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TeacherKind {
    /// A file of rewrites made earlier: a stand-in.
    Recorded,
    /// An endpoint that speaks OpenAI's chat interface.
    Openai,
    /// A model in this process, which needs a prompt and no training.
    Local,
}

/// Service of an endpoint, which determines request parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Provider {
    /// Detected from the address.
    #[default]
    Auto,
    /// OpenAI, and Azure's service of its models.
    Openai,
    /// DeepSeek.
    Deepseek,
    /// Qwen at Alibaba Cloud.
    Qwen,
    /// vLLM's server.
    Vllm,
    /// llama.cpp's server.
    LlamaCpp,
    /// Ollama.
    Ollama,
    /// Any other: `max_tokens`, except for OpenAI's reasoning models.
    Other,
}

named_enum! {
    /// Reasoning effort of the model.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum ReasoningEffort {
        /// Not sent: the service uses its default.
        #[default]
        Unset = "unset",
        /// No reasoning.
        None = "none",
        /// Minimal effort.
        Minimal = "minimal",
        /// Low effort.
        Low = "low",
        /// Medium effort.
        Medium = "medium",
        /// High effort.
        High = "high",
    }
}

/// `response_format` of an OpenAI-compatible request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponseFormat {
    /// Any text.
    #[default]
    Text,
    /// A JSON object. The prompt must ask for JSON in words, too.
    JsonObject,
}

/// Declares a section with its own keys and those of an OpenAI-compatible endpoint. A macro, since serde's `flatten` does not
/// support `deny_unknown_fields`.
macro_rules! endpoint_section {
    ($(#[$doc:meta])* $name:ident { $($(#[$own_doc:meta])* $own:ident: $own_type:ty = $own_default:expr,)* }) => {
        section! {
            $(#[$doc])*
            $name {
                $($(#[$own_doc])* $own: $own_type = $own_default,)*
                /// `openai`: address of the interface, up to and with `/v1`.
                base_url: Option<String> = None,
                /// `openai`: name of the model at the endpoint.
                model: Option<String> = None,
                /// Service of the endpoint, which determines the request parameters; `auto` detects it from the address.
                provider: Provider = Provider::Auto,
                /// Environment variable that holds the key; the key itself is never stored.
                api_key_env: String = "OPENAI_API_KEY".into(),
                /// File that holds the key and nothing else; used instead of the environment variable.
                api_key_file: Option<PathBuf> = None,
                /// Maximum number of concurrent calls.
                #[schemars(range(min = 1, max = 1024))]
                max_concurrent: usize = 8,
                /// Maximum number of attempts per minute.
                #[schemars(range(min = 1))]
                requests_per_minute: Option<u32> = None,
                /// Maximum number of tokens per minute: an estimate for the prompt plus `max_tokens` for the answer.
                #[schemars(range(min = 1))]
                tokens_per_minute: Option<u32> = None,
                /// Timeout of one call in seconds.
                #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
                timeout_s: f64 = 60.0,
                /// Maximum number of retries.
                #[schemars(range(max = 100))]
                max_retries: usize = 4,
                /// Sampling temperature; not sent if unset (GPT-5 class models reject it).
                #[schemars(range(min = 0.0, max = 2.0))]
                temperature: Option<f64> = None,
                /// Maximum number of answer tokens.
                #[schemars(range(min = 1))]
                max_tokens: u32 = 200,
                /// Send `max_tokens` instead of `max_completion_tokens`.
                legacy_max_tokens: bool = false,
                /// Reasoning effort; `unset` is the service's default. Reasoning tokens count as answer tokens.
                reasoning_effort: ReasoningEffort = ReasoningEffort::Unset,
                /// Format of the answer.
                response_format: ResponseFormat = ResponseFormat::Text,
                /// Price of a million prompt tokens.
                #[schemars(range(min = 0.0))]
                price_prompt_per_million: Option<f64> = None,
                /// Price of a million completion tokens.
                #[schemars(range(min = 0.0))]
                price_completion_per_million: Option<f64> = None,
            }
        }

        impl $name {
            /// The keys of this section that describe the endpoint.
            pub fn endpoint(&self) -> EndpointConfig {
                let section = self.clone();
                EndpointConfig {
                    base_url: section.base_url,
                    model: section.model,
                    provider: section.provider,
                    api_key_env: section.api_key_env,
                    api_key_file: section.api_key_file,
                    max_concurrent: section.max_concurrent,
                    requests_per_minute: section.requests_per_minute,
                    tokens_per_minute: section.tokens_per_minute,
                    timeout_s: section.timeout_s,
                    max_retries: section.max_retries,
                    temperature: section.temperature,
                    max_tokens: section.max_tokens,
                    legacy_max_tokens: section.legacy_max_tokens,
                    reasoning_effort: section.reasoning_effort,
                    response_format: section.response_format,
                    price_prompt_per_million: section.price_prompt_per_million,
                    price_completion_per_million: section.price_completion_per_million,
                }
            }
        }
    };
}

endpoint_section! {
    /// The teacher model.
    TeacherConfig {
        /// Kind of teacher.
        kind: TeacherKind = TeacherKind::Openai,
        /// `recorded`: the file (jsonl, xlsx, csv, tsv or parquet with `rewritten_query`, and query, profile and history under the column
        /// names of `[data]` or as `original_query`, `user_profile`, `history_summary`).
        path: Option<PathBuf> = None,
        /// `local`: a Hugging Face directory, of a model as it is or as a run left it.
        model_path: Option<PathBuf> = None,
        /// `local`: an adapter for it, such as the `rl/best` of another run.
        adapter_path: Option<PathBuf> = None,
        /// `openai`: use the batch interface for all rows, which answers within a day at a lower price.
        batch: bool = false,
        /// `batch`: factor on the prices.
        #[schemars(range(min = 0.0, max = 1.0))]
        batch_price_factor: f64 = 0.5,
        /// `batch`: polling interval in seconds.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
        batch_poll_s: f64 = 60.0,
    }
}

endpoint_section! {
    /// An OpenAI-compatible endpoint. The key is read from the environment or a file and never stored.
    EndpointConfig {}
}

/// Kind of judge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum JudgeKind {
    /// A deterministic rubric over the tenant's lexicon: a stand-in.
    Rubric,
    /// An endpoint that speaks OpenAI's chat interface.
    Openai,
    /// No judge.
    None,
}

/// Task of a judge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum JudgeForm {
    /// A score of 0 to 5 for each rewrite, with the prompt of the tenant's plugin.
    #[default]
    Score,
    /// Pairwise comparison of two rewrites by dimensions.
    Compare,
}

endpoint_section! {
    /// The judge of rewrites.
    JudgeConfig {
        /// Kind of judge.
        kind: JudgeKind = JudgeKind::None,
        /// Task of the judge: a score for each rewrite, or a pairwise comparison, which needs `openai`.
        form: JudgeForm = JudgeForm::Score,
        /// `compare`: dimensions of the comparison.
        dimensions: Vec<String> = ["意图准确", "信息完整", "便于检索"].map(str::to_owned).to_vec(),
        /// Share of training episodes that are judged, chosen by episode id. Evaluation judges all.
        #[schemars(range(min = 0.0, max = 1.0))]
        sample_rate: f64 = 0.3,
    }
}

/// Kind of retrieval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RetrievalKind {
    /// An index in this process.
    Embedded,
    /// An HTTP service.
    Http,
    /// No retrieval: the policy writes answers, and the rewards need no passages.
    None,
}

/// Language of the knowledge base: how texts are split into words, and how words are normalised.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Language {
    /// Detected from the passages.
    #[default]
    Auto,
    /// Chinese, or Chinese with words of other languages: jieba's segmentation.
    Zh,
    /// Arabic.
    Ar,
    /// Danish.
    Da,
    /// Dutch.
    Nl,
    /// English.
    En,
    /// Finnish.
    Fi,
    /// French.
    Fr,
    /// German.
    De,
    /// Greek.
    El,
    /// Hungarian.
    Hu,
    /// Italian.
    It,
    /// Norwegian.
    No,
    /// Portuguese.
    Pt,
    /// Romanian.
    Ro,
    /// Russian.
    Ru,
    /// Spanish.
    Es,
    /// Swedish.
    Sv,
    /// Tamil.
    Ta,
    /// Turkish.
    Tr,
    /// Any other language with spaces between words: no stemming.
    Other,
}

impl Language {
    fn is_auto(&self) -> bool {
        *self == Self::Auto
    }
}

/// Form of the history in requests to a retrieval service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HistoryForm {
    /// A string.
    #[default]
    Text,
    /// A list with one message (`role` and `content`).
    List,
    /// Not sent.
    None,
}

/// Passage retrieval.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RetrievalConfig {
    /// Kind of retrieval.
    pub kind: RetrievalKind,
    /// `embedded`: passages, jsonl, csv, tsv, xlsx or parquet with `id`, `title`, `text`.
    pub knowledge_base: Option<PathBuf>,
    /// `embedded`: language of the passages. `auto` detects it; languages with word endings are stemmed, Chinese is segmented by jieba.
    #[serde(default, skip_serializing_if = "Language::is_auto")]
    pub language: Language,
    /// `embedded`, and the rubric judge: the tenant's products, aliases, intents and synonyms. Without a lexicon the passages stay in the
    /// order in which the rewrite found them.
    pub lexicon: Option<PathBuf>,
    /// `embedded`: user dictionary of the word segmentation in jieba's format, one `word [frequency] [tag]` per line.
    pub user_dictionary: Option<PathBuf>,
    /// `embedded`: synonyms, one comma-separated group per line; a query for one finds passages with any.
    pub synonyms: Option<PathBuf>,
    /// `embedded`: folder of the indexes; by default the user's cache folder.
    pub index_dir: Option<PathBuf>,
    /// `embedded`: maximum number of indexes in that folder; the least recently used one is removed first.
    #[serde(default = "defaults::indexes_kept")]
    #[schemars(range(min = 1, max = 100_000))]
    pub indexes_kept: usize,
    /// `http`: API of the service.
    #[serde(default)]
    pub service: ServiceKind,
    /// `http`: the full address of the service's route.
    pub url: Option<String>,
    /// `http`: environment variable that holds the service's key; the key itself is never stored.
    #[serde(default)]
    pub api_key_env: String,
    /// `http`: file that holds the key and nothing else; used instead of the environment variable.
    pub api_key_file: Option<PathBuf>,
    /// `http`: how the key is sent in the `Authorization` header; `auto` is as the service wants it.
    #[serde(default)]
    pub auth: AuthScheme,
    /// `http`: knowledge base to search, sent as a name or, for Dify and RAGFlow, as an id; also the `kb_name` under which
    /// `querl serve rag` serves this configuration.
    #[serde(default = "defaults::kb_name")]
    pub kb_name: String,
    /// `http`, `general_rag`: how the history is sent: as a string, as a list of messages or not at all.
    #[serde(default)]
    pub history: HistoryForm,
    /// Number of passages.
    #[serde(default = "defaults::top_k")]
    #[schemars(range(min = 1, max = 1000))]
    pub top_k: usize,
    /// Minimum score of a passage.
    #[serde(default = "defaults::score_threshold")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub score_threshold: f64,
    /// Maximum number of concurrent calls; with the embedded index at most the number of CPU cores.
    #[serde(default = "defaults::retrieval_concurrent")]
    #[schemars(range(min = 1, max = 1024))]
    pub max_concurrent: usize,
    /// Maximum number of attempts per minute.
    #[schemars(range(min = 1))]
    pub requests_per_minute: Option<u32>,
    /// Timeout of one call in seconds.
    #[serde(default = "defaults::retrieval_timeout")]
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
    pub timeout_s: f64,
    /// Maximum number of retries.
    #[serde(default = "defaults::retries")]
    #[schemars(range(max = 100))]
    pub max_retries: usize,
    /// `http`: price of a thousand calls; unset, they are free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0))]
    pub price_per_thousand_calls: Option<f64>,
    /// `http`: request and response mapping: overrides single keys of the built-in mapping of `service`, or defines the whole mapping
    /// with `service = "custom"`.
    #[serde(default)]
    pub mapping: MappingConfig,
    /// Embedding model.
    #[serde(default)]
    pub embedding: EmbeddingConfig,
    /// Reranker.
    #[serde(default)]
    pub rerank: RerankConfig,
}

impl RetrievalConfig {
    /// Price of calls to the retrieval service.
    pub fn price(&self) -> ServicePrice {
        ServicePrice::of_retrieval(self.price_per_thousand_calls)
    }

    /// True if requests to the retrieval service contain a query vector.
    pub fn wants_vector(&self) -> bool {
        let is_mapped = self.kind == RetrievalKind::Http && self.service != ServiceKind::GeneralRag;
        let request = self.mapping.request.as_ref();
        let has_place = request.map(|request| request.values().any(|value| has_embedding(&value.to_string())));
        is_mapped && has_place.unwrap_or(self.service.wants_vector())
    }

    /// True if an external embedding service is called.
    pub fn calls_embedding_service(&self) -> bool {
        self.embedding.kind == EmbeddingKind::Openai && self.wants_vector()
    }

    /// True if an external reranking service is called.
    pub fn calls_rerank_service(&self) -> bool {
        self.kind != RetrievalKind::None && self.rerank.is_service()
    }
}

/// Whether a template contains the placeholder `{{embedding}}`.
fn has_embedding(template: &str) -> bool {
    let mut places = template.split("{{").skip(1);
    places.any(|rest| rest.split_once("}}").is_some_and(|(place, _)| place.trim() == "embedding"))
}

mod defaults {
    pub(super) fn kb_name() -> String {
        "default".into()
    }
    pub(super) fn indexes_kept() -> usize {
        32
    }
    pub(super) fn top_k() -> usize {
        5
    }
    pub(super) fn score_threshold() -> f64 {
        0.5
    }
    pub(super) fn retrieval_concurrent() -> usize {
        16
    }
    pub(super) fn retrieval_timeout() -> f64 {
        30.0
    }
    pub(super) fn retries() -> usize {
        3
    }
}

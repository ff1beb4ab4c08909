//! Where rewrites, judgements and passages come from.

use super::services::{AuthScheme, EmbeddingConfig, MappingConfig, RerankConfig, ServiceKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Which teacher.
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

/// Whose rules a request keeps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Provider {
    /// Told by the address.
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
    /// Any other: `max_tokens`, but for models of OpenAI that think.
    Other,
}

/// How long a model may think before it answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReasoningEffort {
    /// As the service has it.
    #[default]
    Unset,
    /// Not at all.
    None,
    /// As little as it can.
    Minimal,
    /// A little.
    Low,
    /// Some.
    Medium,
    /// Much.
    High,
}

impl ReasoningEffort {
    /// As requests say it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unset => "unset",
            Self::None => "none",
            Self::Minimal => "minimal",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }
}

/// What an answer must be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponseFormat {
    /// Any text.
    #[default]
    Text,
    /// A JSON object. The prompt must ask for JSON in words, too.
    JsonObject,
}

/// Declares a section that names an OpenAI-compatible endpoint beside its own keys. The keys stand flat in the file, which
/// serde's `flatten` cannot do together with `deny_unknown_fields`.
macro_rules! endpoint_section {
    ($(#[$doc:meta])* $name:ident { $($(#[$own_doc:meta])* $own:ident: $own_type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$own_doc])* pub $own: $own_type,)*
            /// `openai`: address of the interface, up to and with `/v1`.
            pub base_url: Option<String>,
            /// `openai`: the model's name there.
            pub model: Option<String>,
            /// Whose rules a request keeps: which parameters it names, and how.
            pub provider: Provider,
            /// Environment variable that holds the key; the key itself is never stored.
            pub api_key_env: String,
            /// File that holds the key and nothing else; used instead of the environment variable.
            pub api_key_file: Option<PathBuf>,
            /// Calls under way at once.
            #[schemars(range(min = 1, max = 1024))]
            pub max_concurrent: usize,
            /// Most tries a minute.
            #[schemars(range(min = 1))]
            pub requests_per_minute: Option<u32>,
            /// Most tokens a minute: an estimate of the prompt's, and `max_tokens` for the answer.
            #[schemars(range(min = 1))]
            pub tokens_per_minute: Option<u32>,
            /// Limit for one call, in seconds.
            #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
            pub timeout_s: f64,
            /// Tries after the first.
            #[schemars(range(max = 100))]
            pub max_retries: usize,
            /// Absent leaves it out of the request (GPT-5 class models refuse it).
            #[schemars(range(min = 0.0, max = 2.0))]
            pub temperature: Option<f64>,
            /// Limit of the answer in tokens.
            #[schemars(range(min = 1))]
            pub max_tokens: u32,
            /// Send `max_tokens` instead of `max_completion_tokens`.
            pub legacy_max_tokens: bool,
            /// How long the model may think before it answers; `unset` leaves it to the service. What it thinks counts as answer.
            pub reasoning_effort: ReasoningEffort,
            /// What an answer must be.
            pub response_format: ResponseFormat,
            /// Price of a million prompt tokens.
            #[schemars(range(min = 0.0))]
            pub price_prompt_per_million: Option<f64>,
            /// Price of a million completion tokens.
            #[schemars(range(min = 0.0))]
            pub price_completion_per_million: Option<f64>,
        }

        impl $name {
            /// The endpoint's keys of this section.
            pub fn endpoint(&self) -> EndpointConfig {
                let section = self.clone();
                with_endpoint_of!(section, EndpointConfig {})
            }

            #[allow(dead_code, clippy::too_many_arguments)] // one argument per key of the section; `EndpointConfig` has none
            fn with_endpoint(endpoint: EndpointConfig $(, $own: $own_type)*) -> Self {
                with_endpoint_of!(endpoint, Self { $($own,)* })
            }
        }
    };
}

/// A struct with the given fields and the endpoint keys of `$from`.
macro_rules! with_endpoint_of {
    ($from:ident, $name:ident { $($own:ident,)* }) => {
        $name {
            $($own,)*
            base_url: $from.base_url,
            model: $from.model,
            provider: $from.provider,
            api_key_env: $from.api_key_env,
            api_key_file: $from.api_key_file,
            max_concurrent: $from.max_concurrent,
            requests_per_minute: $from.requests_per_minute,
            tokens_per_minute: $from.tokens_per_minute,
            timeout_s: $from.timeout_s,
            max_retries: $from.max_retries,
            temperature: $from.temperature,
            max_tokens: $from.max_tokens,
            legacy_max_tokens: $from.legacy_max_tokens,
            reasoning_effort: $from.reasoning_effort,
            response_format: $from.response_format,
            price_prompt_per_million: $from.price_prompt_per_million,
            price_completion_per_million: $from.price_completion_per_million,
        }
    };
}

endpoint_section! {
    /// Who writes the rewrites to learn from and to beat.
    TeacherConfig {
        /// Which.
        kind: TeacherKind,
        /// `recorded`: the file (jsonl with `original_query`, `user_profile`, `history_summary`, `rewritten_query`).
        path: Option<PathBuf>,
        /// `local`: a Hugging Face directory, of a model as it is or as a run left it.
        model_path: Option<PathBuf>,
        /// `local`: an adapter for it, such as the `rl/best` of another run.
        adapter_path: Option<PathBuf>,
        /// `openai`: hand all rows over at once through the batch interface, which answers within a day at a lower price.
        batch: bool,
        /// `batch`: what a price is multiplied with.
        #[schemars(range(min = 0.0, max = 1.0))]
        batch_price_factor: f64,
        /// `batch`: seconds between questions whether it is done.
        #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
        batch_poll_s: f64,
    }
}

impl Default for TeacherConfig {
    fn default() -> Self {
        Self::with_endpoint(EndpointConfig::default(), TeacherKind::Openai, None, None, None, false, 0.5, 60.0)
    }
}

endpoint_section! {
    /// An OpenAI-compatible endpoint. The key is read from the environment or a file and never stored.
    EndpointConfig {}
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self {
            base_url: None,
            model: None,
            provider: Provider::Auto,
            api_key_env: "OPENAI_API_KEY".into(),
            api_key_file: None,
            max_concurrent: 8,
            requests_per_minute: None,
            tokens_per_minute: None,
            timeout_s: 60.0,
            max_retries: 4,
            temperature: None,
            max_tokens: 200,
            legacy_max_tokens: false,
            reasoning_effort: ReasoningEffort::Unset,
            response_format: ResponseFormat::Text,
            price_prompt_per_million: None,
            price_completion_per_million: None,
        }
    }
}

/// Which judge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum JudgeKind {
    /// A deterministic rubric over the tenant's lexicon: a stand-in.
    Rubric,
    /// An endpoint that speaks OpenAI's chat interface.
    Openai,
    /// Nobody judges.
    None,
}

/// What a judge is asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum JudgeForm {
    /// A score of 0 to 5 for each rewrite by itself, in the words of the tenant's plugin.
    #[default]
    Score,
    /// Which of two rewrites is better, dimension by dimension.
    Compare,
}

endpoint_section! {
    /// Who judges rewrites.
    JudgeConfig {
        /// Which.
        kind: JudgeKind,
        /// What the judge is asked: a score of each rewrite, or which of the two is better. A comparison needs `openai`.
        form: JudgeForm,
        /// `compare`: what the two are compared in.
        dimensions: Vec<String>,
        /// Share of training episodes that are judged, chosen by episode id. Evaluation judges all.
        #[schemars(range(min = 0.0, max = 1.0))]
        sample_rate: f64,
    }
}

impl Default for JudgeConfig {
    fn default() -> Self {
        let dimensions = ["意图准确", "信息完整", "便于检索"].map(str::to_owned).to_vec();
        Self::with_endpoint(EndpointConfig::default(), JudgeKind::None, JudgeForm::Score, dimensions, 0.3)
    }
}

/// Which retrieval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RetrievalKind {
    /// An index in this process.
    Embedded,
    /// A service that is asked over HTTP.
    Http,
    /// Nothing is looked up: what is written are answers, and the rewards need no passages.
    None,
}

/// How a service wants to be told what was said before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HistoryForm {
    /// One text.
    #[default]
    Text,
    /// A list of messages with `role` and `content`, here one.
    List,
    /// Not at all.
    None,
}

/// Retrieval.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RetrievalConfig {
    /// Which.
    pub kind: RetrievalKind,
    /// `embedded`: passages, jsonl with `id`, `title`, `text`.
    #[serde(default)]
    pub knowledge_base: Option<PathBuf>,
    /// `embedded`, and the rubric judge: the tenant's products, aliases, intents and synonyms.
    #[serde(default)]
    pub lexicon: Option<PathBuf>,
    /// `embedded`: words that stay whole when texts are cut into words, jieba's form: `word [frequency] [tag]` a line.
    #[serde(default)]
    pub user_dictionary: Option<PathBuf>,
    /// `embedded`: words of one meaning a line, separated by commas; a query for one finds passages with any.
    #[serde(default)]
    pub synonyms: Option<PathBuf>,
    /// `embedded`: where indexes are kept; by default the user's cache folder.
    #[serde(default)]
    pub index_dir: Option<PathBuf>,
    /// `embedded`: indexes that are kept there; building one more removes the one that was not used for the longest time.
    #[serde(default = "defaults::indexes_kept")]
    #[schemars(range(min = 1, max = 100_000))]
    pub indexes_kept: usize,
    /// `http`: which interface the service speaks.
    #[serde(default)]
    pub service: ServiceKind,
    /// `http`: the full address of the service's route.
    #[serde(default)]
    pub url: Option<String>,
    /// `http`: environment variable that holds the service's key; the key itself is never stored.
    #[serde(default)]
    pub api_key_env: String,
    /// `http`: file that holds the key and nothing else; used instead of the environment variable.
    #[serde(default)]
    pub api_key_file: Option<PathBuf>,
    /// `http`: how the key is sent in the `Authorization` header; `auto` is as the service wants it.
    #[serde(default)]
    pub auth: AuthScheme,
    /// `http`: name (with some services, id) of the knowledge base there; also the name under which `querl rag serve` offers this one.
    #[serde(default = "defaults::kb_name")]
    pub kb_name: String,
    /// `http`, `general_rag`: how the history is sent: as one text, as a list of messages or not at all.
    #[serde(default)]
    pub history: HistoryForm,
    /// Passages wanted.
    #[serde(default = "defaults::top_k")]
    #[schemars(range(min = 1, max = 1000))]
    pub top_k: usize,
    /// Passages below are left out.
    #[serde(default = "defaults::score_threshold")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub score_threshold: f64,
    /// Calls under way at once; of the embedded index never more than there are processor cores.
    #[serde(default = "defaults::retrieval_concurrent")]
    #[schemars(range(min = 1, max = 1024))]
    pub max_concurrent: usize,
    /// Most tries a minute.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub requests_per_minute: Option<u32>,
    /// Limit for one call, in seconds.
    #[serde(default = "defaults::retrieval_timeout")]
    #[schemars(extend("exclusiveMinimum" = 0.0), range(max = 86_400.0))]
    pub timeout_s: f64,
    /// Tries after the first.
    #[serde(default = "defaults::retries")]
    #[schemars(range(max = 100))]
    pub max_retries: usize,
    /// `http`: changes to the ready adapter of `service`, or all of an own one.
    #[serde(default)]
    pub mapping: MappingConfig,
    /// Makes vectors of queries.
    #[serde(default)]
    pub embedding: EmbeddingConfig,
    /// Scores passages anew.
    #[serde(default)]
    pub rerank: RerankConfig,
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

//! The configuration of a run, resolved: every value present, checked and, where it names a file, absolute.
//!
//! Defaults are those of the source plan for real models: actor learning rate 1e-5, critic 1e-4, 4 epochs and so on. An
//! example for a tiny model overrides them in its own file and says why.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Tenant id, sent to the retrieval service.
    pub tenant: String,
    /// `auto`, `cpu` or `cuda:N`.
    #[serde(default = "defaults::device")]
    pub device: String,
    /// Seeds initialisation, shuffling and sampling. Splits have their own.
    #[serde(default = "defaults::seed")]
    pub seed: u64,
    /// Worker threads for the CPU; 0 takes all cores.
    #[serde(default)]
    pub threads: usize,
    /// Where results go.
    #[serde(default = "defaults::output_dir")]
    pub output_dir: PathBuf,
    /// The query table.
    pub data: DataConfig,
    /// Who writes the rewrites to learn from and to beat.
    pub teacher: TeacherConfig,
    /// Who judges rewrites.
    #[serde(default)]
    pub judge: JudgeConfig,
    /// What finds passages.
    pub retrieval: RetrievalConfig,
    /// The model to train.
    pub model: ModelConfig,
    /// Supervised fine-tuning.
    #[serde(default)]
    pub sft: SftConfig,
    /// Reinforcement learning.
    #[serde(default)]
    pub rl: RlConfig,
    /// The final table.
    #[serde(default)]
    pub eval: EvalConfig,
    /// WebAssembly components.
    pub plugins: PluginsConfig,
}

/// The query table and how it becomes a dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// xlsx or jsonl or csv.
    pub input: PathBuf,
    /// Column of the query.
    #[serde(default = "defaults::query_column")]
    pub query_column: String,
    /// Column of the user profile; a missing column reads as empty.
    #[serde(default = "defaults::profile_column")]
    pub profile_column: String,
    /// Column of the history summary; a missing column reads as empty.
    #[serde(default = "defaults::history_column")]
    pub history_column: String,
    /// Column of gold passage ids, separated by commas, semicolons or spaces; a missing column reads as unknown.
    #[serde(default = "defaults::gold_column")]
    pub gold_column: String,
    /// Column whose equal values make one group; by default the gold column, else the normalised query.
    #[serde(default)]
    pub group_column: Option<String>,
    /// Shares of train, val and test; sum 1.
    #[serde(default = "defaults::split")]
    pub split: [f64; 3],
    /// Seeds the split, apart from `seed`, so that runs with other seeds share a test set.
    #[serde(default = "defaults::seed")]
    pub split_seed: u64,
}

/// Which teacher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TeacherKind {
    /// A file of rewrites made earlier: a stand-in.
    Recorded,
    /// An endpoint that speaks OpenAI's chat interface.
    Openai,
}

/// Declares a section that names an OpenAI-compatible endpoint beside its own keys. The keys stand flat in the file, which
/// serde's `flatten` cannot do together with `deny_unknown_fields`.
macro_rules! endpoint_section {
    ($(#[$doc:meta])* $name:ident { $($(#[$own_doc:meta])* $own:ident: $own_type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$own_doc])* pub $own: $own_type,)*
            /// `openai`: address of the interface, up to and with `/v1`.
            pub base_url: Option<String>,
            /// `openai`: the model's name there.
            pub model: Option<String>,
            /// Environment variable that holds the key; the key itself is never stored.
            pub api_key_env: String,
            /// Calls under way at once.
            pub max_concurrent: usize,
            /// Limit for one call, in seconds.
            pub timeout_s: f64,
            /// Tries after the first.
            pub max_retries: usize,
            /// Absent leaves it out of the request (GPT-5 class models refuse it).
            pub temperature: Option<f64>,
            /// Limit of the answer in tokens.
            pub max_tokens: u32,
            /// Send `max_tokens` instead of `max_completion_tokens`.
            pub legacy_max_tokens: bool,
            /// Price of a million prompt tokens.
            pub price_prompt_per_million: Option<f64>,
            /// Price of a million completion tokens.
            pub price_completion_per_million: Option<f64>,
        }

        impl $name {
            /// The endpoint's share of this section.
            pub fn endpoint(&self) -> EndpointConfig {
                EndpointConfig {
                    base_url: self.base_url.clone(),
                    model: self.model.clone(),
                    api_key_env: self.api_key_env.clone(),
                    max_concurrent: self.max_concurrent,
                    timeout_s: self.timeout_s,
                    max_retries: self.max_retries,
                    temperature: self.temperature,
                    max_tokens: self.max_tokens,
                    legacy_max_tokens: self.legacy_max_tokens,
                    price_prompt_per_million: self.price_prompt_per_million,
                    price_completion_per_million: self.price_completion_per_million,
                }
            }

            fn with_endpoint(endpoint: EndpointConfig, $($own: $own_type),*) -> Self {
                Self {
                    $($own,)*
                    base_url: endpoint.base_url,
                    model: endpoint.model,
                    api_key_env: endpoint.api_key_env,
                    max_concurrent: endpoint.max_concurrent,
                    timeout_s: endpoint.timeout_s,
                    max_retries: endpoint.max_retries,
                    temperature: endpoint.temperature,
                    max_tokens: endpoint.max_tokens,
                    legacy_max_tokens: endpoint.legacy_max_tokens,
                    price_prompt_per_million: endpoint.price_prompt_per_million,
                    price_completion_per_million: endpoint.price_completion_per_million,
                }
            }
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
    }
}

impl Default for TeacherConfig {
    fn default() -> Self {
        Self::with_endpoint(EndpointConfig::default(), TeacherKind::Openai, None)
    }
}

/// An OpenAI-compatible endpoint. The key is read from the environment and never stored.
#[derive(Debug, Clone, PartialEq)]
pub struct EndpointConfig {
    /// Up to and with `/v1`.
    pub base_url: Option<String>,
    /// The model's name there.
    pub model: Option<String>,
    /// Environment variable that holds the key.
    pub api_key_env: String,
    /// Calls under way at once.
    pub max_concurrent: usize,
    /// Limit for one call, in seconds.
    pub timeout_s: f64,
    /// Tries after the first.
    pub max_retries: usize,
    /// `None` leaves it out of the request (GPT-5 class models refuse it).
    pub temperature: Option<f64>,
    /// Sent as `max_completion_tokens`, or as `max_tokens` where `legacy_max_tokens`.
    pub max_tokens: u32,
    /// Send `max_tokens` instead of `max_completion_tokens`.
    pub legacy_max_tokens: bool,
    /// Price of a million prompt tokens.
    pub price_prompt_per_million: Option<f64>,
    /// Price of a million completion tokens.
    pub price_completion_per_million: Option<f64>,
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self {
            base_url: None,
            model: None,
            api_key_env: "OPENAI_API_KEY".into(),
            max_concurrent: 8,
            timeout_s: 60.0,
            max_retries: 4,
            temperature: None,
            max_tokens: 200,
            legacy_max_tokens: false,
            price_prompt_per_million: None,
            price_completion_per_million: None,
        }
    }
}

/// Which judge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JudgeKind {
    /// A deterministic rubric over the tenant's lexicon: a stand-in.
    Rubric,
    /// An endpoint that speaks OpenAI's chat interface.
    Openai,
    /// Nobody judges.
    None,
}

endpoint_section! {
    /// Who judges rewrites.
    JudgeConfig {
        /// Which.
        kind: JudgeKind,
        /// Share of training episodes that are judged, chosen by episode id. Evaluation judges all.
        sample_rate: f64,
    }
}

impl Default for JudgeConfig {
    fn default() -> Self {
        Self::with_endpoint(EndpointConfig::default(), JudgeKind::None, 0.3)
    }
}

/// Which retrieval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RetrievalKind {
    /// A full-text index in this process.
    Embedded,
    /// A service that speaks `general_rag`.
    Http,
}

/// Retrieval.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// `http`: the full address of the `general_rag` route.
    #[serde(default)]
    pub url: Option<String>,
    /// `http`: name of the knowledge base there.
    #[serde(default = "defaults::kb_name")]
    pub kb_name: String,
    /// Passages wanted.
    #[serde(default = "defaults::top_k")]
    pub top_k: usize,
    /// Passages below are left out.
    #[serde(default = "defaults::score_threshold")]
    pub score_threshold: f64,
    /// Calls under way at once.
    #[serde(default = "defaults::retrieval_concurrent")]
    pub max_concurrent: usize,
    /// Limit for one call, in seconds.
    #[serde(default = "defaults::retrieval_timeout")]
    pub timeout_s: f64,
    /// Tries after the first.
    #[serde(default = "defaults::retries")]
    pub max_retries: usize,
}

/// The model to train.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// A Hugging Face directory.
    pub path: PathBuf,
    /// `f32` on the CPU; storage of the frozen base elsewhere.
    #[serde(default = "defaults::dtype")]
    pub dtype: String,
}

/// What fine-tuning changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TuningMethod {
    /// Low-rank adapters beside frozen weights.
    Lora,
    /// Every weight.
    Full,
}

/// Supervised fine-tuning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SftConfig {
    /// What is trained.
    pub method: TuningMethod,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Passes over the training split.
    pub epochs: usize,
    /// Stops earlier after so many optimizer steps; 0 for no limit.
    pub max_steps: usize,
    /// Rank of the adapters.
    pub lora_rank: usize,
    /// Adapter scale is `lora_alpha / lora_rank`.
    pub lora_alpha: f64,
    /// Rows of one forward pass.
    pub batch_size: usize,
    /// Forward passes of one optimizer step.
    pub gradient_accumulation_steps: usize,
    /// Share of steps with rising learning rate; then cosine to zero.
    pub warmup_ratio: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Global gradient norm above which gradients are scaled down.
    pub max_grad_norm: f64,
    /// Longer rows are an error, named by row.
    pub max_length: usize,
    /// Optimizer steps between evaluations on the validation split; 0 for once an epoch.
    pub eval_steps: usize,
    /// Evaluations without improvement after which training stops; 0 for never.
    pub early_stopping_patience: usize,
}

impl Default for SftConfig {
    fn default() -> Self {
        Self {
            method: TuningMethod::Lora,
            learning_rate: 5e-5,
            epochs: 3,
            max_steps: 0,
            lora_rank: 16,
            lora_alpha: 32.0,
            batch_size: 2,
            gradient_accumulation_steps: 8,
            warmup_ratio: 0.05,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            max_length: 2048,
            eval_steps: 100,
            early_stopping_patience: 0,
        }
    }
}

/// Which algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RlAlgorithm {
    /// Proximal policy optimisation.
    Ppo,
}

/// How advantages and ratios are formed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageForm {
    /// Per token: KL in the reward, GAE, a ratio per token.
    Token,
    /// The source plan's plain form: one reward, `A = R - V(s)`, a ratio of the whole response.
    Sequence,
}

/// Reinforcement learning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RlConfig {
    /// Which algorithm.
    pub algorithm: RlAlgorithm,
    /// Per token or per response.
    pub advantage_form: AdvantageForm,
    /// Rollout batches.
    pub max_steps: usize,
    /// Queries of one rollout batch.
    pub batch_size: usize,
    /// Responses sampled per query.
    pub n_samples: usize,
    /// Passes over one rollout batch.
    pub ppo_epochs: usize,
    /// Responses of one optimizer step.
    pub mini_batch_size: usize,
    /// Forward passes of one optimizer step; the result does not depend on it.
    pub gradient_accumulation_steps: usize,
    /// Peak learning rate of the policy.
    pub learning_rate: f64,
    /// Learning rate of the critic.
    pub critic_learning_rate: f64,
    /// Steps in which only the critic learns.
    pub critic_warmup_steps: usize,
    /// Share of steps with rising learning rate.
    pub warmup_ratio: f64,
    /// Ratios outside `1 - clip_range ..= 1 + clip_range` stop paying.
    pub clip_range: f64,
    /// Values move at most so far from the rollout's.
    pub clip_range_value: f64,
    /// Weight of the value loss.
    pub vf_coef: f64,
    /// Weight of the entropy bonus.
    pub ent_coef: f64,
    /// Weight of the per-token KL to the SFT policy.
    pub kl_coef: f64,
    /// Global gradient norm above which gradients are scaled down.
    pub max_grad_norm: f64,
    /// Discount.
    pub gamma: f64,
    /// GAE's lambda.
    pub gae_lambda: f64,
    /// Divides the logits in rollout, reference and update alike.
    pub temperature: f64,
    /// Longer answers are cut off and marked.
    pub max_new_tokens: usize,
    /// Subtracted from the score of a cut-off response.
    pub truncation_penalty: f64,
    /// Steps between evaluations on the validation split.
    pub eval_steps: usize,
    /// Evaluations without improvement after which training stops; 0 for never.
    pub early_stopping_patience: usize,
    /// A batch that loses more than this share of its episodes stops the run.
    pub max_drop_rate: f64,
}

impl Default for RlConfig {
    fn default() -> Self {
        Self {
            algorithm: RlAlgorithm::Ppo,
            advantage_form: AdvantageForm::Token,
            max_steps: 100,
            batch_size: 64,
            n_samples: 1,
            ppo_epochs: 4,
            mini_batch_size: 64,
            gradient_accumulation_steps: 4,
            learning_rate: 1e-5,
            critic_learning_rate: 1e-4,
            critic_warmup_steps: 0,
            warmup_ratio: 0.0,
            clip_range: 0.2,
            clip_range_value: 0.2,
            vf_coef: 0.5,
            ent_coef: 0.01,
            kl_coef: 0.05,
            max_grad_norm: 0.5,
            gamma: 0.99,
            gae_lambda: 0.95,
            temperature: 1.0,
            max_new_tokens: 150,
            truncation_penalty: 0.0,
            eval_steps: 10,
            early_stopping_patience: 0,
            max_drop_rate: 0.2,
        }
    }
}

/// The final table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// Any of `raw`, `teacher`, `sft`, `rl`.
    pub systems: Vec<String>,
    /// Resamples of the bootstrap.
    pub bootstrap: usize,
    /// Rewrites shown side by side in the report.
    pub n_examples: usize,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self { systems: ["raw", "teacher", "sft", "rl"].map(String::from).into(), bootstrap: 2000, n_examples: 20 }
    }
}

/// WebAssembly components.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PluginsConfig {
    /// The tenant's prompts.
    pub prompt: PluginConfig,
    /// Filters, applied in order.
    #[serde(default)]
    pub filters: Vec<PluginConfig>,
    /// Rewards, summed by weight.
    pub rewards: Vec<WeightedPluginConfig>,
    /// Limits on every call into a plugin.
    #[serde(default)]
    pub limits: PluginLimits,
}

/// One component.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PluginConfig {
    /// A `.wasm` component, or a folder with its source.
    pub path: PathBuf,
    /// Handed to the plugin as text.
    #[serde(default)]
    pub settings: BTreeMap<String, toml::Value>,
}

/// One reward component and its weight in the sum.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightedPluginConfig {
    /// A `.wasm` component, or a folder with its source.
    pub path: PathBuf,
    /// Weight in the sum.
    #[serde(default = "defaults::one")]
    pub weight: f64,
    /// Handed to the plugin as text.
    #[serde(default)]
    pub settings: BTreeMap<String, toml::Value>,
}

/// What one call into a plugin may use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PluginLimits {
    /// Deterministic instruction budget per item of a batch.
    pub fuel_per_item: u64,
    /// Wall-clock backstop per call, in milliseconds.
    pub timeout_ms: u64,
    /// Linear memory per instance, in bytes.
    pub memory_bytes: usize,
    /// What a call may hand back, in bytes.
    pub output_bytes: usize,
    /// What a call may log, in bytes; the rest is cut with a note.
    pub log_bytes: usize,
}

impl Default for PluginLimits {
    fn default() -> Self {
        Self {
            fuel_per_item: 50_000_000,
            timeout_ms: 5_000,
            memory_bytes: 256 << 20,
            output_bytes: 16 << 20,
            log_bytes: 64 << 10,
        }
    }
}

mod defaults {
    use std::path::PathBuf;

    pub(super) fn device() -> String {
        "auto".into()
    }
    pub(super) fn seed() -> u64 {
        42
    }
    pub(super) fn output_dir() -> PathBuf {
        "runs/default".into()
    }
    pub(super) fn query_column() -> String {
        "问题".into()
    }
    pub(super) fn profile_column() -> String {
        "用户画像".into()
    }
    pub(super) fn history_column() -> String {
        "历史摘要".into()
    }
    pub(super) fn gold_column() -> String {
        "相关文档".into()
    }
    pub(super) fn split() -> [f64; 3] {
        [0.8, 0.1, 0.1]
    }
    pub(super) fn kb_name() -> String {
        "default".into()
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
    pub(super) fn dtype() -> String {
        "f32".into()
    }
    pub(super) fn one() -> f64 {
        1.0
    }
}

//! The resolved configuration of a run: every value present and checked, every path absolute.
//!
//! The structs define name, meaning, default and range of every key: [`schema`], the checks of [`load()`] and
//! docs/configuration.md are derived from them. Defaults are for real models (actor learning rate 1e-5, critic 1e-4, 4
//! epochs); examples with a tiny model override them.

/// Declares a section whose keys all have defaults: `key: Type = default`.
macro_rules! section {
    ($(#[$doc:meta])* $name:ident { $($(#[$meta:meta])* $key:ident: $type:ty = $default:expr,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$meta])* pub $key: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($key: $default,)* }
            }
        }
    };
}

mod check;
mod check_rl;
mod document;
mod load;
mod plugins;
mod rollout;
mod run;
mod schema;
mod services;
mod sources;
mod training;

pub use check::{ModelHub, parse_model_name};
pub use load::{ConfigError, ConfigFile, ConfigLocation, MissingModel, Overrides, load, load_resolved, load_with_file};
pub use plugins::{
    OnLimit, PluginConfig, PluginLimits, PluginsConfig, REGISTRY_PREFIX, StyleModelConfig, WeightedPluginConfig,
    is_registry_reference,
};
pub use rollout::{RolloutConfig, RolloutEngineKind, RolloutServerKind};
pub use run::{
    BaseDtype, Config, DataConfig, DatasetConfig, DeviceSetting, EVAL_SYSTEMS, EvalConfig, ModelConfig, OnLeak,
    PromptedWith, RewriteForm, SecondRetrieval, TableFormat, TextWidth, TrackerKind, TrackingConfig,
};
pub use schema::{KeyInfo, json_schema, keys};
pub use services::{
    AuthScheme, CacheConfig, CallsConfig, EmbeddingConfig, EmbeddingKind, MappingConfig, RerankConfig, RerankKind,
    RerankScores, ScoreOrder, ServiceKind, ServicePrice,
};
pub use sources::{
    EndpointConfig, HistoryForm, JudgeConfig, JudgeForm, JudgeKind, Language, Provider, ReasoningEffort,
    ResponseFormat, RetrievalConfig, RetrievalKind, TeacherConfig, TeacherKind,
};
pub use training::{
    AdvantageForm, CriticKind, KlEstimator, KlPlacement, LossAgg, LrScheduler, OnNoise, PolicyLossKind, RlAlgorithm,
    RlConfig, RlRecord, SftConfig, TuningMethod, ValueLossKind,
};

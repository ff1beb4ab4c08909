//! The configuration of a run, resolved: every value present, checked and, where it names a file, absolute.
//!
//! Defaults are those of the source plan for real models: actor learning rate 1e-5, critic 1e-4, 4 epochs and so on. An
//! example for a tiny model overrides them in its own file and says why.
//!
//! The structs here are the one place that says what a key is called, means, defaults to and may be: [`schema`] and the
//! checks of [`load()`] are derived from them.

mod check;
mod document;
mod load;
mod plugins;
mod run;
mod schema;
mod services;
mod sources;
mod training;

pub use load::{ConfigError, Overrides, Place, load, load_resolved};
pub use plugins::{OnLimit, PluginConfig, PluginLimits, PluginsConfig, StyleModelConfig, WeightedPluginConfig};
pub use run::{BaseDtype, Config, DataConfig, DeviceSetting, EvalConfig, ModelConfig, OnLeak, TableFormat, TextWidth};
pub use schema::{KeyInfo, json_schema, keys};
pub use services::{
    AuthScheme, CacheConfig, CallsConfig, EmbeddingConfig, EmbeddingKind, MappingConfig, RerankConfig, RerankKind,
    RerankScores, ScoreOrder, ServiceKind,
};
pub use sources::{
    EndpointConfig, HistoryForm, JudgeConfig, JudgeForm, JudgeKind, Provider, ReasoningEffort, ResponseFormat,
    RetrievalConfig, RetrievalKind, TeacherConfig, TeacherKind,
};
pub use training::{
    AdvantageForm, CriticKind, KlEstimator, KlPlacement, LrScheduler, RlAlgorithm, RlConfig, SftConfig, TuningMethod,
    ValueLossKind,
};

//! WebAssembly components, their settings and limits.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// WebAssembly components.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PluginsConfig {
    /// The tenant's prompts.
    pub prompt: PluginConfig,
    /// Filters, applied in order.
    #[serde(default)]
    pub filters: Vec<PluginConfig>,
    /// Rewards, a weighted sum; a style scorer uses `style_model`.
    pub rewards: Vec<WeightedPluginConfig>,
    /// A classifier of the style of answers, for scorers of style and as part of every episode.
    #[serde(default)]
    pub style_model: StyleModelConfig,
    /// Limits on every call into a plugin.
    #[serde(default)]
    pub limits: PluginLimits,
    /// Ed25519 public keys, as `querl plugin sign` prints them. Where any is given, only bundles that one of them has signed
    /// are run.
    #[serde(default)]
    pub trusted_keys: Vec<String>,
}

section! {
    /// A classifier of the style of answers.
    StyleModelConfig {
        /// Folder of a classifier of `querl style train` or of transformers, or of a PEFT adapter.
        path: Option<PathBuf> = None,
        /// Folder of the model that an adapter was trained on.
        base: Option<PathBuf> = None,
        /// Maximum number of tokens of a dialogue; question and answer of longer ones are truncated.
        #[schemars(range(min = 1))]
        max_length: usize = 512,
        /// Whether probabilities are corrected by the temperature that was fitted in training.
        calibrated: bool = false,
        /// Folder of a second classifier, trained on other data or with another seed, for evaluation only. No reward uses it: a
        /// difference between the two shows reward hacking of the first.
        audit: Option<PathBuf> = None,
    }
}

impl StyleModelConfig {
    /// The settings of the second classifier (`audit`).
    pub fn of_audit(&self) -> Self {
        Self { path: self.audit.clone(), base: None, audit: None, ..self.clone() }
    }
}

/// Prefix of a plugin path that is a reference to a bundle in a registry.
pub const REGISTRY_PREFIX: &str = "oci://";

/// Whether a plugin's path is a reference to a bundle in a registry: `oci://HOST[:PORT]/REPO[:VERSION]@sha256:DIGEST`.
pub fn is_registry_reference(path: &Path) -> bool {
    path.to_str().is_some_and(|path| path.starts_with(REGISTRY_PREFIX))
}

/// A plugin without a weight, such as prompts or a filter: its location and settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PluginConfig {
    /// A `.querl` bundle, a `.wasm` component, a folder with its source, or a bundle in a registry:
    /// `oci://HOST/REPO:VERSION@sha256:DIGEST`.
    pub path: PathBuf,
    /// Settings, passed to the plugin as text.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, serde_json::Value>")]
    pub settings: BTreeMap<String, toml::Value>,
}

/// One reward component and its weight in the sum.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WeightedPluginConfig {
    /// A `.querl` bundle, a `.wasm` component, a folder with its source, or a bundle in a registry:
    /// `oci://HOST/REPO:VERSION@sha256:DIGEST`.
    pub path: PathBuf,
    /// Weight in the sum.
    #[serde(default = "defaults::one")]
    #[schemars(range(min = -1_000_000.0, max = 1_000_000.0))]
    pub weight: f64,
    /// Settings, passed to the plugin as text.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, serde_json::Value>")]
    pub settings: BTreeMap<String, toml::Value>,
}

section! {
    /// What one call into a plugin may use.
    PluginLimits {
        // Fuel from `cargo run --release -p querl-plugin --example call_cost` over the plugins of this repository: a call costs
        // Rust 2,000 and 4,500 (a reward) to 32,000 (a filter) an item, JavaScript 1.2 million and 1.7 million an item, Python 15
        // million, mostly its regular expressions, and 350,000 an item. A processor burns some 3,000 million a second: a loop
        // in a batch of 64 ends after 840 million, long before the clock.
        /// Fuel (deterministic instruction budget) per call, independent of the number of items: a JavaScript or Python plugin
        /// starts its interpreter in each call.
        fuel_per_call: u64 = 200_000_000,
        /// Fuel per item of a batch, in addition to that of the call.
        #[schemars(range(min = 1))]
        fuel_per_item: u64 = 10_000_000,
        /// CPU time of a call, in milliseconds: a backstop. Wall time may be ten times as long.
        #[schemars(range(min = 1))]
        timeout_ms: u64 = 5_000,
        /// Linear memory per instance, in bytes.
        #[schemars(range(min = 65_536))]
        memory_bytes: usize = 256 << 20,
        /// Maximum size of a call's result in bytes.
        #[schemars(range(min = 1))]
        output_bytes: usize = 16 << 20,
        /// Maximum size of a call's log output in bytes; the rest is truncated with a note.
        log_bytes: usize = 64 << 10,
        /// Maximum number of calls of host functions (tokenizer, segmentation, encoder, judge, style model) per item.
        #[schemars(range(min = 1))]
        host_calls_per_item: u64 = 64,
        /// Timeout of compiling a component in milliseconds; compiled components are cached.
        #[schemars(range(min = 1))]
        compile_timeout_ms: u64 = 120_000,
        /// What happens to an item of a reward, filter or style scorer at which a limit is hit.
        on_limit: OnLimit = OnLimit::Fail,
        /// With `on_limit = "drop"`: more dropped items of one plugin than this stop the run.
        max_dropped: u64 = 100,
    }
}

/// What happens to an item at which a limit is hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnLimit {
    /// The run stops.
    #[default]
    Fail,
    /// The item is dropped with the code `plugin_limit` and counted; the others are scored.
    Drop,
}

mod defaults {
    pub(super) fn one() -> f64 {
        1.0
    }
}

//! The configured plugins, loaded, with what a ledger and a lock file say of them.

use crate::environment::WeightedReward;
use crate::stages::inputs::Inputs;
use querl_core::config::PluginsConfig;
use querl_core::ports::{Filter, Prompts};
use querl_plugins::{HostOptions, PluginError, PluginHost, PluginSettings};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Every plugin of a run.
pub struct Plugins {
    /// The tenant's prompts.
    pub prompts: Arc<dyn Prompts>,
    /// In the order in which they are applied.
    pub filters: Vec<Arc<dyn Filter>>,
    /// Summed by weight.
    pub rewards: Vec<WeightedReward>,
    used: Vec<Used>,
}

/// What a result depends on when it depends on a plugin.
#[derive(Debug, Clone, Serialize)]
pub struct Used {
    /// `prompt`, `filter` or `reward`.
    pub role: &'static str,
    /// As it says itself.
    pub name: String,
    /// As it says itself.
    pub version: String,
    /// Of the component, hexadecimal.
    pub sha256: String,
    /// The component.
    #[serde(skip)]
    pub path: PathBuf,
    /// Of a reward in the sum.
    #[serde(skip)]
    pub weight: Option<f64>,
    #[serde(skip)]
    settings: String,
}

impl Plugins {
    /// Loads all, building those whose source is newer than their component.
    ///
    /// # Errors
    /// One cannot be built, loaded or configured.
    pub fn open(config: &PluginsConfig) -> Result<Self, PluginError> {
        let host = PluginHost::new(HostOptions { limits: config.limits.clone(), cache_dir: None })?;
        let mut used = Vec::new();
        let mut load = |role, path: &Path, settings: &PluginSettings, weight: f64| {
            let plugin = host.load(path)?;
            used.push(Used {
                role,
                name: plugin.id().to_owned(),
                version: plugin.version().to_owned(),
                sha256: plugin.digest().to_owned(),
                path: plugin.path().to_owned(),
                weight: (role == "reward").then_some(weight),
                settings: format!("{settings:?} weight {weight}"),
            });
            Ok::<_, PluginError>(plugin)
        };
        let plugin = load("prompt", &config.prompt.path, &config.prompt.settings, 1.0)?;
        let prompts = Arc::from(host.prompts_of(&plugin, &config.prompt.settings)?);
        let mut filters = Vec::new();
        for filter in &config.filters {
            let plugin = load("filter", &filter.path, &filter.settings, 1.0)?;
            filters.push(Arc::from(host.filter_of(&plugin, &filter.settings)?));
        }
        let mut rewards = Vec::new();
        for reward in &config.rewards {
            let plugin = load("reward", &reward.path, &reward.settings, reward.weight)?;
            let model = Arc::from(host.reward_of(&plugin, &reward.settings)?);
            rewards.push(WeightedReward { model, weight: reward.weight });
        }
        Ok(Self { prompts, filters, rewards, used })
    }

    /// What is used, in the order of the configuration.
    pub fn used(&self) -> &[Used] {
        &self.used
    }

    /// `querl.lock`: which plugins a run used.
    pub fn lock_file(&self) -> String {
        #[derive(Serialize)]
        struct Lock<'a> {
            plugin: &'a [Used],
        }
        let text = toml::to_string(&Lock { plugin: &self.used }).expect("strings have a TOML form");
        format!("# Written by querl: the plugins that this run used.\n{text}")
    }

    /// The prompt plugin.
    pub fn add_prompts(&self, inputs: &mut Inputs) {
        self.add(inputs, "prompt");
    }

    /// The filters, and their order.
    pub fn add_filters(&self, inputs: &mut Inputs) {
        self.add(inputs, "filter");
    }

    /// The rewards.
    pub fn add_rewards(&self, inputs: &mut Inputs) {
        self.add(inputs, "reward");
    }

    fn add(&self, inputs: &mut Inputs, role: &str) {
        for (index, used) in self.used.iter().filter(|used| used.role == role).enumerate() {
            let name = format!("{role} plugin {} ({})", index + 1, used.name);
            inputs.text(&name, format!("{} {}", used.sha256, used.settings));
        }
    }
}

//! The configured plugins, loaded, with what a ledger and a lock file say of them.

pub mod host;
mod labels;
mod secrets;

use crate::environment::WeightedReward;
use crate::failure::Stop;
use crate::ledger::Inputs;
use querl_bundle::Manifest;
use querl_bundle::lock::{LockEntry, LockSource};
use querl_core::config::Config;
use querl_core::ports::{Filter, Prompts, RewardModel};
use querl_plugin::{Plugin, PluginHost, PluginKind, PluginPort, PluginSettings, Source};
use querl_style::{SharedStyleModel, StyleReward, Undecided, unknown_class};
use std::path::Path;
use std::sync::Arc;

/// Every plugin of a run.
pub struct Plugins {
    /// The tenant's prompts.
    pub prompts: Arc<dyn Prompts>,
    /// In the order in which they are applied.
    pub filters: Vec<Arc<dyn Filter>>,
    /// Summed by weight.
    pub rewards: Vec<WeightedReward>,
    /// Says the style of answers, where one is configured.
    pub style: Option<Arc<SharedStyleModel>>,
    /// Says the style of evaluated answers besides, and is no part of any reward.
    pub audit: Option<Arc<SharedStyleModel>>,
    used: Vec<Used>,
}

/// What a result depends on when it depends on a plugin.
#[derive(Debug, Clone)]
pub struct Used {
    /// What a lock file pins.
    pub entry: LockEntry,
    /// In the sum of rewards.
    pub weight: Option<f64>,
    /// Names the parts of a reward where there are several.
    pub label: Option<String>,
    settings: String,
}

impl Used {
    /// Of a plugin without settings and weight.
    #[cfg(test)]
    pub fn pinned(entry: LockEntry) -> Self {
        Self { entry, weight: None, label: None, settings: String::new() }
    }
}

impl Plugins {
    /// Loads all, building those whose source is newer than their component.
    ///
    /// # Errors
    /// One cannot be built, loaded or configured; a setting holds a secret; a trusted key is none.
    pub fn open(config: &Config) -> anyhow::Result<Self> {
        secrets::check(config)?;
        let config = &config.plugins;
        let mut loading = Loading { host: host::open(&config.limits, &config.trusted_keys)?, used: Vec::new() };
        let plugin = loading.load("prompt", &config.prompt.path, &config.prompt.settings)?;
        let prompts = Arc::from(loading.host.open(&plugin, &config.prompt.settings, PluginPort::prompts())?);
        let mut filters = Vec::new();
        for filter in &config.filters {
            let plugin = loading.load("filter", &filter.path, &filter.settings)?;
            filters.push(Arc::from(loading.host.open(&plugin, &filter.settings, PluginPort::filter())?));
        }
        let style = SharedStyleModel::of(&config.style_model, "plugins.style_model.path")?.map(Arc::new);
        let audit = SharedStyleModel::of(&config.style_model.of_audit(), "plugins.style_model.audit")?.map(Arc::new);
        let mut rewards = Vec::new();
        for (index, reward) in config.rewards.iter().enumerate() {
            let plugin = loading.load("reward", &reward.path, &reward.settings)?;
            let model = loading.reward(&plugin, &reward.settings, (index, style.as_ref()))?;
            rewards.push(WeightedReward { label: plugin.id().to_owned(), model, weight: reward.weight });
        }
        let mut plugins = Self { prompts, filters, rewards, style, audit, used: loading.used };
        plugins.label_rewards();
        Ok(plugins)
    }

    /// Whether the style models can be opened.
    ///
    /// # Errors
    /// One cannot.
    pub fn check_style(&self) -> anyhow::Result<()> {
        [&self.style, &self.audit].into_iter().flatten().try_for_each(|model| model.check())
    }

    /// Gives the rewards names that differ, and notes name and weight with what is used.
    fn label_rewards(&mut self) {
        let ids: Vec<_> = self.rewards.iter().map(|reward| reward.label.as_str()).collect();
        let labels = labels::distinct(&ids);
        let used = self.used.iter_mut().filter(|used| used.entry.role == "reward");
        for ((reward, used), label) in self.rewards.iter_mut().zip(used).zip(labels) {
            used.weight = Some(reward.weight);
            used.label = Some(label.clone());
            reward.label = label;
        }
    }

    /// What is used, in the order of the configuration.
    pub fn used(&self) -> &[Used] {
        &self.used
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
        for (index, used) in self.used.iter().filter(|used| used.entry.role == role).enumerate() {
            let name = format!("{role} plugin {} ({})", index + 1, used.entry.id);
            let weight = used.weight.unwrap_or(1.0);
            inputs.text(&name, format!("{} {} weight {weight}", used.entry.sha256, used.settings));
        }
    }
}

/// Loads plugins one by one and notes each.
struct Loading {
    host: PluginHost,
    used: Vec<Used>,
}

impl Loading {
    fn load(&mut self, role: &str, path: &Path, settings: &PluginSettings) -> anyhow::Result<Plugin> {
        let plugin = self.host.load(path)?;
        let entry = entry(role, path, &plugin)?;
        self.used.push(Used { entry, weight: None, label: None, settings: format!("{settings:?}") });
        Ok(plugin)
    }

    /// A reward, or a scorer of style as one.
    fn reward(
        &self,
        plugin: &Plugin,
        settings: &PluginSettings,
        (index, style): (usize, Option<&Arc<SharedStyleModel>>),
    ) -> anyhow::Result<Arc<dyn RewardModel>> {
        if !scores_style(plugin) {
            return Ok(Arc::from(self.host.open(plugin, settings, PluginPort::reward())?));
        }
        let Some(style) = style else {
            let id = plugin.id();
            let message = format!(
                "plugins.rewards[{index}]: `{id}` scores style and there is no style model; name a classifier of `querl style train` as \
                 plugins.style_model.path"
            );
            return Err(Stop::usage(message).into());
        };
        let knows_classes = Arc::new(Undecided(style.classes().to_vec()));
        let asked = self.host.open(plugin, settings, PluginPort::style_scorer(Some(knows_classes)))?;
        if let Some(problem) = unknown_class(asked.as_ref()) {
            let message = format!("plugins.rewards[{index}]: `{}`: {problem}; correct its settings", plugin.id());
            return Err(Stop::usage(message).into());
        }
        let scorer = self.host.open(plugin, settings, PluginPort::style_scorer(Some(style.clone())))?;
        Ok(Arc::new(StyleReward::new(scorer)))
    }
}

/// Whether a plugin stands among rewards as a scorer of style: one that is both is a reward.
pub fn scores_style(plugin: &Plugin) -> bool {
    let kinds = plugin.kinds();
    kinds.contains(&PluginKind::StyleScorer) && !kinds.contains(&PluginKind::Reward)
}

/// What a lock file says of a plugin that was loaded from `path`.
fn entry(role: &str, path: &Path, plugin: &Plugin) -> anyhow::Result<LockEntry> {
    let version = plugin.version().parse().map_err(|error| {
        let (path, version) = (path.display(), plugin.version());
        Stop::usage(format!(
            "plugin {path}: it says that its version is `{version}`; expected a semantic version: {error}"
        ))
    })?;
    let source = match plugin.source() {
        Source::Bundle => LockSource::Bundle,
        Source::Component => LockSource::Component,
        Source::Folder => LockSource::Folder,
    };
    let bundle = plugin.bundle();
    let is_folder_with_one = source == LockSource::Folder && plugin.manifest().is_some();
    Ok(LockEntry {
        role: role.into(),
        id: plugin.id().into(),
        version,
        path: path.into(),
        source,
        sha256: plugin.digest().into(),
        bundle: bundle.map(|facts| facts.digest.clone()),
        manifest: is_folder_with_one.then(|| Manifest::file_digest(path)).transpose()?,
        signed_by: bundle.and_then(|facts| facts.signed_by.as_ref()).map(ToString::to_string),
    })
}

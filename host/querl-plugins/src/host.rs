//! The host: loads plugins and configures them into ports.

use crate::cache::{self, CompiledCache};
use crate::call::Caller;
use crate::engine::{self, N_SLOTS, Slots};
use crate::error::PluginError;
use crate::filter::FilterPlugin;
use crate::load::{self, Exports, Parts, Plugin, PluginKind};
use crate::prompts::PromptPlugin;
use crate::reward::RewardPlugin;
use crate::settings;
use crate::text::{is_name, printable};
use querl_core::config::{PluginConfig, PluginLimits, WeightedPluginConfig};
use querl_core::fsx::digest_hex;
use querl_core::ports::{Filter, Prompts, RewardModel};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use wasmtime::Engine;

/// How a host is set up.
#[derive(Debug, Clone, Default)]
pub struct HostOptions {
    /// What one call into a plugin may use.
    pub limits: PluginLimits,
    /// Where compiled plugins are kept; `None` for the user's cache folder (`$QUERL_CACHE_DIR`, `$XDG_CACHE_HOME/querl` or
    /// `~/.cache/querl`).
    pub cache_dir: Option<PathBuf>,
}

/// Settings of a plugin, as the configuration has them.
pub type PluginSettings = BTreeMap<String, toml::Value>;

/// Loads plugins and makes ports of them. Clones share everything.
#[derive(Clone)]
pub struct PluginHost {
    shared: Arc<Shared>,
}

struct Shared {
    engine: Engine,
    limits: Arc<PluginLimits>,
    slots: Arc<Slots>,
    cache: CompiledCache,
    /// By digest.
    loaded: Mutex<HashMap<String, Plugin>>,
}

impl PluginHost {
    /// A host with nothing loaded.
    ///
    /// # Errors
    /// This machine cannot run WebAssembly, for example for lack of address space.
    pub fn new(options: HostOptions) -> Result<Self, PluginError> {
        let engine = engine::start(&options.limits)?;
        let cache = CompiledCache::open(options.cache_dir.or_else(cache::user_folder), &engine);
        let shared = Shared {
            cache,
            limits: Arc::new(options.limits),
            slots: Arc::new(Slots::new(N_SLOTS)),
            loaded: Mutex::new(HashMap::new()),
            engine,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Loads a `.wasm` component, or a folder with Rust source, which is built first where any of its sources is newer.
    ///
    /// # Errors
    /// Not readable, not buildable, not a plugin for this host, or at fault when asked for its name.
    pub fn load(&self, path: &Path) -> Result<Plugin, PluginError> {
        let (file, bytes) = load::read(path)?;
        let digest = digest_hex(&bytes);
        if let Some(plugin) = self.loaded(&digest) {
            return Ok(plugin);
        }
        let component = self.shared.cache.component(&self.shared.engine, &bytes, &digest);
        let refused = |reason: String| PluginError::NotAPlugin { path: file.clone(), reason };
        let component = component.map_err(|error| refused(format!("it does not compile: {error:#}")))?;
        let (exports, kinds) = load::link(&self.shared.engine, &file, &component)?;
        let (name, version) = self.describe(&file, &exports)?;
        let title = format!("{name} {version}").into();
        let plugin = Plugin { parts: Arc::new(Parts { path: file, name, version, digest, kinds, title, exports }) };
        let mut loaded = self.shared.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.insert(plugin.digest().to_owned(), plugin.clone());
        Ok(plugin)
    }

    /// A tenant's prompts.
    ///
    /// # Errors
    /// As [`PluginHost::load`]; or not a prompt plugin; or a setting that it does not know or accept.
    pub fn prompts(&self, config: &PluginConfig) -> Result<Box<dyn Prompts>, PluginError> {
        self.prompts_of(&self.load(&config.path)?, &config.settings)
    }

    /// As [`PluginHost::prompts`], of a plugin that this host has loaded.
    ///
    /// # Errors
    /// Not a prompt plugin; or a setting that it does not know or accept.
    pub fn prompts_of(&self, plugin: &Plugin, settings: &PluginSettings) -> Result<Box<dyn Prompts>, PluginError> {
        let indices = plugin.parts.exports.prompts.clone().ok_or_else(|| wrong_kind(plugin, PluginKind::Prompt))?;
        Ok(Box::new(PromptPlugin::new(self.configure(plugin, settings)?, indices)))
    }

    /// A filter of training data.
    ///
    /// # Errors
    /// As [`PluginHost::load`]; or not a filter plugin; or a setting that it does not know or accept.
    pub fn filter(&self, config: &PluginConfig) -> Result<Box<dyn Filter>, PluginError> {
        self.filter_of(&self.load(&config.path)?, &config.settings)
    }

    /// As [`PluginHost::filter`], of a plugin that this host has loaded.
    ///
    /// # Errors
    /// Not a filter plugin; or a setting that it does not know or accept.
    pub fn filter_of(&self, plugin: &Plugin, settings: &PluginSettings) -> Result<Box<dyn Filter>, PluginError> {
        let indices = plugin.parts.exports.filters.clone().ok_or_else(|| wrong_kind(plugin, PluginKind::Filter))?;
        Ok(Box::new(FilterPlugin::new(self.configure(plugin, settings)?, indices)))
    }

    /// A reward. The weight in `config` is the caller's to apply.
    ///
    /// # Errors
    /// As [`PluginHost::load`]; or not a reward plugin; or a setting that it does not know or accept; or a range that is none.
    pub fn reward(&self, config: &WeightedPluginConfig) -> Result<Box<dyn RewardModel>, PluginError> {
        self.reward_of(&self.load(&config.path)?, &config.settings)
    }

    /// As [`PluginHost::reward`], of a plugin that this host has loaded.
    ///
    /// # Errors
    /// Not a reward plugin; or a setting that it does not know or accept; or a range that is none.
    pub fn reward_of(&self, plugin: &Plugin, settings: &PluginSettings) -> Result<Box<dyn RewardModel>, PluginError> {
        let indices = plugin.parts.exports.rewards.clone().ok_or_else(|| wrong_kind(plugin, PluginKind::Reward))?;
        Ok(Box::new(RewardPlugin::new(self.configure(plugin, settings)?, indices)?))
    }

    fn loaded(&self, digest: &str) -> Option<Plugin> {
        self.shared.loaded.lock().unwrap_or_else(PoisonError::into_inner).get(digest).cloned()
    }

    fn caller(&self, name: &str, version: &str, exports: &Exports, settings: BTreeMap<String, String>) -> Caller {
        Caller {
            name: name.into(),
            version: version.into(),
            title: format!("{name} {version}").into(),
            exports: exports.clone(),
            settings: Arc::new(settings),
            limits: self.shared.limits.clone(),
            slots: self.shared.slots.clone(),
        }
    }

    /// Name and version, as the plugin says itself.
    fn describe(&self, file: &Path, exports: &Exports) -> Result<(String, String), PluginError> {
        let caller = self.caller(&file.display().to_string(), "(not yet described)", exports, BTreeMap::new());
        let said = caller.call(1, |store, instance| exports.info.load(&mut *store, instance)?.call_describe(store))?;
        let is_plain = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-');
        let is_version = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+');
        if is_name(&said.name, is_plain) && is_name(&said.version, is_version) {
            return Ok((said.name, said.version));
        }
        let (name, version) = (printable(&said.name, 100), printable(&said.version, 100));
        let reason = format!(
            "it calls itself `{name}`, version `{version}`; expected lower-case letters, digits and `-`, and a version"
        );
        Err(PluginError::NotAPlugin { path: file.to_owned(), reason })
    }

    /// Lets the plugin check its settings, and refuses those that it does not look at.
    fn configure(&self, plugin: &Plugin, values: &PluginSettings) -> Result<Caller, PluginError> {
        let parts = &plugin.parts;
        let caller = self.caller(&parts.name, &parts.version, &parts.exports, settings::rendered(values));
        let (checked, known) = caller.call(1, |store, instance| {
            let checked = parts.exports.info.load(&mut *store, instance)?.call_check_settings(&mut *store)?;
            Ok((checked, std::mem::take(&mut store.data_mut().keys_read)))
        })?;
        let refused = |key: &str, message: String| PluginError::Setting {
            plugin: parts.title.to_string(),
            key: key.into(),
            message,
        };
        if let Err(error) = checked {
            return Err(refused(&printable(&error.key, 100), printable(&error.message, 500)));
        }
        match values.keys().find(|key| !known.contains(*key)) {
            Some(key) => Err(refused(key, settings::unknown_key(key, &known))),
            None => Ok(caller),
        }
    }
}

impl std::fmt::Debug for PluginHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PluginHost").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}

fn wrong_kind(plugin: &Plugin, expected: PluginKind) -> PluginError {
    let kinds: Vec<_> = plugin.kinds().iter().map(|kind| kind.name()).collect();
    PluginError::WrongKind {
        plugin: plugin.parts.title.to_string(),
        actual: kinds.join(" and "),
        expected: expected.name(),
    }
}

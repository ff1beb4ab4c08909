//! The host: loads plugins and configures them into ports.

use crate::cache::CompiledCache;
use crate::call::{Caller, Load, Observer};
use crate::compile::Compiler;
use crate::digest::ComponentDigest;
use crate::engine;
use crate::error::PluginError;
use crate::filter::FilterPlugin;
use crate::limits::Limits;
use crate::load::{self, Exports, Linked, Parts, Plugin, PluginKind};
use crate::log::LogBudget;
use crate::open::{self, Opened};
use crate::prompts::PromptPlugin;
use crate::reward::{RewardForm, RewardPlugin};
use crate::settings;
use crate::slots::Slots;
use crate::style::StylePlugin;
use crate::text::{is_name, printable};
use querl_bundle::{Manifest, PublicKey};
use querl_core::config::{PluginConfig, PluginLimits, WeightedPluginConfig};
use querl_core::ports::{Filter, Prompts, RewardModel, RewardRange, StyleModel, StyleScorer};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use wasmtime::Engine;

/// How a host is set up.
#[derive(Clone)]
pub struct HostOptions {
    /// What one call into a plugin may use.
    pub limits: PluginLimits,
    /// Where compiled plugins are kept; `None` for the user's cache folder (`$QUERL_CACHE_DIR`, `$XDG_CACHE_HOME/querl` or
    /// `~/.cache/querl`).
    pub cache_dir: Option<PathBuf>,
    /// Who compiles plugins that are not in the cache. The default, the host itself, can be held up by a hostile plugin: name
    /// a child where plugins are not all your own.
    pub compiler: Compiler,
    /// Where any is given, only bundles that one of them has signed are loaded.
    pub trusted_keys: Vec<PublicKey>,
    /// Hears of every call.
    pub observer: Option<Observer>,
    /// Calls at the same time; more wait for their turn. At least 1.
    pub n_slots: u32,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self {
            limits: PluginLimits::default(),
            cache_dir: None,
            compiler: Compiler::default(),
            trusted_keys: Vec::new(),
            observer: None,
            n_slots: 8,
        }
    }
}

impl std::fmt::Debug for HostOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostOptions")
            .field("limits", &self.limits)
            .field("cache_dir", &self.cache_dir)
            .field("compiler", &self.compiler)
            .field("trusted_keys", &self.trusted_keys)
            .field("is_observed", &self.observer.is_some())
            .field("n_slots", &self.n_slots)
            .finish()
    }
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
    limits: PluginLimits,
    slots: Arc<Slots>,
    cache: CompiledCache,
    compiler: Compiler,
    trusted_keys: Vec<PublicKey>,
    observer: Option<Observer>,
    /// By digest of the component.
    linked: Mutex<HashMap<ComponentDigest, Arc<Linked>>>,
}

impl PluginHost {
    /// A host with nothing loaded.
    ///
    /// # Errors
    /// This machine cannot run WebAssembly, for example for lack of address space.
    pub fn new(options: HostOptions) -> Result<Self, PluginError> {
        let n_slots = options.n_slots.max(1);
        let engine = engine::start(&options.limits, n_slots)?;
        let cache = CompiledCache::open(options.cache_dir.or_else(querl_core::cache_dir::user_cache_folder), &engine);
        let shared = Shared {
            cache,
            limits: options.limits,
            slots: Arc::new(Slots::new(n_slots)),
            compiler: options.compiler,
            trusted_keys: options.trusted_keys,
            observer: options.observer,
            linked: Mutex::new(HashMap::new()),
            engine,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Loads a `.querl` bundle, a `.wasm` component, or a folder with source, which is built first where any of its sources is
    /// newer. Where there is a manifest, in the bundle or as plugin.toml in the folder, what it says of the component is checked.
    ///
    /// # Errors
    /// Not readable, not buildable, not a plugin for this host, not signed by whom it must be; at fault when asked for its name;
    /// or not what its manifest says, or asking for more than the host allows.
    pub fn load(&self, path: &Path) -> Result<Plugin, PluginError> {
        let opened = open::open(path, &self.shared.trusted_keys)?;
        let linked = self.linked(&opened)?;
        let limits = match &opened.manifest {
            Some(manifest) => {
                check_manifest(manifest, &linked).map_err(|reason| differs(&opened, reason))?;
                Limits::asked(manifest, &self.shared.limits).map_err(|reason| differs(&opened, reason))?
            }
            None => Limits::of_host(&self.shared.limits),
        };
        let Opened { file, source, manifest, bundle, .. } = opened;
        let parts = Parts { path: file, source, manifest, bundle, limits: Arc::new(limits), linked };
        let plugin = Plugin { parts: Arc::new(parts) };
        self.check_range(&plugin)?;
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
        let indices =
            plugin.parts.linked.exports.prompts.clone().ok_or_else(|| wrong_kind(plugin, PluginKind::Prompt))?;
        Ok(Box::new(PromptPlugin::new(self.configure(plugin, settings, None)?, indices)))
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
        let indices =
            plugin.parts.linked.exports.filters.clone().ok_or_else(|| wrong_kind(plugin, PluginKind::Filter))?;
        Ok(Box::new(FilterPlugin::new(self.configure(plugin, settings, None)?, indices)))
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
        self.reward_in(plugin, settings, RewardForm::Packed)
    }

    /// As [`PluginHost::reward_of`], in one form where the plugin offers several; for tests of plugins.
    ///
    /// # Errors
    /// As [`PluginHost::reward_of`].
    pub fn reward_in(
        &self,
        plugin: &Plugin,
        settings: &PluginSettings,
        form: RewardForm,
    ) -> Result<Box<dyn RewardModel>, PluginError> {
        let indices =
            plugin.parts.linked.exports.rewards.clone().ok_or_else(|| wrong_kind(plugin, PluginKind::Reward))?;
        Ok(Box::new(RewardPlugin::new(self.configure(plugin, settings, None)?, indices, form)?))
    }

    /// A scorer of style. `model` is what the plugin's `style-model.classify` asks, and may itself run no plugin: the call that
    /// asks it holds a slot.
    ///
    /// # Errors
    /// Not a style scorer plugin; or a setting that it does not know or accept.
    pub fn style_scorer_of(
        &self,
        plugin: &Plugin,
        settings: &PluginSettings,
        model: Option<Arc<dyn StyleModel>>,
    ) -> Result<Box<dyn StyleScorer>, PluginError> {
        let indices = plugin.parts.linked.exports.style_scores.clone();
        let indices = indices.ok_or_else(|| wrong_kind(plugin, PluginKind::StyleScorer))?;
        Ok(Box::new(StylePlugin::new(self.configure(plugin, settings, model)?, indices)))
    }

    /// Compiles and links a component, once in the life of this host.
    fn linked(&self, opened: &Opened) -> Result<Arc<Linked>, PluginError> {
        let shared = &*self.shared;
        let lock = || shared.linked.lock().unwrap_or_else(PoisonError::into_inner);
        let digest = opened.digest();
        if let Some(linked) = lock().get(&digest) {
            return Ok(linked.clone());
        }
        let (bytes, timeout_ms) = (opened.component(), shared.limits.compile_timeout_ms);
        let component = shared.cache.component(&shared.engine, &shared.compiler, timeout_ms, bytes, &digest);
        let component =
            component.map_err(|error| PluginError::Compile { path: opened.file.clone(), reason: error.to_string() })?;
        let (exports, kinds) = load::link(&shared.engine, &opened.file, &component)?;
        let log_budget = Arc::new(LogBudget::new(shared.limits.log_bytes));
        let (name, version) = self.describe(&opened.file, &exports, &log_budget)?;
        let (title, n_bytes, n_dropped) = (format!("{name} {version}"), bytes.len(), Arc::default());
        let linked = Arc::new(Linked { name, version, title, digest, n_bytes, kinds, exports, n_dropped, log_budget });
        Ok(lock().entry(linked.digest.clone()).or_insert(linked).clone())
    }

    /// Name and version, as the plugin says itself.
    fn describe(
        &self,
        file: &Path,
        exports: &Exports,
        log_budget: &Arc<LogBudget>,
    ) -> Result<(String, String), PluginError> {
        let shared = &*self.shared;
        let caller = Caller {
            name: file.display().to_string().into(),
            version: "(not yet described)".into(),
            title: file.display().to_string().into(),
            exports: exports.clone(),
            settings: Arc::default(),
            style_model: None,
            limits: Arc::new(Limits::of_host(&shared.limits)),
            slots: shared.slots.clone(),
            observer: shared.observer.clone(),
            n_dropped: Arc::default(),
            log_budget: log_budget.clone(),
        };
        let job = |store: &mut _, instance: &_| {
            exports.check_types(store, instance)?;
            exports.info.load(&mut *store, instance)?.call_describe(store)
        };
        let said = caller.call("info.describe", Load::of(1), job)?;
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

    /// Under its default settings, a reward must declare the range that its manifest promises. One that cannot be used without
    /// settings is not asked.
    fn check_range(&self, plugin: &Plugin) -> Result<(), PluginError> {
        let Some((min, max)) = plugin.manifest().and_then(|manifest| manifest.plugin.range) else { return Ok(()) };
        let reward = match self.reward_of(plugin, &PluginSettings::new()) {
            Ok(reward) => reward,
            Err(PluginError::Setting { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let declared = reward.range();
        if declared == (RewardRange { min, max }) {
            return Ok(());
        }
        let reason = format!(
            "its plugin.toml says that its range is {min} to {max}; under default settings the component declares {} to {}",
            declared.min, declared.max
        );
        Err(PluginError::Manifest { path: plugin.path().to_owned(), reason })
    }

    fn caller(
        &self,
        plugin: &Plugin,
        settings: BTreeMap<String, String>,
        style: Option<Arc<dyn StyleModel>>,
    ) -> Caller {
        let (shared, parts) = (&*self.shared, &*plugin.parts);
        Caller {
            name: parts.linked.name.as_str().into(),
            version: parts.linked.version.as_str().into(),
            title: parts.linked.title.as_str().into(),
            exports: parts.linked.exports.clone(),
            settings: Arc::new(settings),
            style_model: style,
            limits: parts.limits.clone(),
            slots: shared.slots.clone(),
            observer: shared.observer.clone(),
            n_dropped: parts.linked.n_dropped.clone(),
            log_budget: parts.linked.log_budget.clone(),
        }
    }

    /// Checks the settings against the manifest, lets the plugin check them, and refuses those that it does not look at.
    fn configure(
        &self,
        plugin: &Plugin,
        values: &PluginSettings,
        style: Option<Arc<dyn StyleModel>>,
    ) -> Result<Caller, PluginError> {
        let refused = |key: &str, message: String| PluginError::Setting {
            plugin: plugin.parts.linked.title.clone(),
            key: key.into(),
            message,
        };
        let promised = plugin.manifest().map_or(Ok(()), |manifest| manifest.check_settings(values));
        promised.map_err(|problem| refused(&problem.key, problem.message))?;
        let caller = self.caller(plugin, settings::rendered(values), style);
        let (checked, known) = caller.call("info.check-settings", Load::of(1), |store, instance| {
            let checked = caller.exports.info.load(&mut *store, instance)?.call_check_settings(&mut *store)?;
            Ok((checked, std::mem::take(&mut store.data_mut().keys_read)))
        })?;
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

fn differs(opened: &Opened, reason: String) -> PluginError {
    PluginError::Manifest { path: opened.file.clone(), reason }
}

/// What a manifest says of its component: id, version and kinds.
///
/// # Errors
/// A sentence with what each of the two says.
fn check_manifest(manifest: &Manifest, linked: &Linked) -> Result<(), String> {
    let said = &manifest.plugin;
    let names = |kinds: &[PluginKind]| kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ");
    let facts = [
        ("id", said.id.clone(), linked.name.clone()),
        ("version", said.version.to_string(), linked.version.clone()),
        ("kinds", names(&said.kinds), names(&linked.kinds)),
    ];
    match facts.into_iter().find(|(_, said, is)| said != is) {
        None => Ok(()),
        Some((key, said, is)) => {
            Err(format!("its plugin.toml says `{said}` under `plugin.{key}`; the component says `{is}`"))
        }
    }
}

fn wrong_kind(plugin: &Plugin, expected: PluginKind) -> PluginError {
    let kinds: Vec<_> = plugin.kinds().iter().map(|kind| kind.name()).collect();
    PluginError::WrongKind {
        plugin: plugin.parts.linked.title.clone(),
        actual: kinds.join(" and "),
        expected: expected.name(),
    }
}

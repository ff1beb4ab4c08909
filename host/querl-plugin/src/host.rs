//! The host: loads plugins, and opens a plugin's ports.
//!
//! Where a limit comes from: `plugins.limits` of the configuration ([`HostOptions::limits`]), lowered by the plugin's manifest
//! (`Limits::with_manifest`). Fuel is set for each call in `Caller::new_store`; the limit of time is set
//! there too, and checked at ticks of the epoch, which a thread of `engine::start` increments.

use crate::cache::{CacheAccess, CompiledCache, ComponentDigest};
use crate::call::{Caller, Observer, Rechecks};
use crate::compile::Compiler;
use crate::contract::GuestInstance;
use crate::description::Description;
use crate::engine::{self, MemoryReservation, Slots};
use crate::error::PluginError;
use crate::filter::FilterPlugin;
use crate::host_functions::OnlyStyleModel;
use crate::limits::{CallSize, Limits};
use crate::load::{self, Exports, LinkedComponent, LoadedPlugin, OpenedSource, Plugin, PluginFile, PluginKind};
use crate::log::PluginLog;
use crate::prompts::PromptPlugin;
use crate::reward::{RewardForm, RewardPlugin, StylePlugin};
use crate::series::Series;
use crate::source::SourceFolders;
use crate::text::{self, printable};
use querl_bundle::{HostInterface, Manifest, PublicKey, check_settings};
use querl_core::config::PluginLimits;
use querl_core::ports::{
    EpisodeInputs, Filter, HostFunctions, PluginFault, Prompts, RewardModel, RewardRange, StyleModel, StyleScorer,
};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use wasmtime::Engine;

/// Options of a plugin host.
#[derive(Clone)]
pub struct HostOptions {
    /// Limits of one call into a plugin.
    pub limits: PluginLimits,
    /// Where compiled plugins are cached; `None` for the user's cache folder (`$QUERL_CACHE_DIR`, `$XDG_CACHE_HOME/querl` or
    /// `~/.cache/querl`).
    pub cache_dir: Option<PathBuf>,
    /// Whether the cache of compiled plugins is only read.
    pub cache_access: CacheAccess,
    /// Which process compiles plugins that are not in the cache. The default, the host itself, can be blocked by a hostile
    /// plugin: use a child process for plugins of others.
    pub compiler: Compiler,
    /// Public keys of trusted signers: if there are any, only bundles signed by one of them are loaded.
    pub trusted_keys: Vec<PublicKey>,
    /// Whether a source folder is built if its component is missing or older than its source.
    pub source_folders: SourceFolders,
    /// Callback after every call into a plugin.
    pub observer: Option<Observer>,
    /// Which batches of rewards are scored a second time to check that results do not vary.
    pub rechecks: Rechecks,
    /// Maximum number of concurrent calls, at least 1; further calls wait in order of arrival.
    pub n_slots: u32,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self {
            limits: PluginLimits::default(),
            cache_dir: None,
            cache_access: CacheAccess::default(),
            compiler: Compiler::default(),
            trusted_keys: Vec::new(),
            source_folders: SourceFolders::default(),
            observer: None,
            rechecks: Rechecks::default(),
            n_slots: 8,
        }
    }
}

/// Settings of a plugin by key, as in the configuration.
pub type PluginSettings = BTreeMap<String, toml::Value>;

/// Creates the port of a plugin, for the first of the port's kinds that the plugin has.
type Adapt<P> = Box<dyn FnOnce(Caller, PluginKind) -> Result<Box<P>, PluginFault>>;

/// The port as which [`PluginHost::open`] opens a plugin: prompts, filter, reward or style scorer.
pub struct PluginPort<P: ?Sized> {
    kinds: &'static [PluginKind],
    functions: Option<Arc<dyn HostFunctions>>,
    adapt: Adapt<P>,
}

impl<P: ?Sized> PluginPort<P> {
    /// Sets the implementation of the host functions that plugins of contract 0.2 import; functions that are not for the kind of
    /// plugin stay unavailable. They must not call a plugin of this host: the call that they answer holds a slot.
    #[must_use]
    pub fn with_functions(self, functions: Option<Arc<dyn HostFunctions>>) -> Self {
        Self { functions, ..self }
    }
}

impl PluginPort<dyn Prompts> {
    /// The port of prompt plugins: the prompts of a tenant and the parsing of responses.
    pub fn prompts() -> Self {
        let adapt = |caller, _| Ok(Box::new(PromptPlugin::new(caller)) as Box<dyn Prompts>);
        Self { kinds: &[PluginKind::Prompt], functions: None, adapt: Box::new(adapt) }
    }
}

impl PluginPort<dyn Filter> {
    /// The port of filter plugins: which rows of the training data are kept.
    pub fn filter() -> Self {
        let adapt = |caller, _| Ok(Box::new(FilterPlugin::new(caller)) as Box<dyn Filter>);
        Self { kinds: &[PluginKind::Filter], functions: None, adapt: Box::new(adapt) }
    }
}

impl PluginPort<dyn RewardModel> {
    /// The port of reward plugins, for episodes or for groups. Batches are passed packed if the plugin supports it, else as JSON,
    /// else as records.
    pub fn reward() -> Self {
        Self::reward_as(None)
    }

    /// The port of reward plugins with batches in one form, or as records if the plugin does not support the form; for tests of
    /// plugins.
    pub fn reward_in(form: RewardForm) -> Self {
        Self::reward_as(Some(form))
    }

    fn reward_as(form: Option<RewardForm>) -> Self {
        let adapt = move |caller, kind| {
            RewardPlugin::new(caller, kind, form).map(|reward| Box::new(reward) as Box<dyn RewardModel>)
        };
        Self { kinds: &[PluginKind::Reward, PluginKind::GroupReward], functions: None, adapt: Box::new(adapt) }
    }
}

impl PluginPort<dyn StyleScorer> {
    /// The port of style scorer plugins. `model` implements `style-model.classify` for the plugin; its calls are not recorded, so
    /// that dialogues are scored in batches (for checks and tests). It must not call a plugin of this host: the call that it
    /// answers holds a slot.
    pub fn style_scorer(model: Option<Arc<dyn StyleModel>>) -> Self {
        let is_recorded = model.is_none();
        let adapt = move |caller, _| Ok(Box::new(StylePlugin { caller, is_recorded }) as Box<dyn StyleScorer>);
        let functions = model.map(|model| Arc::new(OnlyStyleModel(model)) as Arc<dyn HostFunctions>);
        Self { kinds: &[PluginKind::StyleScorer], functions, adapt: Box::new(adapt) }
    }
}

/// The plugin host: loads plugins and opens their ports. Clones share engine, cache and limits.
#[derive(Clone)]
pub struct PluginHost {
    shared: Arc<Shared>,
}

struct Shared {
    options: HostOptions,
    engine: Engine,
    slots: Arc<Slots>,
    cache: CompiledCache,
    linked: Mutex<HashMap<ComponentDigest, Arc<LinkedComponent>>>,
}

impl PluginHost {
    /// Makes a host that has loaded no plugin yet.
    ///
    /// # Errors
    /// This machine cannot run WebAssembly, for example for lack of address space.
    pub fn new(options: HostOptions) -> Result<Self, PluginError> {
        let n_slots = options.n_slots.max(1);
        let (engine, reservation) = engine::start(&options.limits, n_slots)?;
        let cache_dir = options.cache_dir.clone().or_else(querl_core::fsx::user_cache_folder);
        let mut cache = CompiledCache::open(cache_dir, &engine, options.cache_access);
        cache.reservation = reservation;
        let (slots, linked) = (Arc::new(Slots::new(n_slots)), Mutex::new(HashMap::new()));
        Ok(Self { shared: Arc::new(Shared { options, engine, slots, cache, linked }) })
    }

    /// How address space for the memories of guests is reserved, which depends on the machine and its limits.
    pub fn memory_reservation(&self) -> MemoryReservation {
        self.shared.cache.reservation
    }

    /// Loads a `.querl` bundle, a `.wasm` component, or a source folder, which is built first where any of its sources is newer and
    /// [`HostOptions::source_folders`] allows it: [`PluginHost::read`], then [`PluginHost::load_file`].
    ///
    /// # Errors
    /// As of the two.
    pub fn load(&self, path: &Path) -> Result<Plugin, PluginError> {
        self.load_file(self.read(path)?)
    }

    /// Reads the file or folder at `path` and checks its signature. No code of the plugin runs, and nothing is built.
    ///
    /// # Errors
    /// Not readable, not a plugin's file or folder, not signed by a trusted key.
    pub fn read(&self, path: &Path) -> Result<PluginFile, PluginError> {
        load::read(path, &self.shared.options.trusted_keys)
    }

    /// Builds a source folder if necessary, then compiles and links the component. The manifest, in the bundle or plugin.toml in
    /// the folder, is checked against the component.
    ///
    /// # Errors
    /// Not buildable, not a plugin for this host; a fault in `info.describe`; or the component differs from its manifest, or the
    /// manifest requests more than the host allows.
    pub fn load_file(&self, file: PluginFile) -> Result<Plugin, PluginError> {
        // Checked before a build, which takes minutes.
        let limits = match file.manifest() {
            Some(manifest) => Limits::with_manifest(manifest, &self.shared.options.limits)
                .map_err(|reason| PluginError::Manifest { path: file.path().to_owned(), reason })?,
            None => Limits::of_host(&self.shared.options.limits),
        };
        let opened = file.into_opened(self.shared.options.source_folders)?;
        let linked = self.linked(&opened)?;
        if let Some(manifest) = &opened.manifest {
            check_manifest(manifest, &linked).map_err(|reason| differs(&opened, reason))?;
        }
        let OpenedSource { file, source, manifest, bundle, .. } = opened;
        let loaded = LoadedPlugin { path: file, source, manifest, bundle, limits: Arc::new(limits), linked };
        let plugin = Plugin { loaded: Arc::new(loaded) };
        self.check_range(&plugin)?;
        Ok(plugin)
    }

    /// Configures a plugin that this host has loaded, and opens one of its ports: `host.open(&plugin, &settings,
    /// PluginPort::reward())`. A port can be called from any thread; a weight in the configuration is for the caller to apply.
    ///
    /// # Errors
    /// A plugin of another kind; a setting that it does not know or accept; a reward whose declared range is invalid.
    pub fn open<P: ?Sized>(
        &self,
        plugin: &Plugin,
        settings: &PluginSettings,
        port: PluginPort<P>,
    ) -> Result<Box<P>, PluginError> {
        let Some(kind) = port.kinds.iter().copied().find(|kind| plugin.kinds().contains(kind)) else {
            return Err(wrong_kind(plugin, port.kinds[0]));
        };
        // Rewards of contract 0.1 could import the style model, and never had one.
        let is_answered = plugin.loaded.linked.exports.series > Series::V0_1 || kind == PluginKind::StyleScorer;
        let functions = port.functions.filter(|_| is_answered).map(|functions| (kind, functions));
        let caller = self.configure(plugin, settings, functions)?;
        Ok((port.adapt)(caller, kind)?)
    }

    /// Compiles and links a component, once in the lifetime of this host.
    fn linked(&self, opened: &OpenedSource) -> Result<Arc<LinkedComponent>, PluginError> {
        let shared = &*self.shared;
        let lock = || shared.linked.lock().unwrap_or_else(PoisonError::into_inner);
        let digest = opened.digest();
        if let Some(linked) = lock().get(&digest) {
            return Ok(linked.clone());
        }
        let (bytes, timeout_ms) = (opened.component(), shared.options.limits.compile_timeout_ms);
        let component = shared.cache.component(&shared.engine, &shared.options.compiler, timeout_ms, bytes, &digest);
        let component =
            component.map_err(|error| PluginError::Compile { path: opened.file.clone(), reason: error.to_string() })?;
        let (exports, kinds) = load::link(&shared.engine, &opened.file, &component)?;
        let description = self.describe(&opened.file, &exports, kinds)?;
        let title = format!("{} {}", description.name, description.version);
        let linked = LinkedComponent {
            log: Arc::new(PluginLog::new(title.clone(), shared.options.limits.log_bytes)),
            title,
            description,
            digest,
            n_bytes: bytes.len(),
            exports,
            n_dropped: Arc::default(),
            used_names: Arc::default(),
        };
        let linked = Arc::new(linked);
        Ok(lock().entry(linked.digest.clone()).or_insert(linked).clone())
    }

    /// The component's `info.describe`, checked.
    fn describe(&self, file: &Path, exports: &Exports, kinds: Vec<PluginKind>) -> Result<Description, PluginError> {
        let shared = &*self.shared;
        let caller = Caller {
            name: file.display().to_string().into(),
            version: "(not yet described)".into(),
            title: file.display().to_string().into(),
            exports: exports.clone(),
            settings: Arc::default(),
            functions: None,
            limits: Arc::new(Limits::of_host(&shared.options.limits)),
            slots: shared.slots.clone(),
            observer: shared.options.observer.clone(),
            rechecks: shared.options.rechecks,
            inputs: EpisodeInputs::default(),
            n_dropped: Arc::default(),
            log: Arc::new(PluginLog::new(file.display().to_string(), shared.options.limits.log_bytes)),
            used_names: Arc::default(),
        };
        let described = caller.call("info.describe", CallSize::of(1), |GuestInstance { store, instance }| {
            exports.contract.check_types(GuestInstance { store: &mut *store, instance })?;
            exports.contract.describe(GuestInstance { store, instance })
        })?;
        let refused = |reason| PluginError::NotAPlugin { path: file.to_owned(), reason };
        described.checked(exports.series, kinds).map_err(refused)
    }

    /// Under its default settings, a reward must declare the range of its manifest and of its description. One that cannot be used
    /// without settings is not checked.
    fn check_range(&self, plugin: &Plugin) -> Result<(), PluginError> {
        let of_manifest = plugin.manifest().and_then(|manifest| manifest.plugin.range);
        let of_manifest = of_manifest.map(|(min, max)| ("plugin.toml", RewardRange { min, max }));
        let of_description = plugin.description().range.map(|range| ("`describe`", range));
        let Some((place, expected)) = of_manifest.or(of_description) else { return Ok(()) };
        let reward = match self.open(plugin, &PluginSettings::new(), PluginPort::reward()) {
            Ok(reward) => reward,
            Err(PluginError::Setting { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let declared = reward.range();
        if declared == expected {
            return Ok(());
        }
        let reason = format!(
            "its {place} says that its range is {} to {}; under default settings the component declares {} to {}",
            expected.min, expected.max, declared.min, declared.max
        );
        Err(PluginError::Manifest { path: plugin.path().to_owned(), reason })
    }

    /// Checks the settings against the manifest and with the plugin's `check-settings`; settings that the plugin does not read
    /// are errors.
    fn configure(
        &self,
        plugin: &Plugin,
        values: &PluginSettings,
        functions: Option<(PluginKind, Arc<dyn HostFunctions>)>,
    ) -> Result<Caller, PluginError> {
        let (shared, loaded) = (&*self.shared, &*plugin.loaded);
        let linked = &*loaded.linked;
        let refused = |key: &str, message: String| PluginError::Setting {
            plugin: linked.title.clone(),
            key: key.into(),
            message,
        };
        let of_manifest = plugin.manifest().map(|manifest| &manifest.settings).filter(|settings| !settings.is_empty());
        let of_manifest_0_1 = plugin.manifest().map(|manifest| &manifest.settings);
        let declared = of_manifest.or(linked.description.settings.as_ref()).or(of_manifest_0_1);
        let checked = declared.map_or(Ok(()), |declared| check_settings(declared, values));
        checked.map_err(|problem| refused(&problem.key, printable(&problem.message, 500)))?;
        let caller = Caller {
            name: linked.description.name.as_str().into(),
            version: linked.description.version.as_str().into(),
            title: linked.title.as_str().into(),
            exports: linked.exports.clone(),
            settings: Arc::new(text::rendered(values)),
            functions,
            limits: loaded.limits.clone(),
            slots: shared.slots.clone(),
            observer: shared.options.observer.clone(),
            rechecks: shared.options.rechecks,
            inputs: linked.description.inputs,
            n_dropped: linked.n_dropped.clone(),
            log: linked.log.clone(),
            used_names: linked.used_names.clone(),
        };
        let (checked, known) =
            caller.call("info.check-settings", CallSize::of(1), |GuestInstance { store, instance }| {
                let checked = caller.exports.contract.check_settings(GuestInstance { store: &mut *store, instance })?;
                Ok((checked, std::mem::take(&mut store.data_mut().keys_read)))
            })?;
        if let Err((key, message)) = checked {
            return Err(refused(&printable(&key, 100), printable(&message, 500)));
        }
        match values.keys().find(|key| !known.contains(*key)) {
            Some(key) => Err(refused(key, text::unknown_key(key, &known))),
            None => Ok(caller),
        }
    }
}

impl std::fmt::Debug for PluginHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PluginHost").field("limits", &self.shared.options.limits).finish_non_exhaustive()
    }
}

fn differs(opened: &OpenedSource, reason: String) -> PluginError {
    PluginError::Manifest { path: opened.file.clone(), reason }
}

/// Compares the manifest with the component's description and imports.
fn check_manifest(manifest: &Manifest, linked: &LinkedComponent) -> Result<(), String> {
    linked.description.check_manifest(manifest)?;
    let declared = &manifest.plugin.host_functions[..];
    let imported = &linked.exports.host_functions[..];
    if linked.exports.series == Series::V0_1 || declared == imported {
        return Ok(());
    }
    let names = |interfaces: &[HostInterface]| interfaces.iter().map(|one| one.name()).collect::<Vec<_>>().join(", ");
    let (declared, imported) = (names(declared), names(imported));
    Err(format!("its plugin.toml says `{declared}` under `plugin.host_functions`; the component imports `{imported}`"))
}

fn wrong_kind(plugin: &Plugin, expected: PluginKind) -> PluginError {
    let kinds: Vec<_> = plugin.kinds().iter().map(|kind| kind.name()).collect();
    PluginError::WrongKind {
        plugin: plugin.loaded.linked.title.clone(),
        actual: kinds.join(" and "),
        expected: expected.name(),
    }
}

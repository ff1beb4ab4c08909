//! The loaded plugins of a configuration, and the options of this program's plugin hosts.

use crate::environment::WeightedReward;
use crate::failure::{PluginKey, Stop};
use crate::faults::{FaultLog, Logged};
use crate::host_functions::RunHostFunctions;
use crate::ledger::Inputs;
use crate::pins::{self, Pins};
use crate::plugin_activity::CallMeter;
use anyhow::Context;
use querl_bundle::lock::{LockEntry, LockSource};
use querl_bundle::oci::{Credentials, PinnedReference, Transport};
use querl_bundle::{BundleError, HostInterface, Manifest, PublicKey};
use querl_core::config::{
    Config, JudgeConfig, JudgeForm, JudgeKind, PluginLimits, PluginsConfig, RetrievalKind, is_registry_reference,
};
use querl_core::fsx::user_cache_folder;
use querl_core::ports::{EpisodeInputs, Filter, HostFunctions, InputUse, Prompts, RewardModel};
use querl_core::run_dir::RunDir;
use querl_data::rubric_answer;
use querl_plugin::{
    CacheAccess, Compiler, HostOptions, Plugin, PluginError, PluginFile, PluginHost, PluginKind, PluginPort,
    PluginSettings, Source, SourceFolders,
};
use querl_style::{SharedStyleModel, StyleReward, Undecided, unknown_class};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use toml::Value;

/// All loaded plugins of a run.
pub struct Plugins {
    /// The prompt plugin.
    pub prompts: Arc<dyn Prompts>,
    /// The filters, in the order in which they are applied.
    pub filters: Vec<Arc<dyn Filter>>,
    /// Whether a filter calls word segmentation, whose dictionary is then an input of the stage.
    pub(crate) filters_use_words: bool,
    pub(crate) rewards: Vec<WeightedReward>,
    /// Number of rewards that call the judge through a host function.
    pub(crate) n_rewards_ask_judge: usize,
    /// The style model of `plugins.style_model`.
    pub style: Option<Arc<SharedStyleModel>>,
    /// The second style model, which classifies responses in the evaluation only.
    pub audit: Option<Arc<SharedStyleModel>>,
    pub(crate) host_functions: Arc<RunHostFunctions>,
    pub(crate) meter: Arc<CallMeter>,
    used: Vec<Used>,
}

/// A plugin in use, as identified in the inputs of a stage and in the lock file.
#[derive(Debug, Clone)]
pub struct Used {
    /// Entry in the lock file.
    pub entry: LockEntry,
    /// Weight in the sum of rewards; `None` for a plugin that is not a reward.
    pub weight: Option<f64>,
    /// Name prefix of the components of a reward, if there are several rewards.
    pub label: Option<String>,
    settings: String,
}

impl Used {
    /// A plugin without settings and weight.
    #[cfg(test)]
    pub(crate) fn pinned(entry: LockEntry) -> Self {
        Self { entry, weight: None, label: None, settings: String::new() }
    }
}

/// Purpose for which plugins are opened, which decides on building and pins.
#[derive(Clone, Copy)]
pub enum PluginUse<'a> {
    /// A run: after the comparison with the pins, source folders are built if the source is newer than the component.
    Run(&'a Pins<'a>),
    /// Inspection of a configuration: no pins are compared, and no source folder is built.
    Look,
    /// Scoring for other engines, with the pinned plugins: no source folder is built.
    Scoring(&'a Pins<'a>),
    /// A dry run, for which [`unprepared`] has compared the pins: nothing is built, fetched or written.
    DryRun,
}

/// A configured plugin that was read, and not yet built or loaded.
pub(crate) struct FoundPlugin<'a> {
    pub(crate) role: &'static str,
    pub(crate) path: &'a Path,
    /// The plugin's file or folder; `None` in a dry run for a registry reference that has not been fetched.
    pub(crate) file: Option<PluginFile>,
}

impl Plugins {
    /// Reads all plugins and checks their signatures, compares them with the pins of a run, then builds and loads them.
    ///
    /// # Errors
    /// A plugin is not signed or not the pinned one, or cannot be built, loaded or configured; a setting contains a secret; a trusted key
    /// is invalid.
    pub fn open(config: &Config, used_for: PluginUse<'_>) -> anyhow::Result<Self> {
        check_secrets(config)?;
        let (whole_config, judge, config) = (config, &config.judge, &config.plugins);
        let meter = Arc::new(CallMeter::default());
        let host = match used_for {
            PluginUse::Run(_) => PluginHost::new(HostOptions {
                trusted_keys: trusted_keys(&config.trusted_keys)?,
                source_folders: SourceFolders::Build,
                observer: Some(meter.observer()),
                ..host_options(&config.limits)?
            })?,
            PluginUse::Look | PluginUse::Scoring(_) => {
                open_host(&config.limits, &config.trusted_keys, SourceFolders::Refuse)?
            }
            PluginUse::DryRun => open_host_for_dry_run(config)?,
        };
        let style = SharedStyleModel::of(&config.style_model, "plugins.style_model.path")?.map(Arc::new);
        let audit = SharedStyleModel::of(&config.style_model.of_audit(), "plugins.style_model.audit")?.map(Arc::new);
        let host_functions = Arc::new(RunHostFunctions::new(whole_config, style.clone()));
        let found = find(config, |path| Ok(Some(read(path, &host)?)))?;
        if let PluginUse::Run(pins) | PluginUse::Scoring(pins) = used_for {
            pins.check(&found)?;
        }
        let unprepared = unprepared_of(&found);
        if !unprepared.is_empty() && !matches!(used_for, PluginUse::Run(_)) {
            return Err(PluginError::NotBuilt { paths: unprepared }.into());
        }
        let functions: Arc<dyn HostFunctions> = host_functions.clone();
        let mut loading = Loading { host, functions: functions.clone(), found: found.into_iter(), used: Vec::new() };
        let faults = match used_for {
            PluginUse::Run(pins) => Some(pins.dir.faults()),
            PluginUse::Look | PluginUse::Scoring(_) | PluginUse::DryRun => None,
        };
        let log = |role, path: &Path, settings: &PluginSettings| {
            let (path, settings, host_functions) = (path.to_owned(), settings.clone(), host_functions.clone());
            faults.clone().map(|folder| FaultLog { folder, role, path, settings, host_functions })
        };
        let plugin = loading.next(&config.prompt.settings)?;
        let opened = loading.host.open(&plugin, &config.prompt.settings, PluginPort::prompts());
        let prompts = Arc::from(opened.map_err(|error| of_key(error, "plugins.prompt.path".into()))?);
        check_judgements(judge, &prompts)?;
        let prompts: Arc<dyn Prompts> = match log("prompt", &config.prompt.path, &config.prompt.settings) {
            Some(log) => Arc::new(Logged { plugin: prompts, log }),
            None => prompts,
        };
        let mut filters: Vec<Arc<dyn Filter>> = Vec::new();
        let mut filters_use_words = false;
        for (index, filter) in config.filters.iter().enumerate() {
            let plugin = loading.next(&filter.settings)?;
            let port = PluginPort::filter().with_functions(Some(functions.clone()));
            let opened = loading.host.open(&plugin, &filter.settings, port);
            let opened = Arc::from(opened.map_err(|error| of_key(error, format!("plugins.filters[{index}].path")))?);
            filters_use_words |= plugin.host_functions().contains(&HostInterface::Words);
            filters.push(match log("filter", &filter.path, &filter.settings) {
                Some(log) => Arc::new(Logged { plugin: opened, log }),
                None => opened,
            });
        }
        let (mut rewards, mut n_rewards_ask_judge) = (Vec::new(), 0);
        for (index, reward) in config.rewards.iter().enumerate() {
            let plugin = loading.next(&reward.settings)?;
            n_rewards_ask_judge += usize::from(plugin.host_functions().contains(&HostInterface::Judge));
            let model = loading.reward(&plugin, &reward.settings, (index, style.as_ref()))?;
            let model: Arc<dyn RewardModel> = match log("reward", &reward.path, &reward.settings) {
                Some(log) => Arc::new(Logged { plugin: model, log }),
                None => model,
            };
            check_inputs(whole_config, &format!("plugins.rewards[{index}]"), plugin.id(), model.inputs())?;
            rewards.push(WeightedReward { label: plugin.id().to_owned(), model, weight: reward.weight });
        }
        let used = loading.used;
        let mut plugins = Self {
            prompts,
            filters,
            filters_use_words,
            rewards,
            n_rewards_ask_judge,
            style,
            audit,
            host_functions,
            meter,
            used,
        };
        plugins.label_rewards();
        Ok(plugins)
    }

    /// Checks that the configured style models can be loaded.
    pub(crate) fn check_style(&self) -> anyhow::Result<()> {
        [&self.style, &self.audit].into_iter().flatten().try_for_each(|model| model.check())
    }

    /// Gives the rewards unique names, and records names and weights.
    fn label_rewards(&mut self) {
        let ids: Vec<_> = self.rewards.iter().map(|reward| reward.label.as_str()).collect();
        let labels = distinct_labels(&ids);
        let used = self.used.iter_mut().filter(|used| used.entry.role == "reward");
        for ((reward, used), label) in self.rewards.iter_mut().zip(used).zip(labels) {
            used.weight = Some(reward.weight);
            used.label = Some(label.clone());
            reward.label = label;
        }
    }

    /// The plugins in use, in the order of the configuration.
    pub fn used(&self) -> &[Used] {
        &self.used
    }

    /// Adds the plugins of a role, with their order, settings and weights, to the inputs of a stage.
    pub(crate) fn add_inputs(&self, inputs: &mut Inputs, role: &str) {
        for (index, used) in self.used.iter().filter(|used| used.entry.role == role).enumerate() {
            let name = format!("{role} plugin {} ({})", index + 1, used.entry.id);
            let weight = used.weight.unwrap_or(1.0);
            inputs.text(&name, format!("{} {} weight {weight}", used.entry.sha256, used.settings));
        }
    }
}

/// Opens only the configured prompt plugin, for a command outside of a run: the plugin is not compared with pins. A source folder is built
/// if the source is newer than the component.
///
/// # Errors
/// The plugin is not signed by a trusted key, or cannot be built, loaded or configured, or a setting contains a secret.
pub(crate) fn open_prompts(config: &Config) -> anyhow::Result<Arc<dyn Prompts>> {
    check_secrets(config)?;
    let plugins = &config.plugins;
    let host = open_host(&plugins.limits, &plugins.trusted_keys, SourceFolders::Build)?;
    let plugin = host.load_file(read(&plugins.prompt.path, &host)?)?;
    Ok(Arc::from(host.open(&plugin, &plugins.prompt.settings, PluginPort::prompts())?))
}

/// Plugin hosts by limits and trusted keys, shared by tenants with the same values, since each host has a thread of its own.
#[derive(Default)]
pub(crate) struct PluginHosts(Mutex<BTreeMap<String, Arc<PluginHost>>>);

impl PluginHosts {
    fn host(&self, config: &PluginsConfig) -> anyhow::Result<Arc<PluginHost>> {
        let mut hosts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = format!("{:?} {:?}", config.limits, config.trusted_keys);
        if let Some(host) = hosts.get(&key) {
            return Ok(host.clone());
        }
        let trusted_keys = trusted_keys(&config.trusted_keys)?;
        let (source_folders, n_slots) = (SourceFolders::Refuse, n_slots());
        let options = host_options(&config.limits)?;
        let host = Arc::new(PluginHost::new(HostOptions { trusted_keys, source_folders, n_slots, ..options })?);
        hosts.insert(key, host.clone());
        Ok(host)
    }

    /// Opens the prompt plugin of a finished run, and returns it with its digest. The plugin must be the one that the run recorded; a
    /// source folder is not built.
    ///
    /// # Errors
    /// The plugin cannot be loaded or configured, or is not the recorded one, or a setting contains a secret.
    pub(crate) fn open_pinned_prompts(
        &self,
        config: &Config,
        dir: &RunDir,
    ) -> anyhow::Result<(Arc<dyn Prompts>, String)> {
        let (plugin, host) = self.load_pinned(config, dir, ("prompt", &config.plugins.prompt.path))?;
        let prompts = Arc::from(host.open(&plugin, &config.plugins.prompt.settings, PluginPort::prompts())?);
        Ok((prompts, plugin.digest().to_owned()))
    }

    /// File and lock file entry of the prompt plugin of a finished run. The file is the bundle or the component, which may have been built
    /// from a source folder.
    ///
    /// # Errors
    /// Those of [`Self::open_pinned_prompts`].
    pub(crate) fn pinned_prompts(&self, config: &Config, dir: &RunDir) -> anyhow::Result<(PathBuf, LockEntry)> {
        let path = &config.plugins.prompt.path;
        let (plugin, _) = self.load_pinned(config, dir, ("prompt", path))?;
        file_and_entry("prompt", path, &plugin)
    }

    /// As [`Self::pinned_prompts`], for every plugin in the order of the configuration: prompt, filters, rewards.
    ///
    /// # Errors
    /// Those of [`Self::open_pinned_prompts`].
    pub(crate) fn pinned_plugins(&self, config: &Config, dir: &RunDir) -> anyhow::Result<Vec<(PathBuf, LockEntry)>> {
        let file = |(role, path)| {
            let (plugin, _) = self.load_pinned(config, dir, (role, path))?;
            file_and_entry(role, path, &plugin)
        };
        configured(&config.plugins).map(file).collect()
    }

    fn load_pinned(
        &self,
        config: &Config,
        dir: &RunDir,
        (role, path): (&'static str, &Path),
    ) -> anyhow::Result<(Plugin, Arc<PluginHost>)> {
        check_secrets(config)?;
        let host = self.host(&config.plugins)?;
        let file = read(path, &host)?;
        let lock = pins::read(&dir.lock())?;
        let mut pinned = lock.iter().flat_map(|lock| &lock.entries).filter(|entry| entry.role == role).peekable();
        if let Some(digest) = file.digest()
            && pinned.peek().is_some()
            && !pinned.any(|entry| entry.sha256 == digest)
        {
            let (path, lock) = (path.display(), dir.lock());
            let message = format!(
                "{path}: not the {role} plugin that the run was made with ({}); bring that one back, or make the run again",
                lock.display()
            );
            return Err(Stop::usage(message).into());
        }
        Ok((host.load_file(file)?, host))
    }
}

fn file_and_entry(role: &str, path: &Path, plugin: &Plugin) -> anyhow::Result<(PathBuf, LockEntry)> {
    let source = if plugin.bundle().is_some() { LockSource::Bundle } else { LockSource::Component };
    let pinned = entry(role, path, plugin)?;
    Ok((plugin.path().to_owned(), LockEntry { source, manifest: None, ..pinned }))
}

/// Refuses a prompt plugin that cannot parse the answers of the rubric judge, whose format is known. A model's answers follow the plugin's
/// own prompt.
fn check_judgements(judge: &JudgeConfig, prompts: &Arc<dyn Prompts>) -> anyhow::Result<()> {
    if judge.kind != JudgeKind::Rubric || judge.form != JudgeForm::Score {
        return Ok(());
    }
    let answer = rubric_answer(4.5, "产品准确 2.0；意图明确 1.1");
    let problem = match prompts.parse_judgement(&answer)? {
        Ok(parsed) if parsed.score == 4.5 => return Ok(()),
        Ok(parsed) => format!("it reads the score {}", parsed.score),
        Err(rejection) => format!("it rejects them with `{rejection}`"),
    };
    let message = format!(
        "plugins.prompt: plugin {} cannot read the answers of judge.kind = \"rubric\", which are JSON objects such as `{answer}`: {problem}; \
         correct its parse-judgement, or use another judge",
        prompts.title()
    );
    Err(Stop::usage(message).into())
}

/// Refuses a reward that requires an input which the configuration does not provide.
fn check_inputs(config: &Config, place: &str, id: &str, inputs: EpisodeInputs) -> Result<(), Stop> {
    let retrieval = config.retrieval.kind != RetrievalKind::None;
    let judgement = config.judge.kind != JudgeKind::None;
    let style = config.plugins.style_model.path.is_some();
    let needs = [
        ("retrieval", inputs.retrieval, retrieval, "set retrieval.kind to \"embedded\" or \"http\""),
        ("judgement", inputs.judgement, judgement, "set judge.kind to \"rubric\" or \"openai\""),
        ("style", inputs.style, style, "name a classifier of `querl style train` as plugins.style_model.path"),
    ];
    let missing = needs.into_iter().find(|(_, used, is_there, _)| *used == InputUse::Required && !is_there);
    if let Some((input, _, _, remedy)) = missing {
        return Err(Stop::usage(format!(
            "{place}: plugin {id} requires the input `{input}`, which this configuration does not provide; {remedy}"
        )));
    }
    if inputs.judgement == InputUse::Required && config.judge.sample_rate == 0.0 {
        return Err(Stop::usage(format!(
            "{place}: plugin {id} requires the input `judgement`, and judge.sample_rate is 0: no training episode is judged; set it \
             above 0"
        )));
    }
    Ok(())
}

/// Role and path of each plugin in the order in which they are loaded: prompt, filters, rewards.
fn configured(config: &PluginsConfig) -> impl Iterator<Item = (&'static str, &Path)> {
    let filters = config.filters.iter().map(|filter| ("filter", &*filter.path));
    let rewards = config.rewards.iter().map(|reward| ("reward", &*reward.path));
    std::iter::once(("prompt", &*config.prompt.path)).chain(filters).chain(rewards)
}

fn find<'a>(
    config: &'a PluginsConfig,
    read: impl Fn(&Path) -> anyhow::Result<Option<PluginFile>>,
) -> anyhow::Result<Vec<FoundPlugin<'a>>> {
    configured(config).map(|(role, path)| Ok(FoundPlugin { role, path, file: read(path)? })).collect()
}

/// Compares the plugins with the pins as a run does, and returns the plugins that the run must build or fetch before it can load them,
/// without duplicates. Nothing is built, fetched or written.
pub(crate) fn unprepared(config: &PluginsConfig, pins: &Pins<'_>) -> anyhow::Result<Vec<PathBuf>> {
    let host = open_host_for_dry_run(config)?;
    let is_fetched = |path: &Path| {
        let reference = PinnedReference::parse(&path.to_string_lossy())?;
        Ok::<_, anyhow::Error>(reference.cached(&bundle_cache(&reference)?).is_some())
    };
    let found = find(config, |path| match is_registry_reference(path) && !is_fetched(path)? {
        true => Ok(None),
        false => Ok(Some(read(path, &host)?)),
    })?;
    pins.check(&found)?;
    Ok(unprepared_of(&found))
}

/// Folders without a component that is newer than their source, and bundles that were not fetched, each once.
fn unprepared_of(found: &[FoundPlugin<'_>]) -> Vec<PathBuf> {
    let mut unprepared: Vec<PathBuf> = Vec::new();
    for FoundPlugin { path, file, .. } in found {
        let is_ready = file.as_ref().is_some_and(|file| file.digest().is_some());
        if !is_ready && !unprepared.iter().any(|known| known == path) {
            unprepared.push(path.to_path_buf());
        }
    }
    unprepared
}

/// Reads a file or folder, or the bundle of a registry reference, which is fetched into the user's cache folder.
fn read(path: &Path, host: &PluginHost) -> anyhow::Result<PluginFile> {
    if !is_registry_reference(path) {
        return Ok(host.read(path)?);
    }
    let reference = PinnedReference::parse(&path.to_string_lossy())?;
    let cache = bundle_cache(&reference)?;
    let file = match reference.cached(&cache) {
        Some(file) => file,
        None => {
            let credentials = Credentials::find(reference.location())?;
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .context("cannot start the async runtime (tokio)")?;
            runtime.block_on(reference.fetch(&cache, &credentials, Transport::Secure))?
        }
    };
    host.read(&file).map_err(anyhow::Error::from).with_context(|| reference.to_string())
}

/// The cache folder for bundles of registries.
fn bundle_cache(reference: &PinnedReference) -> Result<PathBuf, Stop> {
    let cache = user_cache_folder().ok_or_else(|| {
        Stop::usage(format!("{reference}: there is no cache folder to fetch it into; set QUERL_CACHE_DIR"))
    })?;
    Ok(cache.join("bundles"))
}

/// Loads plugins one by one and records each.
struct Loading<'a> {
    host: PluginHost,
    functions: Arc<dyn HostFunctions>,
    found: std::vec::IntoIter<FoundPlugin<'a>>,
    used: Vec<Used>,
}

impl Loading<'_> {
    /// Loads the next of the plugins that were found.
    fn next(&mut self, settings: &PluginSettings) -> anyhow::Result<Plugin> {
        let FoundPlugin { role, path, file } = self.found.next().expect("every configured plugin was found");
        let plugin = self.host.load_file(file.expect("only a dry run leaves a bundle unfetched"))?;
        let entry = entry(role, path, &plugin)?;
        self.used.push(Used { entry, weight: None, label: None, settings: format!("{settings:?}") });
        Ok(plugin)
    }

    /// Loads a reward plugin, or a style scorer as a reward.
    fn reward(
        &self,
        plugin: &Plugin,
        settings: &PluginSettings,
        (index, style): (usize, Option<&Arc<SharedStyleModel>>),
    ) -> anyhow::Result<Arc<dyn RewardModel>> {
        if !scores_style(plugin) {
            let port = PluginPort::reward().with_functions(Some(self.functions.clone()));
            let opened = self.host.open(plugin, settings, port);
            return Ok(Arc::from(opened.map_err(|error| of_key(error, format!("plugins.rewards[{index}].path")))?));
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
        let port = PluginPort::style_scorer(None).with_functions(Some(self.functions.clone()));
        let scorer = self.host.open(plugin, settings, port)?;
        Ok(Arc::new(StyleReward::new(scorer)))
    }
}

/// Adds the configuration key to an error about the plugin's kind.
fn of_key(error: PluginError, key: String) -> anyhow::Error {
    match error {
        PluginError::WrongKind { .. } => anyhow::Error::from(error).context(PluginKey(key)),
        _ => error.into(),
    }
}

/// Whether a plugin among the rewards is used as a style scorer; a plugin of both kinds is used as a reward.
pub fn scores_style(plugin: &Plugin) -> bool {
    let kinds = plugin.kinds();
    let scores_episodes = kinds.iter().any(|kind| matches!(kind, PluginKind::Reward | PluginKind::GroupReward));
    kinds.contains(&PluginKind::StyleScorer) && !scores_episodes
}

/// Lock file entry of a plugin that was loaded from `path`.
fn entry(role: &str, path: &Path, plugin: &Plugin) -> anyhow::Result<LockEntry> {
    let version = plugin.version().parse().map_err(|error| {
        let (path, version) = (path.display(), plugin.version());
        Stop::usage(format!(
            "plugin {path}: it says that its version is `{version}`; expected a semantic version: {error}"
        ))
    })?;
    let source = lock_source(plugin.source());
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

pub(crate) fn lock_source(source: Source) -> LockSource {
    match source {
        Source::Bundle => LockSource::Bundle,
        Source::Component => LockSource::Component,
        Source::Folder => LockSource::Folder,
    }
}

/// Name of the hidden command with which the program compiles a plugin in a child process.
pub const COMPILE_COMMAND: &str = "__compile-plugin";

/// Opens a plugin host with `limits` that, if `keys` is not empty, accepts only bundles signed by one of `keys`.
///
/// # Errors
/// A key is invalid, or this machine cannot run WebAssembly.
pub fn open_host(limits: &PluginLimits, keys: &[String], source_folders: SourceFolders) -> anyhow::Result<PluginHost> {
    Ok(PluginHost::new(HostOptions { trusted_keys: trusted_keys(keys)?, source_folders, ..host_options(limits)? })?)
}

/// A host that builds no folder and writes no compiled plugin.
fn open_host_for_dry_run(config: &PluginsConfig) -> anyhow::Result<PluginHost> {
    let (trusted_keys, source_folders) = (trusted_keys(&config.trusted_keys)?, SourceFolders::Refuse);
    let options = host_options(&config.limits)?;
    Ok(PluginHost::new(HostOptions { trusted_keys, source_folders, cache_access: CacheAccess::Read, ..options })?)
}

/// Options of every plugin host of this program: the given limits, and compilation in a child process.
///
/// # Errors
/// The path of the running program cannot be determined.
pub fn host_options(limits: &PluginLimits) -> anyhow::Result<HostOptions> {
    let limits = limits.clone();
    Ok(HostOptions { limits, compiler: compiler()?, ..HostOptions::default() })
}

/// Number of concurrent plugin calls where each core may make one: at least the host's default, and at most 8 times it, to limit reserved
/// memory.
pub fn n_slots() -> u32 {
    let usual = HostOptions::default().n_slots;
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    u32::try_from(n_cores).unwrap_or(usual).clamp(usual, 8 * usual)
}

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Sets the path of the `querl` program, for a process that is another program, such as Python. Only the first call has an effect.
pub fn set_program(path: PathBuf) {
    // A second import of the module sets the same path.
    let _ = PROGRAM.set(path);
}

/// The compiler of plugins: the program set by [`set_program`], or else this one, run with [`COMPILE_COMMAND`].
///
/// # Errors
/// The path of the running program cannot be determined.
pub fn compiler() -> anyhow::Result<Compiler> {
    let own = || {
        std::env::current_exe().context("this program's own file cannot be found, so that it cannot compile plugins")
    };
    let program = PROGRAM.get().cloned().map_or_else(own, Ok)?;
    Ok(Compiler::Child(program, vec![COMPILE_COMMAND.to_owned()]))
}

fn trusted_keys(texts: &[String]) -> Result<Vec<PublicKey>, BundleError> {
    let key = |(index, text): (usize, &String)| PublicKey::parse(text, &format!("plugins.trusted_keys[{index}]"));
    texts.iter().enumerate().map(key).collect()
}

/// Minimum length for searching a secret within a setting: a shorter value occurs in unrelated texts, and must equal the complete setting.
const SHORTEST_PART_CHARS: usize = 8;

/// Refuses plugin settings that contain the value of an environment variable with an API key.
fn check_secrets(config: &Config) -> Result<(), Stop> {
    let variables = [&config.teacher.api_key_env, &config.judge.api_key_env, &config.rollout.api_key_env];
    let secrets: Vec<(&str, String)> = variables
        .into_iter()
        .filter_map(|name| Some((name.as_str(), std::env::var(name).ok()?.trim().to_owned())))
        .filter(|(_, value)| !value.is_empty())
        .collect();
    let plugins = &config.plugins;
    let prompt = [("plugins.prompt".to_owned(), &plugins.prompt.settings)];
    let of_filter = |(index, filter)| (format!("plugins.filters[{index}]"), filter);
    let of_reward = |(index, reward)| (format!("plugins.rewards[{index}]"), reward);
    let filters = plugins.filters.iter().map(|filter| &filter.settings).enumerate().map(of_filter);
    let rewards = plugins.rewards.iter().map(|reward| &reward.settings).enumerate().map(of_reward);
    for (place, settings) in prompt.into_iter().chain(filters).chain(rewards) {
        for (key, value) in settings {
            if let Some((variable, _)) = secrets.iter().find(|(_, secret)| holds(value, secret)) {
                return Err(Stop::usage(format!(
                    "{place}.settings.{key} holds the value of the environment variable {variable}; a secret must not \
                     reach a plugin, so take it out"
                )));
            }
        }
    }
    Ok(())
}

fn holds(value: &Value, secret: &str) -> bool {
    let is_in = |text: &str| match secret.chars().count() < SHORTEST_PART_CHARS {
        true => text.trim() == secret,
        false => text.contains(secret),
    };
    match value {
        Value::String(text) => is_in(text),
        Value::Array(items) => items.iter().any(|item| holds(item, secret)),
        Value::Table(table) => table.iter().any(|(key, item)| is_in(key) || holds(item, secret)),
        number => is_in(&number.to_string()),
    }
}

/// The ids, unique: repeated ids are numbered in the order of the configuration: `reward-brevity`, `reward-brevity#2`. Ids have no `#`.
fn distinct_labels(ids: &[&str]) -> Vec<String> {
    let label = |(index, id): (usize, &&str)| match ids[..index].iter().filter(|earlier| *earlier == id).count() {
        0 => (*id).to_owned(),
        n_earlier => format!("{id}#{}", n_earlier + 1),
    };
    ids.iter().enumerate().map(label).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serving::deployment::MINIMAL_CONFIG;

    #[test]
    fn a_secret_is_found_wherever_it_stands() {
        let found = |setting: &str, secret: &str| {
            let table: toml::Table = setting.parse().unwrap();
            holds(&table["s"], secret)
        };
        assert!(found("s = 'Bearer sk-1234567'", "sk-1234567"));
        assert!(found("s = ['a', { b = 'sk-1234567' }]", "sk-1234567"));
        assert!(found("s = { sk-1234567 = 1 }", "sk-1234567"));
        assert!(found("s = 123456789", "123456789"));
        assert!(!found("s = '糖'", "sk-1234567"));
    }

    #[test]
    fn a_reward_that_requires_judgements_is_refused_where_no_episode_is_judged() {
        let check = |judge: &str, judgement: InputUse| {
            let config: Config = toml::from_str(&format!("{MINIMAL_CONFIG}\n[judge]\n{judge}\n")).unwrap();
            let inputs = EpisodeInputs { judgement, ..EpisodeInputs::default() };
            check_inputs(&config, "plugins.rewards[0]", "a", inputs).map_err(|error| error.to_string())
        };
        let refused = check("kind = 'rubric'\nsample_rate = 0", InputUse::Required).unwrap_err();
        let expected = "plugins.rewards[0]: plugin a requires the input `judgement`, and judge.sample_rate is 0: no training episode is \
                        judged; set it above 0";
        assert_eq!(refused, expected);
        assert_eq!(check("kind = 'rubric'\nsample_rate = 0", InputUse::Optional), Ok(()));
        assert_eq!(check("kind = 'rubric'\nsample_rate = 0.1", InputUse::Required), Ok(()));
        let refused = check("kind = 'none'\nsample_rate = 0", InputUse::Required).unwrap_err();
        assert!(refused.contains("does not provide; set judge.kind to"), "{refused}");
    }

    #[test]
    fn a_short_value_counts_where_it_is_the_whole_setting() {
        let text = |text: &str| Value::String(text.into());
        assert!(holds(&text(" none "), "none") && !holds(&text("none of these"), "none"));
    }

    #[test]
    fn a_plugin_that_is_used_twice_has_two_names() {
        assert_eq!(distinct_labels(&["a", "b", "a", "a"]), ["a", "b", "a#2", "a#3"]);
    }
}

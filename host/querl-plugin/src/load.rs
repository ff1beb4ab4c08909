//! From a path to a plugin that can be called: open a bundle, component or folder, then check and link the component.

use crate::bindings::{filters, info, packed_rewards, prompts, rewards, style_scores};
use crate::cache::ComponentDigest;
use crate::error::PluginError;
use crate::guest::{Guest, HostRefusal};
use crate::limits::Limits;
use crate::limits::{LogBudget, UsedNames};
use crate::source::SourceFolders;
use crate::{contract, source, wasi};
use querl_bundle::{ArchiveLimits, Bundle, BundleError, Manifest, PublicKey, check_component};
use querl_core::config::PluginLimits;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{Component, Instance, InstancePre, Linker};
use wasmtime::{Engine, Store};

pub use querl_bundle::Kind as PluginKind;

/// What a plugin was loaded from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A `.querl` bundle.
    Bundle,
    /// A `.wasm` component without a manifest.
    Component,
    /// A folder with source.
    Folder,
}

/// Digest and signer of a bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleInfo {
    /// Lower-case hexadecimal SHA-256 over the names and contents of all of its files but the signatures.
    pub digest: String,
    /// The trusted key that signed it. Where no keys are configured, the first that signed it.
    pub signed_by: Option<PublicKey>,
}

/// A component with its manifest, before any of its code runs.
pub(crate) struct OpenedSource {
    /// The bundle, the component, or what was built from the folder.
    pub(crate) file: PathBuf,
    pub(crate) source: Source,
    pub(crate) manifest: Option<Manifest>,
    pub(crate) bundle: Option<BundleInfo>,
    content: Content,
}

enum Content {
    Component(Vec<u8>),
    Bundle(Box<Bundle>),
}

impl OpenedSource {
    pub(crate) fn component(&self) -> &[u8] {
        match &self.content {
            Content::Component(bytes) => bytes,
            Content::Bundle(bundle) => bundle.component(),
        }
    }

    pub(crate) fn digest(&self) -> ComponentDigest {
        ComponentDigest::of(self.component())
    }
}

/// What lies at a plugin's path, read and with its signature checked. Nothing of it was built, compiled or called.
pub struct PluginFile {
    path: PathBuf,
    manifest: Option<Manifest>,
    /// `None` for a folder whose component is missing, or older than its source.
    opened: Option<OpenedSource>,
}

impl PluginFile {
    fn opened(path: &Path, opened: OpenedSource) -> Self {
        Self { path: path.to_owned(), manifest: opened.manifest.clone(), opened: Some(opened) }
    }

    /// What it is.
    pub fn source(&self) -> Source {
        self.opened.as_ref().map_or(Source::Folder, |opened| opened.source)
    }

    /// plugin.toml; `None` for a bare component.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    /// Digest and signer of the bundle; `None` without a bundle.
    pub fn bundle(&self) -> Option<&BundleInfo> {
        self.opened.as_ref()?.bundle.as_ref()
    }

    /// Lower-case hexadecimal SHA-256 of the component; `None` for a folder that has to be built.
    pub fn digest(&self) -> Option<String> {
        Some(self.opened.as_ref()?.digest().as_str().to_owned())
    }

    /// Its component, built where that is allowed and necessary.
    pub(crate) fn into_opened(self, folders: SourceFolders) -> Result<OpenedSource, PluginError> {
        match (self.opened, folders) {
            (Some(opened), _) => Ok(opened),
            (None, SourceFolders::Refuse) => Err(PluginError::NotBuilt { path: self.path }),
            (None, SourceFolders::Build) => {
                open_component(source::build(&self.path)?.component, Source::Folder, self.manifest)
            }
        }
    }
}

impl std::fmt::Debug for PluginFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PluginFile").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Reads a bundle, a component, or the component of a source folder where it is newer than its source.
pub(crate) fn read(path: &Path, trusted: &[PublicKey]) -> Result<PluginFile, PluginError> {
    let metadata = std::fs::metadata(path).map_err(|error| {
        let expected = "expected a `.querl` bundle, a `.wasm` component or a folder with its source";
        unreadable(path, format!("cannot be read: {error}; {expected}"))
    })?;
    if metadata.is_dir() {
        source::check_folder_name(path)?;
    } else if path.extension().is_some_and(|extension| extension == "querl") {
        return Ok(PluginFile::opened(path, open_bundle(path, trusted)?));
    }
    if !trusted.is_empty() {
        return Err(unsigned(path, metadata.is_dir(), trusted));
    }
    if !metadata.is_dir() {
        return Ok(PluginFile::opened(path, open_component(path.to_owned(), Source::Component, None)?));
    }
    let manifest = manifest_of_folder(path)?;
    match source::built(path)? {
        Some(component) => Ok(PluginFile::opened(path, open_component(component, Source::Folder, manifest)?)),
        None => Ok(PluginFile { path: path.to_owned(), manifest, opened: None }),
    }
}

fn open_component(file: PathBuf, source: Source, manifest: Option<Manifest>) -> Result<OpenedSource, PluginError> {
    let content = Content::Component(read_component(&file)?);
    Ok(OpenedSource { file, source, manifest, bundle: None, content })
}

/// A folder's plugin.toml, where it has one.
fn manifest_of_folder(folder: &Path) -> Result<Option<Manifest>, PluginError> {
    let path = folder.join("plugin.toml");
    // Does not follow links: a dangling link is an unreadable manifest, not a missing one.
    match std::fs::symlink_metadata(&path) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(&path, error.to_string())),
    }
    let manifest = Manifest::read(&path)?;
    if manifest.bundle.is_none() {
        return Ok(Some(manifest));
    }
    let reason =
        "it has a section `[bundle]`, which `querl plugin pack` writes; remove it from the folder's plugin.toml";
    Err(PluginError::Manifest { path, reason: reason.into() })
}

fn open_bundle(path: &Path, trusted: &[PublicKey]) -> Result<OpenedSource, PluginError> {
    let bundle = Bundle::open(path)?;
    let signed_by = match trusted {
        [] => bundle.signatures().first().map(|signature| signature.key().clone()),
        trusted => Some(bundle.verify(trusted).map_err(untrusted)?),
    };
    Ok(OpenedSource {
        file: path.to_owned(),
        source: Source::Bundle,
        manifest: Some(bundle.manifest().clone()),
        bundle: Some(BundleInfo { digest: bundle.digest().to_owned(), signed_by }),
        content: Content::Bundle(Box::new(bundle)),
    })
}

fn unsigned(path: &Path, is_folder: bool, trusted: &[PublicKey]) -> PluginError {
    let what = if is_folder { "a folder with source" } else { "a component" };
    let keys: Vec<_> = trusted.iter().map(PublicKey::to_string).collect();
    let reason =
        format!("it is {what}, which nobody signs; expected a bundle with a signature of {}", keys.join(" or "));
    PluginError::Untrusted { plugin: path.display().to_string(), reason }
}

fn untrusted(error: BundleError) -> PluginError {
    match error {
        BundleError::Untrusted { origin, message } => PluginError::Untrusted { plugin: origin, reason: message },
        other => other.into(),
    }
}

fn read_component(file: &Path) -> Result<Vec<u8>, PluginError> {
    let failed = |error: std::io::Error| unreadable(file, error.to_string());
    // Before it is opened: opening a pipe blocks until there is a writer.
    if !std::fs::metadata(file).map_err(failed)?.is_file() {
        return Err(unreadable(file, "it is not a file; expected a component".into()));
    }
    let mut bytes = Vec::new();
    let opened = std::fs::File::open(file).map_err(failed)?;
    let max_bytes = ArchiveLimits::DEFAULT.component_bytes;
    opened.take(max_bytes + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > max_bytes {
        return Err(unreadable(file, format!("it has more than the {max_bytes} bytes that a component may have")));
    }
    check_header(file, &bytes)?;
    Ok(bytes)
}

fn unreadable(path: &Path, reason: String) -> PluginError {
    PluginError::Unreadable { path: path.to_owned(), reason }
}

/// Detects files that are commonly mistaken for a component, before compilation.
fn check_header(path: &Path, bytes: &[u8]) -> Result<(), PluginError> {
    let checked = match bytes {
        [0x7f, b'E', b'L', b'F', ..] => Err("is native code; expected a component".to_owned()),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            Err("is compressed; expected a component, or a bundle with the extension `querl`".to_owned())
        }
        bytes => check_component(bytes),
    };
    checked.map_err(|reason| PluginError::NotAPlugin { path: path.to_owned(), reason: format!("it {reason}") })
}

/// A plugin that was checked and can be configured.
#[derive(Clone)]
pub struct Plugin {
    pub(crate) loaded: Arc<LoadedPlugin>,
}

/// What a plugin is made of.
pub(crate) struct LoadedPlugin {
    pub(crate) path: PathBuf,
    pub(crate) source: Source,
    pub(crate) manifest: Option<Manifest>,
    pub(crate) bundle: Option<BundleInfo>,
    pub(crate) limits: Arc<Limits>,
    pub(crate) linked: Arc<LinkedComponent>,
}

/// A component that is compiled, linked and described.
pub(crate) struct LinkedComponent {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) title: String,
    pub(crate) digest: ComponentDigest,
    pub(crate) n_bytes: usize,
    pub(crate) kinds: Vec<PluginKind>,
    pub(crate) exports: Exports,
    /// Items dropped at limits in the lifetime of the host.
    pub(crate) n_dropped: Arc<AtomicU64>,
    /// What it may log in the lifetime of the host.
    pub(crate) log_budget: Arc<LogBudget>,
    /// The names of components and the codes of rejections in the lifetime of the host.
    pub(crate) used_names: Arc<UsedNames>,
}

/// The exports of a component, looked up once.
#[derive(Clone)]
pub(crate) struct Exports {
    pub(crate) pre: InstancePre<Guest>,
    pub(crate) info: info::GuestIndices,
    pub(crate) prompts: Option<prompts::GuestIndices>,
    pub(crate) filters: Option<filters::GuestIndices>,
    pub(crate) rewards: Option<rewards::GuestIndices>,
    /// The same as `rewards`, in one block of bytes.
    pub(crate) packed_rewards: Option<packed_rewards::GuestIndices>,
    pub(crate) style_scores: Option<style_scores::GuestIndices>,
}

impl Exports {
    /// Checks that the functions have the contract's types. Only an instance knows them.
    pub(crate) fn check_types(&self, store: &mut Store<Guest>, instance: &Instance) -> wasmtime::Result<()> {
        fn of_contract<T>(interface: &str, loaded: Option<wasmtime::Result<T>>) -> wasmtime::Result<()> {
            let Some(Err(error)) = loaded else { return Ok(()) };
            Err(HostRefusal(format!("its `{interface}` is not of the contract's types: {}", error.root_cause())).into())
        }
        of_contract("info", Some(self.info.load(&mut *store, instance)))?;
        of_contract("prompts", self.prompts.as_ref().map(|prompts| prompts.load(&mut *store, instance)))?;
        of_contract("filters", self.filters.as_ref().map(|filters| filters.load(&mut *store, instance)))?;
        of_contract("rewards", self.rewards.as_ref().map(|rewards| rewards.load(&mut *store, instance)))?;
        of_contract("packed-rewards", self.packed_rewards.as_ref().map(|packed| packed.load(&mut *store, instance)))?;
        of_contract("style-scores", self.style_scores.as_ref().map(|scores| scores.load(&mut *store, instance)))
    }
}

impl Plugin {
    /// The plugin's name, from `info.describe`.
    pub fn id(&self) -> &str {
        &self.loaded.linked.name
    }

    /// The plugin's version, from `info.describe`.
    pub fn version(&self) -> &str {
        &self.loaded.linked.version
    }

    /// Lower-case hexadecimal SHA-256 of the component.
    pub fn digest(&self) -> &str {
        self.loaded.linked.digest.as_str()
    }

    /// The kinds that it exports; at least one.
    pub fn kinds(&self) -> &[PluginKind] {
        &self.loaded.linked.kinds
    }

    /// Whether a reward exports `packed-rewards` in addition to `rewards`.
    pub fn has_packed_rewards(&self) -> bool {
        self.loaded.linked.exports.packed_rewards.is_some()
    }

    /// The configured file, or the component that was built from the configured folder.
    pub fn path(&self) -> &Path {
        &self.loaded.path
    }

    /// What it was loaded from.
    pub fn source(&self) -> Source {
        self.loaded.source
    }

    /// Size of the component in bytes.
    pub fn n_bytes(&self) -> usize {
        self.loaded.linked.n_bytes
    }

    /// plugin.toml; `None` for a bare component.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.loaded.manifest.as_ref()
    }

    /// Digest and signer of the bundle; `None` without a bundle.
    pub fn bundle(&self) -> Option<&BundleInfo> {
        self.loaded.bundle.as_ref()
    }

    /// What each of its calls may use: the host's limits, lowered by its manifest.
    pub fn limits(&self) -> &PluginLimits {
        &self.loaded.limits.values
    }
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let linked = &self.loaded.linked;
        f.debug_struct("Plugin")
            .field("title", &linked.title)
            .field("digest", &linked.digest.as_str())
            .finish_non_exhaustive()
    }
}

/// Checks what the component imports and exports, and links it.
pub(crate) fn link(
    engine: &Engine,
    path: &Path,
    component: &Component,
) -> Result<(Exports, Vec<PluginKind>), PluginError> {
    let refused = |reason: String| PluginError::NotAPlugin { path: path.to_owned(), reason };
    let failed = |error: wasmtime::Error| refused(format!("{error:#}"));
    let kinds = kinds(engine, component);
    if kinds.is_empty() {
        return Err(refused(missing_exports(engine, component)));
    }
    if !exports(engine, component, "info") {
        return Err(refused("it does not export `info` of `querl:plugin`, which every plugin does".into()));
    }
    let mut linker = Linker::new(engine);
    contract::define(&mut linker).map_err(failed)?;
    for (name, import) in component.component_type().imports(engine) {
        match import.ty {
            ComponentItem::ComponentInstance(wanted) if name.starts_with(contract::PREFIX) => {
                contract::check_import(engine, name, &wanted).map_err(refused)?;
            }
            ComponentItem::ComponentInstance(wanted) if name.starts_with("wasi:") => {
                wasi::define(&mut linker, engine, name, &wanted).map_err(failed)?;
            }
            _ => return Err(refused(format!("it imports `{name}`, which this host does not offer"))),
        }
    }
    let pre = linker.instantiate_pre(component).map_err(failed)?;
    let indices = |kind: PluginKind| kinds.contains(&kind).then_some(&pre);
    let exports = Exports {
        info: info::GuestIndices::new(&pre).map_err(failed)?,
        prompts: indices(PluginKind::Prompt).map(prompts::GuestIndices::new).transpose().map_err(failed)?,
        filters: indices(PluginKind::Filter).map(filters::GuestIndices::new).transpose().map_err(failed)?,
        rewards: indices(PluginKind::Reward).map(rewards::GuestIndices::new).transpose().map_err(failed)?,
        packed_rewards: exports(engine, component, "packed-rewards")
            .then(|| packed_rewards::GuestIndices::new(&pre))
            .transpose()
            .map_err(failed)?,
        style_scores: indices(PluginKind::StyleScorer)
            .map(style_scores::GuestIndices::new)
            .transpose()
            .map_err(failed)?,
        pre,
    };
    Ok((exports, kinds))
}

fn kinds(engine: &Engine, component: &Component) -> Vec<PluginKind> {
    PluginKind::ALL.into_iter().filter(|kind| exports(engine, component, kind.interface())).collect()
}

fn exports(engine: &Engine, component: &Component, interface: &str) -> bool {
    let prefix = format!("{}{interface}@", contract::PREFIX);
    let is_known = |name: &str| name.strip_prefix(&prefix).is_some_and(contract::is_known);
    component.component_type().exports(engine).any(|(name, _)| is_known(name))
}

fn missing_exports(engine: &Engine, component: &Component) -> String {
    let component_type = component.component_type();
    let mut names = component_type.exports(engine).map(|(name, _)| name);
    match names.find_map(|name| name.strip_prefix(contract::PREFIX)?.split_once('@')) {
        Some((_, version)) if !contract::is_known(version) => contract::other_version(version),
        _ => "it exports none of `prompts`, `filters`, `rewards` and `style-scores` of `querl:plugin`".into(),
    }
}

impl Plugin {
    /// The interfaces that it imports: `querl:plugin/log@0.1.0`, `wasi:clocks/monotonic-clock@0.2.6`.
    pub fn imports(&self) -> Vec<String> {
        let pre = &self.loaded.linked.exports.pre;
        pre.component().component_type().imports(pre.engine()).map(|(name, _)| name.to_owned()).collect()
    }

    /// The interfaces that it exports: `querl:plugin/info@0.1.0`, `querl:plugin/rewards@0.1.0`.
    pub fn exports(&self) -> Vec<String> {
        let pre = &self.loaded.linked.exports.pre;
        pre.component().component_type().exports(pre.engine()).map(|(name, _)| name.to_owned()).collect()
    }
}

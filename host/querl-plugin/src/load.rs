//! From a path to a plugin that can be called: open a bundle, component or folder, then check and link the component.

use crate::cache::ComponentDigest;
use crate::contract::Contract;
use crate::description::Description;
use crate::error::PluginError;
use crate::guest::Guest;
use crate::limits::{Limits, UsedNames};
use crate::log::PluginLog;
use crate::series::{self, Series};
use crate::source::SourceFolders;
use crate::{host_functions, source, v0_1, v0_2, wasi};
use querl_bundle::{ArchiveLimits, Bundle, BundleError, HostInterface, Manifest, PublicKey, check_component};
use querl_core::config::PluginLimits;
use querl_core::fsx::io_problem;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use wasmtime::Engine;
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{Component, InstancePre, Linker};

pub use querl_bundle::Kind as PluginKind;

/// The form in which a plugin is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A `.querl` bundle.
    Bundle,
    /// A `.wasm` component without a manifest.
    Component,
    /// A folder with source.
    Folder,
}

/// Digest and signer of a plugin bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleInfo {
    /// Lower-case hexadecimal SHA-256 over the names and contents of all files of the bundle except the signatures.
    pub digest: String,
    /// The trusted key that signed the bundle; if no keys are configured, the first that signed it. `None` if it is not signed.
    pub signed_by: Option<PublicKey>,
}

/// A component with its manifest, before any of its code runs.
pub(crate) struct OpenedSource {
    /// Path of the bundle, of the component, or of the component that was built from the folder.
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

/// A plugin's file or folder, read and with its signature checked. Nothing of it was built, compiled or called.
pub struct PluginFile {
    path: PathBuf,
    manifest: Option<Manifest>,
    /// The component with its manifest; `None` for a folder whose component is missing or older than its source.
    opened: Option<OpenedSource>,
}

impl PluginFile {
    fn opened(path: &Path, opened: OpenedSource) -> Self {
        Self { path: path.to_owned(), manifest: opened.manifest.clone(), opened: Some(opened) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The form in which the plugin is given.
    pub fn source(&self) -> Source {
        self.opened.as_ref().map_or(Source::Folder, |opened| opened.source)
    }

    /// The manifest, plugin.toml; `None` for a bare component.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    /// Digest and signer of the bundle; `None` for a component or a folder.
    pub fn bundle(&self) -> Option<&BundleInfo> {
        self.opened.as_ref()?.bundle.as_ref()
    }

    /// Lower-case hexadecimal SHA-256 of the component; `None` for a folder that has to be built.
    pub fn digest(&self) -> Option<String> {
        Some(self.opened.as_ref()?.digest().as_str().to_owned())
    }

    /// The component, built first if that is allowed and necessary.
    pub(crate) fn into_opened(self, folders: SourceFolders) -> Result<OpenedSource, PluginError> {
        match (self.opened, folders) {
            (Some(opened), _) => Ok(opened),
            (None, SourceFolders::Refuse) => Err(PluginError::NotBuilt { paths: vec![self.path] }),
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

/// Reads a bundle, a component, or the component of a source folder if it is newer than its source.
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

/// The plugin.toml of a folder, if there is one.
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
    let failed = |error: std::io::Error| unreadable(file, io_problem(&error));
    // Checked before opening the file, because opening a pipe blocks until there is a writer.
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

/// A loaded plugin: checked, compiled and linked, not yet configured.
#[derive(Clone)]
pub struct Plugin {
    pub(crate) loaded: Arc<LoadedPlugin>,
}

/// The parts of a loaded plugin, which clones of it share.
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
    pub(crate) description: Description,
    pub(crate) title: String,
    pub(crate) digest: ComponentDigest,
    pub(crate) n_bytes: usize,
    pub(crate) exports: Exports,
    /// Number of items dropped at limits since the host was started.
    pub(crate) n_dropped: Arc<AtomicU64>,
    pub(crate) log: Arc<PluginLog>,
    /// Names of components and codes of rejections that the plugin has used since the host was started.
    pub(crate) used_names: Arc<UsedNames>,
}

/// The exports of a component, looked up once.
#[derive(Clone)]
pub(crate) struct Exports {
    pub(crate) pre: InstancePre<Guest>,
    pub(crate) series: Series,
    pub(crate) contract: Arc<dyn Contract>,
    /// The interfaces of host functions that the component imports.
    pub(crate) host_functions: Arc<[HostInterface]>,
}

impl Plugin {
    /// The plugin's name, from `info.describe`.
    pub fn id(&self) -> &str {
        &self.loaded.linked.description.name
    }

    /// The plugin's version, from `info.describe`.
    pub fn version(&self) -> &str {
        &self.loaded.linked.description.version
    }

    /// Lower-case hexadecimal SHA-256 of the component.
    pub fn digest(&self) -> &str {
        self.loaded.linked.digest.as_str()
    }

    /// The kinds of plugin that the component exports; at least one.
    pub fn kinds(&self) -> &[PluginKind] {
        &self.loaded.linked.description.kinds
    }

    /// Whether a reward exports `packed-rewards` in addition to `rewards`.
    pub fn has_packed_rewards(&self) -> bool {
        self.loaded.linked.exports.contract.has_packed_rewards()
    }

    /// Whether a reward exports `json-rewards` in addition to `rewards`.
    pub fn has_json_rewards(&self) -> bool {
        self.loaded.linked.exports.contract.has_json_rewards()
    }

    /// The plugin's description of itself (`info.describe`).
    pub fn description(&self) -> &Description {
        &self.loaded.linked.description
    }

    /// The interfaces of host functions that the component imports, in the order of [`HostInterface::ALL`].
    pub fn host_functions(&self) -> &[HostInterface] {
        &self.loaded.linked.exports.host_functions
    }

    /// The configured file, or the component that was built from the configured folder.
    pub fn path(&self) -> &Path {
        &self.loaded.path
    }

    /// The form in which the plugin was given.
    pub fn source(&self) -> Source {
        self.loaded.source
    }

    /// Size of the component in bytes.
    pub fn n_bytes(&self) -> usize {
        self.loaded.linked.n_bytes
    }

    /// The manifest, plugin.toml; `None` for a bare component.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.loaded.manifest.as_ref()
    }

    /// Digest and signer of the bundle; `None` for a component or a folder.
    pub fn bundle(&self) -> Option<&BundleInfo> {
        self.loaded.bundle.as_ref()
    }

    /// Limits of each call into the plugin: those of the host, lowered by the manifest.
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

/// Checks the imports and exports of a component, and links it.
pub(crate) fn link(
    engine: &Engine,
    path: &Path,
    component: &Component,
) -> Result<(Exports, Vec<PluginKind>), PluginError> {
    let refused = |reason: String| PluginError::NotAPlugin { path: path.to_owned(), reason };
    let failed = |error: wasmtime::Error| refused(format!("{error:#}"));
    let exported = exported(engine, component);
    let has = |series: Series, interface: &str| exported.iter().any(|(name, its)| name == interface && *its == series);
    let kinds_of = |series: Series| -> Vec<PluginKind> {
        PluginKind::ALL.into_iter().filter(|kind| has(series, kind.interface())).collect()
    };
    let mut known = Series::ALL.into_iter().map(|series| (series, kinds_of(series)));
    let Some((series, kinds)) = known.find(|(_, kinds)| !kinds.is_empty()) else {
        return Err(refused(missing_exports(engine, component)));
    };
    if !has(series, "info") {
        return Err(refused("it does not export `info` of `querl:plugin`, which every plugin does".into()));
    }
    for (one, other) in [("rewards", "group-rewards"), ("packed-rewards", "json-rewards")] {
        if has(series, one) && has(series, other) {
            return Err(refused(format!("it exports `{one}` and `{other}`; expected one of them")));
        }
    }
    let mut linker = Linker::new(engine);
    host_functions::define(&mut linker, series).map_err(failed)?;
    let mut imported = Vec::new();
    for (name, import) in component.component_type().imports(engine) {
        match import.ty {
            ComponentItem::ComponentInstance(wanted) if name.starts_with(series::PREFIX) => {
                let interface = series.check_import(engine, name, &wanted).map_err(refused)?;
                let Some(interface) = HostInterface::from_name(interface) else { continue };
                if series > Series::V0_1 && !kinds.iter().any(|kind| interface.is_for(*kind)) {
                    let kinds: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
                    return Err(refused(format!(
                        "it imports `{name}`, which is not for a {} plugin",
                        kinds.join(" and ")
                    )));
                }
                imported.push(interface);
            }
            ComponentItem::ComponentInstance(wanted) if name.starts_with("wasi:") => {
                wasi::define(&mut linker, engine, name, &wanted).map_err(failed)?;
            }
            _ => return Err(refused(format!("it imports `{name}`, which this host does not offer"))),
        }
    }
    imported.sort();
    let pre = linker.instantiate_pre(component).map_err(failed)?;
    let contract: Arc<dyn Contract> = match series {
        Series::V0_1 => Arc::new(v0_1::Exports::new(&pre, |interface| has(series, interface)).map_err(failed)?),
        Series::V0_2 => Arc::new(v0_2::Exports::new(&pre, |interface| has(series, interface)).map_err(failed)?),
    };
    Ok((Exports { pre, series, contract, host_functions: imported.into() }, kinds))
}

/// The interfaces of the contract that a component exports in versions that this host runs.
fn exported(engine: &Engine, component: &Component) -> Vec<(String, Series)> {
    let known = |name: &str| {
        let (interface, version) = name.strip_prefix(series::PREFIX)?.split_once('@')?;
        Some((interface.to_owned(), Series::of(version)?))
    };
    component.component_type().exports(engine).filter_map(|(name, _)| known(name)).collect()
}

fn missing_exports(engine: &Engine, component: &Component) -> String {
    let component_type = component.component_type();
    let mut names = component_type.exports(engine).map(|(name, _)| name);
    match names.find_map(|name| name.strip_prefix(series::PREFIX)?.split_once('@')) {
        Some((_, version)) if Series::of(version).is_none() => series::other_version(version),
        _ => "it exports none of `prompts`, `filters`, `rewards`, `group-rewards` and `style-scores` of `querl:plugin`"
            .into(),
    }
}

impl Plugin {
    /// Names of the imported interfaces: `querl:plugin/log@0.1.0`, `wasi:clocks/monotonic-clock@0.2.6`.
    pub fn imports(&self) -> Vec<String> {
        let pre = &self.loaded.linked.exports.pre;
        pre.component().component_type().imports(pre.engine()).map(|(name, _)| name.to_owned()).collect()
    }

    /// Names of the exported interfaces: `querl:plugin/info@0.1.0`, `querl:plugin/rewards@0.1.0`.
    pub fn exports(&self) -> Vec<String> {
        let pre = &self.loaded.linked.exports.pre;
        let component = pre.component().component_type();
        // componentize-py adds an instance called `exports`.
        let names = component.exports(pre.engine()).map(|(name, _)| name.to_owned());
        names.filter(|name| name.contains(':')).collect()
    }
}

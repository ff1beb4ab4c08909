//! From a component to a plugin that can be called.

use crate::bindings::{filters, info, packed_rewards, prompts, rewards, style_scores};
use crate::digest::ComponentDigest;
use crate::error::PluginError;
use crate::guest::{Guest, Refused};
use crate::limits::Limits;
use crate::log::LogBudget;
use crate::open::{BundleFacts, Source};
use crate::{contract, wasi};
use querl_bundle::Manifest;
use querl_core::config::PluginLimits;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{Component, Instance, InstancePre, Linker};
use wasmtime::{Engine, Store};

pub use querl_bundle::Kind as PluginKind;

/// A plugin that was checked and can be configured.
#[derive(Clone)]
pub struct Plugin {
    pub(crate) parts: Arc<Parts>,
}

/// What a plugin is made of.
pub(crate) struct Parts {
    pub(crate) path: PathBuf,
    pub(crate) source: Source,
    pub(crate) manifest: Option<Manifest>,
    pub(crate) bundle: Option<BundleFacts>,
    pub(crate) limits: Arc<Limits>,
    pub(crate) linked: Arc<Linked>,
}

/// A component that was compiled, checked and asked for its name.
pub(crate) struct Linked {
    pub(crate) name: String,
    pub(crate) version: String,
    /// Name and version.
    pub(crate) title: String,
    pub(crate) digest: ComponentDigest,
    pub(crate) n_bytes: usize,
    pub(crate) kinds: Vec<PluginKind>,
    pub(crate) exports: Exports,
    /// Items dropped at limits over the life of the host.
    pub(crate) n_dropped: Arc<AtomicU64>,
    /// What it may log over the life of the host.
    pub(crate) log_budget: Arc<LogBudget>,
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
    /// Whether the functions are of the contract's types, which only an instance can be asked.
    ///
    /// # Errors
    /// One is not: in words for a person.
    pub(crate) fn check_types(&self, store: &mut Store<Guest>, instance: &Instance) -> wasmtime::Result<()> {
        fn of_contract<T>(interface: &str, loaded: Option<wasmtime::Result<T>>) -> wasmtime::Result<()> {
            let Some(Err(error)) = loaded else { return Ok(()) };
            Err(Refused(format!("its `{interface}` is not of the contract's types: {}", error.root_cause())).into())
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
    /// The plugin's name, as it says itself.
    pub fn id(&self) -> &str {
        &self.parts.linked.name
    }

    /// The plugin's version, as it says itself.
    pub fn version(&self) -> &str {
        &self.parts.linked.version
    }

    /// Lower-case hexadecimal SHA-256 of the component.
    pub fn digest(&self) -> &str {
        self.parts.linked.digest.as_str()
    }

    /// What it is for; at least one kind.
    pub fn kinds(&self) -> &[PluginKind] {
        &self.parts.linked.kinds
    }

    /// Whether a reward offers the packed form of its batches beside that of records.
    pub fn has_packed_rewards(&self) -> bool {
        self.parts.linked.exports.packed_rewards.is_some()
    }

    /// The configured file, or the component that was built from the configured folder.
    pub fn path(&self) -> &Path {
        &self.parts.path
    }

    /// What it was loaded from.
    pub fn source(&self) -> Source {
        self.parts.source
    }

    /// Size of the component in bytes.
    pub fn n_bytes(&self) -> usize {
        self.parts.linked.n_bytes
    }

    /// What it says of itself in plugin.toml; `None` of a component without one.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.parts.manifest.as_ref()
    }

    /// Digest and signer of the bundle; `None` of anything else.
    pub fn bundle(&self) -> Option<&BundleFacts> {
        self.parts.bundle.as_ref()
    }

    /// What each of its calls may use: the host's limits, lowered to those that it asks for.
    pub fn limits(&self) -> &PluginLimits {
        &self.parts.limits.values
    }
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let linked = &self.parts.linked;
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

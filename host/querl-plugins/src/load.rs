//! From a file to a plugin that can be called.

use crate::bindings::{filters, info, prompts, rewards};
use crate::error::PluginError;
use crate::guest::Guest;
use crate::{contract, source, wasi};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use wasmtime::Engine;
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{Component, InstancePre, Linker};

/// A larger file is not a plugin. A Python component has about 18 MB.
const MAX_COMPONENT_BYTES: u64 = 64 << 20;

/// A component that was checked and can be called.
#[derive(Clone)]
pub struct Plugin {
    pub(crate) parts: Arc<Parts>,
}

/// What a plugin is made of.
pub(crate) struct Parts {
    pub(crate) path: PathBuf,
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) digest: String,
    pub(crate) kinds: Vec<PluginKind>,
    /// Name and version.
    pub(crate) title: Arc<str>,
    pub(crate) exports: Exports,
}

/// The exports of a component, looked up once.
#[derive(Clone)]
pub(crate) struct Exports {
    pub(crate) pre: InstancePre<Guest>,
    pub(crate) info: info::GuestIndices,
    pub(crate) prompts: Option<prompts::GuestIndices>,
    pub(crate) filters: Option<filters::GuestIndices>,
    pub(crate) rewards: Option<rewards::GuestIndices>,
}

/// What a plugin is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PluginKind {
    /// A tenant's prompts.
    Prompt,
    /// Drops samples.
    Filter,
    /// Scores episodes.
    Reward,
    /// Scores the style of answers.
    StyleScorer,
}

impl PluginKind {
    /// `prompt`, `filter`, `reward`, `style-scorer`: the names of the worlds.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::Filter => "filter",
            Self::Reward => "reward",
            Self::StyleScorer => "style-scorer",
        }
    }

    fn interface(self) -> &'static str {
        match self {
            Self::Prompt => "prompts",
            Self::Filter => "filters",
            Self::Reward => "rewards",
            Self::StyleScorer => "style-scores",
        }
    }

    const ALL: [Self; 4] = [Self::Prompt, Self::Filter, Self::Reward, Self::StyleScorer];
}

impl Plugin {
    /// The plugin's name, as it says itself.
    pub fn id(&self) -> &str {
        &self.parts.name
    }

    /// The plugin's version, as it says itself.
    pub fn version(&self) -> &str {
        &self.parts.version
    }

    /// Lower-case hexadecimal SHA-256 of the component.
    pub fn digest(&self) -> &str {
        &self.parts.digest
    }

    /// What it is for; at least one kind.
    pub fn kinds(&self) -> &[PluginKind] {
        &self.parts.kinds
    }

    /// The component: the configured file, or what was built from the configured folder.
    pub fn path(&self) -> &Path {
        &self.parts.path
    }
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts = &self.parts;
        f.debug_struct("Plugin").field("title", &parts.title).field("digest", &parts.digest).finish_non_exhaustive()
    }
}

/// The file that `path` stands for, a source folder built first, and its bytes.
pub(crate) fn read(path: &Path) -> Result<(PathBuf, Vec<u8>), PluginError> {
    let unreadable = |reason: String| PluginError::Unreadable { path: path.to_owned(), reason };
    let metadata = std::fs::metadata(path).map_err(|error| unreadable(error.to_string()))?;
    let file = if metadata.is_dir() { source::component(path)? } else { path.to_owned() };
    let n_bytes = std::fs::metadata(&file).map_err(|error| unreadable(error.to_string()))?.len();
    if n_bytes > MAX_COMPONENT_BYTES {
        return Err(unreadable(format!("it has {n_bytes} bytes; a component may have {MAX_COMPONENT_BYTES}")));
    }
    let bytes = std::fs::read(&file).map_err(|error| unreadable(error.to_string()))?;
    check_header(&file, &bytes)?;
    Ok((file, bytes))
}

/// Tells apart what people mistake for a component, before the compiler sees it.
fn check_header(path: &Path, bytes: &[u8]) -> Result<(), PluginError> {
    let reason = match bytes {
        [0, b'a', b's', b'm', 0x0d, 0, 1, 0, ..] => return Ok(()),
        [0, b'a', b's', b'm', 1, 0, 0, 0, ..] => {
            "it is a core module; expected a component (build for wasm32-wasip2, or wrap it with `wasm-tools component new`)"
        }
        [0, b'a', b's', b'm', ..] => "it is WebAssembly of an unknown version; expected a component",
        [0x7f, b'E', b'L', b'F', ..] => "it is native code; expected a component",
        _ => "it is not WebAssembly; expected a component",
    };
    Err(PluginError::NotAPlugin { path: path.to_owned(), reason: reason.into() })
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
    let exports = Exports {
        info: info::GuestIndices::new(&pre).map_err(failed)?,
        prompts: kinds
            .contains(&PluginKind::Prompt)
            .then(|| prompts::GuestIndices::new(&pre))
            .transpose()
            .map_err(failed)?,
        filters: kinds
            .contains(&PluginKind::Filter)
            .then(|| filters::GuestIndices::new(&pre))
            .transpose()
            .map_err(failed)?,
        rewards: kinds
            .contains(&PluginKind::Reward)
            .then(|| rewards::GuestIndices::new(&pre))
            .transpose()
            .map_err(failed)?,
        pre,
    };
    Ok((exports, kinds))
}

fn kinds(engine: &Engine, component: &Component) -> Vec<PluginKind> {
    let component_type = component.component_type();
    let exports: Vec<_> = component_type.exports(engine).map(|(name, _)| name.to_owned()).collect();
    let has = |kind: &PluginKind| {
        let prefix = format!("{}{}@{}", contract::PREFIX, kind.interface(), contract::SERIES);
        exports.iter().any(|name| name.starts_with(&prefix))
    };
    PluginKind::ALL.into_iter().filter(has).collect()
}

fn missing_exports(engine: &Engine, component: &Component) -> String {
    let component_type = component.component_type();
    let mut names = component_type.exports(engine).map(|(name, _)| name);
    match names.find_map(|name| name.strip_prefix(contract::PREFIX)?.split_once('@')) {
        Some((_, version)) if !version.starts_with(contract::SERIES) => contract::other_version(version),
        _ => "it exports none of `prompts`, `filters`, `rewards` and `style-scores` of `querl:plugin`".into(),
    }
}

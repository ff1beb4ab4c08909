//! `plugin.toml`: what a plugin is, which settings it has, which limits it requests.

use crate::archive::ArchiveLimits;
use crate::document;
use crate::error::BundleError;
use querl_core::config::PluginLimits;
use querl_core::fsx::digest_hex;
use semver::Version;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::Value;

pub use settings::{SettingProblem, SettingSpec, SettingType, check_settings};

mod parse;
mod settings;

/// The newest version of the contract (`wit/`) that this host implements: what new plugins are built for.
pub const CONTRACT: Version = Version::new(0, 2, 0);
/// The versions of the contract that this host implements, oldest first.
pub const CONTRACTS: [Version; 2] = [Version::new(0, 1, 0), CONTRACT];
/// Version of the layout of a `.querl` archive.
pub const BUNDLE_FORMAT: u64 = 1;
/// The manifest's name in a plugin's folder and in a bundle.
pub(crate) const FILE_NAME: &str = "plugin.toml";
/// Maximum size of a manifest: the limit for text files of a bundle.
const LARGEST_BYTES: u64 = ArchiveLimits::DEFAULT.text_bytes;

querl_core::named_enum! {
    /// Kind of a plugin.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Kind {
        /// Renders a tenant's prompts and parses the responses to them.
        Prompt = "prompt",
        /// Keeps or drops samples of the dataset.
        Filter = "filter",
        /// Scores episodes.
        Reward = "reward",
        /// Scores all episodes of a query together.
        GroupReward = "group-reward",
        /// Scores the style of answers.
        StyleScorer = "style-scorer",
    }
}

impl Kind {
    /// The interface that a component of this kind exports.
    pub fn interface(self) -> &'static str {
        match self {
            Self::Prompt => "prompts",
            Self::Filter => "filters",
            Self::Reward => "rewards",
            Self::GroupReward => "group-rewards",
            Self::StyleScorer => "style-scores",
        }
    }
}

querl_core::named_enum! {
    /// An interface of host functions, which a plugin of contract 0.2 may import.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum HostInterface {
        /// The policy's tokenizer.
        Tokens = "tokens",
        /// Word segmentation.
        Words = "words",
        /// The text encoder.
        Similarity = "similarity",
        /// The judge.
        Judge = "judge",
        /// The style model.
        StyleModel = "style-model",
    }
}

impl HostInterface {
    /// True if plugins of this kind may import this interface.
    pub fn is_for(self, kind: Kind) -> bool {
        match kind {
            Kind::Prompt => false,
            Kind::Filter => self == Self::Words,
            Kind::Reward | Kind::GroupReward => true,
            Kind::StyleScorer => self == Self::StyleModel,
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

querl_core::named_enum! {
    /// Language of a plugin's source.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Language {
        /// Rust, built by cargo.
        Rust = "rust",
        /// Python, built by componentize-py.
        Python = "python",
        /// JavaScript, built by componentize-js.
        JavaScript = "javascript",
    }
}

impl Language {
    /// Language of the plugin in a folder, by its build file; `None` if there is no known build file.
    pub fn of_folder(folder: &Path) -> Option<Self> {
        let marks = [("Cargo.toml", Self::Rust), ("package.json", Self::JavaScript), ("pyproject.toml", Self::Python)];
        marks.into_iter().find(|(file, _)| folder.join(file).is_file()).map(|(_, language)| language)
    }
}

/// A parsed and checked manifest (`plugin.toml`).
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// Identity of the plugin.
    pub plugin: PluginSection,
    /// Declared settings by key.
    pub settings: BTreeMap<String, SettingSpec>,
    /// Requested limits.
    pub limits: RequestedLimits,
    /// How the plugin is built, if declared.
    pub build: Option<BuildSection>,
    /// What packing added; `None` in a source folder.
    pub bundle: Option<BundleSection>,
}

/// Section `[plugin]` of the manifest: identity, kinds and host functions.
#[derive(Debug, Clone, PartialEq)]
pub struct PluginSection {
    /// Id of the plugin: 1 to 64 of `a` to `z`, `0` to `9`, `-`; equals the id that the component reports.
    pub id: String,
    /// Version of the plugin; equals the version that the component reports.
    pub version: Version,
    /// Version of the plugin contract that the plugin was built for.
    pub contract: Version,
    /// Kinds of the plugin: at least one, without repetition, in the order of [`Kind::ALL`].
    pub kinds: Vec<Kind>,
    /// Description of the plugin, one line.
    pub description: String,
    /// License, one line, usually an SPDX expression.
    pub license: String,
    /// Range of the total score (min, max) under the default settings; `Some` exactly for reward plugins.
    pub range: Option<(f64, f64)>,
    /// The host functions that the component imports, in the order of [`HostInterface::ALL`].
    pub host_functions: Vec<HostInterface>,
    /// Folder of the golden cases, relative to the plugin's folder. In a bundle always `golden`.
    pub golden: String,
}

/// Section `[limits]` of the manifest: limits that the plugin requests, at most those of the host; `None` for the limit of the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestedLimits {
    /// Deterministic instruction budget of a call, independent of the number of items.
    pub fuel_per_call: Option<u64>,
    /// Deterministic instruction budget per item of a batch.
    pub fuel_per_item: Option<u64>,
    /// Wall-clock time per call, in milliseconds.
    pub timeout_ms: Option<u64>,
    /// Linear memory per instance, in bytes.
    pub memory_bytes: Option<usize>,
    /// Size of a call's result, in bytes.
    pub output_bytes: Option<usize>,
    /// Size of a call's log output, in bytes.
    pub log_bytes: Option<usize>,
    /// Calls of host functions per item.
    pub host_calls_per_item: Option<u64>,
}

impl RequestedLimits {
    /// The limits that are requested, by key, in the order of the documentation.
    pub fn by_key(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let bytes = |limit: Option<usize>| limit.map(|bytes| bytes as u64);
        let keys = [
            ("fuel_per_call", self.fuel_per_call),
            ("fuel_per_item", self.fuel_per_item),
            ("timeout_ms", self.timeout_ms),
            ("memory_bytes", bytes(self.memory_bytes)),
            ("output_bytes", bytes(self.output_bytes)),
            ("log_bytes", bytes(self.log_bytes)),
            ("host_calls_per_item", self.host_calls_per_item),
        ];
        keys.into_iter().filter_map(|(key, limit)| Some((key, limit?)))
    }
}

/// Section `[build]` of the manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuildSection {
    /// Language of the plugin's source.
    pub language: Language,
}

/// Section `[bundle]` of the manifest, which `querl plugin pack` adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleSection {
    /// Version of the layout of the archive: [`BUNDLE_FORMAT`].
    pub format: u64,
    /// Lower-case hexadecimal SHA-256 of `plugin.wasm`.
    pub component: String,
    /// Size of `plugin.wasm` in bytes.
    pub component_bytes: u64,
}

fn file_at(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(FILE_NAME) } else { path.to_owned() }
}

impl Manifest {
    /// Reads a manifest: the file itself, or `plugin.toml` in a folder.
    ///
    /// # Errors
    /// The file cannot be read, is not a regular file
    /// of at most 1 MiB, or as [`Manifest::parse`].
    pub fn read(path: &Path) -> Result<Self, BundleError> {
        let file = file_at(path);
        Self::parse(&document::read_text_file(&file, LARGEST_BYTES)?, &file.display().to_string())
    }

    /// Lower-case hexadecimal SHA-256 of the bytes of a manifest file, or of `plugin.toml` in a folder.
    ///
    /// # Errors
    /// The file
    /// cannot be read, or is not a regular file of at most 1 MiB.
    pub fn file_digest(path: &Path) -> Result<String, BundleError> {
        Ok(digest_hex(&document::read_file(&file_at(path), LARGEST_BYTES)?))
    }

    /// Parses the text of a manifest; `origin` names it in messages.
    ///
    /// # Errors
    /// Not TOML; a key that is unknown, missing or invalid; an
    /// unsupported contract version. Each message names the line.
    pub fn parse(text: &str, origin: &str) -> Result<Self, BundleError> {
        parse::manifest(text, origin)
    }

    /// File name of the plugin's bundle: `ID-VERSION.querl`.
    pub fn file_name(&self) -> String {
        format!("{}-{}.querl", self.plugin.id, self.plugin.version)
    }

    /// The manifest as TOML, with sections in the order of the documentation, keys in a fixed order and without comments. Parsing it gives
    /// an equal value.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        write_section(&mut text, "plugin", &plugin(&self.plugin));
        for (key, spec) in &self.settings {
            write_section(&mut text, &format!("settings.{key}"), &setting(spec));
        }
        let limits: Vec<_> = self.limits.by_key().map(|(key, limit)| (key, number(limit))).collect();
        if !limits.is_empty() {
            write_section(&mut text, "limits", &limits);
        }
        if let Some(build) = self.build {
            write_section(&mut text, "build", &[("language", build.language.name().into())]);
        }
        if let Some(bundle) = &self.bundle {
            let keys = [
                ("format", number(bundle.format)),
                ("component", bundle.component.as_str().into()),
                ("component_bytes", number(bundle.component_bytes)),
            ];
            write_section(&mut text, "bundle", &keys);
        }
        text
    }

    /// The limits of `host`, lowered to those that the plugin requests.
    ///
    /// # Errors
    /// The plugin requests more than the host allows:
    /// one sentence with both values and the setting to raise.
    pub fn effective_limits(&self, host: &PluginLimits) -> Result<PluginLimits, String> {
        let asked = &self.limits;
        Ok(PluginLimits {
            fuel_per_call: lower("fuel_per_call", asked.fuel_per_call, host.fuel_per_call)?,
            fuel_per_item: lower("fuel_per_item", asked.fuel_per_item, host.fuel_per_item)?,
            timeout_ms: lower("timeout_ms", asked.timeout_ms, host.timeout_ms)?,
            memory_bytes: lower("memory_bytes", asked.memory_bytes, host.memory_bytes)?,
            output_bytes: lower("output_bytes", asked.output_bytes, host.output_bytes)?,
            log_bytes: lower("log_bytes", asked.log_bytes, host.log_bytes)?,
            host_calls_per_item: lower("host_calls_per_item", asked.host_calls_per_item, host.host_calls_per_item)?,
            ..host.clone()
        })
    }
}

fn lower<N: Copy + PartialOrd + std::fmt::Display>(key: &str, asked: Option<N>, allowed: N) -> Result<N, String> {
    match asked {
        None => Ok(allowed),
        Some(asked) if asked <= allowed => Ok(asked),
        Some(asked) => Err(format!(
            "asks for a {key} of {asked}, and this host allows {allowed}; raise `plugins.limits.{key}` to {asked} or more"
        )),
    }
}

fn write_section(text: &mut String, name: &str, keys: &[(&str, Value)]) {
    if !text.is_empty() {
        text.push('\n');
    }
    text.push_str(&format!("[{name}]\n"));
    document::write_keys(text, keys);
}

fn plugin(plugin: &PluginSection) -> Vec<(&'static str, Value)> {
    let kinds: Vec<_> = plugin.kinds.iter().map(|kind| kind.name()).collect();
    let mut keys = vec![
        ("id", plugin.id.as_str().into()),
        ("version", plugin.version.to_string().into()),
        ("contract", plugin.contract.to_string().into()),
        ("kinds", kinds.into()),
        ("description", plugin.description.as_str().into()),
        ("license", plugin.license.as_str().into()),
    ];
    if let Some((min, max)) = plugin.range {
        keys.push(("range", vec![min, max].into()));
    }
    if !plugin.host_functions.is_empty() {
        let names: Vec<_> = plugin.host_functions.iter().map(|interface| interface.name()).collect();
        keys.push(("host_functions", names.into()));
    }
    keys.push(("golden", plugin.golden.as_str().into()));
    keys
}

fn setting(spec: &SettingSpec) -> Vec<(&'static str, Value)> {
    let bound = |bound: f64| match spec.kind {
        SettingType::Integer => Value::Integer(bound as i64),
        _ => Value::Float(bound),
    };
    let mut keys = vec![("type", spec.kind.name().into())];
    keys.extend(spec.default.clone().map(|default| ("default", default)));
    keys.extend(spec.minimum.map(|min| ("minimum", bound(min))));
    keys.extend(spec.maximum.map(|max| ("maximum", bound(max))));
    if !spec.choices.is_empty() {
        keys.push(("choices", spec.choices.clone().into()));
    }
    if !spec.doc.is_empty() {
        keys.push(("doc", spec.doc.as_str().into()));
    }
    keys
}

fn number(count: u64) -> Value {
    Value::Integer(i64::try_from(count).unwrap_or(i64::MAX))
}

//! `querl plugin inspect`: prints what a bundle, a component or a source folder contains, before it is used.

use crate::args::Format;
use clap::Args;
use querl_bundle::{Bundle, Manifest, SettingSpec};
use querl_core::config::PluginLimits;
use querl_core::ports::{InputUse, RewardRange};
use querl_core::text::printable;
use querl_pipeline::failure::{self, Stop};
use querl_pipeline::plugins::open_host;
use querl_plugin::{Plugin, PluginError, SourceFolders};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A bundle, a component or a source folder, which is not built
    #[arg(value_name = "PATH")]
    path: PathBuf,
    #[command(flatten)]
    format: Format,
}

/// Runs `querl plugin inspect`. A bundle that this host refuses to run is also printed, with the reason.
pub fn run(args: &InspectArgs) -> anyhow::Result<()> {
    let inspected = Inspected::open(&args.path)?;
    args.format.print(&to_json(&inspected), || to_text(&inspected))
}

struct Inspected {
    bundle: Option<Bundle>,
    manifest: Option<Manifest>,
    /// The loaded component, or why the host does not run it.
    plugin: Result<Plugin, String>,
}

impl Inspected {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let bundle = is_bundle(path).then(|| Bundle::open(path)).transpose()?;
        let loaded = open_host(&PluginLimits::default(), &[], SourceFolders::Refuse)?.load(path);
        let manifest = match &bundle {
            Some(bundle) => Some(bundle.manifest().clone()),
            None => loaded.as_ref().ok().and_then(|plugin| plugin.manifest().cloned()),
        };
        let plugin = match loaded {
            Ok(plugin) => Ok(plugin),
            Err(error) if bundle.is_some() => Err(failure::sentence(&error.into())),
            Err(error) => return Err(nothing(path, error)),
        };
        Ok(Self { bundle, manifest, plugin })
    }

    /// Settings in plugin.toml, with their descriptions, or else those that the component declares.
    fn settings(&self) -> Option<&BTreeMap<String, SettingSpec>> {
        let of_manifest = self.manifest.as_ref().map(|manifest| &manifest.settings);
        let of_component = self.plugin.as_ref().ok().and_then(|plugin| plugin.description().settings.as_ref());
        of_manifest.filter(|settings| !settings.is_empty()).or(of_component)
    }
}

fn is_bundle(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|extension| extension == "querl")
}

fn nothing(path: &Path, error: PluginError) -> anyhow::Error {
    match path.exists() {
        true => error.into(),
        false => Stop::usage(format!("{}: there is no such file or folder", path.display())).into(),
    }
}

/// Text for a terminal: one fact per line, lists indented below their title.
fn to_text(found: &Inspected) -> String {
    let mut lines = Vec::new();
    if let Some(manifest) = &found.manifest {
        lines.extend(facts(manifest));
    }
    match &found.plugin {
        Ok(plugin) => lines.extend(component_lines(plugin, found.manifest.is_some())),
        Err(reason) => lines.push(fact("refused", &format!("this host does not run it: {reason}"))),
    }
    lines.extend(found.bundle.iter().flat_map(provenance));
    lines.extend(found.settings().map(setting_lines).unwrap_or_default());
    lines.extend(found.manifest.iter().flat_map(limit_lines));
    if let Ok(plugin) = &found.plugin {
        lines.extend(listed("imports", plugin.imports()));
        lines.extend(listed("exports", plugin.exports()));
    }
    lines.extend(found.bundle.iter().flat_map(file_lines));
    lines.iter().map(|line| format!("{}\n", printable(line, usize::MAX))).collect()
}

fn fact(name: &str, value: &str) -> String {
    format!("{name:<12}{value}")
}

fn listed(title: &str, items: Vec<String>) -> Vec<String> {
    match items.is_empty() {
        true => Vec::new(),
        false => std::iter::once(title.to_owned()).chain(items.into_iter().map(|item| format!("  {item}"))).collect(),
    }
}

fn facts(manifest: &Manifest) -> Vec<String> {
    let plugin = &manifest.plugin;
    let kinds: Vec<_> = plugin.kinds.iter().map(|kind| kind.name()).collect();
    let mut lines = vec![
        fact("plugin", &format!("{} {}", plugin.id, plugin.version)),
        fact("", &plugin.description),
        fact("kinds", &kinds.join(", ")),
        fact("contract", &plugin.contract.to_string()),
        fact("licence", &plugin.license),
    ];
    lines.extend(plugin.range.map(|(min, max)| fact("range", &format!("{min} to {max}, under the default settings"))));
    lines
}

fn component_lines(plugin: &Plugin, is_described: bool) -> Vec<String> {
    let kinds: Vec<_> = plugin.kinds().iter().map(|kind| kind.name()).collect();
    let mut lines = Vec::new();
    if !is_described {
        lines.push(fact("plugin", &format!("{} {}", plugin.id(), plugin.version())));
        lines.push(fact("kinds", &kinds.join(", ")));
        lines.push(fact("contract", &plugin.description().contract));
        let range = plugin.description().range;
        lines.extend(
            range.map(|RewardRange { min, max }| fact("range", &format!("{min} to {max}, under the default settings"))),
        );
    }
    let inputs = plugin.description().inputs.used().map(|(name, used)| match used {
        InputUse::Required => name.to_owned(),
        _ => format!("{name} (optional)"),
    });
    let inputs: Vec<_> = inputs.collect();
    if !inputs.is_empty() {
        lines.push(fact("reads", &inputs.join(", ")));
    }
    let functions: Vec<_> = plugin.host_functions().iter().map(|interface| interface.name()).collect();
    if !functions.is_empty() {
        lines.push(fact("calls", &functions.join(", ")));
    }
    lines.push(fact("component", &format!("{} ({} bytes)", plugin.digest(), plugin.n_bytes())));
    lines
}

fn provenance(bundle: &Bundle) -> Vec<String> {
    let mut lines = vec![fact("bundle", bundle.digest())];
    match bundle.signatures() {
        [] => lines.push(fact("signed by", "nobody")),
        signatures => {
            lines.extend(signatures.iter().map(|signature| fact("signed by", &signature.key().to_string())));
        }
    }
    lines
}

fn setting_lines(settings: &BTreeMap<String, SettingSpec>) -> Vec<String> {
    let mut items = Vec::new();
    for (key, spec) in settings {
        let default = spec.default.as_ref().map_or("unset".to_owned(), |value| format!("default {value}"));
        items.push(format!("{key}: {}, {default}", spec.expected()));
        items.extend(spec.doc.lines().map(|line| format!("  {line}")));
    }
    listed("settings", items)
}

fn limit_lines(manifest: &Manifest) -> Vec<String> {
    let items = manifest.limits.by_key().map(|(key, value)| format!("{key} = {value}"));
    listed("asks for these limits", items.collect())
}

fn file_lines(bundle: &Bundle) -> Vec<String> {
    let items = bundle.files().map(|(name, content)| format!("{:>10}  {name}", content.len()));
    listed("files, with their bytes", items.collect())
}

/// JSON for programs. Keys that do not apply are null or empty.
fn to_json(found: &Inspected) -> Value {
    let manifest = found.manifest.as_ref();
    let plugin = found.plugin.as_ref().ok();
    let about = manifest.map(|manifest| &manifest.plugin);
    let description = plugin.map(Plugin::description);
    let text = |of_manifest: Option<String>, of_plugin: Option<&str>| of_manifest.or(of_plugin.map(str::to_owned));
    let kinds: Vec<&str> = match (about, plugin) {
        (Some(about), _) => about.kinds.iter().map(|kind| kind.name()).collect(),
        (None, Some(plugin)) => plugin.kinds().iter().map(|kind| kind.name()).collect(),
        (None, None) => Vec::new(),
    };
    let files = found.bundle.iter().flat_map(Bundle::files);
    let signers = found.bundle.iter().flat_map(|bundle| bundle.signatures());
    json!({
        "id": text(about.map(|about| about.id.clone()), plugin.map(Plugin::id)),
        "version": text(about.map(|about| about.version.to_string()), plugin.map(Plugin::version)),
        "contract": text(about.map(|about| about.contract.to_string()), description.map(|description| description.contract.as_str())),
        "kinds": kinds,
        "description": about.map(|about| &about.description),
        "license": about.map(|about| &about.license),
        "range": about.and_then(|about| about.range).or(description.and_then(|description| description.range).map(|range| (range.min, range.max))).map(|(min, max)| [min, max]),
        "sha256": plugin.map(Plugin::digest),
        "component_bytes": plugin.map(Plugin::n_bytes),
        "bundle": found.bundle.as_ref().map(Bundle::digest),
        "signers": signers.map(|signature| signature.key().to_string()).collect::<Vec<_>>(),
        "refused": found.plugin.as_ref().err(),
        "settings": found.settings().map_or_else(|| json!({}), |settings| json!(settings)),
        "inputs": description.into_iter().flat_map(|description| description.inputs.used()).map(|(name, used)| (name, used == InputUse::Required)).collect::<BTreeMap<_, _>>(),
        "host_functions": plugin.into_iter().flat_map(Plugin::host_functions).map(|interface| interface.name()).collect::<Vec<_>>(),
        "limits": manifest.into_iter().flat_map(|manifest| manifest.limits.by_key()).collect::<BTreeMap<_, _>>(),
        "imports": plugin.map(Plugin::imports).unwrap_or_default(),
        "exports": plugin.map(Plugin::exports).unwrap_or_default(),
        "files": files.map(|(name, content)| (name.to_owned(), json!(content.len()))).collect::<serde_json::Map<_, _>>(),
    })
}

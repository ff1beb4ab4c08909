//! What was found, as text and as JSON.

use super::{Found, asked};
use querl_bundle::{Bundle, Manifest};
use querl_core::text::printable;
use querl_plugin::Plugin;
use serde_json::{Value, json};

/// For a terminal: a line per fact, lists indented below their title.
pub(super) fn text(found: &Found) -> String {
    let mut lines = Vec::new();
    if let Some(manifest) = &found.manifest {
        lines.extend(facts(manifest));
    }
    match &found.plugin {
        Ok(plugin) => lines.extend(component(plugin, found.manifest.is_some())),
        Err(reason) => lines.push(fact("refused", &format!("this host does not run it: {reason}"))),
    }
    lines.extend(found.bundle.iter().flat_map(provenance));
    lines.extend(found.manifest.iter().flat_map(settings));
    lines.extend(found.manifest.iter().flat_map(limits));
    if let Ok(plugin) = &found.plugin {
        lines.extend(listed("imports", plugin.imports()));
        lines.extend(listed("exports", plugin.exports()));
    }
    lines.extend(found.bundle.iter().flat_map(files));
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

fn component(plugin: &Plugin, is_described: bool) -> Vec<String> {
    let kinds: Vec<_> = plugin.kinds().iter().map(|kind| kind.name()).collect();
    let mut lines = Vec::new();
    if !is_described {
        lines.push(fact("plugin", &format!("{} {}", plugin.id(), plugin.version())));
        lines.push(fact("kinds", &kinds.join(", ")));
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

fn settings(manifest: &Manifest) -> Vec<String> {
    let mut items = Vec::new();
    for (key, spec) in &manifest.settings {
        let default = spec.default.as_ref().map_or("unset".to_owned(), |value| format!("default {value}"));
        items.push(format!("{key}: {}, {default}", spec.expected()));
        items.extend(spec.doc.lines().map(|line| format!("  {line}")));
    }
    listed("settings", items)
}

fn limits(manifest: &Manifest) -> Vec<String> {
    let items = asked(&manifest.limits).into_iter().map(|(key, value)| format!("{key} = {value}"));
    listed("asks for these limits", items.collect())
}

fn files(bundle: &Bundle) -> Vec<String> {
    let items = bundle.files().map(|(name, content)| format!("{:>10}  {name}", content.len()));
    listed("files, with their bytes", items.collect())
}

/// For programs. Keys that do not apply are null or empty.
pub(super) fn json(found: &Found) -> Value {
    let manifest = found.manifest.as_ref();
    let plugin = found.plugin.as_ref().ok();
    let about = manifest.map(|manifest| &manifest.plugin);
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
        "contract": about.map(|about| about.contract.to_string()),
        "kinds": kinds,
        "description": about.map(|about| &about.description),
        "license": about.map(|about| &about.license),
        "range": about.and_then(|about| about.range).map(|(min, max)| [min, max]),
        "sha256": plugin.map(Plugin::digest),
        "component_bytes": plugin.map(Plugin::n_bytes),
        "bundle": found.bundle.as_ref().map(Bundle::digest),
        "signers": signers.map(|signature| signature.key().to_string()).collect::<Vec<_>>(),
        "refused": found.plugin.as_ref().err(),
        "settings": manifest.map(settings_json).unwrap_or_else(|| json!({})),
        "limits": manifest.map(|manifest| asked(&manifest.limits)).into_iter().flatten().collect::<std::collections::BTreeMap<_, _>>(),
        "imports": plugin.map(Plugin::imports).unwrap_or_default(),
        "exports": plugin.map(Plugin::exports).unwrap_or_default(),
        "files": files.map(|(name, content)| (name.to_owned(), json!(content.len()))).collect::<serde_json::Map<_, _>>(),
    })
}

fn settings_json(manifest: &Manifest) -> Value {
    let setting = |(key, spec): (&String, &querl_bundle::SettingSpec)| {
        let value = json!({
            "type": spec.kind.name(),
            "default": spec.default,
            "minimum": spec.minimum,
            "maximum": spec.maximum,
            "choices": spec.choices,
            "doc": spec.doc,
        });
        (key.clone(), value)
    };
    Value::Object(manifest.settings.iter().map(setting).collect())
}

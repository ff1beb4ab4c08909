//! A manifest as text.

use super::{AskedLimits, Manifest, PluginSection, SettingSpec, SettingType};
use toml::{Table, Value};

/// Sections in the order of the documentation, keys in a fixed order.
pub(super) fn manifest(manifest: &Manifest) -> String {
    let mut text = String::new();
    write_section(&mut text, "plugin", plugin(&manifest.plugin));
    for (key, spec) in &manifest.settings {
        write_section(&mut text, &format!("settings.{key}"), setting(spec));
    }
    let limits = limits(&manifest.limits);
    if !limits.is_empty() {
        write_section(&mut text, "limits", limits);
    }
    if let Some(build) = manifest.build {
        write_section(&mut text, "build", vec![("language", build.language.name().into())]);
    }
    if let Some(bundle) = &manifest.bundle {
        let keys = vec![
            ("format", number(bundle.format)),
            ("component", bundle.component.as_str().into()),
            ("component_bytes", number(bundle.component_bytes)),
        ];
        write_section(&mut text, "bundle", keys);
    }
    text
}

fn write_section(text: &mut String, name: &str, keys: Vec<(&str, Value)>) {
    if !text.is_empty() {
        text.push('\n');
    }
    text.push_str(&format!("[{name}]\n"));
    for (key, value) in keys {
        // One key at a time keeps our order, whatever order the library's table has.
        let line = Table::from_iter([(key.to_owned(), value)]);
        text.push_str(&line.to_string());
    }
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

fn limits(limits: &AskedLimits) -> Vec<(&'static str, Value)> {
    let bytes = |bytes: usize| number(bytes as u64);
    let keys = [
        ("fuel_per_call", limits.fuel_per_call.map(number)),
        ("fuel_per_item", limits.fuel_per_item.map(number)),
        ("timeout_ms", limits.timeout_ms.map(number)),
        ("memory_bytes", limits.memory_bytes.map(bytes)),
        ("output_bytes", limits.output_bytes.map(bytes)),
        ("log_bytes", limits.log_bytes.map(bytes)),
    ];
    keys.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
}

fn number(count: u64) -> Value {
    Value::Integer(i64::try_from(count).unwrap_or(i64::MAX))
}

//! Mapping of configuration keys to the settings of another engine, with the keys that have no equivalent.

use anyhow::Context;
use querl_core::config::{Config, RlConfig, SftConfig};
use std::fmt::Write;
use toml::{Table, Value};

/// The equivalent of a configuration key in the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Equivalent {
    /// Settings of the engine.
    Settings(Vec<String>),
    /// The reward reads the key from `querl.toml`, with the same meaning.
    Reward,
    None,
}

#[derive(Debug, Clone)]
struct MappedKey {
    key: String,
    /// The value as in TOML; empty if not set.
    value: String,
    is_default: bool,
    equivalent: Equivalent,
    note: String,
}

/// Mapping table of keys, and the engine's settings in the order in which they were added.
pub(super) struct Mapping {
    own: Table,
    defaults: Table,
    keys: Vec<MappedKey>,
    settings: Vec<(String, String)>,
}

impl Mapping {
    pub(super) fn of(config: &Config) -> anyhow::Result<Self> {
        let own = Table::try_from(config).context("the configuration has no TOML form")?;
        let mut defaults = Table::new();
        defaults.insert("rl".into(), Value::try_from(RlConfig::default()).context("[rl] has no TOML form")?);
        defaults.insert("sft".into(), Value::try_from(SftConfig::default()).context("[sft] has no TOML form")?);
        Ok(Self { own, defaults, keys: Vec::new(), settings: Vec::new() })
    }

    /// Maps `key` to the engine's `settings`; `note` says how they differ, and is empty if they mean the same.
    pub(super) fn set(&mut self, key: &str, settings: &[(&str, String)], note: &str) {
        let shown = settings.iter().map(|(name, value)| shown(name, value)).collect();
        self.add(key, Equivalent::Settings(shown), note);
        self.settings.extend(settings.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
    }

    /// Maps `key` to all of the engine's settings `names`, with the same value.
    pub(super) fn set_all(&mut self, key: &str, names: &[&str], value: &str, note: &str) {
        let settings: Vec<(&str, String)> = names.iter().map(|name| (*name, value.to_owned())).collect();
        self.set(key, &settings, note);
    }

    /// Adds a key without an equivalent. `note`: the reason, and the value of the key that corresponds to the engine's behaviour.
    pub(super) fn none(&mut self, key: &str, note: &str) {
        self.add(key, Equivalent::None, note);
    }

    /// Adds keys without an equivalent, each with the reason.
    pub(super) fn all_none(&mut self, keys: &[(&str, &str)]) {
        keys.iter().for_each(|(key, note)| self.none(key, note));
    }

    /// Adds the keys of early stopping, which no engine has; `remedy` ends the note for a run that uses it.
    pub(super) fn early_stopping(&mut self, rl: &RlConfig, engine: &str, remedy: &str) {
        match rl.early_stopping_patience {
            0 => self.set("rl.early_stopping_patience", &[], &format!("{engine} takes all steps, as 0 does")),
            _ => self.none("rl.early_stopping_patience", &format!("{engine} takes all steps{remedy}")),
        }
    }

    /// Adds a key that the reward reads from `querl.toml`, with the same meaning.
    pub(super) fn reward(&mut self, key: &str) {
        self.add(key, Equivalent::Reward, "");
    }

    /// Adds an engine setting to which no configuration key corresponds.
    pub(super) fn fixed(&mut self, name: &str, value: impl Into<String>) {
        self.settings.push((name.to_owned(), value.into()));
    }

    pub(super) fn settings(&self) -> &[(String, String)] {
        &self.settings
    }

    /// Lines `KEY = VALUE: NOTE` for the keys that have no equivalent and are not at their default.
    pub(super) fn without_equivalent(&self) -> Vec<String> {
        let lost = self.keys.iter().filter(|key| key.equivalent == Equivalent::None && !key.is_default);
        lost.map(|key| format!("{} = {}: {}", key.key, key.value, key.note)).collect()
    }

    pub(super) fn to_markdown(&self, engine: &str) -> String {
        let mut text = format!("| key | value | {engine} | |\n|---|---|---|---|\n");
        for MappedKey { key, value, equivalent, note, .. } in &self.keys {
            let there = match equivalent {
                Equivalent::Settings(settings) => {
                    settings.iter().map(|setting| code(setting)).collect::<Vec<_>>().join(" ")
                }
                Equivalent::Reward => "read by the reward".into(),
                Equivalent::None => "none".into(),
            };
            let _ = writeln!(text, "| `{key}` | {} | {there} | {note} |", code(value));
        }
        text
    }

    fn add(&mut self, key: &str, equivalent: Equivalent, note: &str) {
        let value = lookup(&self.own, key);
        let is_default = value == lookup(&self.defaults, key);
        let value = value.map(ToString::to_string).unwrap_or_default();
        self.keys.push(MappedKey { key: key.to_owned(), value, is_default, equivalent, note: note.to_owned() });
    }

    #[cfg(test)]
    pub(super) fn keys(&self) -> Vec<&str> {
        self.keys.iter().map(|key| key.key.as_str()).collect()
    }

    #[cfg(test)]
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.settings.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// A setting as text; a flag has no value.
fn shown(name: &str, value: &str) -> String {
    if value.is_empty() { name.to_owned() } else { format!("{name}={value}") }
}

/// A text as code in a table cell; empty for an empty text.
fn code(text: &str) -> String {
    if text.is_empty() { "not set".into() } else { format!("`{}`", text.replace('|', "\\|")) }
}

fn lookup<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        Some((section, rest)) => lookup(table.get(section)?.as_table()?, rest),
        None => table.get(key),
    }
}

/// Formats a number so that Python, Hydra and TOML parse it: `1e-5`, `0.05`, `1000000.0`.
pub(super) fn float(value: f64) -> String {
    format!("{value:?}")
}

/// Formats a boolean as in Python: `True` or `False`.
pub(super) fn flag(value: bool) -> String {
    if value { "True".into() } else { "False".into() }
}

/// Asserts that each key of `[rl]` is in the mapping table exactly once.
#[cfg(test)]
pub(super) fn assert_has_rl_keys_once(mapping: &Mapping) {
    let mut keys: Vec<&str> = mapping.keys().into_iter().filter(|key| key.starts_with("rl.")).collect();
    keys.sort_unstable();
    assert_eq!(keys, all_rl_keys());
}

#[cfg(test)]
fn all_rl_keys() -> Vec<String> {
    let (epochs, clip_range_high, anchor_baseline) = (Some(1), Some(0.28), Some(0.0));
    let all = RlConfig { epochs, clip_range_high, anchor_baseline, ..RlConfig::default() };
    let table = Table::try_from(all).expect("[rl] has a TOML form");
    let mut keys: Vec<String> = table.keys().map(|key| format!("rl.{key}")).collect();
    keys.sort_unstable();
    keys
}

//! JSON Schema of the configuration file, derived from the structs of [`super`], and validation of a file against it.

use super::document::{join, shorten};
use super::run::Config;
use crate::text::nearest;
use serde_json::Value;
use std::sync::LazyLock;

static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let settings =
        schemars::generate::SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    settings.into_generator().into_root_schema_for::<Config>().to_value()
});

/// The schema of a configuration file as JSON Schema (draft 2020-12), which editors understand.
pub fn json_schema() -> &'static Value {
    &SCHEMA
}

/// One key of a configuration file.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct KeyInfo {
    /// Dotted name: `rl.gae_lambda`, or `plugins.rewards[].weight` inside a list of sections.
    pub key: String,
    /// Type and range: `number, 0.0 to 1.0`.
    pub expects: String,
    /// Default as TOML; `None` if the key is required or unset by default.
    pub default: Option<String>,
    /// True if the section must have the key.
    pub required: bool,
    /// What the key means: its doc comment.
    pub meaning: String,
}

/// Every key, section by section.
pub fn keys() -> Vec<KeyInfo> {
    let mut keys = Vec::new();
    list_section("", &SCHEMA, None, &mut keys);
    keys
}

/// Lists values before sections, so that a section's own keys are contiguous.
fn list_section(prefix: &str, section: &Value, defaults: Option<&Value>, keys: &mut Vec<KeyInfo>) {
    let Some(properties) = properties(section) else { return };
    let (sections, values): (Vec<_>, Vec<_>) =
        properties.iter().partition(|(_, schema)| inner_section(schema).is_some());
    for (name, schema) in values {
        let default = schema.get("default").or_else(|| defaults?.get(name)).filter(|default| !default.is_null());
        keys.push(KeyInfo {
            key: join(prefix, name),
            expects: expects(schema),
            default: default.map(as_toml),
            required: is_required(section, name),
            meaning: text(schema, "description"),
        });
    }
    for (name, schema) in sections {
        let suffix = if has_type(schema, "array") { "[]" } else { "" };
        let key = format!("{}{suffix}", join(prefix, name));
        let inner = inner_section(schema).expect("partitioned by it");
        list_section(&key, inner, schema.get("default"), keys);
    }
}

/// Keys of a section; `None` if any key is allowed (plugin settings) or it is not a section.
pub(super) fn properties(schema: &Value) -> Option<&serde_json::Map<String, Value>> {
    schema.get("properties")?.as_object()
}

/// Schema of a section, or of the entries of a list of sections.
fn inner_section(schema: &Value) -> Option<&Value> {
    let inner = if has_type(schema, "array") { schema.get("items")? } else { schema };
    properties(inner).map(|_| inner)
}

pub(super) fn is_required(section: &Value, key: &str) -> bool {
    section.get("required").and_then(Value::as_array).is_some_and(|keys| keys.iter().any(|required| required == key))
}

/// True if `schema` allows values of the JSON type `name`.
pub(super) fn has_type(schema: &Value, name: &str) -> bool {
    match schema.get("type") {
        Some(Value::String(only)) => only == name,
        Some(Value::Array(any)) => any.iter().any(|one| one == name),
        _ => false,
    }
}

/// Allowed values of an enum; empty for other types.
pub(super) fn choices(schema: &Value) -> Vec<&str> {
    let listed = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
    let described = schema.get("oneOf").and_then(Value::as_array).into_iter().flatten();
    listed.chain(described.filter_map(|one| one.get("const"))).filter_map(Value::as_str).collect()
}

/// `a`, `a or b`, `a, b or c`.
pub(super) fn or_list(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [only] => (*only).into(),
        [most @ .., last] => format!("{} or {last}", most.join(", ")),
    }
}

/// `0.0 to 1.0`, `1 or more`, `more than 0.0`; empty without bounds.
pub(super) fn range(schema: &Value) -> String {
    let bound = |name| schema.get(name).map(|bound| number(schema, bound));
    match (bound("minimum"), bound("exclusiveMinimum"), bound("maximum")) {
        (Some(min), _, Some(max)) => format!("{min} to {max}"),
        (Some(min), _, None) => format!("{min} or more"),
        (None, Some(min), Some(max)) => format!("more than {min}, at most {max}"),
        (None, Some(min), None) => format!("more than {min}"),
        (None, None, Some(max)) => format!("at most {max}"),
        (None, None, None) => String::new(),
    }
}

/// Formats a bound: `1.0` for a number, `1` for an integer.
fn number(schema: &Value, bound: &Value) -> String {
    match (has_type(schema, "number"), bound.as_f64()) {
        (true, Some(float)) => format!("{float:?}"),
        (false, Some(float)) if float.fract() == 0.0 => format!("{float:.0}"),
        _ => bound.to_string(),
    }
}

/// Type and range of a key.
pub(super) fn expects(schema: &Value) -> String {
    let choices = choices(schema);
    if !choices.is_empty() {
        return or_list(&choices);
    }
    let kind = kind(schema);
    let inner = if has_type(schema, "array") { schema.get("items").unwrap_or(schema) } else { schema };
    match range(inner) {
        range if range.is_empty() => kind,
        range => format!("{kind}, {range}"),
    }
}

/// Type of a key, with an article.
pub(super) fn kind(schema: &Value) -> String {
    if has_type(schema, "integer") {
        "an integer".into()
    } else if has_type(schema, "number") {
        "a number".into()
    } else if has_type(schema, "boolean") {
        "true or false".into()
    } else if has_type(schema, "array") {
        list_kind(schema)
    } else if has_type(schema, "object") {
        // A path in place of a plugin's section.
        let form = if is_required(schema, "path") { ", such as { path = \"...\" }" } else { "" };
        format!("a section{form}")
    } else if !choices(schema).is_empty() {
        or_list(&choices(schema))
    } else {
        "a string".into()
    }
}

fn list_kind(schema: &Value) -> String {
    let items = schema.get("items").unwrap_or(&Value::Null);
    let of = if has_type(items, "number") {
        "numbers"
    } else if has_type(items, "integer") {
        "integers"
    } else if has_type(items, "object") {
        "sections"
    } else {
        "strings"
    };
    match schema.get("minItems").and_then(Value::as_u64) {
        Some(n_items) => format!("a list of {n_items} {of}"),
        None => format!("a list of {of}"),
    }
}

fn text(schema: &Value, name: &str) -> String {
    schema.get(name).and_then(Value::as_str).unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

fn as_toml(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(as_toml).collect::<Vec<_>>().join(", ")),
        Value::Object(_) => "{}".into(),
        _ => value.to_string(),
    }
}

/// An invalid key or value.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Violation {
    /// Key in the form of [`super::document::Document`].
    pub(super) key: String,
    /// One sentence that names the key.
    pub(super) message: String,
}

impl Violation {
    pub(super) fn new(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self { key: key.into(), message: message.into() }
    }

    /// The message is the key followed by `problem`.
    pub(super) fn of(key: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let key = key.into();
        Self { message: format!("{key} {problem}"), key }
    }
}

pub(super) fn conform(table: &toml::Table, schema: &Value) -> Vec<Violation> {
    let mut violations = Vec::new();
    check_section("", table, schema, &mut violations);
    violations
}

fn check_section(prefix: &str, table: &toml::Table, schema: &Value, violations: &mut Vec<Violation>) {
    let Some(properties) = properties(schema) else { return };
    for (name, value) in table {
        let key = join(prefix, name);
        match properties.get(name) {
            Some(schema) => check_value(&key, value, schema, violations),
            None => violations.push(unknown(&key, name, properties.keys())),
        }
    }
    let missing = properties.iter().filter(|(name, _)| !table.contains_key(*name) && is_required(schema, name));
    let (sections, keys): (Vec<_>, Vec<_>) = missing.partition(|(_, schema)| has_type(schema, "object"));
    let mut sections: Vec<String> = sections.into_iter().map(|(name, _)| join(prefix, name)).collect();
    sections.sort_unstable();
    if !sections.is_empty() {
        violations.push(missing_sections(&sections));
    }
    for (name, schema) in keys {
        let key = join(prefix, name);
        let message = format!("the key {key} is missing; expected {}", expects(schema));
        violations.push(Violation::new(key, message));
    }
}

/// The error for missing sections; `keys` names at least one.
pub(super) fn missing_sections(keys: &[impl AsRef<str>]) -> Violation {
    let named: Vec<String> = keys.iter().map(|key| format!("[{}]", key.as_ref())).collect();
    let (noun, verb) = if keys.len() == 1 { ("section", "is") } else { ("sections", "are") };
    let message = format!(
        "the {noun} {} {verb} missing; examples/appliances/querl.toml is an example, and `querl config schema` lists the keys",
        named.join(", ")
    );
    Violation::new(keys[0].as_ref(), message)
}

fn check_value(key: &str, value: &toml::Value, schema: &Value, violations: &mut Vec<Violation>) {
    match value {
        toml::Value::Table(table) if has_type(schema, "object") => check_section(key, table, schema, violations),
        toml::Value::Array(items) if has_type(schema, "array") => check_list(key, items, schema, violations),
        toml::Value::String(word) if !choices(schema).is_empty() => {
            check_choice(key, word, &choices(schema), violations)
        }
        toml::Value::String(_) if has_type(schema, "string") => {}
        toml::Value::Boolean(_) if has_type(schema, "boolean") => {}
        toml::Value::Integer(number) if has_type(schema, "integer") || has_type(schema, "number") => {
            check_range(key, value, *number as f64, schema, violations);
        }
        toml::Value::Float(number) if has_type(schema, "number") => {
            check_range(key, value, *number, schema, violations)
        }
        _ => violations.push(wrong(key, value, &kind(schema))),
    }
}

fn check_list(key: &str, items: &[toml::Value], schema: &Value, violations: &mut Vec<Violation>) {
    let wanted = schema.get("minItems").and_then(Value::as_u64);
    if wanted.is_some_and(|wanted| wanted != items.len() as u64) {
        violations.push(wrong(key, &toml::Value::Array(items.to_vec()), &kind(schema)));
        return;
    }
    let Some(of) = schema.get("items") else { return };
    for (index, item) in items.iter().enumerate() {
        check_value(&format!("{key}[{index}]"), item, of, violations);
    }
}

fn check_choice(key: &str, word: &str, choices: &[&str], violations: &mut Vec<Violation>) {
    if !choices.contains(&word) {
        violations.push(wrong(key, &toml::Value::String(word.into()), &or_list(choices)));
    }
}

fn check_range(key: &str, value: &toml::Value, number: f64, schema: &Value, violations: &mut Vec<Violation>) {
    let bound = |name: &str| schema.get(name).and_then(Value::as_f64);
    let fits = number.is_finite()
        && bound("minimum").is_none_or(|min| number >= min)
        && bound("exclusiveMinimum").is_none_or(|min| number > min)
        && bound("maximum").is_none_or(|max| number <= max);
    if !fits {
        let range = range(schema);
        violations.push(wrong(key, value, if range.is_empty() { "a finite number" } else { &range }));
    }
}

/// `rl.gae_lambda is 1.4; expected 0.0 to 1.0`.
pub(super) fn wrong(key: &str, value: &toml::Value, expected: &str) -> Violation {
    let value = match value {
        toml::Value::Table(_) => "a section".into(),
        toml::Value::Array(items) if items.iter().any(toml::Value::is_table) => "a list of sections".into(),
        // Long and multi-line strings are shortened.
        toml::Value::String(text) => shorten(&format!("{text:?}")),
        _ => shorten(&value.to_string()),
    };
    Violation::new(key, format!("{key} is {value}; expected {expected}"))
}

/// Keys and their names in TRL, PEFT, verl and OpenRLHF that no likeness of letters would find.
const OTHER_NAMES: [(&str, &[&str]); 18] = [
    ("learning_rate", &["lr", "actor_learning_rate"]),
    ("critic_learning_rate", &["critic_lr"]),
    ("batch_size", &["bs", "train_batch_size", "per_device_train_batch_size"]),
    ("mini_batch_size", &["ppo_mini_batch_size"]),
    ("epochs", &["num_train_epochs", "num_epochs", "total_epochs"]),
    ("ppo_epochs", &["num_ppo_epochs", "num_iterations"]),
    ("max_steps", &["total_training_steps", "num_steps"]),
    ("lora_rank", &["lora_r", "r"]),
    ("lora_target_modules", &["target_modules"]),
    ("kl_coef", &["beta", "init_kl_coef", "kl_loss_coef"]),
    ("clip_range", &["cliprange", "clip_ratio", "clip_eps", "epsilon"]),
    ("clip_range_high", &["clip_ratio_high", "epsilon_high"]),
    ("gae_lambda", &["lam", "lambda", "lambd"]),
    ("n_samples", &["num_generations", "rollout_n", "n", "n_samples_per_prompt"]),
    ("max_new_tokens", &["response_length", "max_completion_length", "max_tokens"]),
    ("max_length", &["max_seq_length", "max_seq_len"]),
    ("algorithm", &["adv_estimator", "advantage_estimator"]),
    ("path", &["model_name_or_path", "pretrained_model_name_or_path"]),
];

fn unknown<'a>(key: &str, name: &str, known: impl Iterator<Item = &'a String>) -> Violation {
    let known: Vec<&str> = known.map(String::as_str).collect();
    let near = match OTHER_NAMES.iter().find(|(own, others)| known.contains(own) && others.contains(&name)) {
        Some((own, _)) => Some(*own),
        None => nearest(name, known.iter().copied()).first().copied(),
    };
    let message = match near {
        Some(near) => format!("unknown key {key}; did you mean {}{near}?", key.strip_suffix(name).unwrap_or_default()),
        None => format!("unknown key {key}; `querl config schema` lists the keys"),
    };
    Violation::new(key, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(key: &str) -> KeyInfo {
        keys().into_iter().find(|info| info.key == key).unwrap_or_else(|| panic!("no key {key}"))
    }

    #[test]
    fn keys_carry_type_range_default_and_meaning() {
        let info = find("rl.gae_lambda");
        assert_eq!(info.expects, "a number, 0.0 to 1.0");
        assert_eq!(info.default.as_deref(), Some("0.95"));
        assert_eq!(info.meaning, "GAE's lambda.");
        assert!(!info.required);
        assert!(find("tenant").required);
        assert_eq!(find("retrieval.kind").expects, "embedded, http or none");
        assert_eq!(find("data.split").expects, "a list of 3 numbers, 0.0 to 1.0");
        assert_eq!(find("data.query_column").default.as_deref(), Some("\"问题\""));
        assert_eq!(find("retrieval.mapping.top_k_range").expects, "a list of 2 integers, 0 or more");
        assert_eq!(find("plugins.rewards[].weight").default.as_deref(), Some("1.0"));
        assert_eq!(find("sft.learning_rate").expects, "a number, more than 0.0, at most 1.0");
    }

    #[test]
    fn keys_with_other_names_elsewhere_exist_here() {
        let listed = keys();
        let is_key = |name: &str| listed.iter().any(|info| info.key.rsplit('.').next() == Some(name));
        assert!(OTHER_NAMES.iter().all(|(own, _)| is_key(own)));
    }

    #[test]
    fn every_key_of_a_resolved_configuration_is_listed_and_explained() {
        let listed = keys();
        assert!(listed.iter().all(|info| !info.meaning.is_empty()), "{listed:?}");
        let config = crate::config::load::tests::example();
        let written = toml::Table::try_from(&config).unwrap();
        let mut missing = Vec::new();
        collect_missing("", &written, &listed, &mut missing);
        assert!(missing.is_empty(), "{missing:?}");
    }

    fn collect_missing(prefix: &str, table: &toml::Table, listed: &[KeyInfo], missing: &mut Vec<String>) {
        for (name, value) in table {
            let key = join(prefix, name);
            match value {
                toml::Value::Table(inner) if name != "settings" => collect_missing(&key, inner, listed, missing),
                toml::Value::Array(items) if items.iter().all(toml::Value::is_table) => {
                    for item in items.iter().filter_map(toml::Value::as_table) {
                        collect_missing(&format!("{key}[]"), item, listed, missing);
                    }
                }
                _ if listed.iter().any(|info| info.key == key) => {}
                _ => missing.push(key),
            }
        }
    }
}

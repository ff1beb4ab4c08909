//! Does a configuration as written have the shape of the schema: known keys, right types, numbers in range?

use super::document::join;
use super::schema::{choices, expects, has_type, is_required, kind, or_list, properties, range};
use serde_json::Value as Schema;
use toml::Value;

/// What is wrong at one key.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Violation {
    /// As [`super::document::Document`] writes keys.
    pub(super) key: String,
    /// One sentence that names the key.
    pub(super) message: String,
}

impl Violation {
    pub(super) fn new(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self { key: key.into(), message: message.into() }
    }
}

/// Everything in `table` that does not fit the schema of its section.
pub(super) fn conform(table: &toml::Table, schema: &Schema) -> Vec<Violation> {
    let mut violations = Vec::new();
    check_section("", table, schema, &mut violations);
    violations
}

fn check_section(prefix: &str, table: &toml::Table, schema: &Schema, violations: &mut Vec<Violation>) {
    let Some(properties) = properties(schema) else { return };
    for (name, value) in table {
        let key = join(prefix, name);
        match properties.get(name) {
            Some(schema) => check_value(&key, value, schema, violations),
            None => violations.push(unknown(&key, name, properties.keys())),
        }
    }
    let missing = properties.iter().filter(|(name, _)| !table.contains_key(*name) && is_required(schema, name));
    for (name, schema) in missing {
        let key = join(prefix, name);
        let message = match has_type(schema, "object") {
            true => format!("the section [{key}] is missing"),
            false => format!("the key {key} is missing; expected {}", expects(schema)),
        };
        violations.push(Violation::new(key, message));
    }
}

fn check_value(key: &str, value: &Value, schema: &Schema, violations: &mut Vec<Violation>) {
    match value {
        Value::Table(table) if has_type(schema, "object") => check_section(key, table, schema, violations),
        Value::Array(items) if has_type(schema, "array") => check_list(key, items, schema, violations),
        Value::String(word) if !choices(schema).is_empty() => check_choice(key, word, &choices(schema), violations),
        Value::String(_) if has_type(schema, "string") => {}
        Value::Boolean(_) if has_type(schema, "boolean") => {}
        Value::Integer(number) if has_type(schema, "integer") || has_type(schema, "number") => {
            check_range(key, value, *number as f64, schema, violations);
        }
        Value::Float(number) if has_type(schema, "number") => check_range(key, value, *number, schema, violations),
        _ => violations.push(wrong(key, value, &kind(schema))),
    }
}

fn check_list(key: &str, items: &[Value], schema: &Schema, violations: &mut Vec<Violation>) {
    let wanted = schema.get("minItems").and_then(Schema::as_u64);
    if wanted.is_some_and(|wanted| wanted != items.len() as u64) {
        violations.push(wrong(key, &Value::Array(items.to_vec()), &kind(schema)));
        return;
    }
    let Some(of) = schema.get("items") else { return };
    for (index, item) in items.iter().enumerate() {
        check_value(&format!("{key}[{index}]"), item, of, violations);
    }
}

fn check_choice(key: &str, word: &str, choices: &[&str], violations: &mut Vec<Violation>) {
    if !choices.contains(&word) {
        violations.push(wrong(key, &Value::String(word.into()), &or_list(choices)));
    }
}

fn check_range(key: &str, value: &Value, number: f64, schema: &Schema, violations: &mut Vec<Violation>) {
    let bound = |name: &str| schema.get(name).and_then(Schema::as_f64);
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
pub(super) fn wrong(key: &str, value: &Value, expected: &str) -> Violation {
    let value = match value {
        Value::Table(_) => "a section".into(),
        Value::Array(items) if items.iter().any(Value::is_table) => "a list of sections".into(),
        // A long or multi-line string would drown the sentence.
        Value::String(text) => shorten(&format!("{text:?}")),
        _ => shorten(&value.to_string()),
    };
    Violation::new(key, format!("{key} is {value}; expected {expected}"))
}

fn shorten(text: &str) -> String {
    const LONGEST: usize = 80;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into(),
    }
}

fn unknown<'a>(key: &str, name: &str, known: impl Iterator<Item = &'a String>) -> Violation {
    let message = match nearest(name, known) {
        Some(near) => format!("unknown key {key}; did you mean {near}?"),
        None => format!("unknown key {key}; `querl config schema` lists the keys"),
    };
    Violation::new(key, message)
}

fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a String>) -> Option<&'a String> {
    // Below this, strsim's own examples and ours (`lr` for `learning_rate`) stop looking alike.
    const ALIKE: f64 = 0.75;
    known
        .map(|candidate| (strsim::jaro_winkler(name, candidate), candidate))
        .filter(|(likeness, _)| *likeness >= ALIKE)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, candidate)| candidate)
}

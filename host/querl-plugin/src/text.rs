//! Texts that host and guest exchange: valid names, codes and keys, and settings as text.

use std::collections::{BTreeMap, BTreeSet};

pub(crate) use querl_core::text::printable;

/// True for a text of 1 to 64 characters that are all `allowed`.
pub(crate) fn is_name(text: &str, allowed: impl Fn(char) -> bool) -> bool {
    (1..=64).contains(&text.len()) && text.chars().all(allowed)
}

/// True for a valid rejection code or component name: 1 to 64 of `a` to `z`, `0` to `9`, `_`.
pub(crate) fn is_code(text: &str) -> bool {
    is_name(text, |c| matches!(c, 'a'..='z' | '0'..='9' | '_'))
}

/// True for a role of a chat message: `system`, `user` or `assistant`.
pub(crate) fn is_role(name: &str) -> bool {
    matches!(name, "system" | "user" | "assistant")
}

const MAX_LISTED_KEYS: usize = 20;

/// True for a key that plugin.toml could declare. A guest may read any key; only these appear in messages.
pub(crate) fn is_key(text: &str) -> bool {
    is_name(text, |c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'))
}

/// Settings by key, each value in the text form that the contract specifies.
pub(crate) fn rendered(settings: &BTreeMap<String, toml::Value>) -> BTreeMap<String, String> {
    settings.iter().map(|(key, value)| (key.clone(), text(value))).collect()
}

fn text(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Float(number) => number.to_string(),
        toml::Value::Boolean(truth) => truth.to_string(),
        toml::Value::Datetime(time) => time.to_string(),
        toml::Value::Array(_) | toml::Value::Table(_) => json(value).to_string(),
    }
}

fn json(value: &toml::Value) -> serde_json::Value {
    match value {
        toml::Value::String(text) => text.as_str().into(),
        toml::Value::Integer(number) => (*number).into(),
        toml::Value::Float(number) => (*number).into(),
        toml::Value::Boolean(truth) => (*truth).into(),
        toml::Value::Datetime(time) => time.to_string().into(),
        toml::Value::Array(values) => values.iter().map(json).collect(),
        toml::Value::Table(table) => table.iter().map(|(key, value)| (key.clone(), json(value))).collect(),
    }
}

/// The error message for a setting that the plugin does not know, with the keys that it knows.
pub(crate) fn unknown_key(key: &str, known: &BTreeSet<String>) -> String {
    let known: Vec<_> = known.iter().filter(|name| is_key(name)).collect();
    if known.is_empty() {
        return "the plugin has no settings".into();
    }
    let nearest = known.iter().map(|name| (strsim::levenshtein(key, name), name)).min();
    match nearest {
        Some((distance, name)) if distance <= 3 => format!("the plugin knows no such setting; did you mean `{name}`?"),
        _ => {
            let names: Vec<_> = known.iter().take(MAX_LISTED_KEYS).map(|name| format!("`{name}`")).collect();
            let n_more = known.len() - names.len();
            let more = if n_more > 0 { format!(" and {n_more} more") } else { String::new() };
            format!("the plugin knows no such setting; it knows {}{more}", names.join(", "))
        }
    }
}

#[cfg(test)]
mod text_tests {
    use super::*;

    #[test]
    fn codes_are_short_and_plain() {
        assert!(is_code("top1_below_threshold"));
        for code in ["", "Top", "a b", "胶", &"a".repeat(65)] {
            assert!(!is_code(code), "{code}");
        }
    }
}

#[cfg(test)]
mod settings_tests {
    use super::*;

    #[test]
    fn values_become_the_texts_of_the_contract() {
        let settings = toml::from_str("a = 0.1\nb = 3\nc = true\nd = '胶'\ne = ['x', '胶']\nf = { g = 1e-7 }").unwrap();
        let texts: Vec<_> = rendered(&settings).into_values().collect();
        assert_eq!(texts, ["0.1", "3", "true", "胶", r#"["x","胶"]"#, r#"{"g":1e-7}"#]);
    }

    #[test]
    fn unknown_key_gets_the_nearest_name() {
        let known = ["min_top1".to_owned(), "max_chars".to_owned()].into();
        assert!(unknown_key("min_top", &known).ends_with("did you mean `min_top1`?"));
        assert!(unknown_key("colour", &known).ends_with("it knows `max_chars`, `min_top1`"));
    }

    #[test]
    fn keys_that_no_manifest_could_declare_are_not_shown_and_many_are_counted() {
        let known = ["\u{1b}[2J".to_owned(), "胶原".to_owned(), "a b".to_owned()].into();
        assert_eq!(unknown_key("colour", &known), "the plugin has no settings");
        let known = (0..100).map(|n| format!("setting_{n:03}")).collect();
        let message = unknown_key("colour", &known);
        assert!(message.ends_with("`setting_018`, `setting_019` and 80 more"), "{message}");
    }
}

//! Settings on their way from the configuration into a plugin.

use std::collections::{BTreeMap, BTreeSet};

/// Every value as the text that the contract describes.
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

/// What to tell about a key that the plugin does not know.
pub(crate) fn unknown_key(key: &str, known: &BTreeSet<String>) -> String {
    if known.is_empty() {
        return "the plugin has no settings".into();
    }
    let nearest = known.iter().map(|name| (strsim::levenshtein(key, name), name)).min();
    match nearest {
        Some((distance, name)) if distance <= 3 => format!("the plugin knows no such setting; did you mean `{name}`?"),
        _ => {
            let names: Vec<_> = known.iter().map(|name| format!("`{name}`")).collect();
            format!("the plugin knows no such setting; it knows {}", names.join(", "))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
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
}

//! Texts and JSON values with placeholders for values: `{{query}}`.

use serde_json::Value;

/// The names of all placeholders in a template, in order.
pub(crate) fn placeholders(template: &Value) -> Vec<&str> {
    match template {
        Value::String(text) => pieces(text).filter_map(|(_, name)| name).collect(),
        Value::Array(items) => items.iter().flat_map(placeholders).collect(),
        Value::Object(entries) => entries.values().flat_map(placeholders).collect(),
        _ => Vec::new(),
    }
}

/// The template with its placeholders filled. A string that is one place and nothing else becomes the value itself, with its type.
pub(crate) fn fill(template: &Value, value: &impl Fn(&str) -> Value) -> Value {
    match template {
        Value::String(text) => match sole_placeholder(text) {
            Some(name) => value(name),
            None => Value::String(fill_text(text, value)),
        },
        Value::Array(items) => items.iter().map(|item| fill(item, value)).collect(),
        Value::Object(entries) => entries.iter().map(|(key, entry)| (key.clone(), fill(entry, value))).collect(),
        other => other.clone(),
    }
}

pub(crate) fn fill_text(text: &str, value: &impl Fn(&str) -> Value) -> String {
    let mut filled = String::new();
    for (before, name) in pieces(text) {
        filled.push_str(before);
        match name.map(value) {
            Some(Value::String(text)) => filled.push_str(&text),
            Some(other) => filled.push_str(&other.to_string()),
            None => {}
        }
    }
    filled
}

fn sole_placeholder(text: &str) -> Option<&str> {
    let name = text.trim().strip_prefix("{{")?.strip_suffix("}}")?;
    (!name.contains(['{', '}'])).then(|| name.trim())
}

fn pieces(text: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let place = text.find("{{").and_then(|start| Some((start, start + text[start..].find("}}")?)));
        let Some((start, end)) = place else {
            rest = None;
            return Some((text, None));
        };
        rest = Some(&text[end + 2..]);
        Some((&text[..start], Some(text[start + 2..end].trim())))
    })
}

pub(crate) fn first<'a>(entry: &'a Value, pointers: &[impl AsRef<str>]) -> Option<&'a Value> {
    pointers.iter().find_map(|pointer| entry.pointer(pointer.as_ref()).filter(|value| !value.is_null()))
}

pub(crate) fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.trim().parse().ok()).filter(|number| number.is_finite())
}

pub(crate) fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

pub(crate) fn excerpt(value: &Value) -> String {
    let text: String = value.to_string().chars().take(120).collect();
    format!("`{text}`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn value(name: &str) -> Value {
        match name {
            "query" => json!("鱼油 \"怎么吃\""),
            "top_k" => json!(5),
            other => json!(format!("<{other}>")),
        }
    }

    #[test]
    fn a_place_alone_keeps_its_type_and_one_in_a_text_becomes_text() {
        let template =
            json!({"q": "{{ query }}", "k": "{{top_k}}", "s": "{{top_k}} of {{query}}", "n": [1, ["{{top_k}}"]]});
        let filled = fill(&template, &value);
        assert_eq!(filled, json!({"q": "鱼油 \"怎么吃\"", "k": 5, "s": "5 of 鱼油 \"怎么吃\"", "n": [1, [5]]}));
    }

    #[test]
    fn what_only_looks_like_a_place_stays() {
        assert_eq!(fill(&json!("{{query"), &value), json!("{{query"));
        assert_eq!(fill(&json!("a }} b {{x}}"), &value), json!("a }} b <x>"));
        assert_eq!(placeholders(&json!(["{{a}}{{b}}", {"k": "x {{ c }}"}])), ["a", "b", "c"]);
    }
}

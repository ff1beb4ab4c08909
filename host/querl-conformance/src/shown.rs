//! Values and texts of plugins as a report shows them: short, on one line, harmless to a terminal.

use serde::Serialize;
use serde_json::{Map, Value};

/// Longer texts inside a value are truncated.
const TEXT_CHARS: usize = 24;
/// Longer lists inside a value are truncated.
const LIST_ITEMS: usize = 1;
/// Longer lines are truncated.
const LINE_CHARS: usize = 600;

/// `value` as compact JSON: long texts and lists are truncated with a note; absent values and empty lists other than hits are
/// omitted.
pub(crate) fn compact<T: Serialize + ?Sized>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(value) => line(&shortened(value).to_string()),
        Err(error) => format!("(cannot be shown: {error})"),
    }
}

/// An item as its id, which names what is odd about it, and its [`compact`] JSON.
pub(crate) fn item<T: Serialize + ?Sized>(item: &T) -> String {
    match serde_json::to_value(item) {
        Ok(Value::Object(mut fields)) => match fields.remove("id") {
            Some(Value::String(id)) => line(&format!("`{id}` {}", compact(&fields))),
            _ => compact(item),
        },
        _ => compact(item),
    }
}

/// `text` on one line of limited length; control and invisible characters are escaped.
pub(crate) fn line(text: &str) -> String {
    let mut line = String::new();
    for (index, c) in text.chars().enumerate() {
        if index == LINE_CHARS {
            line.push_str(&format!("… ({} characters)", text.chars().count()));
            break;
        }
        match c {
            '\n' | '\r' | '\t' => line.push(' '),
            c if c.is_control() || is_hidden(c) => line.extend(c.escape_unicode()),
            c => line.push(c),
        }
    }
    line
}

/// Bidirectional overrides and zero-width characters.
fn is_hidden(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

fn shortened(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(cut(text)),
        Value::Array(items) => {
            let n_left_out = items.len().saturating_sub(LIST_ITEMS);
            let mut shown: Vec<_> = items.into_iter().take(LIST_ITEMS).map(shortened).collect();
            if n_left_out > 0 {
                shown.push(Value::String(format!("… {n_left_out} more")));
            }
            Value::Array(shown)
        }
        Value::Object(fields) => {
            let says_something = |(key, value): &(String, Value)| match value {
                Value::Null => false,
                Value::Array(items) => !items.is_empty() || key == "hits",
                _ => true,
            };
            let fields = fields.into_iter().filter(says_something);
            Value::Object(fields.map(|(key, value)| (key, shortened(value))).collect::<Map<_, _>>())
        }
        other => other,
    }
}

fn cut(text: String) -> String {
    let n_chars = text.chars().count();
    if n_chars <= TEXT_CHARS {
        return text;
    }
    let head: String = text.chars().take(TEXT_CHARS / 2).collect();
    format!("{head}… ({n_chars} characters)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn long_texts_and_lists_say_what_was_left_out() {
        let value = json!({"query": "胶".repeat(100), "hits": [], "gold_ids": [], "style": null, "list": [1, 2, 3, 4]});
        let expected =
            format!(r#"{{"hits":[],"list":[1,"… 3 more"],"query":"{}… (100 characters)"}}"#, "胶".repeat(12));
        assert_eq!(compact(&value), expected);
    }

    #[test]
    fn an_item_begins_with_its_id() {
        assert_eq!(item(&json!({"id": "empty", "query": ""})), r#"`empty` {"query":""}"#);
        assert_eq!(item("胶原"), r#""胶原""#);
    }

    #[test]
    fn what_a_terminal_acts_on_is_escaped() {
        assert_eq!(line("a\u{1b}[31m\nb\u{202e}c\u{0}"), "a\\u{1b}[31m b\\u{202e}c\\u{0}");
    }

    #[test]
    fn a_line_has_an_end() {
        let shown = line(&"x".repeat(10_000));
        assert!(shown.ends_with("x… (10000 characters)") && shown.chars().count() < LINE_CHARS + 30);
    }
}

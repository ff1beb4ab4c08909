//! PEFT's regular expressions: values by pattern of a layer's path.

use fancy_regex::Regex;
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::marker::PhantomData;

/// Values by pattern, in the order of the file: the first pattern that fits a layer counts.
///
/// A pattern fits a name if it fits the whole of it or what follows one of its dots.
///
/// Source: PEFT's `get_pattern_key` (`peft/utils/other.py`).
#[derive(Debug, Clone, PartialEq)]
pub struct Patterns<T>(Vec<(String, T)>);

impl<T> Default for Patterns<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> FromIterator<(String, T)> for Patterns<T> {
    fn from_iter<I: IntoIterator<Item = (String, T)>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

impl<T: Copy> Patterns<T> {
    /// True without any pattern.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Patterns with their values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, T)> {
        self.0.iter().map(|(pattern, value)| (pattern.as_str(), *value))
    }

    /// The compiled patterns; `key` names them in errors.
    pub(super) fn compile(&self, key: &str) -> Result<Vec<(Regex, T)>, String> {
        let compiled =
            |(pattern, value): &(String, T)| Ok((regex(&format!(r"^(.*\.)?({pattern})$"), pattern, key)?, *value));
        self.0.iter().map(compiled).collect()
    }
}

/// The value of the first pattern that matches `name`.
pub(super) fn first<T: Copy>(patterns: &[(Regex, T)], name: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| is_match(pattern, name)).map(|(_, value)| *value)
}

/// A pattern that must match a whole name.
pub(super) fn whole(pattern: &str, key: &str) -> Result<Regex, String> {
    regex(&format!("^(?:{pattern})$"), pattern, key)
}

/// Whether it matches; a pattern that takes too many steps does not.
pub(super) fn is_match(pattern: &Regex, name: &str) -> bool {
    pattern.is_match(name).unwrap_or(false)
}

fn regex(text: &str, pattern: &str, key: &str) -> Result<Regex, String> {
    Regex::new(text).map_err(|error| format!("{key}: `{pattern}` is no regular expression: {error}"))
}

impl<T: Serialize> Serialize for Patterns<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (pattern, value) in &self.0 {
            map.serialize_entry(pattern, value)?;
        }
        map.end()
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Patterns<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for InOrder<T> {
            type Value = Patterns<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of patterns and values")
            }

            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(Patterns::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut values = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    values.push(entry);
                }
                Ok(Patterns(values))
            }
        }
        deserializer.deserialize_any(InOrder(PhantomData))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// ```python
    /// from peft.utils.other import get_pattern_key
    /// keys = ["layers\\.0\\..*q_proj", "q_proj", "k_pro", "^model.layers.1.mlp.up_proj", "(?!o)[a-z]_proj"]
    /// [get_pattern_key(keys, f"model.layers.{name}") for name in names]
    /// ```
    #[test]
    fn patterns_fit_as_in_peft() {
        let text = r#"{"layers\\.0\\..*q_proj": 1, "q_proj": 2, "k_pro": 3, "^model.layers.1.mlp.up_proj": 4, "(?!o)[a-z]_proj": 5}"#;
        let patterns: Patterns<usize> = serde_json::from_str(text).unwrap();
        assert_eq!(
            serde_json::to_string(&patterns).unwrap().replace(": ", ":"),
            text.replace(": ", ":").replace(", ", ",")
        );
        let patterns = patterns.compile("rank_pattern").unwrap();
        let names =
            ["0.self_attn.q_proj", "1.self_attn.q_proj", "1.self_attn.k_proj", "1.mlp.up_proj", "0.self_attn.o_proj"];
        let found = names.map(|name| first(&patterns, &format!("model.layers.{name}")));
        // `^` follows the optional prefix: it matches since the prefix may be empty.
        assert_eq!(found, [Some(1), Some(2), Some(5), Some(4), None]);
    }

    #[test]
    fn a_broken_pattern_is_named() {
        let patterns: Patterns<usize> = [("q_(proj".to_owned(), 2)].into_iter().collect();
        let error = patterns.compile("rank_pattern").unwrap_err();
        assert!(error.starts_with("rank_pattern: `q_(proj` is no regular expression: "), "{error}");
    }
}

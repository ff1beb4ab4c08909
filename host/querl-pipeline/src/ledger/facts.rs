//! What a stage found: the lines of its summary, and the same as JSON.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Marks a count that is a part of the figure before.
pub const PART: &str = "- ";

/// Named figures, in the order they are shown.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Facts(Vec<(String, Value)>);

impl Facts {
    /// Adds a figure.
    pub fn add(&mut self, name: impl Into<String>, value: impl Into<Value>) -> &mut Self {
        self.0.push((name.into(), value.into()));
        self
    }

    /// Adds counts that are parts of the figure before, most frequent first, marked with a dash.
    pub fn add_parts(&mut self, counts: &BTreeMap<String, u64>) -> &mut Self {
        let mut sorted: Vec<_> = counts.iter().collect();
        sorted.sort_by_key(|(code, count)| (std::cmp::Reverse(**count), (*code).clone()));
        for (code, count) in sorted {
            self.add_part(code, *count);
        }
        self
    }

    /// Adds a count that is a part of the figure before.
    pub fn add_part(&mut self, name: &str, count: u64) -> &mut Self {
        self.add(format!("{PART}{name}"), count)
    }

    /// Adds figures that were found elsewhere.
    pub fn append(&mut self, mut other: Self) -> &mut Self {
        self.0.append(&mut other.0);
        self
    }

    /// One figure, by name.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    /// A count, by name; 0 where there is none.
    pub fn count(&self, name: &str) -> u64 {
        self.get(name).and_then(Value::as_u64).unwrap_or(0)
    }

    /// The counts that are parts of a figure, by name.
    pub fn parts(&self, name: &str) -> BTreeMap<String, u64> {
        let after = self.0.iter().skip_while(|(known, _)| known != name).skip(1);
        let parts = after.map_while(|(part, value)| Some((part.strip_prefix(PART)?.to_owned(), value.as_u64()?)));
        parts.collect()
    }

    /// As an object.
    pub fn to_json(&self) -> Value {
        Value::Object(self.0.iter().cloned().collect())
    }

    /// One line a figure, values in a column.
    pub fn to_lines(&self) -> Vec<String> {
        let width = self.0.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        self.0.iter().map(|(name, value)| format!("  {name:<width$}  {}", readable(value))).collect()
    }
}

fn readable(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => format!("{:.4}", number.as_f64().unwrap_or(f64::NAN)),
        Value::Null => "-".into(),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stand_in_a_column() {
        let mut facts = Facts::default();
        facts.add("rows", 480).add("mean top1", 0.61234);
        facts.add("dropped", 8).add_parts(&BTreeMap::from([("empty".into(), 1), ("unchanged".into(), 7)]));
        let expected =
            ["  rows         480", "  mean top1    0.6123", "  dropped      8", "  - unchanged  7", "  - empty      1"];
        assert_eq!(facts.to_lines(), expected);
        assert_eq!(facts.to_json()["- unchanged"], 7);
        assert_eq!(facts.parts("dropped"), BTreeMap::from([("empty".into(), 1), ("unchanged".into(), 7)]));
        assert_eq!((facts.parts("rows"), facts.count("rows"), facts.count("mean top1")), (BTreeMap::new(), 480, 0));
    }
}

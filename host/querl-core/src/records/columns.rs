//! Further columns of a query's row, which plugins can read.

use serde::de::Error as _;
use serde::{Deserialize, Serialize};
use serde_json::{Number, Value};

/// Value of a table cell, other than a list.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum Scalar {
    Flag(bool),
    Number(f64),
    Text(String),
}

/// Value of a table cell. All cells of a text format such as CSV are text.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum ColumnValue {
    Flag(bool),
    Number(f64),
    Text(String),
    Items(Vec<Scalar>),
}

/// Largest integer below which all integers are exact in f64.
const LARGEST_INTEGER: u64 = 1 << 53;

impl Scalar {
    /// Converts a JSON number. An integer beyond ±2^53 (such as an id), which f64 may not represent exactly, is kept as text; one beyond
    /// 64 bits has already been parsed as f64.
    pub fn of_number(number: &Number) -> Self {
        let integer = number.as_u64().or_else(|| number.as_i64().map(i64::unsigned_abs));
        match number.as_f64().filter(|_| integer.is_none_or(|integer| integer <= LARGEST_INTEGER)) {
            Some(number) => Self::Number(number),
            None => Self::Text(number.to_string()),
        }
    }

    fn of_json(value: &Value) -> Option<Self> {
        match value {
            Value::Bool(flag) => Some(Self::Flag(*flag)),
            Value::Number(number) => Some(Self::of_number(number)),
            Value::String(text) => Some(Self::Text(text.clone())),
            Value::Null | Value::Array(_) | Value::Object(_) => None,
        }
    }

    fn n_bytes(&self) -> usize {
        match self {
            Self::Flag(_) => 1,
            Self::Number(_) => 8,
            Self::Text(text) => text.len(),
        }
    }
}

impl From<Scalar> for ColumnValue {
    fn from(scalar: Scalar) -> Self {
        match scalar {
            Scalar::Flag(flag) => Self::Flag(flag),
            Scalar::Number(number) => Self::Number(number),
            Scalar::Text(text) => Self::Text(text),
        }
    }
}

impl<'de> Deserialize<'de> for ColumnValue {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let read = match &value {
            Value::Array(items) => items.iter().map(Scalar::of_json).collect::<Option<_>>().map(Self::Items),
            scalar => Scalar::of_json(scalar).map(Self::from),
        };
        read.ok_or_else(|| {
            let shown: String = value.to_string().chars().take(SHOWN).collect();
            D::Error::custom(format!("is {shown}; expected a text, a number, true, false or a list of these"))
        })
    }
}

/// Maximum number of characters of a value in an error.
const SHOWN: usize = 60;

impl ColumnValue {
    fn n_bytes(&self) -> usize {
        match self {
            Self::Flag(_) => 1,
            Self::Number(_) => 8,
            Self::Text(text) => text.len(),
            Self::Items(items) => items.iter().map(Scalar::n_bytes).sum(),
        }
    }
}

/// The named values of a query's row, in the order of the table, without cells that have no value. In JSON an object.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Columns(pub Vec<(String, ColumnValue)>);

impl Columns {
    /// Maximum number of columns that a plugin gets.
    pub const MAX: usize = 256;
    /// Maximum size of names and values of one row, in bytes.
    pub const MAX_BYTES: usize = 1 << 20;
    /// Maximum number of entries of a list in a cell.
    pub const MAX_ITEMS: usize = 1000;

    /// True if there are no columns.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Size of names and values in bytes.
    pub fn n_bytes(&self) -> usize {
        self.0.iter().map(|(name, value)| name.len() + value.n_bytes()).sum()
    }
}

impl Serialize for Columns {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize_columns(&self.0, serializer)
    }
}

impl<'de> Deserialize<'de> for Columns {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Columns;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object from column names to texts, numbers, true, false or lists of these")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Columns, A::Error> {
                let mut columns = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    let of_column = |error: A::Error| A::Error::custom(format!("column `{name}` {error}"));
                    let value = map.next_value().map_err(of_column)?;
                    columns.push((name, value));
                }
                Ok(Columns(columns))
            }
        }

        deserializer.deserialize_map(Visitor)
    }
}

pub(super) fn serialize_columns<S: serde::Serializer>(
    columns: &[(String, ColumnValue)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(columns.iter().map(|(name, value)| (name, value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Columns, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    /// Regression: 9007199254740993 was read as 9007199254740992.
    #[test]
    fn integers_beyond_the_exact_ones_of_f64_are_texts() {
        let columns =
            read(r#"{"a": 9007199254740992, "b": 9007199254740993, "c": [-9007199254740993, 7], "d": 1e300}"#).unwrap();
        let text = |text: &str| Scalar::Text(text.into());
        let expected = [
            ("a".to_owned(), ColumnValue::Number(9_007_199_254_740_992.0)),
            ("b".to_owned(), text("9007199254740993").into()),
            ("c".to_owned(), ColumnValue::Items(vec![text("-9007199254740993"), Scalar::Number(7.0)])),
            ("d".to_owned(), ColumnValue::Number(1e300)),
        ];
        assert_eq!(columns.0, expected);
    }

    /// Regression: the error message was "data did not match any variant of untagged enum ColumnValue".
    #[test]
    fn a_value_of_another_form_is_refused_with_its_column() {
        for (value, shown) in
            [("null", "null"), ("[[1]]", "[[1]]"), ("{\"b\": 1}", "{\"b\":1}"), ("[\"x\", null]", "[\"x\",null]")]
        {
            let error = read(&format!("{{\"price\": {value}}}")).unwrap_err();
            let expected =
                format!("column `price` is {shown}; expected a text, a number, true, false or a list of these");
            assert!(error.starts_with(&expected), "{error}");
        }
    }
}

//! The other columns of a query's row.

use serde::{Deserialize, Serialize};

/// A value of a table that is no list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum Scalar {
    Flag(bool),
    Number(f64),
    Text(String),
}

/// A value of a table. Cells of a text format such as CSV are text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum ColumnValue {
    Flag(bool),
    Number(f64),
    Text(String),
    Items(Vec<Scalar>),
}

impl Scalar {
    fn n_bytes(&self) -> usize {
        match self {
            Self::Flag(_) => 1,
            Self::Number(_) => 8,
            Self::Text(text) => text.len(),
        }
    }
}

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
    /// Maximum number of entries of a list.
    pub const MAX_ITEMS: usize = 1000;

    /// True without columns.
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
                while let Some(column) = map.next_entry()? {
                    columns.push(column);
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

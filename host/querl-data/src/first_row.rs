//! Reads the first row of a JSON lines file, for messages about a file of the wrong kind.

use querl_core::fsx::{NumberedLine, ReadError, open_rows};
use serde_json::Value;
use std::fmt;
use std::path::Path;

/// Maximum number of keys in a message.
const MOST_KEYS: usize = 16;

/// Describes the keys of a row, as the predicate of a sentence: `has the keys id, text`.
pub fn shown_keys(row: &Value) -> String {
    let keys = row.as_object().into_iter().flat_map(|row| row.keys().map(String::as_str));
    let keys: Vec<&str> = keys.take(MOST_KEYS).collect();
    match keys.is_empty() {
        true => "not a JSON object with keys".into(),
        false => format!("has the keys {}", keys.join(", ")),
    }
}

/// The first non-empty line of a JSON lines file. Displayed like [`shown_keys`], or as `not JSON (...)`.
pub(crate) struct FirstRow {
    /// Line number, from 1.
    pub(crate) line: usize,
    /// The row as JSON, or the reason why the line is not JSON.
    row: Result<Value, String>,
}

impl FirstRow {
    /// Reads the first non-empty line; `None` if there is none.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>, ReadError> {
        let (line, row) = match open_rows::<Value>(path)?.next() {
            Some(Ok(NumberedLine { line, value, .. })) => (line, Ok(value)),
            Some(Err(ReadError::Line { line, problem, .. })) => (line, Err(format!("not JSON ({problem})"))),
            Some(Err(error)) => return Err(error),
            None => return Ok(None),
        };
        Ok(Some(Self { line, row }))
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.row.as_ref().is_ok_and(|row| row.get(key).is_some())
    }
}

impl fmt::Display for FirstRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.row.as_ref().map_or_else(String::clone, shown_keys))
    }
}

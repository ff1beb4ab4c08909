//! The first row of a file of JSON lines, for messages about files of another kind, which are wrong in every row.

use querl_core::fsx::{NumberedLine, ReadError, open_rows};
use serde_json::Value;
use std::fmt;
use std::path::Path;

/// Most keys of a row that a message lists.
const MOST_KEYS: usize = 16;

/// What a row is, as the beginning of a message: `has the keys id, text`.
pub fn shown_keys(row: &Value) -> String {
    let keys = row.as_object().into_iter().flat_map(|row| row.keys().map(String::as_str));
    let keys: Vec<&str> = keys.take(MOST_KEYS).collect();
    match keys.is_empty() {
        true => "not a JSON object with keys".into(),
        false => format!("has the keys {}", keys.join(", ")),
    }
}

/// The first line that is not empty. Displayed as [`shown_keys`], or `not JSON (...)`.
pub(crate) struct FirstRow {
    /// 1-based.
    pub(crate) line: usize,
    /// Or why the line is no JSON.
    row: Result<Value, String>,
}

impl FirstRow {
    /// `None` where every line is empty.
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

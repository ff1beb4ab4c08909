//! The first row of a file of JSON lines, for messages about files of another kind, which are wrong in every row.

use querl_core::fsx::{NumberedLine, ReadError, open_rows};
use serde_json::Value;
use std::fmt;
use std::path::Path;

/// Most keys of a row that a message lists.
const MOST_KEYS: usize = 16;

/// The first line that is not empty. Displayed as the beginning of a message: `has the keys id, text`, `not JSON (...)`.
pub(crate) struct FirstRow {
    /// 1-based.
    pub(crate) line: usize,
    /// Or what the line is in place of an object.
    keys: Result<Vec<String>, String>,
}

impl FirstRow {
    /// `None` where every line is empty.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>, ReadError> {
        let (line, keys) = match open_rows::<Value>(path)?.next() {
            Some(Ok(NumberedLine { line, value: Value::Object(row), .. })) if !row.is_empty() => {
                (line, Ok(row.into_iter().map(|(key, _)| key).collect()))
            }
            Some(Ok(NumberedLine { line, .. })) => (line, Err("not a JSON object with keys".into())),
            Some(Err(ReadError::Line { line, problem, .. })) => (line, Err(format!("not JSON ({problem})"))),
            Some(Err(error)) => return Err(error),
            None => return Ok(None),
        };
        Ok(Some(Self { line, keys }))
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.keys.as_ref().is_ok_and(|keys| keys.iter().any(|own| own == key))
    }
}

impl fmt::Display for FirstRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.keys {
            Ok(keys) => write!(f, "has the keys {}", keys[..keys.len().min(MOST_KEYS)].join(", ")),
            Err(problem) => f.write_str(problem),
        }
    }
}

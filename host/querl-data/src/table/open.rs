//! Opens a table by its file extension.

use super::delimited::open_delimited;
use super::parquet::open_parquet;
use super::source::Table;
use super::workbook::open_xlsx;
use crate::error::DataError;
use querl_core::fsx::{NumberedLine, open_jsonl};
use std::collections::HashSet;
use std::io::Read;
use std::path::Path;

/// Opens a table by the file's extension.
pub(crate) fn open_table(path: &Path) -> Result<Table, DataError> {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    let n_bytes = match std::fs::metadata(path) {
        Ok(meta) if meta.is_file() => meta.len(),
        _ => return Err(DataError::file(path, "there is no such file; check the path")),
    };
    let extension = extension.as_deref().unwrap_or_default();
    let open = match extension {
        "xlsx" => open_xlsx,
        "csv" => |path: &Path| open_delimited(path, b','),
        "tsv" => |path: &Path| open_delimited(path, b'\t'),
        "jsonl" => open_lines,
        "parquet" => open_parquet,
        _ => {
            let expected = "expected a name that ends in .xlsx, .csv, .tsv, .jsonl or .parquet";
            return Err(DataError::file(path, format!("not a table that can be read; {expected}")));
        }
    };
    if n_bytes == 0 {
        return Err(DataError::file(path, "the file is empty; expected a table with a column of queries"));
    }
    check_first_bytes(path, extension)?;
    open(path)
}

/// Detects a wrong extension by the first bytes.
fn check_first_bytes(path: &Path, extension: &str) -> Result<(), DataError> {
    let unreadable = |error| DataError::file(path, format!("cannot be read: {error}"));
    let mut start = Vec::new();
    std::fs::File::open(path).and_then(|file| file.take(4).read_to_end(&mut start)).map_err(unreadable)?;
    let (expected, what, remedy) = match start.as_slice() {
        b"PK\x03\x04" => ("xlsx", "a workbook or another archive", "give a workbook the ending .xlsx"),
        b"PAR1" => ("parquet", "parquet", "give it that ending"),
        [0xd0, 0xcf, 0x11, 0xe0] => ("", "an old or encrypted workbook", "save it as .xlsx without a password"),
        _ => return Ok(()),
    };
    if extension == expected {
        return Ok(());
    }
    Err(DataError::file(path, format!("by its first bytes the file is {what}; {remedy}")))
}

type Object = serde_json::Map<String, serde_json::Value>;

/// The header of JSON lines is the union of their keys, in order of appearance: known after a first reading.
fn open_lines(path: &Path) -> Result<Table, DataError> {
    let (mut header, mut known) = (Vec::new(), HashSet::new());
    for line in open_jsonl::<Object>(path)? {
        for key in line?.value.keys() {
            if !known.contains(key) {
                known.insert(key.clone());
                header.push(key.clone());
            }
        }
    }
    if header.is_empty() {
        return Err(DataError::file(path, "the file holds no object; expected one JSON object a line"));
    }
    let columns = header.clone();
    let rows = open_jsonl::<Object>(path)?.map(move |line| {
        let NumberedLine { line, value, .. } = line?;
        let cells = columns.iter().map(|key| value.get(key).map_or_else(String::new, value_text)).collect();
        Ok((line, cells))
    });
    Ok(Table::of_rows(path, header, Box::new(rows)))
}

fn value_text(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::Null => String::new(),
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Array(items) => items.iter().map(value_text).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

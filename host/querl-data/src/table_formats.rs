//! The three file formats of a query table, each read into the same grid of text.

use crate::error::DataError;
use calamine::{Data, Reader};
use std::path::Path;

/// A table as text.
pub(crate) struct Grid {
    /// Of a workbook: which sheet.
    pub(crate) sheet: Option<String>,
    /// Column names.
    pub(crate) header: Vec<String>,
    /// Row number as a spreadsheet or editor shows it, and the cells.
    pub(crate) rows: Vec<(usize, Vec<String>)>,
}

/// Reads a grid by the file's extension.
///
/// # Errors
/// The extension is unknown, or the file is not what its extension says.
pub(crate) fn read_grid(path: &Path) -> Result<Grid, DataError> {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    if !path.is_file() {
        return Err(DataError::file(path, "there is no such file; check data.input"));
    }
    match extension.as_deref() {
        Some("xlsx") => read_xlsx(path),
        Some("csv") => read_csv(path),
        Some("jsonl") => read_jsonl(path),
        _ => Err(DataError::file(
            path,
            "not a table that can be read; expected a name that ends in .xlsx, .csv or .jsonl",
        )),
    }
}

fn read_xlsx(path: &Path) -> Result<Grid, DataError> {
    let unreadable = |error: &dyn std::fmt::Display| {
        DataError::file(path, format!("not a readable xlsx workbook ({error}); save it again as .xlsx"))
    };
    let mut workbook: calamine::Xlsx<_> =
        calamine::open_workbook(path).map_err(|error: calamine::XlsxError| unreadable(&error))?;
    let sheet =
        workbook.sheet_names().first().cloned().ok_or_else(|| DataError::file(path, "the workbook has no sheet"))?;
    let range = workbook.worksheet_range(&sheet).map_err(|error| unreadable(&error))?;
    let first_row = range.start().map_or(1, |(row, _)| row as usize + 1);
    let mut rows = range.rows().enumerate().map(|(index, cells)| (first_row + index, cells));
    let Some((_, header)) = rows.next() else {
        return Err(DataError::file(path, format!("sheet `{sheet}` is empty; expected a header row")));
    };
    let header = header.iter().map(|cell| cell_text(cell).trim().to_owned()).collect();
    let mut read = Vec::new();
    for (row, cells) in rows {
        if let Some(column) = cells.iter().position(|cell| matches!(cell, Data::Error(_))) {
            let place = format!("sheet `{sheet}` row {row} column {}", column + 1);
            return Err(DataError::file(
                path,
                format!("{place}: holds the error value `{}`; mend or clear it", cells[column]),
            ));
        }
        read.push((row, cells.iter().map(cell_text).collect()));
    }
    Ok(Grid { sheet: Some(sheet), header, rows: read })
}

/// A number without a fraction reads as the digits a person typed.
fn cell_text(cell: &Data) -> String {
    match cell {
        Data::Float(number) if number.fract() == 0.0 && number.abs() < 1e15 => format!("{number:.0}"),
        other => other.to_string(),
    }
}

fn read_csv(path: &Path) -> Result<Grid, DataError> {
    let problem = |error: csv::Error| DataError::file(path, format!("not readable as UTF-8 CSV: {error}"));
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_path(path).map_err(problem)?;
    let header = reader
        .headers()
        .map_err(problem)?
        .iter()
        .map(|name| name.trim_start_matches('\u{feff}').trim().to_owned())
        .collect();
    let mut rows = Vec::new();
    for (index, record) in reader.records().enumerate() {
        // The row that a spreadsheet shows: a line number would count the lines of a cell, and CRLF differently from LF.
        rows.push((index + 2, record.map_err(problem)?.iter().map(str::to_owned).collect()));
    }
    Ok(Grid { sheet: None, header, rows })
}

/// The header of JSON lines is the union of their keys, in order of appearance.
fn read_jsonl(path: &Path) -> Result<Grid, DataError> {
    let lines: Vec<(usize, serde_json::Map<String, serde_json::Value>)> = querl_core::fsx::read_numbered_jsonl(path)?;
    let mut header: Vec<String> = Vec::new();
    for key in lines.iter().flat_map(|(_, object)| object.keys()) {
        if !header.contains(key) {
            header.push(key.clone());
        }
    }
    let cells = |object: &serde_json::Map<String, serde_json::Value>| {
        header.iter().map(|key| object.get(key).map_or_else(String::new, value_text)).collect()
    };
    let rows = lines.iter().map(|(line, object)| (*line, cells(object))).collect();
    Ok(Grid { sheet: None, header, rows })
}

fn value_text(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::Null => String::new(),
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Array(items) => items.iter().map(value_text).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

//! The file formats of a table, each read row by row into text.

use super::delimited::open_delimited;
use super::encoding::TextEncoding;
use super::parquet::open_parquet;
use crate::error::DataError;
use calamine::{Data, ExcelDateTime, Reader};
use querl_core::fsx::{NumberedLine, open_jsonl};
use std::collections::HashSet;
use std::io::Read;
use std::path::Path;

/// A table as text, read as it is asked for.
pub(crate) struct Table {
    /// Of a workbook: which sheet, in words.
    pub(crate) sheet: Option<String>,
    /// Of a csv or tsv file.
    pub(crate) encoding: Option<TextEncoding>,
    /// Column names.
    pub(crate) header: Vec<String>,
    /// Row number as a spreadsheet or editor shows it, and the cells.
    pub(crate) rows: TableRows,
}

/// Numbered rows of cells; a row may have fewer than the header.
pub(crate) type TableRows = Box<dyn Iterator<Item = Result<(usize, Vec<String>), DataError>>>;

/// A cell that is longer is damage, and no text that anybody asks or remembers.
const MAX_CELL_BYTES: usize = 1 << 20;

/// Opens a table by the file's extension.
///
/// # Errors
/// The extension is unknown, the file is empty, or it is not what its extension says.
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
    let table = open(path)?;
    let (of_file, names) = (path.to_owned(), table.header.clone());
    let rows = table.rows.map(move |row| check_cells(&of_file, &names, row?));
    Ok(Table { rows: Box::new(rows), ..table })
}

/// A file that goes by the wrong name is told from its first bytes.
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

fn check_cells(path: &Path, names: &[String], row: (usize, Vec<String>)) -> Result<(usize, Vec<String>), DataError> {
    let Some(column) = row.1.iter().position(|cell| cell.len() > MAX_CELL_BYTES) else { return Ok(row) };
    let (number, n_bytes) = (row.0, row.1[column].len());
    let name = names.get(column).map_or("", String::as_str);
    let problem = format!("row {number} column `{name}`: a cell of {n_bytes} bytes; expected at most {MAX_CELL_BYTES}");
    Err(DataError::file(path, format!("{problem} (look for a quote before it that is not closed)")))
}

fn open_xlsx(path: &Path) -> Result<Table, DataError> {
    let unreadable = |error: &dyn std::fmt::Display| {
        DataError::file(path, format!("not a readable xlsx workbook ({error}); save it again as .xlsx"))
    };
    let mut workbook: calamine::Xlsx<_> =
        calamine::open_workbook(path).map_err(|error: calamine::XlsxError| unreadable(&error))?;
    let names = workbook.sheet_names();
    let name = names.first().cloned().ok_or_else(|| DataError::file(path, "the workbook has no sheet"))?;
    let sheet = match names.len() {
        1 => format!("sheet `{name}`"),
        n => format!("sheet `{name}`, the first of {n} and the one that is read"),
    };
    let range = workbook.worksheet_range(&name).map_err(|error| unreadable(&error))?;
    let first_row = range.start().map_or(1, |(row, _)| row as usize + 1);
    let mut rows = range.rows().enumerate().map(|(index, cells)| (first_row + index, cells));
    let Some((_, header)) = rows.next() else {
        return Err(DataError::file(path, format!("{sheet}: is empty; expected a header row")));
    };
    let header = header.iter().map(|cell| cell_text(cell).trim().to_owned()).collect();
    // A sheet has at most a million rows and is read whole by its reader anyway.
    let rows: Vec<_> = rows.map(|(row, cells)| sheet_row(path, &sheet, row, cells)).collect();
    Ok(Table { sheet: Some(sheet), encoding: None, header, rows: Box::new(rows.into_iter()) })
}

fn sheet_row(path: &Path, sheet: &str, row: usize, cells: &[Data]) -> Result<(usize, Vec<String>), DataError> {
    if let Some(column) = cells.iter().position(|cell| matches!(cell, Data::Error(_))) {
        let place = format!("{sheet}: row {row} column {}", column + 1);
        let problem = format!("{place}: holds the error value `{}`; mend or clear it", cells[column]);
        return Err(DataError::file(path, problem));
    }
    Ok((row, cells.iter().map(cell_text).collect()))
}

/// A number without a fraction reads as the digits a person typed, a date as year, month and day.
fn cell_text(cell: &Data) -> String {
    match cell {
        Data::DateTime(time) if time.is_datetime() => time_text(time),
        Data::Float(number) if number.fract() == 0.0 && number.abs() < 1e15 => format!("{number:.0}"),
        other => other.to_string(),
    }
}

fn time_text(time: &ExcelDateTime) -> String {
    let (year, month, day, hour, minute, second, _) = time.to_ymd_hms_milli();
    let (date, clock) = (format!("{year}-{month:02}-{day:02}"), format!("{hour:02}:{minute:02}:{second:02}"));
    match time.as_f64() {
        days if days < 1.0 => clock,
        days if days.fract() == 0.0 => date,
        _ => format!("{date} {clock}"),
    }
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
    Ok(Table { sheet: None, encoding: None, header, rows: Box::new(rows) })
}

fn value_text(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::Null => String::new(),
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Array(items) => items.iter().map(value_text).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

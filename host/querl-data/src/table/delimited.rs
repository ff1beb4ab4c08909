//! csv and tsv files. A quote that is never closed swallows all rows behind it, and a separator without quotes shifts the cells
//! of its row: both are refused with the row.

use super::encoding::{detect, open_text};
use super::source::Table;
use crate::error::DataError;
use csv::StringRecord;
use std::io::Read;
use std::path::Path;

/// Comes behind the text: a row of its own, or the end of a cell whose quote is not closed. The text itself has no zero byte.
const END: &str = "\n\0";

pub(super) fn open_delimited(path: &Path, delimiter: u8) -> Result<Table, DataError> {
    let encoding = detect(path)?;
    let text = open_text(path, encoding).map_err(|error| DataError::file(path, format!("cannot be read: {error}")))?;
    let of_file = path.to_owned();
    let problem = move |error: csv::Error| {
        DataError::file(&of_file, format!("not readable as a table of {} text: {error}", encoding.name()))
    };
    let mut reader = csv::ReaderBuilder::new();
    reader.delimiter(delimiter).flexible(true).has_headers(false);
    let mut records = reader.from_reader(text.chain(END.as_bytes())).into_records();
    let header = match records.next() {
        Some(header) => header.map_err(&problem)?,
        None => StringRecord::new(),
    };
    check_quotes(path, 1, &header)?;
    let header: Vec<String> = header.iter().map(|name| name.trim().to_owned()).collect();
    if header.iter().all(|name| name.is_empty() || is_end(name)) {
        return Err(DataError::file(path, "the file has no header row; expected the names of the columns"));
    }
    let (of_file, n_columns) = (path.to_owned(), header.len());
    let is_ours = crate::dataset::export::is_header(&header);
    // The row that a spreadsheet shows: a line number would count the lines of a cell, and CRLF differently from LF.
    let rows = (2..).zip(records).filter_map(move |(row, record)| {
        let checked = record.map_err(&problem).and_then(|record| {
            check_quotes(&of_file, row, &record)?;
            check_width(&of_file, row, &record, n_columns)?;
            let cell = |cell: &str| {
                if is_ours { crate::dataset::export::formula_text(cell).to_owned() } else { cell.to_owned() }
            };
            Ok((row, record.iter().map(cell).collect::<Vec<_>>()))
        });
        let ended = checked.as_ref().is_ok_and(|(_, cells)| matches!(&cells[..], [cell] if is_end(cell)));
        (!ended).then_some(checked)
    });
    let mut table = Table::of_rows(path, header, Box::new(rows));
    table.encoding = Some(encoding);
    Ok(table)
}

fn is_end(cell: &str) -> bool {
    cell == END.trim_start()
}

fn check_quotes(path: &Path, row: usize, record: &StringRecord) -> Result<(), DataError> {
    const SHOWN: usize = 20;
    let Some(cell) = record.iter().next_back().and_then(|cell| cell.strip_suffix(END)) else { return Ok(()) };
    let start: String = cell.trim_end().chars().take(SHOWN).collect::<String>().escape_debug().to_string();
    let problem = format!("row {row}: the quote before `{start}` is not closed");
    Err(DataError::file(path, format!("{problem}; close it, or write a quote within a quoted cell twice")))
}

fn check_width(path: &Path, row: usize, record: &StringRecord, n_columns: usize) -> Result<(), DataError> {
    if record.iter().skip(n_columns).all(|cell| cell.trim().is_empty()) {
        return Ok(());
    }
    let n_cells = record.len();
    let problem = format!("row {row} has {n_cells} cells, and the header {n_columns}");
    Err(DataError::file(path, format!("{problem}; put quotes around a cell that holds a separator")))
}

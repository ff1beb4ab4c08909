//! Workbooks: the first sheet, and further sheets with the same columns, as in a table with more rows than a sheet takes.

use super::source::Table;
use crate::error::DataError;
use calamine::{Data, ExcelDateTime, Range, Reader, SheetType, SheetVisible};
use std::path::Path;

/// Rows of a sheet, as the format has it: those of the next are numbered on from here.
const SHEET_ROWS: usize = 1_048_576;

type NumberedRow = Result<(usize, Vec<String>), DataError>;

pub(super) fn open_xlsx(path: &Path) -> Result<Table, DataError> {
    let unreadable = |error: &dyn std::fmt::Display| {
        DataError::file(path, format!("not a readable xlsx workbook ({error}); save it again as .xlsx"))
    };
    let mut workbook: calamine::Xlsx<_> =
        calamine::open_workbook(path).map_err(|error: calamine::XlsxError| unreadable(&error))?;
    let sheets = workbook.sheets_metadata().iter().filter(|sheet| {
        // A hidden one is not what people see as the table.
        sheet.typ == SheetType::WorkSheet && sheet.visible == SheetVisible::Visible
    });
    let mut names = sheets.map(|sheet| sheet.name.clone()).collect::<Vec<_>>().into_iter();
    let name = names.next().ok_or_else(|| DataError::file(path, "the workbook has no sheet that is shown"))?;
    let sheet = match names.len() {
        0 => format!("sheet `{name}`"),
        n => format!("sheet `{name}`, the first of {}", n + 1),
    };
    let range = workbook.worksheet_range(&name).map_err(|error| unreadable(&error))?;
    let header =
        header(&range).ok_or_else(|| DataError::file(path, format!("{sheet}: is empty; expected a header row")))?;
    // A sheet has at most a million rows and is read whole by its reader anyway.
    let (mut rows, mut unread_sheets, mut n_before) = (rows(path, &name, &range, 0), Vec::new(), 0);
    drop(range);
    for name in names {
        let range = workbook.worksheet_range(&name).map_err(|error| unreadable(&format!("sheet `{name}`: {error}")))?;
        match self::header(&range) {
            None => {}
            Some(other) if other == header => {
                n_before += SHEET_ROWS;
                rows.extend(self::rows(path, &name, &range, n_before));
            }
            Some(_) => unread_sheets.push(name),
        }
    }
    let mut table = Table::of_rows(path, header, Box::new(rows.into_iter()));
    (table.sheet, table.unread_sheets) = (Some(sheet), unread_sheets);
    Ok(table)
}

fn header(range: &Range<Data>) -> Option<Vec<String>> {
    Some(range.rows().next()?.iter().map(|cell| cell_text(cell).trim().to_owned()).collect())
}

fn rows(path: &Path, sheet: &str, range: &Range<Data>, n_before: usize) -> Vec<NumberedRow> {
    let first_row = range.start().map_or(1, |(row, _)| row as usize + 1);
    let rows = range.rows().zip(first_row..).skip(1);
    rows.map(|(cells, row)| Ok((n_before + row, texts(path, sheet, row, cells)?))).collect()
}

fn texts(path: &Path, sheet: &str, row: usize, cells: &[Data]) -> Result<Vec<String>, DataError> {
    if let Some(column) = cells.iter().position(|cell| matches!(cell, Data::Error(_))) {
        let place = format!("sheet `{sheet}`: row {row} column {}", column + 1);
        let problem = format!("{place}: holds the error value `{}`; mend or clear it", cells[column]);
        return Err(DataError::file(path, problem));
    }
    Ok(cells.iter().map(cell_text).collect())
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

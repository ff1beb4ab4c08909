//! Workbooks with a frozen header, filters, scores coloured from red to green, and failures in red.
//!
//! The library panics if its temporary file cannot be written, for example on a full disk.

use super::{Cell, Column, ColumnKind, RowWriter};
use crate::error::{DataError, catch_panic, panic_message};
use querl_core::fsx::AtomicFile;
use rust_xlsxwriter::{
    Color, ConditionalFormat3ColorScale, ConditionalFormatCell, ConditionalFormatCellRule, ConditionalFormatType,
    Format, Workbook, Worksheet, XlsxError,
};
use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};

/// Maximum rows of a sheet without its header; further rows go to further sheets.
const SHEET_ROWS: u32 = 1_048_575;

/// Maximum length of a cell in UTF-16 units.
const CELL_UNITS: usize = 32_767;

/// Pale colours, so that text on them is readable.
const RED: Color = Color::RGB(0xf8696b);
const YELLOW: Color = Color::RGB(0xffeb84);
const GREEN: Color = Color::RGB(0x63be7b);

pub(super) struct XlsxWriter {
    path: PathBuf,
    workbook: Workbook,
    columns: &'static [Column],
    /// Rows of the last sheet, header included; 0 without a sheet.
    n_rows: u32,
    sheet_rows: u32,
    score: Format,
}

impl XlsxWriter {
    pub(super) fn create(path: &Path, columns: &'static [Column]) -> Result<Self, DataError> {
        let mut workbook = Workbook::new();
        // Sheets may exceed 4 GiB.
        workbook.use_zip_large_file(true);
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(|error| DataError::write(path, error))?;
            workbook.set_tempdir(folder).map_err(|error| unwritten(path, error))?;
        }
        let score = Format::new().set_num_format("0.000");
        let mut writer = Self { path: path.to_owned(), workbook, columns, n_rows: 0, sheet_rows: SHEET_ROWS, score };
        writer.add_sheet().map_err(|error| unwritten(path, error))?;
        Ok(writer)
    }

    fn add_sheet(&mut self) -> Result<(), XlsxError> {
        let sheet = self.workbook.add_worksheet_with_constant_memory()?;
        let header = Format::new().set_bold().set_background_color(Color::RGB(0xd9e1f2));
        for (index, column) in (0..).zip(self.columns) {
            sheet.set_column_width(index, column.width)?;
            sheet.write_with_format(0, index, column.name, &header)?;
        }
        sheet.set_freeze_panes(1, 0)?;
        self.n_rows = 1;
        Ok(())
    }

    fn last_sheet(&mut self) -> Result<&mut Worksheet, XlsxError> {
        let index = self.workbook.worksheets().len() - 1;
        self.workbook.worksheet_from_index(index)
    }

    fn end_sheet(&mut self) -> Result<(), XlsxError> {
        let (columns, last) = (self.columns, self.n_rows - 1);
        let sheet = self.last_sheet()?;
        sheet.autofilter(0, 0, last, columns.len() as u16 - 1)?;
        if last == 0 {
            return Ok(());
        }
        for (index, column) in (0..).zip(columns) {
            match column.kind {
                ColumnKind::Score => sheet.add_conditional_format(1, index, last, index, &score_colours())?,
                ColumnKind::Flag => sheet.add_conditional_format(1, index, last, index, &failure_colour())?,
                ColumnKind::Text | ColumnKind::Count => continue,
            };
        }
        Ok(())
    }

    fn add_row(&mut self, cells: &[Cell<'_>]) -> Result<(), XlsxError> {
        if self.n_rows > self.sheet_rows {
            self.end_sheet()?;
            self.add_sheet()?;
        }
        let (row, score) = (self.n_rows, self.score.clone());
        let sheet = self.last_sheet()?;
        for (index, cell) in (0..).zip(cells) {
            match cell {
                Cell::Empty => continue,
                Cell::Text(text) => sheet.write_string(row, index, truncated(&sanitized(text)))?,
                Cell::Count(number) => sheet.write_number(row, index, *number as f64)?,
                Cell::Score(number) => sheet.write_number_with_format(row, index, *number, &score)?,
                Cell::Flag(flag) => sheet.write_boolean(row, index, *flag)?,
            };
        }
        self.n_rows += 1;
        Ok(())
    }

    fn save(&mut self, file: &mut AtomicFile) -> Result<(), XlsxError> {
        self.end_sheet()?;
        self.workbook.save_to_writer(file)
    }
}

/// Fixed scale from 0 to 1: a colour means the same score in every table.
fn score_colours() -> ConditionalFormat3ColorScale {
    ConditionalFormat3ColorScale::new()
        .set_minimum(ConditionalFormatType::Number, 0)
        .set_midpoint(ConditionalFormatType::Number, 0.5)
        .set_maximum(ConditionalFormatType::Number, 1)
        .set_minimum_color(RED)
        .set_midpoint_color(YELLOW)
        .set_maximum_color(GREEN)
}

fn failure_colour() -> ConditionalFormatCell {
    let red = Format::new().set_background_color(RED);
    ConditionalFormatCell::new().set_rule(ConditionalFormatCellRule::EqualTo(false)).set_format(red)
}

fn truncated(text: &str) -> &str {
    let mut n_units = 0;
    let mut fits = text.char_indices().take_while(|(_, character)| {
        n_units += character.len_utf16();
        n_units <= CELL_UNITS
    });
    // A text has at most as many UTF-16 units as bytes.
    if text.len() <= CELL_UNITS {
        return text;
    }
    let end = fits.by_ref().last().map_or(0, |(at, character)| at + character.len_utf8());
    &text[..end]
}

/// Normalises line breaks and removes characters that XML does not allow, which would be read back as `_x000D_`.
fn sanitized(text: &str) -> Cow<'_, str> {
    let is_bare = |character: char| character < ' ' && !matches!(character, '\t' | '\n');
    let is_odd = |character: char| is_bare(character) || matches!(character, '\u{fffe}' | '\u{ffff}');
    match text.contains(is_odd) {
        true => Cow::Owned(text.replace("\r\n", "\n").replace('\r', "\n").replace(is_odd, "")),
        false => Cow::Borrowed(text),
    }
}

fn unwritten(path: &Path, problem: impl std::fmt::Display) -> DataError {
    let problem = problem.to_string().replace('\n', " ");
    let remedy = "see whether the disk is full, or take xlsx out of data.export";
    DataError::write(path, io::Error::other(format!("{problem}; {remedy}")))
}

/// Converts a panic of the library into a write error.
fn guarded<T>(path: &Path, work: impl FnOnce() -> Result<T, XlsxError>) -> Result<T, DataError> {
    match catch_panic(work) {
        Ok(done) => done.map_err(|error| unwritten(path, error)),
        Err(panic) => Err(unwritten(path, panic_message(panic.as_ref()))),
    }
}

impl RowWriter for XlsxWriter {
    fn row(&mut self, cells: &[Cell<'_>]) -> Result<(), DataError> {
        guarded(&self.path.clone(), || self.add_row(cells))
    }

    fn finish(mut self: Box<Self>) -> Result<(), DataError> {
        let mut file = AtomicFile::create(&self.path).map_err(|error| DataError::write(&self.path, error))?;
        guarded(&self.path.clone(), || self.save(&mut file))?;
        file.commit().map_err(|error| DataError::write(&self.path, error))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] = &[super::super::column("original_query", ColumnKind::Text, 20.0)];

    fn text(text: &str) -> [Cell<'_>; 1] {
        [Cell::Text(text.into())]
    }

    #[test]
    fn rows_beyond_a_sheet_go_to_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.xlsx");
        let mut writer = XlsxWriter::create(&path, COLUMNS).unwrap();
        writer.sheet_rows = 2;
        for query in ["一", "二", "三", "四", "五"] {
            writer.row(&text(query)).unwrap();
        }
        Box::new(writer).finish().unwrap();
        let rows: Vec<(usize, Vec<String>)> =
            crate::table::open_table(&path).unwrap().all_rows().map(Result::unwrap).collect();
        let queries: Vec<&str> = rows.iter().map(|(_, cells)| cells[0].as_str()).collect();
        assert_eq!(queries, ["一", "二", "三", "四", "五"]);
        let numbers: Vec<usize> = rows.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, [2, 3, 1_048_578, 1_048_579, 2_097_154]);
    }

    #[test]
    fn control_characters_are_removed() {
        assert_eq!(sanitized("甲\r\n乙\r丙\u{8}\u{1b}\t丁\n"), "甲\n乙\n丙\t丁\n");
        assert!(matches!(sanitized("甲\t乙\n"), Cow::Borrowed(_)));
    }
}

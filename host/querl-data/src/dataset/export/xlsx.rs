//! Export of Excel workbooks with a frozen header, filters, scores coloured from red to green, and failures in red.
//!
//! The library panics if its temporary file cannot be written, for example on a full disk.

use super::{Cell, Column, ColumnKind, RowWriter};
use crate::error::{DataError, catch_panic, panic_message};
use crate::text::{has_control_characters, without_control_characters};
use querl_core::fsx::{AtomicFile, exhaustion};
use rust_xlsxwriter::{
    Color, ConditionalFormat3ColorScale, ConditionalFormatCell, ConditionalFormatCellRule, ConditionalFormatType,
    DocProperties, ExcelDateTime, Format, Workbook, Worksheet, XlsxError,
};
use std::fs::File;
use std::io::{self, BufReader, BufWriter};
use std::path::{Path, PathBuf};
use zip::result::ZipResult;
use zip::{ZipArchive, ZipWriter};

/// Maximum rows of a sheet without its header; further rows go to further sheets.
const SHEET_ROWS: u32 = 1_048_575;

/// Maximum length of a cell in UTF-16 units.
const CELL_UNITS: usize = 32_767;

/// Texts of a sheet that may exceed the 4 GiB of an entry without zip64 fields: a byte takes up to 6 when it is escaped, and a row some 600 more.
const LARGE_SHEET_BYTES: usize = 512 << 20;

/// Year of the creation time in the document properties, the same in every workbook.
const CREATED_YEAR: u16 = 2000;

/// Pale colours, so that text on them is readable.
const RED: Color = Color::RGB(0xf8696b);
const YELLOW: Color = Color::RGB(0xffeb84);
const GREEN: Color = Color::RGB(0x63be7b);

pub(super) struct XlsxWriter {
    path: PathBuf,
    /// Folder for the sheets until they are complete.
    folder: PathBuf,
    workbook: Workbook,
    columns: &'static [Column],
    /// Rows of the last sheet, header included; 0 without a sheet.
    n_rows: u32,
    sheet_rows: u32,
    /// Bytes of texts in the last sheet, and whether a sheet has more than [`LARGE_SHEET_BYTES`].
    n_text_bytes: usize,
    is_large: bool,
    score: Format,
}

impl XlsxWriter {
    pub(super) fn create(path: &Path, columns: &'static [Column]) -> Result<Self, DataError> {
        let mut workbook = Workbook::new();
        let created = ExcelDateTime::from_ymd(CREATED_YEAR, 1, 1).map_err(|error| unwritten(path, error))?;
        // The default is the current time, with which equal rows would give different bytes.
        workbook.set_properties(&DocProperties::new().set_creation_datetime(&created));
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).map_err(|error| DataError::write(path, error))?;
        workbook.set_tempdir(folder).map_err(|error| unwritten(path, error))?;
        let score = Format::new().set_num_format("0.000");
        let (path, folder, sheet_rows) = (path.to_owned(), folder.to_owned(), SHEET_ROWS);
        let (n_text_bytes, is_large) = (0, false);
        let mut writer = Self { path, folder, workbook, columns, n_rows: 0, sheet_rows, n_text_bytes, is_large, score };
        writer.add_sheet().map_err(|error| unwritten(&writer.path, error))?;
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
        (self.n_rows, self.n_text_bytes) = (1, 0);
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
        let n_text_bytes = |cell: &Cell<'_>| if let Cell::Text(text) = cell { text.len() } else { 0 };
        self.n_text_bytes += cells.iter().map(n_text_bytes).sum::<usize>();
        self.is_large |= self.n_text_bytes > LARGE_SHEET_BYTES;
        let (row, score) = (self.n_rows, self.score.clone());
        let sheet = self.last_sheet()?;
        for (index, cell) in (0..).zip(cells) {
            match cell {
                Cell::Empty => continue,
                // A control character would be read back as `_x001B_`.
                Cell::Text(text) => sheet.write_string(row, index, truncated(&without_control_characters(text)))?,
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
        self.workbook.use_zip_large_file(self.is_large);
        let mut streamed = BufWriter::new(tempfile::tempfile_in(&self.folder)?);
        self.workbook.save_to_writer(&mut streamed)?;
        let streamed = streamed.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok(copy_with_sizes(streamed, file).map_err(io::Error::other)?)
    }
}

/// Copies the compressed entries of an archive, with their sizes in the local headers. The library streams its entries, so their sizes come
/// after the data, which LibreOffice 7.4 refuses together with zip64 fields.
fn copy_with_sizes(streamed: File, file: &mut AtomicFile) -> ZipResult<()> {
    let mut streamed = ZipArchive::new(BufReader::new(streamed))?;
    let mut archive = ZipWriter::new(file);
    for index in 0..streamed.len() {
        archive.raw_copy_file(streamed.by_index_raw(index)?)?;
    }
    archive.finish()?;
    Ok(())
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

/// True if a text fits in one Excel cell without loss, other than normalised line breaks.
pub(crate) fn fits_cell(text: &str) -> bool {
    truncated(text).len() == text.len() && !has_control_characters(text)
}

fn unwritten(path: &Path, error: XlsxError) -> DataError {
    match exhaustion(&error) {
        Some(source) => DataError::write(path, source),
        None => unexplained(path, &error.to_string()),
    }
}

fn unexplained(path: &Path, problem: &str) -> DataError {
    let problem = problem.replace('\n', " ");
    let remedy = "see whether the disk is full, or take xlsx out of data.export";
    DataError::write(path, io::Error::other(format!("{problem}; {remedy}")))
}

/// Converts a panic of the library into a write error.
fn guarded<T>(path: &Path, work: impl FnOnce() -> Result<T, XlsxError>) -> Result<T, DataError> {
    match catch_panic(work) {
        Ok(done) => done.map_err(|error| unwritten(path, error)),
        Err(panic) => Err(unexplained(path, &panic_message(panic.as_ref()))),
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
mod tests {
    use super::*;

    const COLUMNS: &[Column] = &[super::super::column("original_query", ColumnKind::Text, 20.0)];

    fn text(text: &str) -> [Cell<'_>; 1] {
        [Cell::Text(text.into())]
    }

    #[test]
    fn rows_beyond_a_sheet_go_to_the_next() {
        let (_folder, path) = crate::scratch_file("a.xlsx");
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

    fn written(name: &str, folder: &Path) -> PathBuf {
        let path = folder.join(name);
        let mut writer = XlsxWriter::create(&path, COLUMNS).unwrap();
        for query in ["胶原蛋白怎么吃", "鱼油, \"一天\"几粒"] {
            writer.row(&text(query)).unwrap();
        }
        Box::new(writer).finish().unwrap();
        path
    }

    /// Regression: LibreOffice 7.4 could not load a workbook whose entries were streamed with zip64 fields.
    #[test]
    fn local_headers_have_the_sizes_of_their_entries() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = std::fs::read(written("a.xlsx", folder.path())).unwrap();
        let number =
            |at: usize, n: usize| bytes[at..at + n].iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
        let (mut at, mut n_entries) = (0, 0);
        while bytes[at..].starts_with(b"PK\x03\x04") {
            let (flags, compressed, inflated) = (number(at + 6, 2), number(at + 18, 4), number(at + 22, 4));
            let (name, extra) = (number(at + 26, 2), number(at + 28, 2));
            assert_eq!((flags & 8, extra), (0, 0), "no data descriptor, no zip64 field");
            assert!(compressed > 0 && inflated > 0 && inflated < bytes.len() * 100);
            (at, n_entries) = (at + 30 + name + extra + compressed, n_entries + 1);
        }
        assert!(bytes[at..].starts_with(b"PK\x01\x02"), "the directory follows the last entry");
        assert!(n_entries >= 8, "{n_entries}");
    }

    /// Regression: the creation time made the tables of equal runs differ.
    #[test]
    fn the_same_rows_give_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let first = std::fs::read(written("a.xlsx", folder.path())).unwrap();
        // The creation time that was written formerly had a resolution of one second.
        std::thread::sleep(std::time::Duration::from_millis(1100));
        assert!(first == std::fs::read(written("b.xlsx", folder.path())).unwrap());
    }

    #[test]
    #[ignore = "needs LibreOffice (`soffice`)"]
    fn libreoffice_opens_a_workbook() {
        let folder = tempfile::tempdir().unwrap();
        let path = written("a.xlsx", folder.path());
        let profile = format!("-env:UserInstallation=file://{}/profile", folder.path().display());
        let mut command = std::process::Command::new("soffice");
        command.args([&profile, "--headless", "--convert-to", "csv:Text - txt - csv (StarCalc):44,34,76", "--outdir"]);
        let output = command.arg(folder.path()).arg(&path).output().unwrap();
        let text = std::fs::read_to_string(folder.path().join("a.csv"));
        assert_eq!(text.unwrap(), "original_query\n胶原蛋白怎么吃\n\"鱼油, \"\"一天\"\"几粒\"\n", "{output:?}");
    }
}

//! Reads the sheets of a workbook cell by cell. A file of a few kilobytes can declare 17 billion cells and inflate to many gigabytes: the
//! parts are inflated and counted first, and only cells that exist take memory.

use super::formats::{CellForm, MAX_CELL_BYTES, MAX_LISTED, RowSource, Table, TableCell, TypedRows};
use crate::error::{DataError, catch_panic, panic_message};
use calamine::{
    Data, DataRef, Dimensions, ExcelDateTime, Reader, Sheet, SheetType, SheetVisible, Xlsx, XlsxCellReader, XlsxError,
};
use querl_core::records::ColumnValue;
use rust_xlsxwriter::utility::row_col_to_cell;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use zip::ZipArchive;

/// Maximum rows and columns of a sheet; rows of the next sheet are numbered from here.
const SHEET_ROWS: usize = 1_048_576;
const SHEET_COLUMNS: usize = 16_384;

/// Maximum number of sheets that are read.
const MAX_SHEETS: usize = 1_024;

/// Maximum size of a part after inflation: a sheet, which is streamed; a part with styles, names or relations; another part.
const MAX_SHEET_BYTES: u64 = 1 << 30;
const MAX_INDEX_BYTES: u64 = 16 << 20;
const MAX_PART_BYTES: u64 = 256 << 20;

/// Maximum size of all sheets in which merged cells are looked for, which takes as long as reading the rows.
const MAX_MERGED_BYTES: u64 = 16 << 20;

/// Maximum size of all parts after inflation, which takes time.
const MAX_ALL_BYTES: u64 = 4 << 30;

/// Maximum number of shared texts: each takes memory even if it is empty.
const MAX_TEXTS: usize = 1 << 23;

/// Maximum size of the rows, which are held in memory.
const MAX_HELD_BYTES: usize = 1 << 30;

/// The remedy for a workbook that is too large.
const BY_ROW: &str = "save the table as .csv or .parquet, which are read row by row";

type Workbook = Xlsx<BufReader<File>>;

/// The position of a table in a sheet.
#[derive(Debug)]
struct SheetTable {
    name: String,
    /// Index of the row with the header.
    header_row: u32,
    /// Index of the first column with a name.
    first_column: u32,
    /// Number of rows in earlier sheets.
    n_before: usize,
}

/// Opens the first sheet, and further sheets with the same columns (a table with more rows than a sheet can have).
pub(super) fn open_xlsx(path: &Path) -> Result<Table, DataError> {
    let n_sheet_bytes = check_parts(path)?;
    guarded(path, || open_workbook(path, n_sheet_bytes))
}

/// Rows of a workbook are held in memory: the reader borrows the workbook.
struct XlsxFile {
    path: PathBuf,
    workbook: Workbook,
    sheets: Vec<SheetTable>,
    n_columns: usize,
    /// Size of all sheets after inflation.
    n_sheet_bytes: u64,
}

impl RowSource for XlsxFile {
    fn merged(&mut self, columns: &[usize]) -> Vec<String> {
        if self.n_sheet_bytes > MAX_MERGED_BYTES {
            return Vec::new();
        }
        let path = self.path.clone();
        let found = guarded(&path, || {
            let mut found = Vec::new();
            for sheet in &self.sheets {
                let regions = self.workbook.merge_cells_by_sheet_name(&sheet.name);
                for Dimensions { start, end } in regions.map_err(|error| unread(&self.path, "", &error))? {
                    let mut used = columns.iter().map(|column| sheet.first_column + *column as u32);
                    if found.len() < MAX_LISTED
                        && end.0 > sheet.header_row
                        && used.any(|column| (start.1..=end.1).contains(&column))
                    {
                        found.push(format!("{}:{}", address(start.0, start.1), address(end.0, end.1)));
                    }
                }
            }
            Ok(found)
        });
        // The required parts of the workbook are read and checked with its rows.
        found.unwrap_or_default()
    }

    fn rows(mut self: Box<Self>, columns: &[usize], form: CellForm) -> Result<TypedRows, DataError> {
        let path = self.path.clone();
        let rows = guarded(&path, || {
            let (mut rows, mut n_held) = (Vec::new(), 0);
            for sheet in &self.sheets {
                let used = (self.n_columns, columns, form);
                read_rows(&self.path, &mut self.workbook, sheet, used, &mut rows, &mut n_held)?;
            }
            Ok(rows)
        })?;
        Ok(Box::new(rows.into_iter().map(Ok)))
    }
}

fn unreadable(path: &Path, error: &str) -> DataError {
    let error = error.replace('\n', " ");
    DataError::file(path, format!("not a readable xlsx workbook ({error}); save it again as .xlsx"))
}

/// The error of a library in `place`: empty, or `sheet NAME: `.
fn unread(path: &Path, place: &str, error: &(dyn std::error::Error + 'static)) -> DataError {
    DataError::reading(path, error, || unreadable(path, &format!("{place}{error}")))
}

/// Converts a panic of the library on a damaged workbook into an error.
fn guarded<T>(path: &Path, work: impl FnOnce() -> Result<T, DataError>) -> Result<T, DataError> {
    catch_panic(work).unwrap_or_else(|panic| Err(unreadable(path, &panic_message(panic.as_ref()))))
}

/// Inflates each part and counts its bytes: the sizes that an archive declares may be false. Returns the size of all sheets.
fn check_parts(path: &Path) -> Result<u64, DataError> {
    let file = File::open(path).map_err(|error| unread(path, "", &error))?;
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(|error| unread(path, "", &error))?;
    let mut buffer = vec![0; 1 << 16];
    let (mut n_all, mut n_sheet_bytes) = (0, 0);
    for index in 0..archive.len() {
        // A part that cannot be read is reported when it is needed.
        let Ok(mut part) = archive.by_index(index) else { continue };
        let Ok(shown) = part.name().map(|name| name.escape_debug().to_string()) else { continue };
        let name = shown.to_lowercase();
        let is_index = [".rels", "styles", "theme", "workbook", "content_types"].iter().any(|word| name.contains(word));
        let is_strings = name.contains("sharedstrings");
        let is_sheet = name.contains("worksheets/") && !name.ends_with(".rels");
        let is_used = is_sheet || is_strings || [".rels", "styles", "workbook"].iter().any(|word| name.contains(word));
        let max_bytes = match is_sheet {
            true => MAX_SHEET_BYTES,
            false if is_index => MAX_INDEX_BYTES,
            false => MAX_PART_BYTES,
        };
        let (mut n_bytes, mut start, mut n_untagged, mut n_texts) = (0, Vec::new(), 0, 0);
        loop {
            // Reading to the end also checks the checksum, which the library does not do.
            let n = match part.read(&mut buffer) {
                Ok(n) => n,
                Err(error) if is_used => {
                    let problem = format!("`{shown}` is damaged ({error}); save it again as .xlsx");
                    return Err(DataError::reading(path, &error, || DataError::file(path, problem)));
                }
                Err(_) => 0,
            };
            if n == 0 {
                break;
            }
            n_bytes += n as u64;
            n_all += n as u64;
            if n_all > MAX_ALL_BYTES {
                return Err(DataError::file(path, format!("inflates to more than {MAX_ALL_BYTES} bytes; {BY_ROW}")));
            }
            if n_bytes > max_bytes {
                let problem = format!("`{shown}` inflates to more than {max_bytes} bytes; {BY_ROW}");
                return Err(DataError::file(path, problem));
            }
            // The library keeps a tag, or the text between two tags, in memory.
            n_untagged = match buffer[..n].iter().rposition(|byte| *byte == b'<') {
                Some(last) => n - last,
                None => n_untagged + n,
            };
            if n_untagged > 4 * MAX_CELL_BYTES && (is_strings || max_bytes == MAX_SHEET_BYTES) {
                let problem = format!("`{shown}` holds a text of more than {} bytes", 4 * MAX_CELL_BYTES);
                return Err(DataError::file(path, format!("{problem}; a cell holds at most {MAX_CELL_BYTES}")));
            }
            if is_strings {
                n_texts += count_texts(&buffer[..n]);
            }
            let n_missing = buffer.len() - start.len().min(buffer.len());
            start.extend_from_slice(&buffer[..n.min(n_missing)]);
        }
        n_sheet_bytes += if is_sheet { n_bytes } else { 0 };
        if n_texts > MAX_TEXTS {
            let problem = format!("`{shown}` holds more than {MAX_TEXTS} texts; save the table as .csv or .parquet");
            return Err(DataError::file(path, problem));
        }
        if is_strings && declared_texts(&start).is_none_or(|n_texts| n_texts > n_bytes) {
            let problem = format!("`{shown}` does not hold the number of texts that it declares");
            return Err(DataError::file(path, format!("{problem}; save it again as .xlsx")));
        }
    }
    Ok(n_sheet_bytes)
}

/// Number of tags `<si` or `<PREFIX:si`; one between two buffers may be missed.
fn count_texts(xml: &[u8]) -> usize {
    xml.windows(3).filter(|bytes| matches!(*bytes, [b'<' | b':', b's', b'i'])).count()
}

/// The largest `uniqueCount` in the start of the table of texts, for which the library takes memory; 0 without one, `None` without a table.
fn declared_texts(start: &[u8]) -> Option<u64> {
    let start = String::from_utf8_lossy(start);
    start.contains("sst").then_some(())?;
    let numbers = start.split("uniqueCount").skip(1).map(|rest| {
        let digits = rest.trim_start_matches(|character: char| !character.is_ascii_digit());
        let end = digits.find(|character: char| !character.is_ascii_digit()).unwrap_or(digits.len());
        digits[..end].parse().unwrap_or(u64::MAX)
    });
    Some(numbers.max().unwrap_or(0))
}

fn open_workbook(path: &Path, n_sheet_bytes: u64) -> Result<Table, DataError> {
    let mut workbook: Workbook = calamine::open_workbook(path).map_err(|error: XlsxError| unread(path, "", &error))?;
    let (names, hidden_sheets) = sheet_names(&workbook);
    let sheet = match &names[..] {
        [] => return Err(DataError::file(path, "the workbook has no sheet that is shown")),
        [name] => format!("sheet `{name}`"),
        [..] if names.len() > MAX_SHEETS => {
            let problem = format!("the workbook has {} sheets; expected at most {MAX_SHEETS}", names.len());
            return Err(DataError::file(path, problem));
        }
        [name, ..] => format!("sheet `{name}`, the first of {}", names.len()),
    };
    let (mut columns, mut sheets, mut unread_sheets) = (None, Vec::new(), Vec::new());
    for (index, name) in names.into_iter().enumerate() {
        let Some((header, mut table)) = read_header(path, &mut workbook, &name)? else {
            if index == 0 {
                return Err(DataError::file(path, format!("{sheet}: is empty; expected a header row")));
            }
            continue;
        };
        if *columns.get_or_insert_with(|| header.clone()) == header {
            table.n_before = sheets.len() * SHEET_ROWS;
            sheets.push(table);
        } else {
            unread_sheets.push(name);
        }
    }
    let header = columns.unwrap_or_default();
    let source = XlsxFile { path: path.to_owned(), workbook, sheets, n_columns: header.len(), n_sheet_bytes };
    let mut table = Table::new(path, header, Box::new(source));
    (table.sheet, table.unread_sheets, table.hidden_sheets) = (Some(sheet), unread_sheets, hidden_sheets);
    Ok(table)
}

/// Names of the sheets that are shown, and of the hidden ones.
fn sheet_names(workbook: &Workbook) -> (Vec<String>, Vec<String>) {
    let sheets = workbook.sheets_metadata().iter().filter(|sheet| sheet.typ == SheetType::WorkSheet);
    let (shown, hidden): (Vec<&Sheet>, Vec<&Sheet>) = sheets.partition(|sheet| sheet.visible == SheetVisible::Visible);
    let names = |sheets: Vec<&Sheet>| sheets.into_iter().map(|sheet| sheet.name.clone()).collect();
    (names(shown), names(hidden))
}

/// Cells of the first rows of the first visible sheet, each with its row number, for an error about the header.
pub(super) fn first_cells(path: &Path, n_rows: u32) -> Vec<(usize, String)> {
    let found = guarded(path, || {
        let opened: Result<Workbook, XlsxError> = calamine::open_workbook(path);
        let mut workbook = opened.map_err(|error| unread(path, "", &error))?;
        let Some(sheet) = sheet_names(&workbook).0.into_iter().next() else { return Ok(Vec::new()) };
        let (mut found, mut cells) = (Vec::new(), cells_of(path, &mut workbook, &sheet)?);
        while let Some(cell) = next_cell(path, &sheet, &mut cells)? {
            if cell.row >= n_rows {
                break;
            }
            found.push((cell.row as usize + 1, cell.text(path, &sheet).unwrap_or_default()));
        }
        Ok(found)
    });
    found.unwrap_or_default()
}

/// A cell with a value, or a formula whose value is not in the file.
struct SheetCell<'a> {
    row: u32,
    column: u32,
    value: DataRef<'a>,
}

/// A cell address such as `B2`, from indices that start at 0.
fn address(row: u32, column: u32) -> String {
    // A merged range in the file may end outside of a sheet.
    row_col_to_cell(row.min(SHEET_ROWS as u32 - 1), column.min(SHEET_COLUMNS as u32 - 1) as u16)
}

impl SheetCell<'_> {
    fn address(&self) -> String {
        address(self.row, self.column)
    }

    fn text(&self, path: &Path, sheet: &str) -> Result<String, DataError> {
        let data: Data = match &self.value {
            DataRef::Empty => {
                let problem = format!("sheet `{sheet}`: cell {} has a formula without its value", self.address());
                let remedy = "open the workbook in a spreadsheet program, which calculates it, and save it";
                return Err(DataError::file(path, format!("{problem}; {remedy}")));
            }
            value => value.clone().into(),
        };
        Ok(cell_text(&data))
    }

    /// The value of a number or a flag.
    fn typed(&self, form: CellForm) -> Option<ColumnValue> {
        match self.value {
            _ if form == CellForm::Text => None,
            DataRef::Int(number) => Some(ColumnValue::Number(number as f64)),
            DataRef::Float(number) => Some(ColumnValue::Number(number)),
            DataRef::Bool(flag) => Some(ColumnValue::Flag(flag)),
            _ => None,
        }
    }

    fn n_bytes(&self) -> usize {
        match &self.value {
            DataRef::String(text) => text.len(),
            DataRef::SharedString(text) => text.len(),
            _ => 0,
        }
    }
}

/// The next cell with a value or a formula.
fn next_cell<'a>(
    path: &Path,
    sheet: &str,
    cells: &mut XlsxCellReader<'a, BufReader<File>>,
) -> Result<Option<SheetCell<'a>>, DataError> {
    loop {
        let cell = cells.next_cell_with_formula_metadata();
        let cell = cell.map_err(|error| unread(path, &format!("sheet `{sheet}`: "), &error))?;
        let Some(cell) = cell else { return Ok(None) };
        let (row, column) = cell.pos;
        let cell = match (cell.value, cell.formula) {
            (DataRef::Empty, None) => continue,
            (value, _) => SheetCell { row, column, value },
        };
        if row as usize >= SHEET_ROWS || column as usize >= SHEET_COLUMNS {
            let problem = format!("sheet `{sheet}`: row {} column {}", u64::from(row) + 1, u64::from(column) + 1);
            let problem = format!("{problem} is outside of {SHEET_ROWS} rows and {SHEET_COLUMNS} columns");
            return Err(DataError::file(path, format!("{problem}; save it again as .xlsx")));
        }
        if let DataRef::Error(error) = &cell.value {
            let problem = format!("sheet `{sheet}`: row {} column {}: holds the error value", row + 1, column + 1);
            return Err(DataError::file(path, format!("{problem} `{error}`; correct or clear it")));
        }
        return Ok(Some(cell));
    }
}

fn cells_of<'a>(
    path: &Path,
    workbook: &'a mut Workbook,
    sheet: &str,
) -> Result<XlsxCellReader<'a, BufReader<File>>, DataError> {
    workbook.worksheet_cells_reader(sheet).map_err(|error| unread(path, &format!("sheet `{sheet}`: "), &error))
}

/// The names in the first row with a value.
fn read_header(
    path: &Path,
    workbook: &mut Workbook,
    sheet: &str,
) -> Result<Option<(Vec<String>, SheetTable)>, DataError> {
    let mut cells = cells_of(path, workbook, sheet)?;
    let mut names: Vec<(u32, String)> = Vec::new();
    let mut header_row = None;
    while let Some(cell) = next_cell(path, sheet, &mut cells)? {
        if *header_row.get_or_insert(cell.row) != cell.row {
            break;
        }
        names.push((cell.column, cell.text(path, sheet)?.trim().to_owned()));
    }
    let columns = || names.iter().map(|(column, _)| *column);
    let (Some(header_row), Some(first), Some(last)) = (header_row, columns().min(), columns().max()) else {
        return Ok(None);
    };
    let mut header = vec![String::new(); (last - first) as usize + 1];
    for (column, name) in names {
        header[(column - first) as usize] = name;
    }
    let table = SheetTable { name: sheet.to_owned(), header_row, first_column: first, n_before: 0 };
    Ok(Some((header, table)))
}

fn read_rows(
    path: &Path,
    workbook: &mut Workbook,
    sheet: &SheetTable,
    (n_columns, columns, form): (usize, &[usize], CellForm),
    rows: &mut Vec<(usize, Vec<TableCell>)>,
    n_held: &mut usize,
) -> Result<(), DataError> {
    let name = &sheet.name;
    let mut cells = cells_of(path, workbook, name)?;
    while let Some(cell) = next_cell(path, name, &mut cells)? {
        if cell.row == sheet.header_row {
            continue;
        }
        let number = sheet.n_before + cell.row as usize + 1;
        let column = cell.column.checked_sub(sheet.first_column).map(|column| column as usize);
        let Some(column) = column.filter(|column| *column < n_columns) else { continue };
        let is_used = columns.contains(&column);
        if !is_used && matches!(cell.value, DataRef::Empty) {
            continue;
        }
        if rows.last().is_some_and(|(last, _)| number < *last) || cell.row < sheet.header_row {
            let problem = format!("sheet `{name}`: cell {} comes after a later row", cell.address());
            return Err(DataError::file(path, format!("{problem}; save it again as .xlsx")));
        }
        if rows.last().is_none_or(|(last, _)| number != *last) {
            rows.push((number, Vec::new()));
            *n_held += size_of::<(usize, Vec<TableCell>)>();
        }
        let Some((_, row)) = rows.last_mut() else { continue };
        let n_missing = (column + 1).saturating_sub(row.len());
        *n_held += n_missing * size_of::<TableCell>() + if is_used { cell.n_bytes() } else { 0 };
        if *n_held > MAX_HELD_BYTES {
            let problem = format!("the cells up to row {number} take more than {MAX_HELD_BYTES} bytes");
            return Err(DataError::file(path, format!("{problem}; {BY_ROW}")));
        }
        row.resize(row.len() + n_missing, TableCell::default());
        row[column] = match is_used {
            true => TableCell { text: cell.text(path, name)?, value: cell.typed(form) },
            // For other columns, it matters only whether the cell is empty.
            false => cell.text(path, name)?.trim().chars().take(1).collect::<String>().into(),
        };
    }
    Ok(())
}

/// Integers without a decimal point, dates as year, month and day.
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

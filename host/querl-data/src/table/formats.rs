//! Reads tables of text cells from xlsx, csv, tsv, jsonl and parquet files, row by row.

use super::encoding::{TextEncoding, detect, open_text};
use crate::dataset::export::{formula_text, is_header};
use crate::error::{DataError, catch_panic, panic_message};
use calamine::{Data, ExcelDateTime, Range, Reader, SheetType, SheetVisible};
use csv::StringRecord;
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter as ParquetRows;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use querl_core::fsx::{NumberedLine, open_jsonl};
use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A table of text cells, read lazily.
pub(crate) struct Table {
    path: PathBuf,
    pub(crate) sheet: Option<String>,
    pub(crate) unread_sheets: Vec<String>,
    pub(crate) encoding: Option<TextEncoding>,
    pub(crate) header: Vec<String>,
    source: Box<dyn RowSource>,
}

/// Reads the rows of one file format.
trait RowSource {
    /// The rows; cells of columns other than `columns` may be empty.
    fn rows(self: Box<Self>, columns: &[usize]) -> Result<TableRows, DataError>;
}

/// Rows with the cells of all columns.
struct AllCells(TableRows);

impl RowSource for AllCells {
    fn rows(self: Box<Self>, _columns: &[usize]) -> Result<TableRows, DataError> {
        Ok(self.0)
    }
}

impl Table {
    fn new(path: &Path, header: Vec<String>, source: Box<dyn RowSource>) -> Self {
        Self { path: path.to_owned(), sheet: None, unread_sheets: Vec::new(), encoding: None, header, source }
    }

    fn of_rows(path: &Path, header: Vec<String>, rows: TableRows) -> Self {
        Self::new(path, header, Box::new(AllCells(rows)))
    }

    /// The rows, numbered as in a spreadsheet or editor; cells of columns other than `columns` may be empty.
    pub(crate) fn rows(self, columns: &[usize]) -> Result<TableRows, DataError> {
        let Self { path, header, source, .. } = self;
        let rows = source.rows(columns)?;
        let columns = columns.to_vec();
        Ok(Box::new(rows.map(move |row| check_cells(&path, &header, &columns, row?))))
    }

    #[cfg(test)]
    pub(crate) fn all_rows(self) -> TableRows {
        let columns: Vec<usize> = (0..self.header.len()).collect();
        self.rows(&columns).expect("all columns are text")
    }
}

/// Numbered rows of cells; a row may have fewer cells than the header.
pub(crate) type TableRows = Box<dyn Iterator<Item = Result<(usize, Vec<String>), DataError>>>;

/// A longer cell is damage.
const MAX_CELL_BYTES: usize = 1 << 20;

fn check_cells(
    path: &Path,
    names: &[String],
    columns: &[usize],
    row: (usize, Vec<String>),
) -> Result<(usize, Vec<String>), DataError> {
    let n_bytes = |column: usize| row.1.get(column).map_or(0, String::len);
    let Some(column) = columns.iter().find(|column| n_bytes(**column) > MAX_CELL_BYTES) else { return Ok(row) };
    let (number, n_bytes) = (row.0, n_bytes(*column));
    let name = names.get(*column).map_or("", String::as_str);
    let problem = format!("row {number} column `{name}`: a cell of {n_bytes} bytes; expected at most {MAX_CELL_BYTES}");
    Err(DataError::file(path, format!("{problem} (look for a quote before it that is not closed)")))
}

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

/// Detects a wrong file extension by the first bytes.
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

/// The header of JSON lines is the union of their keys, in order of appearance: the file is read twice.
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

/// Appended to the text, which has no zero byte: becomes a row of its own, or the end of a cell whose quote is not closed.
const END: &str = "\n\0";

/// A csv or tsv file. A quote that is not closed would swallow all rows after it, and an unquoted separator shifts cells: both are errors
/// with the row.
fn open_delimited(path: &Path, delimiter: u8) -> Result<Table, DataError> {
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
    let is_exported = is_header(&header);
    // Rows as a spreadsheet numbers them: line numbers would count line breaks within cells.
    let rows = (2..).zip(records).filter_map(move |(row, record)| {
        let checked = record.map_err(&problem).and_then(|record| {
            check_quotes(&of_file, row, &record)?;
            check_width(&of_file, row, &record, n_columns)?;
            let cell = |cell: &str| if is_exported { formula_text(cell).to_owned() } else { cell.to_owned() };
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

/// Maximum rows of a sheet; rows of the next sheet are numbered from here.
const SHEET_ROWS: usize = 1_048_576;

/// A workbook: the first sheet, and further sheets with the same columns, as in a table with more rows than a sheet can have.
fn open_xlsx(path: &Path) -> Result<Table, DataError> {
    let unreadable = |error: &dyn std::fmt::Display| {
        DataError::file(path, format!("not a readable xlsx workbook ({error}); save it again as .xlsx"))
    };
    let mut workbook: calamine::Xlsx<_> =
        calamine::open_workbook(path).map_err(|error: calamine::XlsxError| unreadable(&error))?;
    let sheets = workbook.sheets_metadata().iter().filter(|sheet| {
        // Hidden sheets are ignored.
        sheet.typ == SheetType::WorkSheet && sheet.visible == SheetVisible::Visible
    });
    let mut names = sheets.map(|sheet| sheet.name.clone()).collect::<Vec<_>>().into_iter();
    let name = names.next().ok_or_else(|| DataError::file(path, "the workbook has no sheet that is shown"))?;
    let sheet = match names.len() {
        0 => format!("sheet `{name}`"),
        n => format!("sheet `{name}`, the first of {}", n + 1),
    };
    let range = workbook.worksheet_range(&name).map_err(|error| unreadable(&error))?;
    let header = sheet_header(&range)
        .ok_or_else(|| DataError::file(path, format!("{sheet}: is empty; expected a header row")))?;
    // Rows are held in memory: calamine reads whole sheets.
    let (mut rows, mut unread_sheets, mut n_before) = (sheet_rows(path, &name, &range, 0), Vec::new(), 0);
    drop(range);
    for name in names {
        let range = workbook.worksheet_range(&name).map_err(|error| unreadable(&format!("sheet `{name}`: {error}")))?;
        match sheet_header(&range) {
            None => {}
            Some(other) if other == header => {
                n_before += SHEET_ROWS;
                rows.extend(sheet_rows(path, &name, &range, n_before));
            }
            Some(_) => unread_sheets.push(name),
        }
    }
    let mut table = Table::of_rows(path, header, Box::new(rows.into_iter()));
    (table.sheet, table.unread_sheets) = (Some(sheet), unread_sheets);
    Ok(table)
}

fn sheet_header(range: &Range<Data>) -> Option<Vec<String>> {
    Some(range.rows().next()?.iter().map(|cell| cell_text(cell).trim().to_owned()).collect())
}

fn sheet_rows(
    path: &Path,
    sheet: &str,
    range: &Range<Data>,
    n_before: usize,
) -> Vec<Result<(usize, Vec<String>), DataError>> {
    let first_row = range.start().map_or(1, |(row, _)| row as usize + 1);
    let rows = range.rows().zip(first_row..).skip(1);
    rows.map(|(cells, row)| Ok((n_before + row, sheet_cells(path, sheet, row, cells)?))).collect()
}

fn sheet_cells(path: &Path, sheet: &str, row: usize, cells: &[Data]) -> Result<Vec<String>, DataError> {
    if let Some(column) = cells.iter().position(|cell| matches!(cell, Data::Error(_))) {
        let location = format!("sheet `{sheet}`: row {row} column {}", column + 1);
        let problem = format!("{location}: holds the error value `{}`; correct or clear it", cells[column]);
        return Err(DataError::file(path, problem));
    }
    Ok(cells.iter().map(cell_text).collect())
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

/// A parquet file with flat columns. The library panics on damaged files: offsets are checked first, a panic within a page is an error of
/// the file, and unused columns are not read. Values other than texts, numbers and lists of them are errors, since programs write them in
/// different ways.
fn open_parquet(path: &Path) -> Result<Table, DataError> {
    let reader = caught(|| open_reader(path)).map_err(|problem| unreadable(path, &problem))?;
    let fields = reader.metadata().file_metadata().schema().get_fields();
    let header = fields.iter().map(|field| field.name().to_owned()).collect();
    Ok(Table::new(path, header, Box::new(ParquetFile { path: path.to_owned(), reader })))
}

/// An opened file whose rows are not read yet.
struct ParquetFile {
    path: PathBuf,
    reader: SerializedFileReader<File>,
}

impl RowSource for ParquetFile {
    fn rows(self: Box<Self>, columns: &[usize]) -> Result<TableRows, DataError> {
        let Self { path, reader } = *self;
        let schema = reader.metadata().file_metadata().schema();
        let mut columns = columns.to_vec();
        columns.sort_unstable();
        columns.dedup();
        let used = columns.iter().map(|column| schema.get_fields()[*column].clone()).collect();
        let (name, n_columns) = (schema.name().to_owned(), schema.get_fields().len());
        let projected = || {
            let used = Type::group_type_builder(&name).with_fields(used).build()?;
            ParquetRows::from_file_into(Box::new(reader)).project(Some(used))
        };
        let mut rows = caught(projected).map_err(|problem| unreadable(&path, &problem))?;
        let mut number = 0;
        Ok(Box::new(std::iter::from_fn(move || {
            number += 1;
            let row = match caught(|| rows.next().transpose()) {
                Ok(row) => row?,
                Err(problem) => return Some(Err(unreadable(&path, &format!("row {number}: {problem}")))),
            };
            let cells = parquet_cells(&row, &columns, n_columns).map_err(|problem| {
                let remedy = "write the column as text, numbers or lists of them";
                DataError::file(&path, format!("row {number} {problem}; {remedy}"))
            });
            Some(cells.map(|cells| (number, cells)))
        })))
    }
}

fn unreadable(path: &Path, problem: &str) -> DataError {
    let remedy = match problem.contains("Disabled feature") {
        true => "write it with snappy, zstd or gzip, or uncompressed",
        false => "write it again",
    };
    DataError::file(path, format!("not a parquet file that can be read ({problem}); {remedy}"))
}

/// Runs `work`; errors and panics become messages.
fn caught<T>(work: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match catch_panic(work) {
        Ok(result) => result.map_err(|error| error.to_string().replace('\n', " ")),
        Err(panic) => Err(format!("its pages are damaged: {}", panic_message(panic.as_ref()))),
    }
}

fn open_reader(path: &Path) -> Result<SerializedFileReader<File>, ParquetError> {
    let file = File::open(path)?;
    let n_bytes = file.metadata()?.len();
    let reader = SerializedFileReader::new(file)?;
    let mut columns = reader.metadata().row_groups().iter().flat_map(|group| group.columns());
    match columns.find(|column| !is_within(column, n_bytes)) {
        Some(column) => {
            let name = column.column_path().string();
            Err(ParquetError::General(format!("column `{name}` has an offset beyond the end of the file")))
        }
        None => Ok(reader),
    }
}

fn is_within(column: &ColumnChunkMetaData, n_bytes: u64) -> bool {
    let start = column.dictionary_page_offset().unwrap_or_else(|| column.data_page_offset());
    let end = start.checked_add(column.compressed_size()).and_then(|end| u64::try_from(end).ok());
    let is_positive = start >= 0 && column.compressed_size() >= 0 && column.num_values() >= 0;
    is_positive && end.is_some_and(|end| end <= n_bytes)
}

/// The cells of a row with the fields of `columns`, or an error with the column.
fn parquet_cells(row: &Row, columns: &[usize], n_columns: usize) -> Result<Vec<String>, String> {
    let mut cells = vec![String::new(); n_columns];
    for (column, (name, field)) in columns.iter().zip(row.get_column_iter()) {
        cells[*column] = field_text(field).map_err(|what| format!("column `{name}` holds {what}"))?;
    }
    Ok(cells)
}

fn field_text(field: &Field) -> Result<String, &'static str> {
    Ok(match field {
        Field::Null => String::new(),
        Field::Str(text) => text.clone(),
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => text.to_owned(),
            Err(_) => return Err("bytes that are not UTF-8 text"),
        },
        Field::Float16(number) => number_text((*number).into()),
        Field::Float(number) if number.fract() != 0.0 => number.to_string(),
        Field::Float(number) => number_text((*number).into()),
        Field::Double(number) => number_text(*number),
        Field::ListInternal(list) => list.elements().iter().map(field_text).collect::<Result<Vec<_>, _>>()?.join(","),
        Field::Bool(_) | Field::Decimal(_) => field.to_string(),
        Field::Byte(_) | Field::Short(_) | Field::Int(_) | Field::Long(_) => field.to_string(),
        Field::UByte(_) | Field::UShort(_) | Field::UInt(_) | Field::ULong(_) => field.to_string(),
        Field::Date(_) | Field::TimestampMillis(_) | Field::TimestampMicros(_) => return Err("a date"),
        Field::TimeMillis(_) | Field::TimeMicros(_) => return Err("a time"),
        Field::Group(_) | Field::MapInternal(_) => return Err("an object"),
    })
}

/// Integers without a decimal point, since ids have none.
fn number_text(number: f64) -> String {
    if number.fract() == 0.0 && number.abs() < 1e15 { format!("{number:.0}") } else { number.to_string() }
}

//! Reads tables of text cells from csv, tsv, jsonl and parquet files, row by row, and opens those of a workbook.

use super::encoding::{TextEncoding, detect, open_text};
use super::parquet_pages::{check_footer, check_pages};
use super::xlsx::{first_cells, open_xlsx};
use crate::dataset::export::{formula_text, is_header};
use crate::error::{DataError, catch_panic, panic_message};
use csv::StringRecord;
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter as ParquetRows;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use querl_core::fsx::{MAX_ROW_BYTES, NumberedLine, open_rows};
use querl_core::records::{ColumnValue, Scalar};
use serde_json::Value;
use std::cell::Cell;
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A table of text cells, whose rows are read lazily.
pub(crate) struct Table {
    path: PathBuf,
    pub(crate) sheet: Option<String>,
    pub(crate) unread_sheets: Vec<String>,
    pub(crate) hidden_sheets: Vec<String>,
    pub(crate) encoding: Option<TextEncoding>,
    /// Separator of cells in a csv or tsv file.
    delimiter: u8,
    pub(crate) header: Vec<String>,
    source: Box<dyn RowSource>,
}

/// Whether cells are read as text only or also with their typed value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CellForm {
    /// Text only. In formats where programs write them differently, values other than texts, numbers and lists are errors.
    Text,
    Typed,
}

/// Reader of the rows of one file format.
pub(super) trait RowSource {
    /// Reads all rows; cells of columns other than `columns` may be empty.
    fn rows(self: Box<Self>, columns: &[usize], form: CellForm) -> Result<TypedRows, DataError>;

    /// Merged cells of `columns` below the header, as ranges (`C2:C3`): only the first ones, and none for a large workbook.
    fn merged(&mut self, _columns: &[usize]) -> Vec<String> {
        Vec::new()
    }
}

/// Rows of texts, with the cells of all columns.
struct TextRows(TableRows);

impl RowSource for TextRows {
    fn rows(self: Box<Self>, _: &[usize], _: CellForm) -> Result<TypedRows, DataError> {
        Ok(Box::new(self.0.map(|row| row.map(|(row, texts)| (row, texts.into_iter().map(TableCell::from).collect())))))
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct TableCell {
    pub(super) text: String,
    /// Typed value of a cell that is not text; `None` if it is text or was not read as [`CellForm::Typed`].
    pub(super) value: Option<ColumnValue>,
}

impl From<String> for TableCell {
    fn from(text: String) -> Self {
        Self { text, value: None }
    }
}

impl AsRef<str> for TableCell {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

impl TableCell {
    /// The typed value, or the text if there is none; `None` for an empty cell.
    pub(super) fn into_value(self) -> Option<ColumnValue> {
        let Self { text, value } = self;
        value.or_else(|| (!text.trim().is_empty()).then_some(ColumnValue::Text(text)))
    }
}

impl Table {
    pub(super) fn new(path: &Path, header: Vec<String>, source: Box<dyn RowSource>) -> Self {
        let (path, unread_sheets, hidden_sheets) = (path.to_owned(), Vec::new(), Vec::new());
        Self { path, sheet: None, unread_sheets, hidden_sheets, encoding: None, delimiter: b',', header, source }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Merged cells of `columns` below the header, as ranges (`C2:C3`).
    pub(super) fn merged(&mut self, columns: &[usize]) -> Vec<String> {
        self.source.merged(columns)
    }

    /// Number of the first row that has one of `names` as a cell: the header may be below a title.
    pub(super) fn header_below(&self, names: &[&str]) -> Option<usize> {
        const N_ROWS: u32 = 10;
        let cells = match self.encoding {
            _ if self.sheet.is_some() => first_cells(&self.path, N_ROWS),
            Some(encoding) => {
                // A quote that is not closed would read the whole file.
                let text = open_text(&self.path, encoding).ok()?.take(MAX_CELL_BYTES as u64);
                let mut reader = csv::ReaderBuilder::new();
                reader.delimiter(self.delimiter).flexible(true).has_headers(false);
                let rows = (1..)
                    .zip(reader.from_reader(text).into_records())
                    .take(N_ROWS as usize)
                    .filter_map(|(row, record)| Some((row, record.ok()?)));
                rows.flat_map(|(row, record)| record.iter().map(|cell| (row, cell.to_owned())).collect::<Vec<_>>())
                    .collect()
            }
            None => Vec::new(),
        };
        cells.iter().find(|(_, cell)| names.contains(&cell.trim())).map(|(row, _)| *row)
    }

    /// The rows with their numbers as in a spreadsheet or editor; cells of columns other than `columns` may be empty.
    pub(crate) fn rows(self, columns: &[usize]) -> Result<TableRows, DataError> {
        let rows = self.cells(columns, CellForm::Text)?;
        let texts = |(row, cells): (usize, Vec<TableCell>)| (row, cells.into_iter().map(|cell| cell.text).collect());
        Ok(Box::new(rows.map(move |row| row.map(texts))))
    }

    pub(super) fn cells(self, columns: &[usize], form: CellForm) -> Result<TypedRows, DataError> {
        let Self { path, header, source, .. } = self;
        let rows = source.rows(columns, form)?;
        let columns = columns.to_vec();
        Ok(Box::new(rows.map(move |row| check_cells(&path, &header, &columns, row?))))
    }

    #[cfg(test)]
    pub(crate) fn all_rows(self) -> TableRows {
        let columns: Vec<usize> = (0..self.header.len()).collect();
        self.rows(&columns).expect("all columns are text")
    }
}

/// Rows of text cells with their row number; a row may have fewer cells than the header.
pub(crate) type TableRows = Box<dyn Iterator<Item = Result<(usize, Vec<String>), DataError>>>;

pub(super) type TypedRows = Box<dyn Iterator<Item = Result<(usize, Vec<TableCell>), DataError>>>;

/// Maximum number of rows that are listed for a finding; the counts include all.
pub(super) const MAX_LISTED: usize = 100;

/// Maximum size of a cell in bytes; a longer one is treated as a damaged file.
pub(super) const MAX_CELL_BYTES: usize = 1 << 20;

/// Maximum number of columns: that of a sheet.
const MAX_COLUMNS: usize = 16_384;

/// Maximum number of rows of a table. A row takes 40 bytes of memory, while equal rows of a parquet file take no space in it.
pub(crate) const MAX_ROWS: u32 = 1 << 24;

fn check_columns(path: &Path, n_columns: usize) -> Result<(), DataError> {
    match n_columns > MAX_COLUMNS {
        true => {
            Err(DataError::file(path, format!("the table has {n_columns} columns; expected at most {MAX_COLUMNS}")))
        }
        false => Ok(()),
    }
}

fn check_cells(
    path: &Path,
    names: &[String],
    columns: &[usize],
    row: (usize, Vec<TableCell>),
) -> Result<(usize, Vec<TableCell>), DataError> {
    let n_bytes = |column: usize| row.1.get(column).map_or(0, |cell| cell.text.len());
    let Some(column) = columns.iter().find(|column| n_bytes(**column) > MAX_CELL_BYTES) else { return Ok(row) };
    let (number, n_bytes) = (row.0, n_bytes(*column));
    let name = names.get(*column).map_or("", String::as_str);
    let problem = format!("row {number} column `{name}`: a cell of {n_bytes} bytes; expected at most {MAX_CELL_BYTES}");
    Err(DataError::file(path, format!("{problem} (look for a quote before it that is not closed)")))
}

/// Opens a table in the format of the file's extension.
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
        return Err(DataError::file(path, "the file is empty; expected a table with a header"));
    }
    check_first_bytes(path, extension)?;
    let table = open(path)?;
    check_columns(path, table.header.len())?;
    Ok(table)
}

/// Reports a wrong file extension by the first bytes of the file.
pub(super) fn check_first_bytes(path: &Path, extension: &str) -> Result<(), DataError> {
    let mut start = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(4).read_to_end(&mut start));
    read.map_err(|error| DataError::read(path, error))?;
    let (expected, what, remedy) = match start.as_slice() {
        b"PK\x03\x04" => ("xlsx", "a workbook or another archive", "give a workbook the ending .xlsx"),
        b"PAR1" => ("parquet", "parquet", "give it that ending"),
        [0x1f, 0x8b, ..] => ("", "compressed with gzip", "decompress it"),
        [0xd0, 0xcf, 0x11, 0xe0] => ("", "an old or encrypted workbook", "save it as .xlsx without a password"),
        _ => return Ok(()),
    };
    if extension == expected {
        return Ok(());
    }
    Err(DataError::file(path, format!("by its first bytes the file is {what}; {remedy}")))
}

pub(super) type Object = serde_json::Map<String, Value>;

/// The header of JSON lines is the union of their keys, in order of appearance: the file is read twice.
fn open_lines(path: &Path) -> Result<Table, DataError> {
    let (mut header, mut known) = (Vec::new(), HashSet::new());
    for line in open_rows::<Object>(path)? {
        for key in line?.value.keys() {
            if !known.contains(key) {
                known.insert(key.clone());
                header.push(key.clone());
            }
        }
        check_columns(path, header.len())?;
    }
    if header.is_empty() {
        return Err(DataError::file(path, "the file holds no object; expected one JSON object a line"));
    }
    let file = LinesFile { path: path.to_owned(), header: header.clone() };
    Ok(Table::new(path, header, Box::new(file)))
}

struct LinesFile {
    path: PathBuf,
    header: Vec<String>,
}

impl RowSource for LinesFile {
    fn rows(self: Box<Self>, _: &[usize], form: CellForm) -> Result<TypedRows, DataError> {
        let Self { path, header } = *self;
        let cell = move |value: &Value| TableCell { text: value_text(value), value: typed(value, form) };
        Ok(Box::new(open_rows::<Object>(&path)?.map(move |line| {
            let NumberedLine { line, value, .. } = line?;
            Ok((line, header.iter().map(|key| value.get(key).map_or_else(TableCell::default, &cell)).collect()))
        })))
    }
}

/// Typed value of a JSON cell that is not text. Nested values are JSON text.
pub(super) fn typed(value: &Value, form: CellForm) -> Option<ColumnValue> {
    let scalar = |item: &Value| match item {
        Value::Null => None,
        Value::Bool(flag) => Some(Scalar::Flag(*flag)),
        Value::Number(number) => Some(Scalar::of_number(number)),
        Value::String(text) => Some(Scalar::Text(text.clone())),
        nested => Some(Scalar::Text(nested.to_string())),
    };
    match value {
        _ if form == CellForm::Text => None,
        Value::Array(items) => Some(ColumnValue::Items(items.iter().filter_map(scalar).collect())),
        Value::Bool(flag) => Some(ColumnValue::Flag(*flag)),
        Value::Number(number) => Some(Scalar::of_number(number).into()),
        Value::Null | Value::String(_) | Value::Object(_) => None,
    }
}

pub(crate) fn value_text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(value_text).collect::<Vec<_>>().join(","),
        Value::Number(number) if number.is_f64() => {
            number.as_f64().and_then(integer_text).unwrap_or_else(|| number.to_string())
        }
        other => other.to_string(),
    }
}

/// Appended to the text, which has no zero byte: becomes a row of its own, or the end of a cell whose quote is not closed.
const END: &str = "\n\0";

/// A csv or tsv file. A quote that is not closed would swallow all rows after it, and an unquoted separator shifts cells: both are errors
/// with the row.
fn open_delimited(path: &Path, delimiter: u8) -> Result<Table, DataError> {
    let encoding = detect(path)?;
    let text = open_text(path, encoding).map_err(|error| DataError::read(path, error))?;
    let of_file = path.to_owned();
    let problem = move |error: csv::Error| {
        let name = encoding.name();
        let otherwise = || DataError::file(&of_file, format!("not readable as a table of {name} text: {error}"));
        match error.kind() {
            csv::ErrorKind::Io(source) => DataError::reading(&of_file, source, otherwise),
            _ => otherwise(),
        }
    };
    let row_bytes = RowBytes::default();
    let text = BoundedRows { text: text.chain(END.as_bytes()), row_bytes: row_bytes.clone() };
    let mut reader = csv::ReaderBuilder::new();
    reader.delimiter(delimiter).flexible(true).has_headers(false);
    let mut records = reader.from_reader(text).into_records();
    let header = match records.next() {
        Some(header) => header.map_err(&problem)?,
        None => StringRecord::new(),
    };
    check_quotes(path, 1, &header)?;
    check_columns(path, header.len())?;
    let header: Vec<String> = header.iter().map(|name| name.trim().to_owned()).collect();
    if header.iter().all(|name| name.is_empty() || is_end(name)) {
        return Err(DataError::file(path, "the file has no header row; expected the names of the columns"));
    }
    let (of_file, n_columns) = (path.to_owned(), header.len());
    let is_exported = is_header(&header);
    // Rows as a spreadsheet numbers them: line numbers would count line breaks within cells.
    let rows = (2..).zip(records).filter_map(move |(row, record)| {
        row_bytes.set(0);
        let checked = record.map_err(&problem).and_then(|record| {
            check_quotes(&of_file, row, &record)?;
            check_width(&of_file, row, &record, n_columns)?;
            let cell = |cell: &str| if is_exported { formula_text(cell).to_owned() } else { cell.to_owned() };
            Ok((row, record.iter().take(n_columns).map(cell).collect::<Vec<_>>()))
        });
        let ended = checked.as_ref().is_ok_and(|(_, cells)| matches!(&cells[..], [cell] if is_end(cell)));
        (!ended).then_some(checked)
    });
    let mut table = Table::new(path, header, Box::new(TextRows(Box::new(rows))));
    (table.encoding, table.delimiter) = (Some(encoding), delimiter);
    Ok(table)
}

/// Number of bytes that were read since the last complete row; may include bytes of later rows.
type RowBytes = Rc<Cell<usize>>;

/// A reader that returns an error within a row that is too long for memory, such as a row with an unclosed quote.
struct BoundedRows<R> {
    text: R,
    row_bytes: RowBytes,
}

impl<R: Read> Read for BoundedRows<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n_bytes = self.text.read(buffer)?;
        self.row_bytes.set(self.row_bytes.get() + n_bytes);
        if self.row_bytes.get() > MAX_ROW_BYTES {
            let problem = format!("a row of more than {MAX_ROW_BYTES} bytes; look for a quote that is not closed");
            return Err(io::Error::other(problem));
        }
        Ok(n_bytes)
    }
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

/// A parquet file with flat columns. The library panics on damaged files: offsets are checked first, a panic within a page is an error of
/// the file, and unused columns are not read. As texts, values other than texts, numbers and lists of them are errors, since programs write
/// them in different ways.
fn open_parquet(path: &Path) -> Result<Table, DataError> {
    let reader = caught(path, None, || open_reader(path))?;
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
    fn rows(self: Box<Self>, columns: &[usize], form: CellForm) -> Result<TypedRows, DataError> {
        let Self { path, reader } = *self;
        let schema = reader.metadata().file_metadata().schema();
        let mut columns = columns.to_vec();
        columns.sort_unstable();
        columns.dedup();
        let used = columns.iter().map(|column| schema.get_fields()[*column].clone()).collect();
        let (name, n_columns) = (schema.name().to_owned(), schema.get_fields().len());
        let projected = || {
            check_pages(&path, &reader, &columns)?;
            let used = Type::group_type_builder(&name).with_fields(used).build()?;
            ParquetRows::from_file_into(Box::new(reader)).project(Some(used))
        };
        let mut rows = caught(&path, None, projected)?;
        let mut number = 0;
        Ok(Box::new(std::iter::from_fn(move || {
            number += 1;
            let row = match caught(&path, Some(number), || rows.next().transpose()) {
                Ok(row) => row?,
                Err(error) => return Some(Err(error)),
            };
            let cells = parquet_cells(&row, &columns, n_columns, form).map_err(|problem| {
                let remedy = match () {
                    () if problem.ends_with(CHAT) => CHAT_REMEDY,
                    () if problem.ends_with(INFINITE) => "write a finite number, or null where a value is missing",
                    () => "write the column as text, numbers or lists of them",
                };
                DataError::file(&path, format!("row {number} {problem}; {remedy}"))
            });
            Some(cells.map(|cells| (number, cells)))
        })))
    }
}

fn unreadable(path: &Path, row: Option<usize>, problem: &str) -> DataError {
    let row = row.map(|row| format!("row {row}: ")).unwrap_or_default();
    let remedy = match problem.contains("Disabled feature") {
        true => "write it with snappy, zstd or gzip, or uncompressed",
        false => "write it again",
    };
    DataError::file(path, format!("not a parquet file that can be read ({row}{problem}); {remedy}"))
}

/// Runs `work`; an error or a panic is returned as an error of the file, or of its row.
pub(super) fn caught<T>(
    path: &Path,
    row: Option<usize>,
    work: impl FnOnce() -> Result<T, ParquetError>,
) -> Result<T, DataError> {
    let problem = match catch_panic(work) {
        Ok(Ok(done)) => return Ok(done),
        Ok(Err(error)) => {
            let otherwise = || unreadable(path, row, &error.to_string().replace('\n', " "));
            return Err(DataError::reading(path, &error, otherwise));
        }
        Err(panic) => format!("its pages are damaged: {}", panic_message(panic.as_ref())),
    };
    Err(unreadable(path, row, &problem))
}

pub(super) fn open_reader(path: &Path) -> Result<SerializedFileReader<File>, ParquetError> {
    let mut file = File::open(path)?;
    let n_bytes = file.metadata()?.len();
    check_footer(&mut file)?;
    let reader = SerializedFileReader::new(file)?;
    let n_rows = reader.metadata().file_metadata().num_rows();
    let of_groups = reader.metadata().row_groups().iter().map(|group| group.num_rows());
    if !(0..=i64::from(MAX_ROWS)).contains(&n_rows) || of_groups.fold(0, i64::saturating_add) != n_rows {
        return Err(ParquetError::General(format!(
            "declares {n_rows} rows; expected those of its groups, at most {MAX_ROWS}"
        )));
    }
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
fn parquet_cells(row: &Row, columns: &[usize], n_columns: usize, form: CellForm) -> Result<Vec<TableCell>, String> {
    let mut cells = vec![TableCell::default(); n_columns];
    for (column, (name, field)) in columns.iter().zip(row.get_column_iter()) {
        cells[*column] = match (field_text(field), form) {
            (Err(what), CellForm::Text) | (Err(what @ INFINITE), CellForm::Typed) => {
                return Err(format!("column `{name}` holds {what}"));
            }
            (Ok(text), CellForm::Text) => text.into(),
            (text, CellForm::Typed) => {
                let value = field_value(field);
                let text = text.unwrap_or_else(|_| value_text(&value));
                TableCell { text, value: typed(&value, form) }
            }
        };
    }
    Ok(cells)
}

pub(super) fn field_value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(flag) => (*flag).into(),
        Field::Byte(number) => (*number).into(),
        Field::Short(number) => (*number).into(),
        Field::Int(number) => (*number).into(),
        Field::Long(number) => (*number).into(),
        Field::UByte(number) => (*number).into(),
        Field::UShort(number) => (*number).into(),
        Field::UInt(number) => (*number).into(),
        Field::ULong(number) => (*number).into(),
        Field::Float16(number) => f64::from(*number).into(),
        Field::Float(number) => f64::from(*number).into(),
        Field::Double(number) => (*number).into(),
        Field::Str(text) => text.clone().into(),
        Field::Bytes(bytes) => String::from_utf8_lossy(bytes.data()).into(),
        Field::ListInternal(list) => list.elements().iter().map(field_value).collect(),
        Field::Group(row) => {
            row.get_column_iter().map(|(name, field)| (name.clone(), field_value(field))).collect::<Object>().into()
        }
        other => other.to_string().into(),
    }
}

fn field_text(field: &Field) -> Result<String, &'static str> {
    Ok(match field {
        Field::Null => String::new(),
        Field::Str(text) => text.clone(),
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => text.to_owned(),
            Err(_) => return Err("bytes that are not UTF-8 text"),
        },
        Field::Float16(number) => number_text((*number).into(), number)?,
        Field::Float(number) => number_text((*number).into(), number)?,
        Field::Double(number) => number_text(*number, number)?,
        Field::ListInternal(list) if list.elements().iter().any(is_message) => return Err(CHAT),
        Field::Group(_) if is_message(field) => return Err(CHAT),
        Field::ListInternal(list) => list.elements().iter().map(field_text).collect::<Result<Vec<_>, _>>()?.join(","),
        Field::Bool(_) | Field::Decimal(_) => field.to_string(),
        Field::Byte(_) | Field::Short(_) | Field::Int(_) | Field::Long(_) => field.to_string(),
        Field::UByte(_) | Field::UShort(_) | Field::UInt(_) | Field::ULong(_) => field.to_string(),
        Field::Date(_) | Field::TimestampMillis(_) | Field::TimestampMicros(_) => return Err("a date"),
        Field::TimeMillis(_) | Field::TimeMicros(_) => return Err("a time"),
        Field::Group(_) | Field::MapInternal(_) => return Err("an object"),
    })
}

/// Description of a column of chat messages, for an error message.
pub(super) const CHAT: &str = "a list of chat messages";
pub(super) const CHAT_REMEDY: &str = "write the text of the last user message in a column of its own, and name that in \
                                       data.query_column; a summary of the earlier messages belongs in data.history_column";

/// Keys of a chat message, as in `messages` and `prompt` (OpenAI, TRL, ms-swift) and in `conversations` (ShareGPT).
const MESSAGE_KEYS: [[&str; 2]; 2] = [["role", "content"], ["from", "value"]];

fn is_message(field: &Field) -> bool {
    let Field::Group(row) = field else { return false };
    let has = |key: &&str| row.get_column_iter().any(|(name, _)| name == key);
    MESSAGE_KEYS.iter().any(|keys| keys.iter().all(has))
}

/// True if a text is a list of chat messages, in the syntax of JSON or Python.
pub(crate) fn is_chat(cell: &str) -> bool {
    let start = cell.trim_start();
    let inner = start.strip_prefix('[').unwrap_or(start).trim_start();
    let has = |key: &str| inner.contains(&format!("\"{key}\"")) || inner.contains(&format!("'{key}'"));
    inner.starts_with('{') && MESSAGE_KEYS.iter().any(|keys| keys.iter().all(|key| has(key)))
}

/// Description of an infinite number, for an error message.
const INFINITE: &str = "an infinite number";

/// Text of a number in a column of floats; `own` has its precision. NaN is a missing value: pandas and pyarrow write missing values so.
fn number_text(number: f64, own: &impl ToString) -> Result<String, &'static str> {
    if number.is_infinite() {
        return Err(INFINITE);
    }
    let text = || integer_text(number).unwrap_or_else(|| own.to_string());
    Ok(if number.is_nan() { String::new() } else { text() })
}

/// The digits of a number without a fraction: ids have no decimal point, and pandas writes integers of a column with missing values as
/// floats.
fn integer_text(number: f64) -> Option<String> {
    (number.fract() == 0.0 && number.abs() < 1e15).then(|| format!("{number:.0}"))
}

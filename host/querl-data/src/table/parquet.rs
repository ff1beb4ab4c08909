//! Parquet files with flat columns. The library that reads them takes what a file says of itself for true and panics where it
//! is not: offsets are looked at first, a panic within a page is an error of the file, and columns that are not used are not
//! read. Values that are no text, number or list of such are refused with their place, as no two programs write them alike.

use super::source::{RowSource, Table, TableRows};
use crate::error::DataError;
use crate::error::{catch_panic, panic_message};
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use std::fs::File;
use std::path::{Path, PathBuf};

pub(super) fn open_parquet(path: &Path) -> Result<Table, DataError> {
    let reader = caught(|| open_reader(path)).map_err(|problem| unreadable(path, &problem))?;
    let fields = reader.metadata().file_metadata().schema().get_fields();
    let header = fields.iter().map(|field| field.name().to_owned()).collect();
    Ok(Table::new(path, header, Box::new(ParquetFile { path: path.to_owned(), reader })))
}

/// An opened file, not read yet.
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
            RowIter::from_file_into(Box::new(reader)).project(Some(used))
        };
        let mut rows = caught(projected).map_err(|problem| unreadable(&path, &problem))?;
        let mut number = 0;
        Ok(Box::new(std::iter::from_fn(move || {
            number += 1;
            let row = match caught(|| rows.next().transpose()) {
                Ok(row) => row?,
                Err(problem) => return Some(Err(unreadable(&path, &format!("row {number}: {problem}")))),
            };
            let cells = cells(&row, &columns, n_columns).map_err(|problem| {
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

/// What `step` gives, or in words why it failed or panicked.
fn caught<T>(step: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match catch_panic(step) {
        Ok(given) => given.map_err(|error| error.to_string().replace('\n', " ")),
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
            Err(ParquetError::General(format!("column `{name}` is said to be where the file has no bytes")))
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

/// The texts of a row that has the fields of `columns` alone, or which column holds what.
fn cells(row: &Row, columns: &[usize], n_columns: usize) -> Result<Vec<String>, String> {
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
            Err(_) => return Err("bytes that are no UTF-8 text"),
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

/// Whole numbers as the digits of an integer: passages have no `1.0`.
fn number_text(number: f64) -> String {
    if number.fract() == 0.0 && number.abs() < 1e15 { format!("{number:.0}") } else { number.to_string() }
}

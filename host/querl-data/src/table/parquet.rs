//! Parquet files with flat columns. The library that reads them takes what a file says of itself for true and panics where it
//! is not: offsets are looked at first, and a panic within a page is an error of the file.

use super::formats::Table;
use crate::error::DataError;
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

pub(super) fn open_parquet(path: &Path) -> Result<Table, DataError> {
    let of_file = path.to_owned();
    let unreadable = move |said: String| {
        let remedy = match said.contains("Disabled feature") {
            true => "write it with snappy, zstd or gzip, or uncompressed",
            false => "write it again",
        };
        DataError::file(&of_file, format!("not a parquet file that can be read ({said}); {remedy}"))
    };
    let reader = caught(|| open_reader(path)).map_err(&unreadable)?;
    let fields = reader.metadata().file_metadata().schema().get_fields();
    let header = fields.iter().map(|field| field.name().to_owned()).collect();
    let mut rows = RowIter::from_file_into(Box::new(reader));
    let mut number = 0;
    let rows = std::iter::from_fn(move || {
        number += 1;
        let row = caught(|| rows.next().transpose());
        match row {
            Ok(row) => row.map(|row| Ok((number, cells(&row)))),
            Err(said) => Some(Err(unreadable(said))),
        }
    });
    Ok(Table { sheet: None, encoding: None, header, rows: Box::new(rows) })
}

/// What `step` gives, or in words why it failed or panicked.
fn caught<T>(step: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    // After a panic nothing of what the step has changed is used again.
    match catch_unwind(AssertUnwindSafe(step)) {
        Ok(given) => given.map_err(|error| error.to_string().replace('\n', " ")),
        Err(_) => Err("its pages are damaged".into()),
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

fn cells(row: &Row) -> Vec<String> {
    row.get_column_iter().map(|(_, field)| field_text(field)).collect()
}

fn field_text(field: &Field) -> String {
    match field {
        Field::Null => String::new(),
        Field::Str(text) => text.clone(),
        Field::Bytes(bytes) => String::from_utf8_lossy(bytes.data()).into_owned(),
        Field::Double(number) if number.fract() == 0.0 && number.abs() < 1e15 => format!("{number:.0}"),
        Field::ListInternal(list) => list.elements().iter().map(field_text).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

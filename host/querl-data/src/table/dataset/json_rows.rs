//! Rows of JSON lines and parquet files as JSON objects, with nested columns.

use crate::error::DataError;
use crate::table::formats::{Object, caught, check_first_bytes, field_value, open_reader};
use crate::table::parquet_pages::check_pages;
use parquet::file::reader::FileReader;
use parquet::record::reader::RowIter as ParquetRows;
use querl_core::fsx::{NumberedLine, open_rows};
use std::path::Path;
use std::sync::Arc;

/// Location of a row in a file, for messages.
#[derive(Debug, Clone)]
pub(super) struct RowLocation {
    path: Arc<Path>,
    /// Number from 1: the line of a JSON lines file, blank lines counted, or the row of a parquet file.
    number: usize,
    is_line: bool,
}

impl RowLocation {
    /// An error at this row; `problem` is the end of a sentence.
    pub(super) fn error(&self, problem: String) -> DataError {
        match self.is_line {
            true => DataError::line(&self.path, self.number, problem),
            false => DataError::file(&self.path, format!("row {}: {problem}", self.number)),
        }
    }
}

pub(super) type JsonRows = Box<dyn Iterator<Item = Result<(RowLocation, Object), DataError>>>;

/// Opens a JSON lines or parquet file, by its extension.
pub(super) fn open_json_rows(path: &Path) -> Result<JsonRows, DataError> {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase()).unwrap_or_default();
    let open: fn(&Path) -> Result<JsonRows, DataError> = match extension.as_str() {
        "jsonl" => lines,
        "parquet" => parquet_rows,
        _ => {
            let expected = "expected a name that ends in .jsonl or .parquet";
            return Err(DataError::file(path, format!("not a dataset that can be read; {expected}")));
        }
    };
    check_first_bytes(path, &extension)?;
    open(path)
}

fn lines(path: &Path) -> Result<JsonRows, DataError> {
    let shared: Arc<Path> = path.into();
    Ok(Box::new(open_rows::<Object>(path)?.map(move |line| {
        let NumberedLine { line, value, .. } = line?;
        Ok((RowLocation { path: shared.clone(), number: line, is_line: true }, value))
    })))
}

fn parquet_rows(path: &Path) -> Result<JsonRows, DataError> {
    let reader = caught(path, None, || open_reader(path))?;
    let n_columns = reader.metadata().file_metadata().schema().get_fields().len();
    let columns: Vec<usize> = (0..n_columns).collect();
    let mut rows = caught(path, None, || {
        check_pages(path, &reader, &columns)?;
        Ok(ParquetRows::from_file_into(Box::new(reader)))
    })?;
    let (shared, mut number): (Arc<Path>, usize) = (path.into(), 0);
    Ok(Box::new(std::iter::from_fn(move || {
        number += 1;
        let row = match caught(&shared, Some(number), || rows.next().transpose()) {
            Ok(row) => row?,
            Err(error) => return Some(Err(error)),
        };
        let columns = row.get_column_iter().map(|(name, field)| (name.clone(), field_value(field)));
        let location = RowLocation { path: shared.clone(), number, is_line: false };
        Some(Ok((location, columns.collect::<Object>())))
    })))
}

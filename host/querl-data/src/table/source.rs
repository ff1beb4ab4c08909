//! A table of text cells, read row by row. The file formats are in their own files; [`super::open`] picks one.

use super::encoding::TextEncoding;
use crate::error::DataError;
use std::path::{Path, PathBuf};

/// A table as text, read as it is asked for.
pub(crate) struct Table {
    path: PathBuf,
    pub(crate) sheet: Option<String>,
    pub(crate) unread_sheets: Vec<String>,
    pub(crate) encoding: Option<TextEncoding>,
    pub(crate) header: Vec<String>,
    source: Box<dyn RowSource>,
}

/// Reads the rows of one file format.
pub(super) trait RowSource {
    /// The rows; cells of columns that are not in `columns` may be empty.
    fn rows(self: Box<Self>, columns: &[usize]) -> Result<TableRows, DataError>;
}

/// Rows whose cells are all read, whichever columns are used.
struct AllCells(TableRows);

impl RowSource for AllCells {
    fn rows(self: Box<Self>, _columns: &[usize]) -> Result<TableRows, DataError> {
        Ok(self.0)
    }
}

impl Table {
    pub(super) fn new(path: &Path, header: Vec<String>, source: Box<dyn RowSource>) -> Self {
        Self { path: path.to_owned(), sheet: None, unread_sheets: Vec::new(), encoding: None, header, source }
    }

    pub(super) fn of_rows(path: &Path, header: Vec<String>, rows: TableRows) -> Self {
        Self::new(path, header, Box::new(AllCells(rows)))
    }

    /// The rows, as a spreadsheet or editor numbers them, with the cells of `columns`; those of others may be empty.
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

/// Numbered rows of cells; a row may have fewer than the header.
pub(crate) type TableRows = Box<dyn Iterator<Item = Result<(usize, Vec<String>), DataError>>>;

/// A cell that is longer is damage, and no text that anybody asks or remembers.
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

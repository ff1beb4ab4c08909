//! csv and tsv files. They begin with a byte order mark: without it a spreadsheet takes UTF-8 for the machine's old encoding. A
//! text that a spreadsheet would compute as a formula has an apostrophe before it, which this program takes away again.

use super::{Cell, Column, RowWriter};
use crate::error::DataError;
use querl_core::fsx::{AtomicFile, UTF8_MARK};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

pub(super) struct DelimitedWriter {
    path: PathBuf,
    writer: csv::Writer<AtomicFile>,
}

impl DelimitedWriter {
    pub(super) fn create(path: &Path, columns: &[Column], delimiter: u8) -> Result<Self, DataError> {
        let create = || -> io::Result<csv::Writer<AtomicFile>> {
            let mut file = AtomicFile::create(path)?;
            file.write_all(UTF8_MARK)?;
            let mut writer = csv::WriterBuilder::new().delimiter(delimiter).from_writer(file);
            writer.write_record(columns.iter().map(|column| column.name))?;
            Ok(writer)
        };
        let writer = create().map_err(|error| DataError::write(path, error))?;
        Ok(Self { path: path.to_owned(), writer })
    }
}

impl RowWriter for DelimitedWriter {
    fn row(&mut self, cells: &[Cell<'_>]) -> Result<(), DataError> {
        let text = |cell: &Cell<'_>| match cell {
            Cell::Empty => String::new(),
            Cell::Text(text) if is_formula(text) => format!("'{text}"),
            Cell::Text(text) => text.to_string(),
            Cell::Count(number) => number.to_string(),
            Cell::Score(number) => number.to_string(),
            Cell::Flag(flag) => flag.to_string(),
        };
        let written = self.writer.write_record(cells.iter().map(text));
        written.map_err(|error| DataError::write(&self.path, error.into()))
    }

    fn finish(self: Box<Self>) -> Result<(), DataError> {
        let Self { path, writer } = *self;
        let file = writer.into_inner().map_err(|error| DataError::write(&path, error.into_error()))?;
        file.commit().map_err(|error| DataError::write(&path, error))
    }
}

/// What a spreadsheet computes, behind apostrophes too, so that each of these texts can be told from every other.
fn is_formula(text: &str) -> bool {
    text.trim_start_matches('\'').starts_with(['=', '+', '-', '@', '\t', '\r'])
}

/// The text of a cell of our own tables.
pub(crate) fn formula_text(cell: &str) -> &str {
    cell.strip_prefix('\'').filter(|text| is_formula(text)).unwrap_or(cell)
}

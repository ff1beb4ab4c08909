//! The results of a stage as tables for people and their tools: the columns that the source plan's tools read, then why a row
//! failed, its gold ids and its group. They are made of the stage's output, which is there whatever becomes of them.

mod parquet;
mod xlsx;

use crate::dataset::rows::{RecordFile, Rows};
use crate::error::DataError;
use querl_core::config::TableFormat;
use querl_core::fsx::{AtomicFile, UTF8_MARK};
use querl_core::records::{RewriteRecord, ValidatedRecord};
use serde::de::DeserializeOwned;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ColumnKind {
    Text,
    Count,
    Score,
    Flag,
}

/// A column of a table.
#[derive(Debug)]
struct Column {
    name: &'static str,
    kind: ColumnKind,
    /// In a workbook, in characters.
    width: f64,
}

const fn column(name: &'static str, kind: ColumnKind, width: f64) -> Column {
    Column { name, kind, width }
}

const REWRITES: &[Column] = &[
    column("original_query", ColumnKind::Text, 40.0),
    column("rewritten_query", ColumnKind::Text, 40.0),
    column("user_profile", ColumnKind::Text, 24.0),
    column("history_summary", ColumnKind::Text, 40.0),
    column("error", ColumnKind::Text, 50.0),
    column("gold_ids", ColumnKind::Text, 24.0),
    column("group", ColumnKind::Text, 24.0),
];

const VALIDATED: &[Column] = &[
    column("original_query", ColumnKind::Text, 40.0),
    column("rewritten_query", ColumnKind::Text, 40.0),
    column("user_profile", ColumnKind::Text, 24.0),
    column("history_summary", ColumnKind::Text, 40.0),
    column("recall_count", ColumnKind::Count, 14.0),
    column("top1_score", ColumnKind::Score, 14.0),
    column("success", ColumnKind::Flag, 12.0),
    column("error", ColumnKind::Text, 50.0),
    column("gold_ids", ColumnKind::Text, 24.0),
    column("group", ColumnKind::Text, 24.0),
];

/// One value of a row.
#[derive(Debug, Clone, PartialEq)]
enum Cell<'a> {
    Empty,
    Text(std::borrow::Cow<'a, str>),
    Count(u64),
    Score(f64),
    Flag(bool),
}

/// A table of one format, row by row. After an error nothing more is written.
trait RowWriter {
    fn row(&mut self, cells: &[Cell<'_>]) -> Result<(), DataError>;

    fn finish(self: Box<Self>) -> Result<(), DataError>;
}

/// The table file for a stage's output: `rewrites.jsonl` has `rewrites.xlsx`.
pub fn table_path(output: &Path, format: TableFormat) -> PathBuf {
    output.with_extension(format.extension())
}

/// A record that has a table for people.
pub trait TableRecord: DeserializeOwned + 'static {
    #[doc(hidden)]
    fn columns() -> Columns;

    #[doc(hidden)]
    fn cells(&self) -> Cells<'_>;
}

/// The columns of a table.
pub struct Columns(&'static [Column]);

/// A cell for each of them.
pub struct Cells<'a>(Vec<Cell<'a>>);

/// Writes the records in `output` as tables next to it. All formats are tried even where one fails.
///
/// # Errors
/// The records cannot be read, or a table cannot be written; the first of several is named.
pub fn write_tables<R: TableRecord>(output: &Path, formats: &[TableFormat]) -> Result<(), DataError> {
    let records = RecordFile::<R>::new(output);
    let written: Vec<Result<(), DataError>> =
        formats.iter().map(|format| write_table(&records, &table_path(output, *format), *format)).collect();
    written.into_iter().collect()
}

fn write_table<R: TableRecord>(records: &RecordFile<R>, path: &Path, format: TableFormat) -> Result<(), DataError> {
    let Columns(columns) = R::columns();
    let mut writer: Box<dyn RowWriter> = match format {
        TableFormat::Xlsx => Box::new(xlsx::XlsxWriter::create(path, columns)?),
        TableFormat::Csv => Box::new(DelimitedWriter::create(path, columns, b',')?),
        TableFormat::Tsv => Box::new(DelimitedWriter::create(path, columns, b'\t')?),
        TableFormat::Parquet => Box::new(parquet::ParquetWriter::create(path, columns)?),
    };
    for record in records.read()? {
        writer.row(&record?.cells().0)?;
    }
    writer.finish()
}

pub(crate) fn is_header(names: &[String]) -> bool {
    [REWRITES, VALIDATED].iter().any(|columns| columns.iter().map(|column| column.name).eq(names.iter()))
}

/// A failed row has an empty `rewritten_query` and its reason in `error`.
impl TableRecord for RewriteRecord {
    fn columns() -> Columns {
        Columns(REWRITES)
    }

    fn cells(&self) -> Cells<'_> {
        let [query, rewrite, profile, history] = query_cells(self);
        let error = self.rewrite.as_ref().err().map_or(Cell::Empty, |failure| text_cell(failure.to_string()));
        let [gold, group] = last_cells(self);
        Cells(vec![query, rewrite, profile, history, error, gold, group])
    }
}

/// `recall_count` and `top1_score` are empty where retrieval failed or was not tried; `success` says whether it answered; `error`
/// says why not.
impl TableRecord for ValidatedRecord {
    fn columns() -> Columns {
        Columns(VALIDATED)
    }

    fn cells(&self) -> Cells<'_> {
        let [query, rewrite, profile, history] = query_cells(&self.rewritten);
        let hits = self.retrieval.as_ref().and_then(|retrieval| retrieval.as_ref().ok());
        let count = hits.map_or(Cell::Empty, |hits| Cell::Count(hits.len() as u64));
        let score = self.top1_score().map_or(Cell::Empty, Cell::Score);
        let retrieval_failure = self.retrieval.as_ref().and_then(|retrieval| retrieval.as_ref().err());
        let failure = self.rewritten.rewrite.as_ref().err().or(retrieval_failure);
        let error = failure.map_or(Cell::Empty, |failure| text_cell(failure.to_string()));
        let [gold, group] = last_cells(&self.rewritten);
        let success = Cell::Flag(hits.is_some());
        Cells(vec![query, rewrite, profile, history, count, score, success, error, gold, group])
    }
}

fn query_cells(record: &RewriteRecord) -> [Cell<'_>; 4] {
    let rewrite = record.rewrite.as_ref().map_or("", |completion| completion.text.as_str());
    let query = &record.query;
    [&query.original_query, rewrite, &query.user_profile, &query.history_summary].map(|text| match text {
        "" => Cell::Empty,
        text => Cell::Text(text.into()),
    })
}

fn last_cells(record: &RewriteRecord) -> [Cell<'_>; 2] {
    let gold = match record.query.gold_ids.join(",") {
        ids if ids.is_empty() => Cell::Empty,
        ids => text_cell(ids),
    };
    [gold, Cell::Text(record.query.group.as_str().into())]
}

fn text_cell<'a>(text: String) -> Cell<'a> {
    Cell::Text(text.into())
}

struct DelimitedWriter {
    path: PathBuf,
    writer: csv::Writer<AtomicFile>,
}

impl DelimitedWriter {
    fn create(path: &Path, columns: &[Column], delimiter: u8) -> Result<Self, DataError> {
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

/// Whether a spreadsheet would compute the text as a formula, after any apostrophes, so that escaping stays reversible.
fn is_formula(text: &str) -> bool {
    text.trim_start_matches('\'').starts_with(['=', '+', '-', '@', '\t', '\r'])
}

pub(crate) fn formula_text(cell: &str) -> &str {
    cell.strip_prefix('\'').filter(|text| is_formula(text)).unwrap_or(cell)
}

#[cfg(test)]
mod tests;

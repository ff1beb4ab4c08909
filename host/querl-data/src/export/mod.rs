//! The results of a stage as tables for people and their tools: the columns that the source plan's tools read, then why a row
//! failed and its gold ids. Rows are written as they come.

mod delimited;
mod parquet;
mod xlsx;

use crate::error::DataError;
use querl_core::config::TableFormat;
use querl_core::records::{RewriteRecord, ValidatedRecord};
use std::path::{Path, PathBuf};

/// What a column holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Count,
    /// 0 to 1.
    Score,
    Flag,
}

/// A column of a table.
#[derive(Debug)]
struct Column {
    name: &'static str,
    kind: Kind,
    /// In a workbook, in characters.
    width: f64,
}

const fn column(name: &'static str, kind: Kind, width: f64) -> Column {
    Column { name, kind, width }
}

const REWRITES: &[Column] = &[
    column("original_query", Kind::Text, 40.0),
    column("rewritten_query", Kind::Text, 40.0),
    column("user_profile", Kind::Text, 24.0),
    column("history_summary", Kind::Text, 40.0),
    column("error", Kind::Text, 50.0),
    column("gold_ids", Kind::Text, 24.0),
];

const VALIDATED: &[Column] = &[
    column("original_query", Kind::Text, 40.0),
    column("rewritten_query", Kind::Text, 40.0),
    column("user_profile", Kind::Text, 24.0),
    column("history_summary", Kind::Text, 40.0),
    column("recall_count", Kind::Count, 14.0),
    column("top1_score", Kind::Score, 14.0),
    column("success", Kind::Flag, 12.0),
    column("error", Kind::Text, 50.0),
    column("gold_ids", Kind::Text, 24.0),
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

/// A table of one format, row by row.
trait RowWriter {
    /// Adds a row, with a cell for each column.
    fn row(&mut self, cells: &[Cell<'_>]) -> Result<(), DataError>;

    /// Puts the file in its place.
    fn finish(self: Box<Self>) -> Result<(), DataError>;
}

/// The same rows in several formats.
struct Tables(Vec<Box<dyn RowWriter>>);

/// Where the tables beside a stage's output are: `rewrites.jsonl` has `rewrites.xlsx`.
pub fn table_path(output: &Path, format: TableFormat) -> PathBuf {
    output.with_extension(format.extension())
}

impl Tables {
    fn create(output: &Path, formats: &[TableFormat], columns: &'static [Column]) -> Result<Self, DataError> {
        let create = |format: &TableFormat| -> Result<Box<dyn RowWriter>, DataError> {
            let path = table_path(output, *format);
            Ok(match format {
                TableFormat::Xlsx => Box::new(xlsx::XlsxWriter::create(&path, columns)?),
                TableFormat::Csv => Box::new(delimited::DelimitedWriter::create(&path, columns, b',')?),
                TableFormat::Tsv => Box::new(delimited::DelimitedWriter::create(&path, columns, b'\t')?),
                TableFormat::Parquet => Box::new(parquet::ParquetWriter::create(&path, columns)?),
            })
        };
        formats.iter().map(create).collect::<Result<_, _>>().map(Self)
    }

    fn row(&mut self, cells: &[Cell<'_>]) -> Result<(), DataError> {
        self.0.iter_mut().try_for_each(|writer| writer.row(cells))
    }

    fn finish(self) -> Result<(), DataError> {
        self.0.into_iter().try_for_each(|writer| writer.finish())
    }
}

/// Rewrites as tables; a failed row has an empty `rewritten_query` and its reason in `error`.
pub struct RewriteTables(Tables);

impl RewriteTables {
    /// Begins the tables beside `output`.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn create(output: &Path, formats: &[TableFormat]) -> Result<Self, DataError> {
        Tables::create(output, formats, REWRITES).map(Self)
    }

    /// Adds a row.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn add(&mut self, record: &RewriteRecord) -> Result<(), DataError> {
        let [query, rewrite, profile, history] = query_cells(record);
        let error = record.rewrite.as_ref().err().map_or(Cell::Empty, |failure| said(failure.to_string()));
        self.0.row(&[query, rewrite, profile, history, error, gold_cell(record)])
    }

    /// Puts the files in their places.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn finish(self) -> Result<(), DataError> {
        self.0.finish()
    }
}

/// Validated rewrites as tables. `recall_count` and `top1_score` are empty where retrieval failed or was not tried; `success`
/// says whether it answered; `error` says why not.
pub struct ValidatedTables(Tables);

impl ValidatedTables {
    /// Begins the tables beside `output`.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn create(output: &Path, formats: &[TableFormat]) -> Result<Self, DataError> {
        Tables::create(output, formats, VALIDATED).map(Self)
    }

    /// Adds a row.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn add(&mut self, record: &ValidatedRecord) -> Result<(), DataError> {
        let [query, rewrite, profile, history] = query_cells(&record.rewritten);
        let hits = record.retrieval.as_ref().and_then(|retrieval| retrieval.as_ref().ok());
        let count = hits.map_or(Cell::Empty, |hits| Cell::Count(hits.len() as u64));
        let score = record.top1_score().map_or(Cell::Empty, Cell::Score);
        let retrieval_failure = record.retrieval.as_ref().and_then(|retrieval| retrieval.as_ref().err());
        let failure = record.rewritten.rewrite.as_ref().err().or(retrieval_failure);
        let error = failure.map_or(Cell::Empty, |failure| said(failure.to_string()));
        let (success, gold) = (Cell::Flag(hits.is_some()), gold_cell(&record.rewritten));
        self.0.row(&[query, rewrite, profile, history, count, score, success, error, gold])
    }

    /// Puts the files in their places.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn finish(self) -> Result<(), DataError> {
        self.0.finish()
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

/// Without them a table that is a query table again would have other groups.
fn gold_cell(record: &RewriteRecord) -> Cell<'static> {
    match record.query.gold_ids.join(",") {
        ids if ids.is_empty() => Cell::Empty,
        ids => Cell::Text(ids.into()),
    }
}

fn said(text: String) -> Cell<'static> {
    Cell::Text(text.into())
}

#[cfg(test)]
mod tests;

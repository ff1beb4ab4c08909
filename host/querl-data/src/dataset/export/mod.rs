//! Exports the output of a stage as tables (xlsx, csv, tsv, parquet).

pub(crate) mod verl;
mod xlsx;

pub(crate) use xlsx::fits_cell;

use crate::dataset::records::{RecordFile, Rows};
use crate::error::DataError;
use crate::request_log::lines::LoggedQueryRow;
use parquet::basic::Compression;
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::parser::parse_message_type;
use querl_core::config::TableFormat;
use querl_core::fsx::{AtomicFile, UTF8_MARK};
use querl_core::records::{RewriteRecord, ValidatedRecord};
use serde::de::DeserializeOwned;
use std::borrow::Cow;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ColumnKind {
    Text,
    Count,
    Score,
    Flag,
}

#[derive(Debug)]
struct Column {
    name: &'static str,
    kind: ColumnKind,
    /// Width in a workbook, in characters.
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

const LOGGED: &[Column] = &[
    column("original_query", ColumnKind::Text, 40.0),
    column("user_profile", ColumnKind::Text, 24.0),
    column("history_summary", ColumnKind::Text, 40.0),
    column("gold_ids", ColumnKind::Text, 24.0),
    column("group", ColumnKind::Text, 24.0),
    column("requests", ColumnKind::Count, 14.0),
    column("fallbacks", ColumnKind::Count, 14.0),
];

#[derive(Debug, Clone, PartialEq)]
enum Cell<'a> {
    Empty,
    Text(Cow<'a, str>),
    Count(u64),
    Score(f64),
    Flag(bool),
}

/// Writes a table of one format row by row. After an error nothing more is written.
trait RowWriter {
    fn row(&mut self, cells: &[Cell<'_>]) -> Result<(), DataError>;

    fn finish(self: Box<Self>) -> Result<(), DataError>;
}

/// Path of the table that is exported from a stage's output: `rewrites.xlsx` for `rewrites.jsonl`.
pub fn table_path(output: &Path, format: TableFormat) -> PathBuf {
    output.with_extension(format.name())
}

/// A record of a stage that can be exported as a table row.
pub trait TableRecord: DeserializeOwned + 'static {
    #[doc(hidden)]
    fn columns() -> Columns;

    #[doc(hidden)]
    fn cells(&self) -> Cells<'_>;
}

/// The columns of an exported table.
pub struct Columns(&'static [Column]);

/// The cells of an exported row, one per column.
pub struct Cells<'a>(Vec<Cell<'a>>);

/// Writes the records in `output` as tables next to it. All formats are written even if one fails.
///
/// # Errors
/// The records cannot be read, or a table cannot be written; the first such error is returned.
pub fn write_tables<R: TableRecord>(output: &Path, formats: &[TableFormat]) -> Result<(), DataError> {
    let records = RecordFile::<R>::new(output);
    let written: Vec<Result<(), DataError>> =
        formats.iter().map(|format| write_table(&records, &table_path(output, *format), *format)).collect();
    written.into_iter().collect()
}

pub(crate) fn write_table<R: TableRecord>(
    records: &RecordFile<R>,
    path: &Path,
    format: TableFormat,
) -> Result<(), DataError> {
    let Columns(columns) = R::columns();
    let mut writer: Box<dyn RowWriter> = match format {
        TableFormat::Xlsx => Box::new(xlsx::XlsxWriter::create(path, columns)?),
        TableFormat::Csv => Box::new(DelimitedWriter::create(path, columns, b',')?),
        TableFormat::Tsv => Box::new(DelimitedWriter::create(path, columns, b'\t')?),
        TableFormat::Parquet => Box::new(ParquetWriter::create(path, columns)?),
    };
    for record in records.read()? {
        writer.row(&record?.cells().0)?;
    }
    writer.finish()
}

pub(crate) fn is_header(names: &[String]) -> bool {
    [REWRITES, VALIDATED, LOGGED].iter().any(|columns| columns.iter().map(|column| column.name).eq(names.iter()))
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

/// `recall_count` and `top1_score` are empty if retrieval failed or was not tried; `success` is true if it succeeded; `error` has the reason
/// if not.
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

/// A row of `querl data from-log`.
impl TableRecord for LoggedQueryRow {
    fn columns() -> Columns {
        Columns(LOGGED)
    }

    fn cells(&self) -> Cells<'_> {
        let texts = [&self.original_query, &self.user_profile, &self.history_summary].map(text_cell);
        let gold = text_cell(self.gold_ids.join(","));
        let others = [gold, Cell::Text((&self.group).into()), Cell::Count(self.requests), Cell::Count(self.fallbacks)];
        Cells(texts.into_iter().chain(others).collect())
    }
}

fn query_cells(record: &RewriteRecord) -> [Cell<'_>; 4] {
    let rewrite = record.rewrite.as_ref().map_or("", |completion| completion.text.as_str());
    let query = &record.query;
    [&query.original_query, rewrite, &query.user_profile, &query.history_summary].map(text_cell)
}

fn last_cells(record: &RewriteRecord) -> [Cell<'_>; 2] {
    [text_cell(record.query.gold_ids.join(",")), Cell::Text((&record.query.group).into())]
}

fn text_cell<'a>(text: impl Into<Cow<'a, str>>) -> Cell<'a> {
    match text.into() {
        text if text.is_empty() => Cell::Empty,
        text => Cell::Text(text),
    }
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
            // A zero byte would make the table unreadable. Other characters stay as they are: the ids of rows are hashes of the texts.
            Cell::Text(text) => match text.replace('\0', "") {
                text if is_formula(&text) => format!("'{text}"),
                text => text,
            },
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

/// True if a spreadsheet would evaluate the text as a formula, apostrophes ignored, so that escaping is reversible.
fn is_formula(text: &str) -> bool {
    text.trim_start_matches('\'').starts_with(['=', '+', '-', '@', '\t', '\r'])
}

/// Removes the apostrophe that protects a cell from evaluation as a spreadsheet formula.
pub(crate) fn formula_text(cell: &str) -> &str {
    cell.strip_prefix('\'').filter(|text| is_formula(text)).unwrap_or(cell)
}

/// Rows of one row group, which are held in memory.
const GROUP_ROWS: usize = 16_384;

/// Parquet files: typed optional columns, compressed with snappy.
struct ParquetWriter {
    path: PathBuf,
    writer: SerializedFileWriter<AtomicFile>,
    columns: Vec<ColumnBuffer>,
    n_waiting: usize,
}

/// Buffered values of one column, with the definition level of each row: 1 for a value, 0 for null.
struct ColumnBuffer {
    levels: Vec<i16>,
    values: ColumnValues,
}

enum ColumnValues {
    Text(Vec<ByteArray>),
    Count(Vec<i64>),
    Score(Vec<f64>),
    Flag(Vec<bool>),
}

impl ColumnValues {
    fn of(kind: ColumnKind) -> Self {
        match kind {
            ColumnKind::Text => Self::Text(Vec::new()),
            ColumnKind::Count => Self::Count(Vec::new()),
            ColumnKind::Score => Self::Score(Vec::new()),
            ColumnKind::Flag => Self::Flag(Vec::new()),
        }
    }

    fn push(&mut self, cell: &Cell<'_>) -> bool {
        match (self, cell) {
            (Self::Text(values), Cell::Text(text)) => values.push(text.as_ref().into()),
            (Self::Count(values), Cell::Count(number)) => values.push(*number as i64),
            (Self::Score(values), Cell::Score(number)) => values.push(*number),
            (Self::Flag(values), Cell::Flag(flag)) => values.push(*flag),
            _ => return false,
        }
        true
    }
}

fn schema(columns: &[Column]) -> String {
    let field = |column: &Column| match column.kind {
        ColumnKind::Text => format!("optional binary {} (UTF8);", column.name),
        ColumnKind::Count => format!("optional int64 {};", column.name),
        ColumnKind::Score => format!("optional double {};", column.name),
        ColumnKind::Flag => format!("optional boolean {};", column.name),
    };
    format!("message rows {{ {} }}", columns.iter().map(field).collect::<String>())
}

impl ParquetWriter {
    fn create(path: &Path, columns: &[Column]) -> Result<Self, DataError> {
        let file = AtomicFile::create(path).map_err(|error| DataError::write(path, error))?;
        let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
        let writer = parse_message_type(&schema(columns))
            .and_then(|schema| SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)));
        let writer = writer.map_err(|error| unwritten(path, error))?;
        let values = |column: &Column| ColumnBuffer { levels: Vec::new(), values: ColumnValues::of(column.kind) };
        Ok(Self { path: path.to_owned(), writer, columns: columns.iter().map(values).collect(), n_waiting: 0 })
    }

    fn write_group(&mut self) -> Result<(), ParquetError> {
        let mut group = self.writer.next_row_group()?;
        for ColumnBuffer { levels, values } in &mut self.columns {
            let Some(mut column) = group.next_column()? else { break };
            let levels = std::mem::take(levels);
            match values {
                ColumnValues::Text(values) => write_values::<ByteArrayType>(&mut column, values, &levels)?,
                ColumnValues::Count(values) => write_values::<Int64Type>(&mut column, values, &levels)?,
                ColumnValues::Score(values) => write_values::<DoubleType>(&mut column, values, &levels)?,
                ColumnValues::Flag(values) => write_values::<BoolType>(&mut column, values, &levels)?,
            };
            column.close()?;
        }
        group.close()?;
        self.n_waiting = 0;
        Ok(())
    }
}

fn write_values<T: DataType>(
    column: &mut SerializedColumnWriter<'_>,
    values: &mut Vec<T::T>,
    levels: &[i16],
) -> Result<usize, ParquetError> {
    column.typed::<T>().write_batch(&std::mem::take(values), Some(levels), None)
}

fn unwritten(path: &Path, error: ParquetError) -> DataError {
    DataError::write(path, io::Error::other(error))
}

impl RowWriter for ParquetWriter {
    fn row(&mut self, cells: &[Cell<'_>]) -> Result<(), DataError> {
        for (column, cell) in self.columns.iter_mut().zip(cells) {
            let has_value = column.values.push(cell);
            column.levels.push(i16::from(has_value));
        }
        self.n_waiting += 1;
        match self.n_waiting {
            GROUP_ROWS => self.write_group().map_err(|error| unwritten(&self.path, error)),
            _ => Ok(()),
        }
    }

    fn finish(mut self: Box<Self>) -> Result<(), DataError> {
        if self.n_waiting > 0 {
            self.write_group().map_err(|error| unwritten(&self.path, error))?;
        }
        let Self { path, writer, .. } = *self;
        let file = writer.into_inner().map_err(|error| unwritten(&path, error))?;
        file.commit().map_err(|error| DataError::write(&path, error))
    }
}

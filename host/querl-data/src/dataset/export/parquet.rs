//! Parquet files: typed optional columns, compressed with snappy.

use super::{Cell, Column, ColumnKind, RowWriter};
use crate::error::DataError;
use parquet::basic::Compression;
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use querl_core::fsx::AtomicFile;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Rows of one group: as many are held before they are written.
const GROUP_ROWS: usize = 16_384;

pub(super) struct ParquetWriter {
    path: PathBuf,
    writer: SerializedFileWriter<AtomicFile>,
    columns: Vec<ColumnBuffer>,
    n_waiting: usize,
}

/// The waiting values of one column, and for each row 1 where there is one.
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
    pub(super) fn create(path: &Path, columns: &[Column]) -> Result<Self, DataError> {
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
                ColumnValues::Text(values) => {
                    column.typed::<ByteArrayType>().write_batch(&std::mem::take(values), Some(&levels), None)?
                }
                ColumnValues::Count(values) => {
                    column.typed::<Int64Type>().write_batch(&std::mem::take(values), Some(&levels), None)?
                }
                ColumnValues::Score(values) => {
                    column.typed::<DoubleType>().write_batch(&std::mem::take(values), Some(&levels), None)?
                }
                ColumnValues::Flag(values) => {
                    column.typed::<BoolType>().write_batch(&std::mem::take(values), Some(&levels), None)?
                }
            };
            column.close()?;
        }
        group.close()?;
        self.n_waiting = 0;
        Ok(())
    }
}

fn unwritten(path: &Path, error: ParquetError) -> DataError {
    DataError::write(path, std::io::Error::other(error))
}

impl RowWriter for ParquetWriter {
    fn row(&mut self, cells: &[Cell<'_>]) -> Result<(), DataError> {
        for (column, cell) in self.columns.iter_mut().zip(cells) {
            let is_there = column.values.push(cell);
            column.levels.push(i16::from(is_there));
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

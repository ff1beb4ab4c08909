//! Export of a dataset in verl's format, as a parquet file: `prompt` is a list of messages, `reward_model` and `extra_info` are structs.
//!
//! Source: `RLHFDataset` of verl 0.9.1 (`verl/utils/dataset/rl_dataset.py`) and the keys that its reward managers read.

use super::{GROUP_ROWS, unwritten};
use crate::error::DataError;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use querl_core::fsx::AtomicFile;
use querl_core::records::Message;
use std::path::Path;
use std::sync::Arc;

/// One row of verl's dataset.
#[derive(Debug, Clone, PartialEq)]
pub struct VerlRow {
    /// `prompt`: the chat messages for the policy; the last one is the user's.
    pub prompt: Vec<Message>,
    /// `data_source`: the name by which verl chooses a built-in reward function and groups metrics; querl writes the tenant.
    pub data_source: String,
    /// `reward_model.ground_truth`: the reference that verl passes to reward functions; querl writes the id of the query.
    pub ground_truth: String,
    /// `extra_info.index`: index of the row in its split.
    pub index: u64,
    /// `extra_info.split`: name of the split.
    pub split: String,
    /// `extra_info.querl`: the query with context, gold ids and the baseline rewrite, as JSON text.
    pub querl: String,
}

/// Every column is required. The levels of a message are 1 for each, except that the first of a row repeats at level 0.
const SCHEMA: &str = "message rows {
    required group prompt (LIST) {
        repeated group list {
            required group element {
                required binary role (UTF8);
                required binary content (UTF8);
            }
        }
    }
    required binary data_source (UTF8);
    required group reward_model {
        required binary style (UTF8);
        required binary ground_truth (UTF8);
    }
    required group extra_info {
        required int64 index;
        required binary split (UTF8);
        required binary querl (UTF8);
    }
}";

/// `reward_model.style`: the reward is a function, not a model.
const RULE: &str = "rule";

/// Writes the rows atomically, compressed with snappy.
///
/// # Errors
/// The file cannot be written.
pub fn write_verl_rows(path: &Path, rows: &[VerlRow]) -> Result<(), DataError> {
    let file = AtomicFile::create(path).map_err(|error| DataError::write(path, error))?;
    let file = write(file, rows).map_err(|error| unwritten(path, error))?;
    file.commit().map_err(|error| DataError::write(path, error))
}

fn write(file: AtomicFile, rows: &[VerlRow]) -> Result<AtomicFile, ParquetError> {
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
    let schema = parse_message_type(SCHEMA)?;
    let mut writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties))?;
    for some in rows.chunks(GROUP_ROWS) {
        let mut group = writer.next_row_group()?;
        write_messages(&mut group, some, |message| message.role.as_str())?;
        write_messages(&mut group, some, |message| message.content.as_str())?;
        write_texts(&mut group, some, |row| row.data_source.as_str())?;
        write_texts(&mut group, some, |_| RULE)?;
        write_texts(&mut group, some, |row| row.ground_truth.as_str())?;
        write_indices(&mut group, some)?;
        write_texts(&mut group, some, |row| row.split.as_str())?;
        write_texts(&mut group, some, |row| row.querl.as_str())?;
        group.close()?;
    }
    writer.into_inner()
}

type RowGroup<'a> = SerializedRowGroupWriter<'a, AtomicFile>;

/// A column below `prompt.list.element`.
fn write_messages(group: &mut RowGroup<'_>, rows: &[VerlRow], text: fn(&Message) -> &str) -> Result<(), ParquetError> {
    let (mut values, mut definition, mut repetition) = (Vec::<ByteArray>::new(), Vec::new(), Vec::new());
    for row in rows {
        for (index, message) in row.prompt.iter().enumerate() {
            values.push(text(message).into());
            definition.push(1_i16);
            repetition.push(i16::from(index > 0));
        }
        if row.prompt.is_empty() {
            definition.push(0);
            repetition.push(0);
        }
    }
    let Some(mut column) = group.next_column()? else { return Ok(()) };
    column.typed::<ByteArrayType>().write_batch(&values, Some(&definition), Some(&repetition))?;
    column.close()
}

fn write_texts(group: &mut RowGroup<'_>, rows: &[VerlRow], text: fn(&VerlRow) -> &str) -> Result<(), ParquetError> {
    let values: Vec<ByteArray> = rows.iter().map(|row| text(row).into()).collect();
    let Some(mut column) = group.next_column()? else { return Ok(()) };
    column.typed::<ByteArrayType>().write_batch(&values, None, None)?;
    column.close()
}

fn write_indices(group: &mut RowGroup<'_>, rows: &[VerlRow]) -> Result<(), ParquetError> {
    let values: Vec<i64> = rows.iter().map(|row| row.index as i64).collect();
    let Some(mut column) = group.next_column()? else { return Ok(()) };
    column.typed::<Int64Type>().write_batch(&values, None, None)?;
    column.close()
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::file::reader::SerializedFileReader;
    use parquet::record::reader::RowIter;

    fn row(index: u64, prompt: &[(&str, &str)]) -> VerlRow {
        let message = |(role, content): &(&str, &str)| Message { role: (*role).into(), content: (*content).into() };
        VerlRow {
            prompt: prompt.iter().map(message).collect(),
            data_source: "fivedoctors".into(),
            ground_truth: format!("id-{index}"),
            index,
            split: "train".into(),
            querl: "{\"query\":\"胶原蛋白\"}".into(),
        }
    }

    #[test]
    fn lists_of_messages_and_structs_are_read_back() {
        let (_folder, path) = crate::scratch_file("train.parquet");
        let rows = [row(0, &[("system", "s"), ("user", "胶原蛋白")]), row(1, &[("user", "b")]), row(2, &[])];
        write_verl_rows(&path, &rows).unwrap();
        let reader = SerializedFileReader::new(std::fs::File::open(&path).unwrap()).unwrap();
        let read: Vec<String> = RowIter::from_file_into(Box::new(reader)).map(|row| row.unwrap().to_string()).collect();
        assert_eq!(read.len(), 3);
        let place = |row: usize, text: &str| read[row].find(text).unwrap_or_else(|| panic!("{text}: {}", read[row]));
        assert!(place(0, "role: \"system\"") < place(0, "role: \"user\""));
        assert!(place(0, "content: \"胶原蛋白\"") < place(0, "data_source: \"fivedoctors\""));
        assert_eq!(read[1].matches("role: ").count(), 1);
        assert_eq!(read[2].matches("role: ").count(), 0);
        for (index, row) in read.iter().enumerate() {
            for text in ["style: \"rule\"", &format!("ground_truth: \"id-{index}\""), &format!("index: {index}")] {
                assert!(row.contains(text), "{text}: {row}");
            }
        }
    }
}

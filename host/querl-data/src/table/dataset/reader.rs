//! Reads prompts and completions of `data.dataset`, which the records of a run do not contain.

use super::{DatasetFiles, Records};
use crate::error::DataError;
use crate::table::QueryColumns;
use querl_core::config::DataConfig;
use querl_core::records::{Message, QueryRow};

/// Reads prompt and completion of each row of `data.dataset`, in order.
pub(crate) struct DatasetReader {
    files: DatasetFiles,
    query: QueryColumns,
    records: Records,
}

/// Prompt and completion of a row of `data.dataset`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PromptAndCompletion {
    /// The chat messages of the prompt; the last one is the user's.
    pub(crate) prompt: Vec<Message>,
    /// The response; `None` if the row has none.
    pub(crate) completion: Option<String>,
}

impl DatasetReader {
    /// Opens the files of `data.dataset`.
    ///
    /// # Errors
    /// As [`DatasetFiles::open`], or a configured column is missing.
    pub(crate) fn open(config: &DataConfig) -> Result<Self, DataError> {
        let files = DatasetFiles::open(config)?;
        let query = QueryColumns::find(&files.clone().table(), config)?;
        let records = files.records()?;
        Ok(Self { files, query, records })
    }

    /// Prompt and completion of a row; rows must be read in the order of the dataset.
    ///
    /// # Errors
    /// The dataset has changed and has another query in this row, or cannot be read.
    pub(crate) fn read(&mut self, query: &QueryRow) -> Result<PromptAndCompletion, DataError> {
        for record in self.records.by_ref() {
            let (row, record) = record?;
            if row < query.row {
                continue;
            }
            let (prompt, completion) = (record.prompt.clone(), record.completion.clone());
            let cells = DatasetFiles::cells(&self.files.header, record);
            if row > query.row || self.query.read(row, &cells).id != query.id {
                break;
            }
            return Ok(PromptAndCompletion { prompt, completion });
        }
        let problem = format!(
            "row {} of the dataset is not the query of the run: a file was changed since; restore it, or run again with `--from rewrite`",
            query.row
        );
        Err(DataError::file(self.files.path(), problem))
    }
}

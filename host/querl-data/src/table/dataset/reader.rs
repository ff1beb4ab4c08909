//! Prompts and completions of a dataset for the rows of a run, whose records do not have them.

use super::{DatasetFiles, Records};
use crate::error::DataError;
use crate::table::QueryColumns;
use querl_core::config::DataConfig;
use querl_core::records::{Message, QueryRow};

/// Reads the rows of `data.dataset` in their order, again from the files.
pub(crate) struct DatasetReader {
    files: DatasetFiles,
    query: QueryColumns,
    records: Records,
}

/// What a row of a dataset has in addition to its query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PromptAndCompletion {
    /// Ends with a message of the user.
    pub(crate) prompt: Vec<Message>,
    /// `None` where the row has none.
    pub(crate) completion: Option<String>,
}

impl DatasetReader {
    /// Opens the configured files.
    ///
    /// # Errors
    /// As [`DatasetFiles::open`], or a configured column is missing.
    pub(crate) fn open(config: &DataConfig) -> Result<Self, DataError> {
        let files = DatasetFiles::open(config)?;
        let query = QueryColumns::find(&files.clone().table(), config)?;
        let records = files.records()?;
        Ok(Self { files, query, records })
    }

    /// Those of a row that comes after the rows that were read before.
    ///
    /// # Errors
    /// The dataset has another query there by now, or cannot be read.
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

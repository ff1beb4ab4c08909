//! Stage rewrite with `data.dataset`: the completions of the dataset are the rewrites, and no teacher is called.

use super::rewrite::parsed;
use crate::dataset::records::{RecordWriter, Rows};
use crate::error::DataError;
use crate::table::DatasetReader;
use querl_core::config::DataConfig;
use querl_core::ports::Prompts;
use querl_core::records::{CallFailure, Completion, FailureKind, QueryRow, RewriteRecord};
use std::path::Path;

/// Writes one record per row of the dataset to `output`, in order, and calls `each` with it. The prompt plugin parses the rewrite from
/// the completion, as from a teacher's response; a row without a completion has the failure `NotRecorded`.
///
/// # Errors
/// The dataset cannot be read, a plugin broke its contract, or `each` returned an error.
pub fn dataset_rewrites(
    rows: &dyn Rows<QueryRow>,
    config: &DataConfig,
    prompts: &dyn Prompts,
    output: &Path,
    each: &mut dyn FnMut(&RewriteRecord) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let (mut dataset, mut writer) = (DatasetReader::open(config)?, RecordWriter::create(output)?);
    for query in rows.read()? {
        let query = query?;
        let rewrite = match dataset.read(&query)?.completion {
            Some(text) => parsed(Completion::of(text), prompts)?,
            None => {
                let message = "the row of the dataset has no completion".into();
                Err(CallFailure { kind: FailureKind::NotRecorded, message })
            }
        };
        let record = RewriteRecord { query, rewrite };
        writer.add(&record)?;
        each(&record)?;
    }
    writer.commit()
}

//! Additional columns of the query table or the dataset, for rewards that read them.

use super::rewards::{self, WeightedReward};
use querl_core::config::DataConfig;
use querl_core::ports::InputUse;
use querl_core::records::{Columns, DatasetRow, QueryRow};
use querl_data::{ColumnReader, DataError};
use std::collections::HashMap;

/// Additional columns of each row by the id of its query; empty if no reward reads columns.
#[derive(Debug, Default)]
pub(crate) struct RowColumns(HashMap<String, Columns>);

static NONE: Columns = Columns(Vec::new());

impl RowColumns {
    /// Whether a reward reads columns, in which case the query table is an input of the stage.
    pub(crate) fn are_read(rewards: &[WeightedReward]) -> bool {
        rewards::inputs(rewards).columns != InputUse::Unused
    }

    /// Reads the columns of `rows` from the query table or the dataset, if a reward reads them.
    ///
    /// # Errors
    /// The table cannot be read, or one of its rows now has another query.
    pub(crate) fn read(
        rewards: &[WeightedReward],
        config: &DataConfig,
        rows: &[DatasetRow],
    ) -> Result<Self, DataError> {
        if !Self::are_read(rewards) || rows.is_empty() {
            return Ok(Self::default());
        }
        let mut reader = ColumnReader::open(config)?;
        let mut queries: Vec<&QueryRow> = rows.iter().map(|row| &row.metadata.query).collect();
        queries.sort_by_key(|query| query.row);
        queries.into_iter().map(|query| Ok((query.id.clone(), reader.read(query)?))).collect::<Result<_, _>>().map(Self)
    }

    pub(crate) fn of(&self, query: &QueryRow) -> &Columns {
        self.0.get(&query.id).unwrap_or(&NONE)
    }
}

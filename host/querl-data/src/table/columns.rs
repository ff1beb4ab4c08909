//! Other columns of the query table (all but query, profile, history and gold ids), for plugins that read them.

use super::formats::{CellForm, TypedRows};
use super::{QueryColumns, check_unique, open_source};
use crate::error::DataError;
use querl_core::config::DataConfig;
use querl_core::records::{ColumnValue, Columns, QueryRow};
use std::path::PathBuf;

/// Reads the other columns of each row from the query table, in order, since the records of a run do not contain them.
pub struct ColumnReader {
    path: PathBuf,
    query: QueryColumns,
    /// Positions and names.
    others: Vec<(usize, String)>,
    rows: TypedRows,
}

impl ColumnReader {
    /// Opens the configured query table or dataset.
    ///
    /// # Errors
    /// The file cannot be read, lacks a configured column, or two columns have one name.
    pub fn open(config: &DataConfig) -> Result<Self, DataError> {
        let table = open_source(config)?;
        let path = table.path().to_owned();
        let query = QueryColumns::find(&table, config)?;
        let own = [Some(query.query), query.profile, query.history, query.gold];
        let is_other = |(index, name): &(usize, &String)| !name.is_empty() && !own.contains(&Some(*index));
        let named = table.header.iter().enumerate().filter(is_other);
        let others: Vec<(usize, String)> = named.map(|(index, name)| (index, name.clone())).collect();
        others.iter().try_for_each(|(index, _)| check_unique(&table, *index))?;
        let used: Vec<usize> = query.used().into_iter().chain(others.iter().map(|(index, _)| *index)).collect();
        let rows = table.cells(&used, CellForm::Typed)?;
        Ok(Self { path, query, others, rows })
    }

    /// The other columns of a row; rows must be read in the order of the table.
    ///
    /// # Errors
    /// The table has changed and has another query in this row, it cannot be read, or the row is larger than the limits of [`Columns`].
    pub fn read(&mut self, query: &QueryRow) -> Result<Columns, DataError> {
        for row in self.rows.by_ref() {
            let (number, mut cells) = row?;
            if number < query.row {
                continue;
            }
            if number > query.row || self.query.read(number, &cells).id != query.id {
                break;
            }
            let value = |(index, name): &(usize, String)| {
                Some((name.clone(), std::mem::take(cells.get_mut(*index)?).into_value()?))
            };
            let columns = Columns(self.others.iter().filter_map(value).collect());
            return self.checked(number, columns);
        }
        let problem = format!(
            "row {} is not the query that the run rewrote: the table was changed since; restore it, or run again with `--from rewrite`",
            query.row
        );
        Err(DataError::file(&self.path, problem))
    }

    fn checked(&self, row: usize, columns: Columns) -> Result<Columns, DataError> {
        let n_items = |value: &ColumnValue| if let ColumnValue::Items(items) = value { items.len() } else { 0 };
        let long = columns.0.iter().find(|(_, value)| n_items(value) > Columns::MAX_ITEMS);
        let problem = match long {
            Some((name, value)) => {
                format!(
                    "column `{name}` has a list of {} entries; a plugin gets at most {}",
                    n_items(value),
                    Columns::MAX_ITEMS
                )
            }
            None if columns.0.len() > Columns::MAX => {
                format!("has {} other columns; a plugin gets at most {}", columns.0.len(), Columns::MAX)
            }
            None if columns.n_bytes() > Columns::MAX_BYTES => {
                format!(
                    "its other columns have {} bytes; a plugin gets at most {}",
                    columns.n_bytes(),
                    Columns::MAX_BYTES
                )
            }
            None => return Ok(columns),
        };
        Err(DataError::file(&self.path, format!("row {row}: {problem}; shorten the row or remove columns")))
    }
}

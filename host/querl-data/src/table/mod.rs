//! The query table: which columns mean what, which rows count, and what makes a row's identity and group.

mod encoding;
mod formats;
mod groups;

pub use encoding::TextEncoding;
pub(crate) use formats::open_table;

use crate::error::DataError;
use crate::text::normalise;
use formats::Table;
use groups::join_groups;
use querl_core::config::DataConfig;
use querl_core::fsx::digest_hex;
use querl_core::records::QueryRow;
use std::collections::{BTreeSet, HashSet};
use std::path::Path;

/// What a query table held.
#[derive(Debug, Clone, PartialEq)]
pub struct QueryTable {
    /// Usable rows, in the table's order; ids are unique.
    pub rows: Vec<QueryRow>,
    /// Row numbers whose query is empty.
    pub empty_rows: Vec<usize>,
    /// Row numbers that repeat an earlier row's query, profile and history.
    pub repeated_rows: Vec<usize>,
}

impl QueryTable {
    /// One line for a person about the rows that were passed over; `None` where there are none.
    pub fn skipped_note(&self) -> Option<String> {
        let part = |rows: &[usize], what: &str| {
            (!rows.is_empty()).then(|| format!("{} {what} ({})", rows.len(), list_rows(rows)))
        };
        let parts: Vec<String> =
            [part(&self.empty_rows, "with an empty query"), part(&self.repeated_rows, "repeating an earlier row")]
                .into_iter()
                .flatten()
                .collect();
        (!parts.is_empty()).then(|| format!("rows passed over: {}", parts.join("; ")))
    }
}

fn list_rows(rows: &[usize]) -> String {
    const SHOWN: usize = 10;
    let shown = rows.iter().take(SHOWN).map(usize::to_string).collect::<Vec<_>>().join(", ");
    match rows.len() {
        1 => format!("row {shown}"),
        n if n > SHOWN => format!("rows {shown}, ..."),
        _ => format!("rows {shown}"),
    }
}

/// Reads the query table that the configuration names. Rows of one group are those with the same gold ids or group cell, and
/// those whose query, profile and history say the same.
///
/// # Errors
/// The file cannot be read, lacks a column it must have (the sentence lists those it has), or holds no usable row.
pub fn read_table(config: &DataConfig) -> Result<QueryTable, DataError> {
    let file = open_table(&config.input)?;
    let columns = Columns::find(&file, config)?;
    let mut table = QueryTable { rows: Vec::new(), empty_rows: Vec::new(), repeated_rows: Vec::new() };
    let (mut seen, mut n_rows) = (HashSet::new(), 0);
    for row in file.rows {
        let (row, cells) = row?;
        n_rows += 1;
        let query = columns.read(row, &cells);
        if query.original_query.is_empty() {
            // A row without a single value is only the space between others.
            if cells.iter().any(|cell| !cell.trim().is_empty()) {
                table.empty_rows.push(row);
            }
        } else if seen.insert(query.id.clone()) {
            table.rows.push(query);
        } else {
            table.repeated_rows.push(row);
        }
    }
    if table.rows.is_empty() {
        let problem = format!("no row has a query in column `{}`; {n_rows} row(s) looked at", columns.query_name);
        return Err(DataError::file(&config.input, problem));
    }
    join_groups(&mut table.rows);
    Ok(table)
}

/// Identity of a query in its context: 16 hexadecimal digits.
pub fn query_id(query: &str, user_profile: &str, history_summary: &str) -> String {
    let mut digest = digest_hex(serde_json::json!([query, user_profile, history_summary]).to_string().as_bytes());
    digest.truncate(16);
    digest
}

struct Columns {
    query: usize,
    query_name: String,
    profile: Option<usize>,
    history: Option<usize>,
    gold: Option<usize>,
    group: Option<usize>,
}

impl Columns {
    fn find(table: &Table, config: &DataConfig) -> Result<Self, DataError> {
        let position = |name: &str| {
            let place = |name: &str| table.header.iter().position(|column| column == name);
            place(name).or_else(|| place(DataConfig::other_name(name)?))
        };
        let required =
            |name: &str, key: &str| position(name).ok_or_else(|| missing_column(table, &config.input, name, key));
        // A table may lack these columns, but not one that the user named.
        let optional = |name: &str, key: &str| match position(name) {
            None if DataConfig::other_name(name).is_none() => Err(missing_column(table, &config.input, name, key)),
            found => Ok(found),
        };
        let query = required(&config.query_column, "query_column")?;
        let gold = optional(&config.gold_column, "gold_column")?;
        Ok(Self {
            query,
            query_name: table.header[query].clone(),
            profile: optional(&config.profile_column, "profile_column")?,
            history: optional(&config.history_column, "history_column")?,
            gold,
            group: match &config.group_column {
                Some(name) => Some(required(name, "group_column")?),
                None => gold,
            },
        })
    }

    fn read(&self, row: usize, cells: &[String]) -> QueryRow {
        let cell = |column: Option<usize>| column.and_then(|column| cells.get(column)).map_or("", |cell| cell.trim());
        let (query, profile, history) = (cell(Some(self.query)), cell(self.profile), cell(self.history));
        let gold_ids = split_ids(cell(self.gold));
        let group = if self.group == self.gold { joined(&gold_ids) } else { cell(self.group).to_owned() };
        QueryRow {
            id: query_id(query, profile, history),
            row,
            original_query: query.to_owned(),
            user_profile: profile.to_owned(),
            history_summary: history.to_owned(),
            gold_ids,
            group: if group.is_empty() { normalise(query) } else { group },
        }
    }
}

fn missing_column(table: &Table, path: &Path, name: &str, key: &str) -> DataError {
    let names: Vec<String> =
        table.header.iter().filter(|name| !name.is_empty()).map(|name| format!("`{name}`")).collect();
    let found = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let other = DataConfig::other_name(name).map(|other| format!(" or `{other}`")).unwrap_or_default();
    let sheet = table.sheet.as_ref().map(|sheet| format!("sheet `{sheet}`: ")).unwrap_or_default();
    // A header that was decoded wrongly has no column of the right name.
    let decoded = table.encoding.filter(|encoding| *encoding == TextEncoding::Gb18030);
    let decoded = decoded.map(|encoding| format!(" (read as {})", encoding.name())).unwrap_or_default();
    let problem = format!("no column `{name}`{other} (data.{key}); found {found}{decoded}");
    DataError::file(path, format!("{sheet}{problem}; name one of these in data.{key}"))
}

fn split_ids(text: &str) -> Vec<String> {
    let separators = [',', ';', '，', '；', '、'];
    text.split(|character: char| character.is_whitespace() || separators.contains(&character))
        .filter(|id| !id.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The same text for the same ids, in whatever order they were written.
fn joined(ids: &[String]) -> String {
    let ids: BTreeSet<&str> = ids.iter().map(String::as_str).collect();
    ids.into_iter().collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests;

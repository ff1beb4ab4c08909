//! Which columns of a table mean what, and what a row says.

use super::encoding::TextEncoding;
use super::source::Table;
use crate::error::DataError;
use crate::text::{normalise, with_width};
use querl_core::config::{DataConfig, TextWidth};
use querl_core::fsx::digest_hex;
use querl_core::records::QueryRow;
use std::collections::BTreeSet;
use std::path::Path;

/// Where in a row each value is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Columns {
    query: usize,
    pub(super) query_name: String,
    profile: Option<usize>,
    history: Option<usize>,
    gold: Option<usize>,
    group: Option<usize>,
    width: TextWidth,
}

impl Columns {
    pub(super) fn find(table: &Table, config: &DataConfig) -> Result<Self, DataError> {
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
        let group = match &config.group_column {
            Some(name) => Some(required(name, "group_column")?),
            None => gold,
        };
        let profile = optional(&config.profile_column, "profile_column")?;
        let history = optional(&config.history_column, "history_column")?;
        for column in [Some(query), profile, history, gold, group].into_iter().flatten() {
            check_alone(table, &config.input, column)?;
        }
        let (query_name, width) = (table.header[query].clone(), config.width);
        Ok(Self { query, query_name, profile, history, gold, group, width })
    }

    pub(super) fn used(&self) -> Vec<usize> {
        [Some(self.query), self.profile, self.history, self.gold, self.group].into_iter().flatten().collect()
    }

    pub(super) fn read(&self, row: usize, cells: &[String]) -> QueryRow {
        let cell = |column: Option<usize>| column.and_then(|column| cells.get(column)).map_or("", |cell| cell.trim());
        let text = |column: Option<usize>| with_width(cell(column), self.width);
        let (query, profile, history) = (text(Some(self.query)), text(self.profile), text(self.history));
        let gold_ids = split_ids(cell(self.gold));
        let group = if self.group == self.gold { joined(&gold_ids) } else { cell(self.group).to_owned() };
        QueryRow {
            id: query_id(&query, &profile, &history),
            row,
            group: if group.is_empty() { normalise(&query) } else { group },
            original_query: query,
            user_profile: profile,
            history_summary: history,
            gold_ids,
        }
    }
}

/// Identity of a query in its context: 16 hexadecimal digits.
pub fn query_id(query: &str, user_profile: &str, history_summary: &str) -> String {
    let mut digest = digest_hex(serde_json::json!([query, user_profile, history_summary]).to_string().as_bytes());
    digest.truncate(16);
    digest
}

fn check_alone(table: &Table, path: &Path, column: usize) -> Result<(), DataError> {
    let name = &table.header[column];
    let Some(other) = table.header.iter().skip(column + 1).position(|other| other == name) else { return Ok(()) };
    let (first, second) = (column + 1, column + other + 2);
    Err(DataError::file(path, format!("columns {first} and {second} are both called `{name}`; rename one of them")))
}

fn missing_column(table: &Table, path: &Path, name: &str, key: &str) -> DataError {
    let names: Vec<String> =
        table.header.iter().filter(|name| !name.is_empty()).map(|name| format!("`{name}`")).collect();
    let found = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let other = DataConfig::other_name(name).map(|other| format!(" or `{other}`")).unwrap_or_default();
    let sheet = table.sheet.as_ref().map(|sheet| format!("{sheet}: ")).unwrap_or_default();
    // A header that was decoded wrongly has no column of the right name.
    let decoded = table.encoding.filter(|encoding| *encoding == TextEncoding::Gb18030);
    let decoded = decoded.map(|encoding| format!(" (read as {})", encoding.name())).unwrap_or_default();
    let problem = format!("no column `{name}`{other} (data.{key}); found {found}{decoded}");
    let remedy = match separator(table) {
        Some(separator) => format!("save it with `,` instead of `{separator}` between cells, or with tabs as .tsv"),
        None => format!("name one of these in data.{key}"),
    };
    DataError::file(path, format!("{sheet}{problem}; {remedy}"))
}

/// What separates cells where the file's ending promised something else: the header is then one cell.
fn separator(table: &Table) -> Option<&'static str> {
    let [name] = &table.header[..] else { return None };
    let known = [(';', ";"), ('\t', "\\t"), (',', ","), ('|', "|")];
    let of_text = known.iter().filter(|_| table.encoding.is_some());
    of_text.into_iter().find(|(character, _)| name.contains(*character)).map(|(_, shown)| *shown)
}

fn split_ids(text: &str) -> Vec<String> {
    let separators = [',', ';', '，', '；', '、'];
    text.split(|character: char| character.is_whitespace() || separators.contains(&character))
        .filter(|id| !id.is_empty())
        .map(str::to_owned)
        .collect()
}

fn joined(ids: &[String]) -> String {
    let ids: BTreeSet<&str> = ids.iter().map(String::as_str).collect();
    ids.into_iter().collect::<Vec<_>>().join(",")
}

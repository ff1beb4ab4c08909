//! The query table: which columns mean what, which rows count, and what makes a row's identity and group.
//!
//! A table is not held: of each row there are 40 bytes while its repeats and groups are found, and afterwards nothing but what
//! was found. Rows are read from the file each time they are asked for.

mod columns;
mod delimited;
mod encoding;
mod findings;
mod groups;
mod open;
mod parquet;
mod source;
mod workbook;

pub use columns::query_id;
pub(crate) use encoding::read_text;
pub use findings::{Findings, RowList, RowReference};
pub(crate) use open::open_table;

use crate::dataset::rows::{RowIter, Rows, UnchangedFile};
use crate::error::DataError;
use crate::text::{hash_of, normalise};
use columns::Columns;
use groups::{RowDigest, for_each_pair, joined};
use querl_core::config::DataConfig;
use querl_core::records::QueryRow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

/// A query table whose rows are known to be readable.
#[derive(Debug)]
pub struct QueryTable {
    file: UnchangedFile,
    columns: Columns,
    /// Rows that repeat an earlier one, by their place from 0.
    repeated: HashSet<u32>,
    names: HashMap<u32, Arc<str>>,
    findings: Findings,
}

/// Opens the query table that the configuration names and reads it through. Rows of one group are those with the same gold ids
/// or group cell, and those whose query, profile and history say the same.
///
/// # Errors
/// The file cannot be read, lacks a column it must have (the sentence lists those it has), or holds no usable row.
pub fn open_queries(config: &DataConfig) -> Result<QueryTable, DataError> {
    let file = UnchangedFile::new(&config.input);
    let table = open_table(&file.path)?;
    let columns = Columns::find(&table, config)?;
    let encoding = table.encoding.map(encoding::TextEncoding::name);
    let findings = Findings { encoding, unread_sheets: table.unread_sheets.clone(), ..Findings::default() };
    let mut table = QueryTable { file, columns, repeated: HashSet::new(), names: HashMap::new(), findings };
    let digests = table.row_digests()?;
    if digests.is_empty() {
        let n_rows = table.findings.n_rows;
        let name = &table.columns.query_name;
        let remedy = "fill it, or name another column in data.query_column";
        let problem = format!("none of {n_rows} row(s) has a query in column `{name}`; {remedy}");
        return Err(DataError::file(&config.input, problem));
    }
    let digests = table.find_repeats(digests);
    table.name_groups(&digests)?;
    Ok(table)
}

impl QueryTable {
    /// Rows that are skipped or need a look.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    fn rows(&self) -> Result<source::TableRows, DataError> {
        open_table(&self.file.path)?.rows(&self.columns.used())
    }

    fn row_digests(&mut self) -> Result<Vec<RowDigest>, DataError> {
        let mut digests = Vec::new();
        for (index, row) in (0..).zip(self.rows()?) {
            let (row, cells) = row?;
            let query = self.columns.read(row, &cells);
            if !query.original_query.is_empty() {
                digests.push(row_digest(index, &query));
            } else if cells.iter().any(|cell| !cell.trim().is_empty()) {
                // A row without a single value is only the space between others.
                self.findings.empty.add(row, None);
            }
        }
        self.findings.n_rows = digests.len() + self.findings.empty.n;
        Ok(digests)
    }

    /// Lists rows that repeat or contradict others, and returns the digests of rows that repeat no earlier one.
    fn find_repeats(&mut self, digests: Vec<RowDigest>) -> Vec<RowDigest> {
        let (mut repeated, mut alike, mut conflicting) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let row_of = |row_digest: &RowDigest| row_digest.row as usize;
        for_each_pair(
            &digests,
            |row_digest| row_digest.id,
            |first, other| {
                repeated.insert(other.index, (row_of(other), row_of(first)));
            },
        );
        for_each_pair(
            &digests,
            |row_digest| row_digest.text,
            |first, other| {
                if !repeated.contains_key(&other.index) {
                    alike.insert(other.index, (row_of(other), row_of(first)));
                }
            },
        );
        let golden: Vec<RowDigest> = digests.iter().filter(|row_digest| row_digest.gold != 0).copied().collect();
        for_each_pair(
            &golden,
            |row_digest| row_digest.text,
            |first, other| {
                if first.gold != other.gold {
                    conflicting.insert(other.index, (row_of(other), row_of(first)));
                }
            },
        );
        let Findings { repeated: of_repeated, alike: of_alike, conflicting: of_conflicting, .. } = &mut self.findings;
        for (list, found) in [(of_repeated, &repeated), (of_alike, &alike), (of_conflicting, &conflicting)] {
            found.values().for_each(|(row, earlier)| list.add(*row, Some(*earlier)));
        }
        self.repeated = repeated.into_keys().collect();
        let kept: Vec<RowDigest> =
            digests.into_iter().filter(|row_digest| !self.repeated.contains(&row_digest.index)).collect();
        self.findings.n_usable = kept.len();
        kept
    }

    /// A joined group gets the least of its names, so that the order of rows makes no difference.
    fn name_groups(&mut self, digests: &[RowDigest]) -> Result<(), DataError> {
        let (joined, n_groups) = joined(digests);
        self.findings.n_groups = n_groups;
        let mut least: HashMap<u32, Arc<str>> = HashMap::new();
        if !joined.is_empty() {
            for (index, row) in (0..).zip(self.rows()?) {
                let (row, cells) = row?;
                let Some(root) = joined.get(&index) else { continue };
                let group: Arc<str> = self.columns.read(row, &cells).group.into();
                let name = least.entry(*root).or_insert_with(|| group.clone());
                if group < *name {
                    *name = group;
                }
            }
        }
        let changed = |(index, root): (&u32, &u32)| Some((*index, least.get(root)?.clone()));
        self.names = joined.iter().filter_map(changed).collect();
        Ok(())
    }
}

fn row_digest(index: u32, query: &QueryRow) -> RowDigest {
    let text = [&query.original_query, &query.user_profile, &query.history_summary].map(|text| normalise(text));
    let gold: BTreeSet<&String> = query.gold_ids.iter().collect();
    RowDigest {
        index,
        row: query.row as u32,
        id: hash_of(&query.id),
        text: hash_of(&text),
        group: hash_of(&query.group),
        gold: if gold.is_empty() { 0 } else { hash_of(&gold).max(1) },
    }
}

impl Rows<QueryRow> for QueryTable {
    fn read(&self) -> Result<RowIter<'_, QueryRow>, DataError> {
        self.file.check()?;
        let rows = (0..).zip(self.rows()?);
        Ok(self.file.guard(rows.filter_map(|(index, row)| match row {
            Err(error) => Some(Err(error)),
            Ok(_) if self.repeated.contains(&index) => None,
            Ok((row, cells)) => {
                let mut query = self.columns.read(row, &cells);
                if let Some(name) = self.names.get(&index) {
                    query.group = name.to_string();
                }
                (!query.original_query.is_empty()).then_some(Ok(query))
            }
        })))
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.file.path)
    }
}

#[cfg(test)]
mod damage_tests;
#[cfg(test)]
mod tests;

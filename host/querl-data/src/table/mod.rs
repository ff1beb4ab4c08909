//! The query table: its columns, usable rows, and the id and group of each row.
//!
//! The table is not held in memory: each row takes 40 bytes while repeats and groups are determined. Rows are read from the file each
//! time they are needed.

mod columns;
mod dataset;
mod encoding;
mod formats;
mod parquet_pages;
mod xlsx;

pub use columns::ColumnReader;
pub(crate) use dataset::{DatasetFiles, DatasetReader};
pub(crate) use encoding::{MAX_VOCABULARY_BYTES, read_text, warn_of_guess};
pub(crate) use formats::{MAX_ROWS, Table, is_chat, open_table, value_text};

use crate::dataset::records::{RowIter, Rows, UnchangedFile};
use crate::error::DataError;
use crate::text::{hash_of, normalise, separates_ids, with_width};
use encoding::{TextEncoding, decoded_excerpt};
use formats::{CHAT, CHAT_REMEDY, MAX_LISTED, TableRows};
use querl_core::config::{DataConfig, TextWidth};
use querl_core::fsx::digest_hex;
use querl_core::records::QueryRow;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

/// A query table, read once without errors.
#[derive(Debug)]
pub struct QueryTable {
    config: DataConfig,
    /// The query table, or the files of `data.dataset`.
    files: Vec<UnchangedFile>,
    columns: QueryColumns,
    /// Rows that repeat an earlier one, by their index from 0.
    repeated: HashSet<u32>,
    /// Names of joined groups by row index.
    group_names: HashMap<u32, Arc<str>>,
    findings: Findings,
}

/// The table that queries are read from: `data.input`, or `data.dataset` as a table.
fn open_source(config: &DataConfig) -> Result<Table, DataError> {
    match &config.input {
        _ if config.dataset.is_set() => Ok(DatasetFiles::open(config)?.table()),
        Some(path) => open_table(path),
        None => Err(DataError::setting("data.input", "is not set; name a query table, or files in data.dataset")),
    }
}

/// Opens the query table or dataset of the configuration and reads it once. Rows are in the same group if they have the same gold ids or
/// group cell, or equal query, profile and history.
///
/// # Errors
/// A file cannot be read, lacks a required column, or has no usable row.
pub fn open_queries(config: &DataConfig) -> Result<QueryTable, DataError> {
    let files = config.query_files().into_iter().map(UnchangedFile::new).collect();
    let table = open_source(config)?;
    let columns = QueryColumns::find(&table, config)?;
    let findings = Findings {
        encoding: table.encoding.map(TextEncoding::name),
        unread_sheets: table.unread_sheets,
        hidden_sheets: table.hidden_sheets,
        ..Findings::default()
    };
    let (repeated, group_names) = (HashSet::new(), HashMap::new());
    let mut table = QueryTable { config: config.clone(), files, columns, repeated, group_names, findings };
    let digests = table.row_digests()?;
    if digests.is_empty() {
        let n_rows = table.findings.n_rows;
        let name = &table.columns.query_name;
        let remedy = "fill it, or name another column in data.query_column";
        let problem = format!("none of {n_rows} row(s) has a query in column `{name}`; {remedy}");
        return Err(DataError::file(table.first_path(), problem));
    }
    let digests = table.find_repeats(digests);
    table.name_groups(&digests)?;
    Ok(table)
}

impl QueryTable {
    /// Adds merged cells of a workbook to the findings, which takes as long as reading the rows.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn with_merged_cells(mut self) -> Result<Self, DataError> {
        // Text formats have no merged cells, and opening one again would read it to its end to detect the encoding.
        if self.findings.encoding.is_none() {
            self.findings.merged_cells = open_source(&self.config)?.merged(&self.columns.used());
        }
        Ok(self)
    }

    /// Rows that are skipped or should be checked.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    fn first_path(&self) -> &Path {
        self.files.first().map_or(Path::new(""), |file| file.path.as_path())
    }

    /// An error if a file has changed since the first reading.
    fn check(&self) -> Result<(), DataError> {
        self.files.iter().try_for_each(UnchangedFile::check)
    }

    fn rows(&self) -> Result<TableRows, DataError> {
        open_source(&self.config)?.rows(&self.columns.used())
    }

    fn row_digests(&mut self) -> Result<Vec<RowDigest>, DataError> {
        let mut digests = Vec::new();
        let table = open_source(&self.config)?;
        let (header, is_guessed) = (table.header.clone(), table.encoding.is_some_and(TextEncoding::is_guess));
        for (index, row) in (0..).zip(table.rows(&self.columns.used())?) {
            let (row, cells) = row?;
            if index >= MAX_ROWS {
                let problem = format!("the table has more than {MAX_ROWS} rows; divide it into several tables");
                return Err(DataError::file(self.first_path(), problem));
            }
            if is_guessed && self.findings.decoded_cell.is_none() {
                let decoded = header.iter().zip(&cells).find(|(_, cell)| !cell.is_ascii());
                self.findings.decoded_cell = decoded.map(|(name, cell)| {
                    format!("row {row} column `{}` is `{}`", decoded_excerpt(name), decoded_excerpt(cell))
                });
            }
            let query = self.columns.read(row, &cells);
            let texts = [(&self.columns.query_name, &query.original_query)].into_iter();
            let mut texts = texts.chain(self.columns.history_name.as_ref().map(|name| (name, &query.history_summary)));
            if let Some((name, _)) = texts.find(|(_, text)| is_chat(text)) {
                let problem = format!("row {row} column `{name}` holds {CHAT}; {CHAT_REMEDY}");
                return Err(DataError::file(self.first_path(), problem));
            }
            if !query.original_query.is_empty() {
                digests.push(row_digest(index, &query));
            } else if cells.iter().any(|cell| !cell.trim().is_empty()) {
                // Rows without any value are not counted.
                self.findings.empty.add(row, None);
            }
        }
        if let Some(name) = header.iter().find(|name| is_guessed && !name.is_ascii()) {
            let shown = || format!("the header has `{}`", decoded_excerpt(name));
            self.findings.decoded_cell.get_or_insert_with(shown);
        }
        self.findings.n_rows = digests.len() + self.findings.empty.n;
        Ok(digests)
    }

    /// Lists rows that repeat or contradict others, and returns the digests of rows that repeat no earlier one.
    fn find_repeats(&mut self, digests: Vec<RowDigest>) -> Vec<RowDigest> {
        let pairs = |digests: &[RowDigest], key| -> BTreeMap<u32, (RowDigest, RowDigest)> {
            let pair = |(first, other): (u32, u32)| (digests[first as usize], digests[other as usize]);
            equal_pairs(digests, key).map(pair).map(|(first, other)| (other.index, (first, other))).collect()
        };
        let repeated = pairs(&digests, |row| row.id);
        let mut alike = pairs(&digests, |row| row.text);
        alike.retain(|index, _| !repeated.contains_key(index));
        let with_gold: Vec<RowDigest> = digests.iter().filter(|row| row.gold != 0).copied().collect();
        let mut conflicting = pairs(&with_gold, |row| row.text);
        conflicting.retain(|_, (first, other)| first.gold != other.gold);
        let Findings { repeated: of_repeated, alike: of_alike, conflicting: of_conflicting, .. } = &mut self.findings;
        for (list, pairs) in [(of_repeated, &repeated), (of_alike, &alike), (of_conflicting, &conflicting)] {
            pairs.values().for_each(|(first, other)| list.add(other.row as usize, Some(first.row as usize)));
        }
        self.repeated = repeated.into_keys().collect();
        let kept: Vec<RowDigest> = digests.into_iter().filter(|row| !self.repeated.contains(&row.index)).collect();
        self.findings.n_usable = kept.len();
        kept
    }

    /// Names a joined group by the smallest of its names, so that the order of rows does not matter.
    fn name_groups(&mut self, digests: &[RowDigest]) -> Result<(), DataError> {
        let (joined, n_groups) = join_groups(digests);
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
        let name = |(index, root): (&u32, &u32)| Some((*index, least.get(root)?.clone()));
        self.group_names = joined.iter().filter_map(name).collect();
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
        self.check()?;
        let rows = (0..).zip(self.rows()?);
        let rows = rows.filter_map(|(index, row)| match row {
            Err(error) => Some(Err(error)),
            Ok(_) if self.repeated.contains(&index) => None,
            Ok((row, cells)) => {
                let mut query = self.columns.read(row, &cells);
                if let Some(name) = self.group_names.get(&index) {
                    query.group = name.to_string();
                }
                (!query.original_query.is_empty()).then_some(Ok(query))
            }
        });
        let changed = std::iter::once_with(|| self.check().err().map(Err));
        Ok(Box::new(rows.chain(changed.flatten())))
    }

    fn path(&self) -> Option<&Path> {
        Some(self.first_path())
    }
}

/// Maximum number of rows in a message.
const SHOWN: usize = 10;

/// Rows of a query table that are skipped or should be checked, for `querl data stats` and messages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// Encoding of a csv or tsv file; `None` for other formats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoding: Option<&'static str>,
    /// Place and excerpt of the first cell with a character outside ASCII, below the header if there is one, if the encoding is a guess.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoded_cell: Option<String>,
    /// Names of the sheets of a workbook that are skipped, because their columns differ from those of the first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unread_sheets: Vec<String>,
    /// Names of the hidden sheets of a workbook, which are skipped.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hidden_sheets: Vec<String>,
    /// Merged cells in used columns of a workbook, as ranges (`C2:C3`): only the first cell of a range has the value. Empty without
    /// [`QueryTable::with_merged_cells`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub merged_cells: Vec<String>,
    /// Number of non-empty rows.
    pub n_rows: usize,
    /// Number of rows whose query does not repeat that of an earlier row in the same context.
    pub n_usable: usize,
    /// Number of groups of the usable rows.
    pub n_groups: usize,
    /// Rows with an empty query, which are skipped.
    pub empty: RowList,
    /// Rows that repeat query, profile and history of an earlier row; they are skipped.
    pub repeated: RowList,
    /// Rows that equal an earlier row up to width, case, space and punctuation; they are kept, in the group of the earlier row.
    pub alike: RowList,
    /// Rows that equal an earlier row up to width, case, space and punctuation, but have other gold ids.
    pub conflicting: RowList,
}

/// Number and list of the rows with one kind of finding.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RowList {
    /// Number of rows with this finding.
    pub n: usize,
    /// The first rows with this finding.
    pub rows: Vec<RowReference>,
}

/// A row, with the earlier row that it repeats or contradicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct RowReference {
    /// Number of the row as in a spreadsheet or editor.
    pub row: usize,
    /// Number of the earlier row; `None` if the finding is about one row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub earlier: Option<usize>,
}

impl RowList {
    fn add(&mut self, row: usize, earlier: Option<usize>) {
        self.n += 1;
        if self.rows.len() < MAX_LISTED {
            self.rows.push(RowReference { row, earlier });
        }
    }

    /// A listing such as `rows 3, 7 (like row 2), ...`.
    fn listing(&self) -> String {
        let shown = |named: &RowReference| match named.earlier {
            Some(earlier) => format!("{} (like row {earlier})", named.row),
            None => named.row.to_string(),
        };
        let listed = self.rows.iter().take(SHOWN).map(shown).collect::<Vec<_>>().join(", ");
        let (word, more) = (if self.n == 1 { "row" } else { "rows" }, if self.n > SHOWN { ", ..." } else { "" });
        format!("{word} {listed}{more}")
    }
}

impl Findings {
    /// One line for each kind of finding.
    pub fn notes(&self) -> Vec<String> {
        let passed_over = [(&self.empty, "with an empty query"), (&self.repeated, "repeating an earlier row")];
        let passed_over: Vec<String> = passed_over
            .iter()
            .filter(|(rows, _)| rows.n > 0)
            .map(|(rows, what)| format!("{} {what} ({})", rows.n, rows.listing()))
            .collect();
        let mut notes = Vec::new();
        if let (Some(guess), Some(cell)) = (self.encoding, &self.decoded_cell) {
            notes.push(format!(
                "the table is read as {guess}, a guess: {cell}; save it as UTF-8 if this text is not right"
            ));
        }
        let quoted = |names: &[String]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        if !self.unread_sheets.is_empty() {
            let names = quoted(&self.unread_sheets);
            notes.push(format!("sheets skipped, as their columns are not those of the first: {names}"));
        }
        if !self.hidden_sheets.is_empty() {
            notes.push(format!("hidden sheets skipped: {}; show those that have queries", quoted(&self.hidden_sheets)));
        }
        if !self.merged_cells.is_empty() {
            let more = if self.merged_cells.len() > SHOWN { ", ..." } else { "" };
            let shown = self.merged_cells[..self.merged_cells.len().min(SHOWN)].join(", ");
            notes.push(format!(
                "merged cells {shown}{more}: only the first cell has the value; unmerge them and fill each row"
            ));
        }
        if !passed_over.is_empty() {
            notes.push(format!("rows skipped: {}", passed_over.join("; ")));
        }
        if self.alike.n > 0 {
            let differ = "differ from an earlier row in width, case, space or punctuation alone";
            let (n, listing) = (self.alike.n, self.alike.listing());
            notes.push(format!("{n} row(s) {differ} and are kept in its group ({listing})"));
        }
        if self.conflicting.n > 0 {
            let what = "say what an earlier row says and name other gold ids";
            notes.push(format!("{} row(s) {what}: check {}", self.conflicting.n, self.conflicting.listing()));
        }
        notes
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RowDigest {
    /// Index of the row in the table, from 0.
    index: u32,
    row: u32,
    id: u64,
    text: u64,
    group: u64,
    gold: u64,
}

/// Joins groups that share a row: rows of one group, and rows whose query, profile and history are equal up to width, case, space and
/// punctuation. The query alone does not count: "how do I take this" is a different question after a different history.
///
/// Returns, for each row (by [`RowDigest::index`]) whose joined group has more than one name, the row that represents the joined group; and
/// the number of groups. `digests` are in the order of their rows.
fn join_groups(digests: &[RowDigest]) -> (HashMap<u32, u32>, usize) {
    let mut sets = UnionFind((0..digests.len() as u32).collect());
    for key in [|row: &RowDigest| row.text, |row: &RowDigest| row.group] {
        equal_pairs(digests, key).for_each(|(first, other)| sets.join(first, other));
    }
    let roots: Vec<u32> = (0..digests.len() as u32).map(|at| sets.find(at)).collect();
    let mut is_mixed = vec![false; digests.len()];
    for (row, root) in digests.iter().zip(&roots) {
        is_mixed[*root as usize] |= row.group != digests[*root as usize].group;
    }
    let mixed = digests.iter().zip(&roots).filter(|(_, root)| is_mixed[**root as usize]);
    let joined = mixed.map(|(row, root)| (row.index, digests[*root as usize].index)).collect();
    (joined, (0..).zip(&roots).filter(|(at, root)| at == *root).count())
}

/// Positions of digests with equal keys: the first of each set with each other one.
fn equal_pairs(digests: &[RowDigest], key: fn(&RowDigest) -> u64) -> impl Iterator<Item = (u32, u32)> {
    let mut order: Vec<(u64, u32)> = digests.iter().zip(0..).map(|(row, at)| (key(row), at)).collect();
    order.sort_unstable();
    let mut first = None::<(u64, u32)>;
    order.into_iter().filter_map(move |(key, at)| match first {
        Some((of, first)) if of == key => Some((first, at)),
        _ => {
            first = Some((key, at));
            None
        }
    })
}

/// Union-find (disjoint sets) over numbers; each set is represented by its smallest number.
pub(crate) struct UnionFind(pub(crate) Vec<u32>);

impl UnionFind {
    pub(crate) fn find(&mut self, mut at: u32) -> u32 {
        while self.0[at as usize] != at {
            // Path halving.
            self.0[at as usize] = self.0[self.0[at as usize] as usize];
            at = self.0[at as usize];
        }
        at
    }

    pub(crate) fn join(&mut self, one: u32, other: u32) {
        let (one, other) = (self.find(one), self.find(other));
        let root = one.min(other);
        self.0[one.max(other) as usize] = root;
    }
}

/// Position of each value in a row.
#[derive(Debug, Clone, PartialEq, Eq)]
struct QueryColumns {
    query: usize,
    query_name: String,
    profile: Option<usize>,
    history: Option<usize>,
    history_name: Option<String>,
    gold: Option<usize>,
    group: Option<usize>,
    width: TextWidth,
}

impl QueryColumns {
    fn find(table: &Table, config: &DataConfig) -> Result<Self, DataError> {
        let position = |name: &str| -> Result<Option<usize>, DataError> {
            match (find_column(table, name)?, DataConfig::other_name(name)) {
                (None, Some(other)) => find_column(table, other),
                (found, _) => Ok(found),
            }
        };
        let required = |name: &str, key: &str| -> Result<usize, DataError> {
            position(name)?.ok_or_else(|| missing_column(table, name, key))
        };
        // Default columns are optional; columns that the configuration names are not.
        let optional = |name: &str, key: &str| -> Result<Option<usize>, DataError> {
            match position(name)? {
                None if DataConfig::other_name(name).is_none() => Err(missing_column(table, name, key)),
                found => Ok(found),
            }
        };
        let query = required(&config.query_column, "query_column")?;
        let gold = optional(&config.gold_column, "gold_column")?;
        let group = match &config.group_column {
            Some(name) => Some(required(name, "group_column")?),
            None => gold,
        };
        let profile = optional(&config.profile_column, "profile_column")?;
        let history = optional(&config.history_column, "history_column")?;
        let (query_name, width) = (table.header[query].clone(), config.width);
        let history_name = history.map(|history| table.header[history].clone());
        Ok(Self { query, query_name, profile, history, history_name, gold, group, width })
    }

    fn used(&self) -> Vec<usize> {
        [Some(self.query), self.profile, self.history, self.gold, self.group].into_iter().flatten().collect()
    }

    fn read(&self, row: usize, cells: &[impl AsRef<str>]) -> QueryRow {
        let cell =
            |column: Option<usize>| column.and_then(|column| cells.get(column)).map_or("", |cell| cell.as_ref().trim());
        let text = |column: Option<usize>| with_width(cell(column), self.width);
        let (query, profile, history) = (text(Some(self.query)), text(self.profile), text(self.history));
        let ids = cell(self.gold).split(separates_ids);
        let gold_ids: Vec<String> = ids.filter(|id| !id.is_empty()).map(str::to_owned).collect();
        let group = if self.group == self.gold { joined_ids(&gold_ids) } else { cell(self.group).to_owned() };
        QueryRow {
            id: query_id(&query, &profile, &history),
            row,
            group: if group.is_empty() { normalise(&query) } else { group },
            original_query: query,
            user_profile: profile,
            history_summary: history,
            gold_ids,
            expansion: None,
        }
    }
}

/// Id of a query in its context: 16 hexadecimal digits of a hash of the three texts.
pub fn query_id(query: &str, user_profile: &str, history_summary: &str) -> String {
    let mut digest = digest_hex(serde_json::json!([query, user_profile, history_summary]).to_string().as_bytes());
    digest.truncate(16);
    digest
}

/// Position of the column called `name`; if there is none, of the one whose name differs in white space alone, as a header cell with a line
/// break does.
///
/// # Errors
/// There are two such columns.
pub(crate) fn find_column(table: &Table, name: &str) -> Result<Option<usize>, DataError> {
    if let Some(equal) = table.header.iter().position(|column| column == name) {
        return check_unique(table, equal).map(|()| Some(equal));
    }
    let is_alike = |column: &str| column.split_whitespace().eq(name.split_whitespace());
    let mut alike = (1..).zip(&table.header).filter(|(_, column)| is_alike(column)).map(|(number, _)| number);
    match (alike.next(), alike.next()) {
        (Some(first), Some(second)) => {
            let problem = format!("columns {first} and {second} are both called `{name}`, apart from white space");
            Err(DataError::file(table.path(), format!("{problem}; rename one of them")))
        }
        (found, _) => Ok(found.map(|number: usize| number - 1)),
    }
}

fn check_unique(table: &Table, column: usize) -> Result<(), DataError> {
    let name = &table.header[column];
    let Some(other) = table.header.iter().skip(column + 1).position(|other| other == name) else { return Ok(()) };
    let (first, second) = (column + 1, column + other + 2);
    let problem = format!("columns {first} and {second} are both called `{name}`; rename one of them");
    Err(DataError::file(table.path(), problem))
}

/// The names of the columns, for messages.
pub(crate) fn column_names(table: &Table) -> String {
    let names: Vec<String> =
        table.header.iter().filter(|name| !name.is_empty()).map(|name| format!("`{name}`")).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn missing_column(table: &Table, name: &str, key: &str) -> DataError {
    let found = column_names(table);
    let other = DataConfig::other_name(name).map(|other| format!(" or `{other}`")).unwrap_or_default();
    let sheet = table.sheet.as_ref().map(|sheet| format!("{sheet}: ")).unwrap_or_default();
    // A wrong encoding garbles the header.
    let decoded = table.encoding.filter(|encoding| encoding.is_guess() && !found.is_ascii());
    let decoded_as = decoded.map(|encoding| format!(" (read as {}, a guess)", encoding.name())).unwrap_or_default();
    let problem = format!("no column `{name}`{other} (data.{key}); found {found}{decoded_as}");
    let names: Vec<&str> = [name].into_iter().chain(DataConfig::other_name(name)).collect();
    // Another key may name a column that is a cell of the data.
    let remedy = match header_remedy(table, if key == "query_column" { &names } else { &[] }) {
        Some(remedy) => remedy,
        None if decoded.is_some() => format!("name one of these in data.{key}, or save the file as UTF-8"),
        None => format!("name one of these in data.{key}"),
    };
    DataError::file(table.path(), format!("{sheet}{problem}; {remedy}"))
}

/// What to correct in a table whose header is below the first row, where one of `names` is a cell, or has another separator.
pub(crate) fn header_remedy(table: &Table, names: &[&str]) -> Option<String> {
    let row = if names.is_empty() { None } else { table.header_below(names) };
    let below = row.map(|row| format!("row {row} looks like the header: delete the rows above it"));
    let saved = |with: &str| format!("save it with `,` instead of `{with}` between cells, or with tabs as .tsv");
    below.or_else(|| separator(table).map(saved))
}

/// The separator of a header that is a single cell because the file extension implies another separator.
fn separator(table: &Table) -> Option<&'static str> {
    let [name] = &table.header[..] else { return None };
    let known = [(';', ";"), ('\t', "\\t"), (',', ","), ('|', "|")];
    let of_text = known.iter().filter(|_| table.encoding.is_some());
    of_text.into_iter().find(|(character, _)| name.contains(*character)).map(|(_, shown)| *shown)
}

pub(crate) fn joined_ids(ids: &[String]) -> String {
    let ids: BTreeSet<&str> = ids.iter().map(String::as_str).collect();
    ids.into_iter().collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests;

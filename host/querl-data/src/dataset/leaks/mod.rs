//! Whether queries of the held-out splits are also in the training split: the same but for width, case, space and punctuation,
//! or nearly the same.
//!
//! Two rows are as similar as their queries or their contexts are, whichever are less so: the Jaccard similarity of the pairs of
//! neighbouring characters. Candidates come from MinHash signatures in bands (Broder 1997; Leskovec, Rajaraman, Ullman,
//! "Mining of Massive Datasets", 3.4) and are then compared exactly, so that no row is named wrongly; at a similarity of 0.8
//! one pair in 400 is missed, of rows that say the same none.
//!
//! Time is bounded whatever the texts: a row that has leaked is not compared again, and of held-out rows that share a band by
//! the hundreds (texts made from one template) a training row is compared with [`candidates::MOST_OF_BAND`], each with others.

mod candidates;

use crate::dataset::rows::{RowIter, Rows};
use crate::dataset::splits::Splits;
use crate::error::DataError;
use candidates::{Candidates, Contexts, Shingles};
use querl_core::records::{DatasetRow, QueryRow, Split};
use serde::Serialize;
use std::collections::HashMap;

/// As many leaks of a split are named; all are counted.
const MAX_LISTED: usize = 100;

/// As many characters of a query stand in a sentence.
const EXCERPT_CHARS: usize = 40;

/// Rows between calls of `watch`.
const PROGRESS_ROWS: u64 = 1024;

/// Held-out rows that also appear in training data.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Leaks {
    /// Rows of the split.
    pub n_rows: usize,
    /// Those of them that a training row is like.
    pub n_leaked: usize,
    /// The first of them.
    pub rows: Vec<Leak>,
    /// Rows that have not leaked and ask word for word what a training row asks, after another profile or history.
    pub n_same_query: usize,
    /// The first of them.
    pub same_query: Vec<Leak>,
}

/// A held-out row and a training row that it is like.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Leak {
    /// As the query table numbers it.
    pub row: usize,
    /// Its query.
    pub query: String,
    /// The training row.
    pub train_row: usize,
    /// Its query.
    pub train_query: String,
    /// 1 where they differ in width, case, space and punctuation alone, or not at all; at most 0.99 otherwise.
    pub similarity: f64,
}

/// The queries of the rows of a dataset.
pub struct DatasetQueries<'a>(pub &'a dyn Rows<DatasetRow>);

impl Rows<QueryRow> for DatasetQueries<'_> {
    fn read(&self) -> Result<RowIter<'_, QueryRow>, DataError> {
        Ok(Box::new(self.0.read()?.map(|row| Ok(row?.metadata.query))))
    }
}

/// The rows of a table that go to one split.
pub struct SplitRows<'a> {
    /// All rows.
    pub table: &'a dyn Rows<QueryRow>,
    /// Of these rows' groups.
    pub splits: &'a Splits,
    /// Which.
    pub split: Split,
}

impl Rows<QueryRow> for SplitRows<'_> {
    fn read(&self) -> Result<RowIter<'_, QueryRow>, DataError> {
        let is_of_split = |row: &Result<QueryRow, DataError>| match row {
            Ok(row) => self.splits.of(&row.group) == Some(self.split),
            Err(_) => true,
        };
        Ok(Box::new(self.table.read()?.filter(is_of_split)))
    }
}

/// Compares every row of each of `held_out` with every row of `train`, which is read once. HeldOutRow-out rows are held in memory, at
/// about a kilobyte and 11 bytes a character; those of train are not.
///
/// `watch` is called now and then with the number of rows read.
///
/// # Errors
/// Rows cannot be read, or `watch` says so.
pub fn find_leaks<const N: usize, E: From<DataError>>(
    train: &dyn Rows<QueryRow>,
    held_out: [&dyn Rows<QueryRow>; N],
    least_similarity: f64,
    watch: &mut dyn FnMut(u64) -> Result<(), E>,
) -> Result<[Leaks; N], E> {
    let mut n_read = 0_u64;
    let mut one_more = || {
        n_read += 1;
        if n_read.is_multiple_of(PROGRESS_ROWS) { watch(n_read) } else { Ok(()) }
    };
    let (mut held, mut contexts) = (Vec::new(), Contexts::default());
    for (split, rows) in held_out.into_iter().enumerate() {
        for row in rows.read()? {
            held.push(HeldOutRow::new(split, row?, &mut contexts));
            one_more()?;
        }
    }
    let mut search = LeakSearch::new(held, least_similarity);
    if !search.held.is_empty() {
        for row in train.read()? {
            search.compare(&row?);
            one_more()?;
        }
    }
    Ok(search.leaks())
}

/// A row of a held-out split, and what was found.
struct HeldOutRow {
    split: usize,
    row: usize,
    query: String,
    shingles: Shingles,
    leak: Option<Leak>,
    same_query: Option<Leak>,
}

impl HeldOutRow {
    fn new(split: usize, row: QueryRow, contexts: &mut Contexts) -> Self {
        let shingles = Shingles::of(&row, contexts);
        Self { split, row: row.row, query: row.original_query, shingles, leak: None, same_query: None }
    }

    fn pair_with(&self, train: &QueryRow, similarity: f64) -> Leak {
        let (query, train_query) = (self.query.clone(), train.original_query.clone());
        Leak { row: self.row, query, train_row: train.row, train_query, similarity }
    }
}

struct LeakSearch {
    held: Vec<HeldOutRow>,
    candidates: Candidates,
    /// Rows by what they ask, as long as no training row was found that asks the same.
    queries: HashMap<u64, Vec<u32>>,
    least_similarity: f64,
}

impl LeakSearch {
    fn new(held: Vec<HeldOutRow>, least_similarity: f64) -> Self {
        let candidates = Candidates::new(held.iter().map(|held| &held.shingles));
        let mut queries: HashMap<u64, Vec<u32>> = HashMap::new();
        for (held, index) in held.iter().zip(0..) {
            queries.entry(held.shingles.query_text).or_default().push(index);
        }
        Self { held, candidates, queries, least_similarity }
    }

    fn compare(&mut self, train: &QueryRow) {
        let shingles = Shingles::of(train, &mut Contexts::default());
        for index in self.candidates.of(&shingles) {
            let held = &mut self.held[index as usize];
            if held.leak.is_some() {
                continue;
            }
            let similarity = shingles.similarity(&held.shingles, self.least_similarity);
            if similarity >= self.least_similarity {
                held.leak = Some(held.pair_with(train, similarity));
                self.candidates.retire(|index| self.held[index as usize].leak.is_none());
            }
        }
        self.note_same_query(train, &shingles);
    }

    fn note_same_query(&mut self, train: &QueryRow, shingles: &Shingles) {
        for index in self.queries.remove(&shingles.query_text).unwrap_or_default() {
            let held = &mut self.held[index as usize];
            let similarity = shingles.similarity(&held.shingles, 0.0);
            held.same_query = Some(held.pair_with(train, similarity));
        }
    }

    fn leaks<const N: usize>(self) -> [Leaks; N] {
        let mut leaks: [Leaks; N] = std::array::from_fn(|_| Leaks::default());
        for HeldOutRow { split, leak, same_query, .. } in self.held {
            let Leaks { n_rows, n_leaked, rows, n_same_query, same_query: alike } = &mut leaks[split];
            *n_rows += 1;
            let (found, n, list) = match leak {
                Some(leak) => (Some(leak), n_leaked, rows),
                None => (same_query, n_same_query, alike),
            };
            *n += usize::from(found.is_some());
            list.extend(found.filter(|_| list.len() < MAX_LISTED));
        }
        leaks
    }
}

impl Leaks {
    /// A sentence about a split that leaks; `None` of one that does not.
    pub fn sentence(&self, split: Split) -> Option<String> {
        let Self { n_rows, n_leaked, .. } = self;
        let first = self.rows.first()?;
        let what = format!("{n_leaked} of {n_rows} rows of {} are in train, or nearly", split.name());
        Some(format!("{what}: {} (similarity {:.2})", first.pair(), first.similarity))
    }

    /// A sentence about a split whose queries are asked in train too, after another profile or history; `None` where there are none.
    pub fn same_query_sentence(&self, split: Split) -> Option<String> {
        let Self { n_rows, n_same_query, .. } = self;
        let first = self.same_query.first()?;
        let what = format!("{n_same_query} of {n_rows} rows of {} ask what a row of train asks", split.name());
        Some(format!("{what}, after another profile or history, and are no leaks: {}", first.pair()))
    }
}

impl Leak {
    fn pair(&self) -> String {
        let Self { row, query, train_row, train_query, .. } = self;
        format!("row {row} `{}` is like row {train_row} `{}`", shown(query), shown(train_query))
    }
}

fn shown(query: &str) -> String {
    let end = if query.chars().nth(EXCERPT_CHARS).is_some() { "…" } else { "" };
    query.chars().take(EXCERPT_CHARS).flat_map(char::escape_debug).collect::<String>() + end
}

#[cfg(test)]
mod tests;

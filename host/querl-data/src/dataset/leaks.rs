//! Leak detection: finds queries of the held-out splits that are also in the training split, either equal up to width, case, space and
//! punctuation, or nearly equal.
//!
//! The similarity of two rows is the smaller of those of their queries and of their contexts: the Jaccard similarity of the pairs of
//! neighbouring characters. Candidates come from MinHash signatures in bands (Broder 1997; Leskovec, Rajaraman, Ullman, "Mining of
//! Massive Datasets", 3.4) and are then compared exactly, so that no row is reported wrongly; at a similarity of 0.8 one pair in 400 is
//! missed, of equal rows none.
//!
//! Time is bounded for all texts: a leaked row is not compared again, and of held-out rows that share a band by the hundreds (texts made
//! from one template) a training row is compared with [`MAX_OF_BAND`].

use crate::dataset::SplitMix64;
use crate::dataset::records::{RowIter, Rows};
use crate::dataset::splits::RowSplits;
use crate::error::DataError;
use crate::text::{hash_of, normalise};
use querl_core::records::{DatasetRow, QueryRow, Split};
use querl_core::text::printable;
use serde::Serialize;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Maximum number of leaks that are listed for a split; the counts include all.
pub(super) const MAX_LISTED: usize = 100;

/// Maximum length of a query in a sentence.
const EXCERPT_CHARS: usize = 40;
/// Maximum length of a profile or history in a sentence.
const CONTEXT_BYTES: usize = 120;

/// Number of rows between calls of the progress callback `watch`, which also checks for interrupts.
const PROGRESS_ROWS: u64 = 1024;

/// Rows of a held-out split that are also in the training split.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Leaks {
    /// Number of rows of the held-out split.
    pub n_rows: usize,
    /// Number of held-out rows that are similar to a training row.
    pub n_leaked: usize,
    /// The first leaks, at most 100; `n_leaked` counts all.
    pub rows: Vec<Leak>,
    /// Number of other held-out rows whose query is in the training split with another profile or history; not counted as leaks.
    pub n_same_query: usize,
    /// The first rows of `n_same_query`, at most 100.
    pub same_query: Vec<Leak>,
}

/// A held-out row and a training row that is similar to it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Leak {
    /// Number of the held-out row in the query table.
    pub row: usize,
    /// Query of the held-out row.
    pub query: String,
    /// Number of the training row in the query table.
    pub train_row: usize,
    /// Query of the training row.
    pub train_query: String,
    /// Histories or profiles of the held-out and the training row if they differ after equal queries, and whether the gold ids differ.
    /// The end of a sentence for [`Leaks::sentence`].
    #[serde(skip)]
    difference: String,
    /// Similarity of the two rows: 1 if they are equal up to width, case, space and punctuation, otherwise at most 0.99.
    pub similarity: f64,
}

/// The rows of a dataset, read as rows of queries.
pub struct DatasetQueries<'a>(pub &'a dyn Rows<DatasetRow>);

impl Rows<QueryRow> for DatasetQueries<'_> {
    fn read(&self) -> Result<RowIter<'_, QueryRow>, DataError> {
        Ok(Box::new(self.0.read()?.map(|row| Ok(row?.metadata.query))))
    }
}

/// The rows of a query table that are in one split.
pub struct SplitRows<'a> {
    /// The query table, with the rows of all splits.
    pub table: &'a dyn Rows<QueryRow>,
    /// The split of each row.
    pub splits: &'a RowSplits,
    /// The split whose rows are read.
    pub split: Split,
}

impl Rows<QueryRow> for SplitRows<'_> {
    fn read(&self) -> Result<RowIter<'_, QueryRow>, DataError> {
        let is_of_split = |row: &Result<QueryRow, DataError>| match row {
            Ok(row) => self.splits.split_of(row) == Some(self.split),
            Err(_) => true,
        };
        Ok(Box::new(self.table.read()?.filter(is_of_split)))
    }
}

/// Compares each row of the `held_out` splits with each row of `train`, which is read once. Held-out rows are held in memory (about 1 KB
/// plus 11 bytes per character each, and up to 240 bytes of profile and history); training rows are not.
///
/// `watch` is called with the number of rows read so far, every [`PROGRESS_ROWS`] rows.
///
/// # Errors
/// Rows cannot be read, or `watch` returned an error.
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

struct HeldOutRow {
    split: usize,
    row: usize,
    query: String,
    /// Excerpts of profile and history.
    context: [String; 2],
    /// Hash of the gold ids; `None` if they are unknown.
    gold: Option<u64>,
    shingles: Shingles,
    leak: Option<Leak>,
    same_query: Option<Leak>,
}

impl HeldOutRow {
    fn new(split: usize, row: QueryRow, contexts: &mut Contexts) -> Self {
        let shingles = Shingles::of(&row, contexts);
        let (context, gold) = (context_excerpts(&row), gold_hash(&row));
        Self { split, row: row.row, query: row.original_query, context, gold, shingles, leak: None, same_query: None }
    }

    fn pair_with(&self, train: &QueryRow, shingles: &Shingles, similarity: f64) -> Leak {
        let (query, train_query) = (self.query.clone(), train.original_query.clone());
        let difference = self.difference(train, shingles);
        Leak { row: self.row, query, train_row: train.row, train_query, difference, similarity }
    }

    fn difference(&self, train: &QueryRow, shingles: &Shingles) -> String {
        let mut difference = String::new();
        if self.shingles.query_text == shingles.query_text && self.shingles.text != shingles.text {
            let [profile, history] = &self.context;
            let [train_profile, train_history] = &context_excerpts(train);
            // Excerpts may be equal where the texts are not.
            difference = match history == train_history && (profile != train_profile || history.is_empty()) {
                true => format!(" with the profiles `{profile}` and `{train_profile}`"),
                false => format!(" after the histories `{history}` and `{train_history}`"),
            };
        }
        if self.gold.zip(gold_hash(train)).is_some_and(|(gold, train_gold)| gold != train_gold) {
            difference.push_str(", with other gold ids");
        }
        difference
    }
}

fn context_excerpts(row: &QueryRow) -> [String; 2] {
    [&row.user_profile, &row.history_summary].map(|text| printable(text, CONTEXT_BYTES))
}

fn gold_hash(row: &QueryRow) -> Option<u64> {
    let ids: BTreeSet<&String> = row.gold_ids.iter().collect();
    (!ids.is_empty()).then(|| hash_of(&ids))
}

struct LeakSearch {
    held: Vec<HeldOutRow>,
    candidates: Candidates,
    /// Rows by the hash of their query; removed with the first training row of the same query.
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
                held.leak = Some(held.pair_with(train, &shingles, similarity));
                self.candidates.retire(|index| self.held[index as usize].leak.is_none());
            }
        }
        for index in self.queries.remove(&shingles.query_text).unwrap_or_default() {
            let held = &mut self.held[index as usize];
            let similarity = shingles.similarity(&held.shingles, 0.0);
            held.same_query = Some(held.pair_with(train, &shingles, similarity));
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
    /// A sentence on the number of leaks of a split, with the first as example; `None` without leaks.
    pub fn sentence(&self, split: Split) -> Option<String> {
        let Self { n_rows, n_leaked, .. } = self;
        let first = self.rows.first()?;
        let what =
            format!("{n_leaked} of {n_rows} rows of {} are in train or nearly equal to a row of it", split.name());
        Some(format!("{what}: {} (similarity {:.2})", first.pair(), first.similarity))
    }

    /// A sentence on the queries of a split that are in train with another profile or history; `None` without such queries.
    pub fn same_query_sentence(&self, split: Split) -> Option<String> {
        let Self { n_rows, n_same_query, .. } = self;
        let first = self.same_query.first()?;
        let what = format!("{n_same_query} of {n_rows} rows of {} have the query of a row of train", split.name());
        Some(format!("{what}, with another profile or history, and are not leaks: {}", first.pair()))
    }
}

impl Leak {
    fn pair(&self) -> String {
        let Self { row, query, train_row, train_query, difference, .. } = self;
        format!("row {row} `{}` is like row {train_row} `{}`{difference}", shown(query), shown(train_query))
    }
}

fn shown(query: &str) -> String {
    let end = if query.chars().nth(EXCERPT_CHARS).is_some() { "…" } else { "" };
    query.chars().take(EXCERPT_CHARS).flat_map(char::escape_debug).collect::<String>() + end
}

/// Number of LSH bands per signature. With 6 hashes per band, the probability of finding a pair of similarity 0.8 is 1 - (1 - 0.8^6)^20 =
/// 0.998.
const N_BANDS: usize = 20;
const BAND_HASHES: usize = 6;

/// Maximum number of rows per LSH band with which a row is compared. A band that more rows share comes from text that all of them have;
/// similar rows also share other bands.
pub(crate) const MAX_OF_BAND: usize = 64;

/// Held-out rows by text and by the bands of their signatures.
struct Candidates {
    /// Rows by the hash of their text; removed with the first training row of the same text.
    texts: HashMap<u64, Vec<u32>>,
    /// Bands with their rows, sorted.
    bands: Vec<(u64, u32)>,
    n_rows: usize,
    n_retired: usize,
    n_compared: usize,
}

impl Candidates {
    fn new<'a>(rows: impl Iterator<Item = &'a Shingles>) -> Self {
        let (mut texts, mut bands, mut n_rows) = (HashMap::<u64, Vec<u32>>::new(), Vec::new(), 0);
        for (shingles, index) in rows.zip(0..) {
            texts.entry(shingles.text).or_default().push(index);
            bands.extend(bands_of(shingles).map(|band| (band, index)));
            n_rows += 1;
        }
        bands.sort_unstable();
        Self { texts, bands, n_rows, n_retired: 0, n_compared: 0 }
    }

    /// Rows to compare with a training row, in order.
    fn of(&mut self, shingles: &Shingles) -> Vec<u32> {
        let mut found = self.texts.remove(&shingles.text).unwrap_or_default();
        if !self.bands.is_empty() {
            for band in bands_of(shingles) {
                let alike = self.of_band(band);
                let n_taken = alike.len().min(MAX_OF_BAND);
                // Each training row is compared with another part of a large band.
                let start = if alike.len() > MAX_OF_BAND { self.n_compared * MAX_OF_BAND % alike.len() } else { 0 };
                found.extend(alike.iter().cycle().skip(start).take(n_taken).map(|(_, index)| *index));
            }
        }
        self.n_compared += 1;
        found.sort_unstable();
        found.dedup();
        found
    }

    fn of_band(&self, band: u64) -> &[(u64, u32)] {
        let start = self.bands.partition_point(|(known, _)| *known < band);
        let rest = &self.bands[start..];
        // Exponential search: bands mostly have few rows.
        let mut reach = 1;
        while rest.get(reach).is_some_and(|(known, _)| *known == band) {
            reach *= 2;
        }
        let within = &rest[..reach.min(rest.len())];
        &rest[..within.partition_point(|(known, _)| *known == band)]
    }

    /// Counts a leaked row. Once half of the rows have leaked, their bands are removed.
    fn retire(&mut self, is_open: impl Fn(u32) -> bool) {
        self.n_retired += 1;
        if self.n_retired * 2 > self.n_rows {
            self.bands.retain(|(_, index)| is_open(*index));
            self.n_rows -= self.n_retired;
            self.n_retired = 0;
        }
    }
}

/// LSH bands of a row's MinHash signatures: of query and context together, and of the query alone if the row has a context.
pub(crate) fn bands_of(shingles: &Shingles) -> impl Iterator<Item = u64> {
    let query = (!shingles.context.is_empty()).then(|| signature(shingles.query(), N_BANDS));
    signature(shingles.all(), 0).into_iter().chain(query.into_iter().flatten())
}

/// MinHash signature: one hash per band, numbered from `first`, of the minima of the shingles under `BAND_HASHES` hash functions.
fn signature(shingles: impl Iterator<Item = u64>, first: usize) -> [u64; N_BANDS] {
    let mut least = [u64::MAX; N_BANDS * BAND_HASHES];
    for shingle in shingles {
        // The n-th number after a hash of the shingle is its n-th hash.
        let mut hashes = SplitMix64(SplitMix64(shingle).next());
        for least in &mut least {
            *least = (*least).min(hashes.next());
        }
    }
    std::array::from_fn(|band| hash_of(&(first + band, &least[band * BAND_HASHES..(band + 1) * BAND_HASHES])))
}

/// Similarity of different texts with the same pairs: "哈哈" and "哈哈哈".
const NEARLY: f64 = 0.99;

/// Shingles of a row: sorted distinct character bigrams of its normalised texts; a text of one character is its own shingle.
pub(crate) struct Shingles {
    query: Box<[u64]>,
    context: Arc<[u64]>,
    query_text: u64,
    /// Hash of the row's normalised texts.
    pub(crate) text: u64,
}

/// Interned shingles of contexts: equal contexts of several rows are stored once.
#[derive(Default)]
pub(crate) struct Contexts(HashSet<Arc<[u64]>>);

impl Contexts {
    fn shared(&mut self, context: Vec<u64>) -> Arc<[u64]> {
        if let Some(known) = self.0.get(context.as_slice()) {
            return known.clone();
        }
        let context: Arc<[u64]> = context.into();
        self.0.insert(context.clone());
        context
    }
}

impl Shingles {
    pub(crate) fn of(row: &QueryRow, contexts: &mut Contexts) -> Self {
        let texts = [&row.original_query, &row.user_profile, &row.history_summary].map(|text| normalise(text));
        let [query, profile, history] = &texts;
        let context = pairs(profile, 1).chain(pairs(history, 2));
        Self {
            query: sorted(pairs(query, 0)).into(),
            context: contexts.shared(sorted(context)),
            query_text: hash_of(query),
            text: hash_of(&texts),
        }
    }

    /// Similarity of two rows: the smaller of the Jaccard similarities of queries and contexts; only that of the queries if it is below
    /// `least`.
    pub(crate) fn similarity(&self, other: &Self, least: f64) -> f64 {
        let of_queries = jaccard(&self.query, &other.query);
        if of_queries < least {
            return of_queries;
        }
        match of_queries.min(jaccard(&self.context, &other.context)) {
            1.0 if self.text != other.text => NEARLY,
            similarity => similarity,
        }
    }

    fn query(&self) -> impl Iterator<Item = u64> {
        self.query.iter().copied()
    }

    fn all(&self) -> impl Iterator<Item = u64> {
        self.query.iter().chain(self.context.iter()).copied()
    }
}

/// Character bigrams, encoded as two characters of 21 bits and the number of the field.
fn pairs(text: &str, field: u64) -> impl Iterator<Item = u64> {
    let number = move |one: char, other: char| field << 42 | u64::from(one as u32) << 21 | u64::from(other as u32);
    let mut characters = text.chars();
    let first = characters.next();
    let only = first.filter(|_| characters.as_str().is_empty()).map(|only| number(only, '\0'));
    let mut before = first;
    let several = characters.filter_map(move |next| Some(number(before.replace(next)?, next)));
    only.into_iter().chain(several)
}

fn sorted(pairs: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut pairs: Vec<u64> = pairs.collect();
    pairs.sort_unstable();
    pairs.dedup();
    pairs
}

fn jaccard(one: &[u64], other: &[u64]) -> f64 {
    if one.is_empty() && other.is_empty() {
        return 1.0;
    }
    let (mut n_shared, mut at) = (0, 0);
    for pair in one {
        while other.get(at).is_some_and(|known| known < pair) {
            at += 1;
        }
        n_shared += usize::from(other.get(at) == Some(pair));
    }
    n_shared as f64 / (one.len() + other.len() - n_shared) as f64
}

//! Whether queries of the held-out splits are also in the training split: the same but for width, case, space and punctuation,
//! or nearly the same.
//!
//! Two rows are as similar as their queries or their contexts are, whichever are less so: the Jaccard similarity of the pairs of
//! neighbouring characters. Candidates come from MinHash signatures in bands (Broder 1997; Leskovec, Rajaraman, Ullman,
//! "Mining of Massive Datasets", 3.4) and are then compared exactly, so that no row is named wrongly; at a similarity of 0.8
//! one pair in 400 is missed, at 1 none.

use crate::error::DataError;
use crate::rows::Rows;
use crate::text::{hash_of, normalise};
use querl_core::records::{DatasetRow, QueryRow, Split};
use serde::Serialize;
use std::collections::HashSet;

/// Bands of a signature, and hashes of a band: 1 - (1 - 0.8^6)^20 is 0.998.
const N_BANDS: usize = 20;
const BAND_HASHES: usize = 6;

/// As many leaks of a split are named; all are counted.
const NAMED: usize = 100;

/// Held-out rows that training would show to the model.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Leaks {
    /// Rows of the split.
    pub n_rows: usize,
    /// Those of them that a training row is like.
    pub n_leaked: usize,
    /// The first of them.
    pub rows: Vec<Leak>,
}

/// A held-out row and a training row that it is like.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Leak {
    /// As the query table numbers it.
    pub row: usize,
    /// Its query.
    pub query: String,
    /// The first training row of that similarity or more, likewise.
    pub train_row: usize,
    /// Its query.
    pub train_query: String,
    /// 1 where they differ in width, case, space and punctuation alone, or not at all.
    pub similarity: f64,
}

/// Compares every row of `held_out` with every row of `train`. Held-out rows are held in memory, at about 400 bytes; those of train
/// are not.
///
/// # Errors
/// Rows cannot be read.
pub fn find_leaks(
    train: &dyn Rows<DatasetRow>,
    held_out: &dyn Rows<DatasetRow>,
    least_similarity: f64,
) -> Result<Leaks, DataError> {
    let mut rows = Vec::new();
    for row in held_out.read()? {
        rows.push(row?.metadata.query);
    }
    let index = Index::new(&rows);
    let mut leaks: Vec<Option<Leak>> = vec![None; rows.len()];
    for row in train.read()? {
        let query = row?.metadata.query;
        let shingles = Shingles::of(&query);
        for candidate in index.candidates(&shingles) {
            let (leak, held) = (&mut leaks[candidate], &rows[candidate]);
            let similarity = shingles.similarity(&Shingles::of(held));
            if leak.is_none() && similarity >= least_similarity {
                *leak = Some(named(held, &query, similarity));
            }
        }
    }
    let n_leaked = leaks.iter().flatten().count();
    Ok(Leaks { n_rows: rows.len(), n_leaked, rows: leaks.into_iter().flatten().take(NAMED).collect() })
}

fn named(held: &QueryRow, train: &QueryRow, similarity: f64) -> Leak {
    let (query, train_query) = (held.original_query.clone(), train.original_query.clone());
    Leak { row: held.row, query, train_row: train.row, train_query, similarity }
}

impl Leaks {
    /// A sentence about a split that leaks; `None` of one that does not.
    pub fn sentence(&self, split: Split) -> Option<String> {
        let first = self.rows.first()?;
        let Self { n_rows, n_leaked, .. } = self;
        let Leak { row, query, train_row, train_query, similarity } = first;
        Some(format!(
            "{n_leaked} of {n_rows} rows of {} are in train, or nearly: row {row} `{query}` is like row {train_row} `{train_query}` \
             (similarity {similarity:.2})",
            split.name()
        ))
    }
}

/// What a row says, as hashes of pairs of neighbouring characters.
struct Shingles {
    query: HashSet<u64>,
    context: HashSet<u64>,
}

impl Shingles {
    fn of(row: &QueryRow) -> Self {
        let mut context = pairs(&row.user_profile, 1);
        context.extend(pairs(&row.history_summary, 2));
        Self { query: pairs(&row.original_query, 0), context }
    }

    fn similarity(&self, other: &Self) -> f64 {
        jaccard(&self.query, &other.query).min(jaccard(&self.context, &other.context))
    }

    /// Where both parts are similar to a degree, so is their union.
    fn all(&self) -> impl Iterator<Item = u64> {
        self.query.iter().chain(&self.context).copied()
    }
}

/// Those of the normalised text, told from the same pairs in other fields; a text of one character is one of its own.
fn pairs(text: &str, field: u8) -> HashSet<u64> {
    let characters: Vec<char> = normalise(text).chars().collect();
    match characters.as_slice() {
        [] => HashSet::new(),
        [only] => HashSet::from([hash_of(&(field, *only))]),
        several => several.windows(2).map(|pair| hash_of(&(field, pair[0], pair[1]))).collect(),
    }
}

fn jaccard(one: &HashSet<u64>, other: &HashSet<u64>) -> f64 {
    if one.is_empty() && other.is_empty() {
        return 1.0;
    }
    let n_shared = one.intersection(other).count();
    n_shared as f64 / (one.len() + other.len() - n_shared) as f64
}

/// The bands of all rows, in order, each with its row.
struct Index(Vec<(u64, u32)>);

impl Index {
    fn new(rows: &[QueryRow]) -> Self {
        let mut bands = Vec::with_capacity(rows.len() * N_BANDS);
        for (row, index) in rows.iter().zip(0..) {
            bands.extend(signature(&Shingles::of(row)).map(|band| (band, index)));
        }
        bands.sort_unstable();
        Self(bands)
    }

    /// Rows that share a band, in order.
    fn candidates(&self, shingles: &Shingles) -> Vec<usize> {
        let mut found = Vec::new();
        for band in signature(shingles) {
            let start = self.0.partition_point(|(known, _)| *known < band);
            let alike = self.0[start..].iter().take_while(|(known, _)| *known == band);
            found.extend(alike.map(|(_, index)| *index as usize));
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// One number a band, of the least hashes of all shingles under as many hash functions as the band has.
fn signature(shingles: &Shingles) -> [u64; N_BANDS] {
    let mut least = [u64::MAX; N_BANDS * BAND_HASHES];
    for shingle in shingles.all() {
        let mut state = shingle;
        for least in &mut least {
            *least = (*least).min(next_random(&mut state));
        }
    }
    std::array::from_fn(|band| hash_of(&(band, &least[band * BAND_HASHES..(band + 1) * BAND_HASHES])))
}

/// SplitMix64 (Steele, Lea, Flood 2014): the n-th number after a shingle is its n-th hash.
fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use querl_core::records::RowMetadata;

    fn row(row: usize, query: &str, history: &str) -> DatasetRow {
        let query = QueryRow {
            id: row.to_string(),
            row,
            original_query: query.into(),
            user_profile: String::new(),
            history_summary: history.into(),
            gold_ids: Vec::new(),
            group: row.to_string(),
        };
        let metadata = RowMetadata { query, top1_score: None, source: "t".into(), dropped: None };
        DatasetRow { messages: Vec::new(), metadata }
    }

    fn rows(texts: &[(&str, &str)]) -> Vec<DatasetRow> {
        texts.iter().zip(2..).map(|((query, history), number)| row(number, query, history)).collect()
    }

    fn leaked(train: &[(&str, &str)], test: &[(&str, &str)], least: f64) -> Vec<(usize, usize, f64)> {
        let leaks = find_leaks(&rows(train), &rows(test), least).unwrap();
        assert_eq!((leaks.n_leaked, leaks.n_rows), (leaks.rows.len(), test.len()));
        leaks.rows.iter().map(|leak| (leak.row, leak.train_row, leak.similarity)).collect()
    }

    #[test]
    fn rows_that_say_the_same_leak_and_other_histories_do_not() {
        let train = [("鱼油怎么吃？", "问过鱼油"), ("多少钱", ""), ("贵", "")];
        let test =
            [("鱼油怎么吃", "问过鱼油。"), ("鱼油怎么吃", "咨询益生菌"), ("多少钱！", ""), ("贵！", ""), ("廉", "")];
        assert_eq!(leaked(&train, &test, 0.8), [(2, 2, 1.0), (4, 3, 1.0), (5, 4, 1.0)]);
    }

    #[test]
    fn near_duplicates_leak_as_far_as_they_are_similar() {
        // 4 pairs of characters of 5.
        let (train, test) = ([("鱼油怎么吃", "")], [("鱼油怎么吃啊", "")]);
        assert_eq!(leaked(&train, &test, 0.8), [(2, 2, 0.8)]);
        assert_eq!(leaked(&train, &test, 0.81), []);
        assert_eq!(leaked(&[("深海鱼油怎么吃", "")], &[("益生菌怎么吃呢", "")], 0.8), []);
    }

    /// Of 2000 pairs at a similarity of 0.83 to 0.9 nearly all must be found.
    #[test]
    fn few_near_duplicates_are_missed() {
        let text = |seed: u32| -> String {
            let mut state = u64::from(seed);
            (0..24).map(|_| char::from_u32(0x4e00 + (next_random(&mut state) % 3000) as u32).unwrap()).collect()
        };
        let train: Vec<DatasetRow> = (0..2000).map(|seed| row(seed as usize, &text(seed), "")).collect();
        let changed = |seed: u32| {
            text(seed).chars().enumerate().map(|(at, c)| if at == 11 { '改' } else { c }).collect::<String>()
        };
        let test: Vec<DatasetRow> = (0..2000).map(|seed| row(seed as usize, &changed(seed), "")).collect();
        let leaks = find_leaks(&train, &test, 0.8).unwrap();
        assert!(leaks.n_leaked >= 1990, "{}", leaks.n_leaked);
        assert!(leaks.rows.len() == NAMED && leaks.rows.iter().all(|leak| leak.row == leak.train_row));
        let sentence = leaks.sentence(Split::Test).unwrap();
        assert!(sentence.contains("of 2000 rows of test are in train, or nearly: row 0 `"), "{sentence}");
        assert_eq!(Leaks::default().sentence(Split::Test), None);
    }
}

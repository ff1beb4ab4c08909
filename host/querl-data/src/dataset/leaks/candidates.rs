//! Which held-out rows may be like a training row: those that say the same, and those that share a band of their signatures.

use crate::text::{hash_of, normalise};
use querl_core::records::QueryRow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Bands of a signature, and hashes of a band: 1 - (1 - 0.8^6)^20 is 0.998.
const N_BANDS: usize = 20;
const BAND_HASHES: usize = 6;

/// As many rows with one band are candidates of a training row. Where more share it, it is of what hundreds of texts have in
/// common; rows that are more alike than these share others, too.
pub(super) const MOST_OF_BAND: usize = 64;

/// Held-out rows by what they say and by the bands of their signatures.
pub(super) struct Candidates {
    /// Rows that say the same; taken out with the first training row that says it.
    texts: HashMap<u64, Vec<u32>>,
    /// Bands with their rows, in order.
    bands: Vec<(u64, u32)>,
    n_rows: usize,
    n_retired: usize,
    n_asked: usize,
}

impl Candidates {
    pub(super) fn new<'a>(rows: impl Iterator<Item = &'a Shingles>) -> Self {
        let (mut texts, mut bands, mut n_rows) = (HashMap::<u64, Vec<u32>>::new(), Vec::new(), 0);
        for (shingles, index) in rows.zip(0..) {
            texts.entry(shingles.text).or_default().push(index);
            bands.extend(bands_of(shingles).map(|band| (band, index)));
            n_rows += 1;
        }
        bands.sort_unstable();
        Self { texts, bands, n_rows, n_retired: 0, n_asked: 0 }
    }

    /// Rows to compare with one that says `shingles`, in order.
    pub(super) fn of(&mut self, shingles: &Shingles) -> Vec<u32> {
        let mut found = self.texts.remove(&shingles.text).unwrap_or_default();
        if !self.bands.is_empty() {
            for band in bands_of(shingles) {
                let alike = self.of_band(band);
                let n_taken = alike.len().min(MOST_OF_BAND);
                // Each training row takes others of those that are too many, in turn.
                let start = if alike.len() > MOST_OF_BAND { self.n_asked * MOST_OF_BAND % alike.len() } else { 0 };
                found.extend(alike.iter().cycle().skip(start).take(n_taken).map(|(_, index)| *index));
            }
        }
        self.n_asked += 1;
        found.sort_unstable();
        found.dedup();
        found
    }

    fn of_band(&self, band: u64) -> &[(u64, u32)] {
        let start = self.bands.partition_point(|(known, _)| *known < band);
        let rest = &self.bands[start..];
        // Mostly few: searched from here, not from the end of all.
        let mut reach = 1;
        while rest.get(reach).is_some_and(|(known, _)| *known == band) {
            reach *= 2;
        }
        let within = &rest[..reach.min(rest.len())];
        &rest[..within.partition_point(|(known, _)| *known == band)]
    }

    /// One more row is of no use. Once half of them are, those that are not `open` are dropped, so that nobody goes through
    pub(super) fn retire(&mut self, is_open: impl Fn(u32) -> bool) {
        self.n_retired += 1;
        if self.n_retired * 2 > self.n_rows {
            self.bands.retain(|(_, index)| is_open(*index));
            self.n_rows -= self.n_retired;
            self.n_retired = 0;
        }
    }
}

/// Bands of query and context, and of the query alone: where hundreds of rows share a context those of both are mostly of what they
/// share, and where hundreds ask the same in other contexts those of the query are.
fn bands_of(shingles: &Shingles) -> impl Iterator<Item = u64> {
    let query = shingles.has_context().then(|| signature(shingles.query(), N_BANDS));
    signature(shingles.all(), 0).into_iter().chain(query.into_iter().flatten())
}

/// One number a band, numbered on from `first`, of the least hashes of all shingles under as many hash functions as the band has.
fn signature(shingles: impl Iterator<Item = u64>, first: usize) -> [u64; N_BANDS] {
    let mut least = [u64::MAX; N_BANDS * BAND_HASHES];
    for shingle in shingles {
        // Pairs of characters are near to one another as numbers; a hash of each is the seed of its hashes.
        let mut state = next_random(&mut { shingle });
        for least in &mut least {
            *least = (*least).min(next_random(&mut state));
        }
    }
    std::array::from_fn(|band| hash_of(&(first + band, &least[band * BAND_HASHES..(band + 1) * BAND_HASHES])))
}

/// SplitMix64 (Steele, Lea, Flood 2014): the n-th number after a shingle is its n-th hash.
pub(super) fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Similarity of rows that have the same pairs and do not say the same: "哈哈" and "哈哈哈".
const NEARLY: f64 = 0.99;

/// The pairs of a row's normalised texts, in order, each once; a text of one character is a pair of its own.
pub(super) struct Shingles {
    query: Box<[u64]>,
    context: Arc<[u64]>,
    pub(super) query_text: u64,
    pub(super) text: u64,
}

/// Contexts that rows share are held once.
#[derive(Default)]
pub(super) struct Contexts(HashSet<Arc<[u64]>>);

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
    pub(super) fn of(row: &QueryRow, contexts: &mut Contexts) -> Self {
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

    /// That of the queries or of the contexts, whichever is less; only known to be less than `least` where that of the queries is.
    pub(super) fn similarity(&self, other: &Self, least: f64) -> f64 {
        let of_queries = jaccard(&self.query, &other.query);
        if of_queries < least {
            return of_queries;
        }
        match of_queries.min(jaccard(&self.context, &other.context)) {
            1.0 if self.text != other.text => NEARLY,
            similarity => similarity,
        }
    }

    pub(super) fn has_context(&self) -> bool {
        !self.context.is_empty()
    }

    pub(super) fn query(&self) -> impl Iterator<Item = u64> {
        self.query.iter().copied()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = u64> {
        self.query.iter().chain(self.context.iter()).copied()
    }
}

/// Two characters of 21 bits, and which field they are of.
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

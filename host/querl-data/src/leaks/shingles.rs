//! What a row says, as pairs of neighbouring characters.

use crate::text::{hash_of, normalise};
use querl_core::records::QueryRow;
use std::collections::HashSet;
use std::sync::Arc;

/// Similarity of rows that have the same pairs and do not say the same: "哈哈" and "哈哈哈".
const NEARLY: f64 = 0.99;

/// The pairs of a row's normalised texts, in order, each once; a text of one character is a pair of its own.
pub(super) struct Shingles {
    query: Box<[u64]>,
    context: Arc<[u64]>,
    /// Stands for the normalised query.
    pub(super) query_text: u64,
    /// Stands for the normalised query, profile and history.
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

    /// Where both parts are similar to a degree, so is their union.
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

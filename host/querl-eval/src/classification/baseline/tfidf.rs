//! Texts as frequencies of their characters and pairs of characters.

use std::collections::{BTreeMap, BTreeSet};

/// A text's features that are not 0, by position.
pub(crate) type SparseRow = Vec<(usize, f64)>;

/// Weights of characters and pairs of characters: how often one stands in a text, times how few texts have it; rows have length 1.
///
/// Source: scikit-learn's `TfidfVectorizer(analyzer="char", ngram_range=(1, 2))`, its defaults else: lower case, runs of white space
/// as one space, `idf = ln((1 + n) / (1 + df)) + 1`.
#[derive(Debug, Clone)]
pub struct TfIdf {
    /// Position and inverse document frequency, in the order of the terms.
    terms: BTreeMap<String, (usize, f64)>,
}

impl TfIdf {
    /// Learns which terms there are and how common each is.
    pub fn fit(texts: &[&str]) -> Self {
        let mut n_texts: BTreeMap<String, usize> = BTreeMap::new();
        for text in texts {
            for term in terms(text).into_iter().collect::<BTreeSet<_>>() {
                *n_texts.entry(term).or_default() += 1;
            }
        }
        let idf = |df: usize| ((1.0 + texts.len() as f64) / (1.0 + df as f64)).ln() + 1.0;
        let terms = n_texts.into_iter().enumerate().map(|(index, (term, df))| (term, (index, idf(df)))).collect();
        Self { terms }
    }

    /// Terms.
    pub fn n_features(&self) -> usize {
        self.terms.len()
    }

    /// A text's row; terms that were not learned are left out.
    pub fn transform(&self, text: &str) -> SparseRow {
        let mut counts: BTreeMap<usize, f64> = BTreeMap::new();
        for (index, idf) in terms(text).iter().filter_map(|term| self.terms.get(term)) {
            *counts.entry(*index).or_default() += idf;
        }
        let length = counts.values().map(|value| value * value).sum::<f64>().sqrt();
        counts.into_iter().map(|(index, value)| (index, value / length)).collect()
    }
}

fn terms(text: &str) -> Vec<String> {
    let characters = characters(&text.to_lowercase());
    let single = characters.iter().map(char::to_string);
    single.chain(characters.windows(2).map(|pair| pair.iter().collect())).collect()
}

/// Characters, with a space for two or more of white space; one alone stays what it is.
fn characters(text: &str) -> Vec<char> {
    let mut found: Vec<char> = Vec::new();
    for c in text.chars() {
        match found.last_mut() {
            Some(last) if last.is_whitespace() && c.is_whitespace() => *last = ' ',
            _ => found.push(c),
        }
    }
    found
}

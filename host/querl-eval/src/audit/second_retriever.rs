//! The second retriever of the audit, which was not used in training: BM25 over words and pairs of CJK characters.
//!
//! Source: Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond", with Lucene's IDF. The embedded index of
//! a run segments words with a dictionary, knows synonyms and reranks; this one does none of that, so that what pleases it is the text.

use crate::terms::terms;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Lucene's defaults.
const K1: f64 = 1.2;
const B: f64 = 0.75;

/// A passage of the knowledge base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditPassage {
    /// Id of the passage.
    pub id: String,
    /// Title and text of the passage.
    pub text: String,
}

pub(super) struct SecondRetriever {
    /// For each term the passages that have it, by index, with the weight of the term in them.
    postings: HashMap<String, Vec<(usize, f64)>>,
    indices: HashMap<String, usize>,
    n_passages: usize,
}

impl SecondRetriever {
    pub(super) fn new(passages: &[AuditPassage]) -> Self {
        let counts: Vec<BTreeMap<String, f64>> = passages.iter().map(|passage| term_counts(&passage.text)).collect();
        let lengths: Vec<f64> = counts.iter().map(|counts| counts.values().sum()).collect();
        let mean_length = (lengths.iter().sum::<f64>() / passages.len().max(1) as f64).max(1.0);
        let mut postings: HashMap<String, Vec<(usize, f64)>> = HashMap::new();
        for (index, counts) in counts.into_iter().enumerate() {
            for (term, count) in counts {
                postings.entry(term).or_default().push((index, count));
            }
        }
        let n = passages.len() as f64;
        for found in postings.values_mut() {
            let n_with_term = found.len() as f64;
            let idf = (1.0 + (n - n_with_term + 0.5) / (n_with_term + 0.5)).ln();
            for (index, weight) in found.iter_mut() {
                let norm = K1 * (1.0 - B + B * lengths[*index] / mean_length);
                *weight = idf * *weight * (K1 + 1.0) / (*weight + norm);
            }
        }
        let indices = passages.iter().enumerate().map(|(index, passage)| (passage.id.clone(), index)).collect();
        Self { postings, indices, n_passages: passages.len() }
    }

    /// The scores of all passages that share a term with `text`, by index.
    fn scores(&self, text: &str) -> BTreeMap<usize, f64> {
        let mut scores = BTreeMap::new();
        let distinct: BTreeSet<String> = terms(text).into_iter().collect();
        for (index, weight) in distinct.iter().filter_map(|term| self.postings.get(term)).flatten() {
            *scores.entry(*index).or_insert(0.0) += weight;
        }
        scores
    }

    /// 1 / rank of the best gold passage, 0 if no gold passage shares a term with `text`; `None` if no gold passage is in the knowledge
    /// base. Passages with equal scores keep the order of the knowledge base.
    pub(super) fn reciprocal_rank(&self, text: &str, gold_ids: &[String]) -> Option<f64> {
        let gold: Vec<usize> = gold_ids.iter().filter_map(|id| self.indices.get(id).copied()).collect();
        if gold.is_empty() {
            return None;
        }
        let scores = self.scores(text);
        let rank = |gold: &usize| {
            let own = *scores.get(gold)?;
            let is_before = |(index, score): (&usize, &f64)| *score > own || (*score == own && index < gold);
            Some(1 + scores.iter().filter(|one| is_before(*one)).count())
        };
        Some(gold.iter().filter_map(rank).min().map_or(0.0, |rank| 1.0 / rank as f64))
    }

    /// Indices of the `n` passages with the highest scores for `text`.
    pub(super) fn best(&self, text: &str, n: usize) -> BTreeSet<usize> {
        let mut scores: Vec<(usize, f64)> = self.scores(text).into_iter().collect();
        scores.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        scores.into_iter().take(n.min(self.n_passages)).map(|(index, _)| index).collect()
    }
}

fn term_counts(text: &str) -> BTreeMap<String, f64> {
    let mut counts = BTreeMap::new();
    for term in terms(text) {
        *counts.entry(term).or_insert(0.0) += 1.0;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retriever() -> SecondRetriever {
        let passage = |(id, text): (&str, &str)| AuditPassage { id: id.into(), text: text.into() };
        SecondRetriever::new(
            &[("a", "深海鱼油 食用方法"), ("b", "深海鱼油 价格"), ("c", "calcium tablets price")].map(passage),
        )
    }

    #[test]
    fn the_passage_with_the_rarer_terms_comes_first() {
        let retriever = retriever();
        let rank = |text: &str, id: &str| retriever.reciprocal_rank(text, &[id.to_owned()]);
        assert_eq!((rank("鱼油 价格", "b"), rank("鱼油 价格", "a")), (Some(1.0), Some(0.5)));
        assert_eq!((rank("Calcium!", "c"), rank("钙片", "c"), rank("鱼油", "missing")), (Some(1.0), Some(0.0), None));
        assert_eq!((rank("鱼油", "b"), rank("鱼油", "a")), (Some(1.0), Some(0.5)), "the shorter passage first");
    }

    #[test]
    fn best_passages_share_a_term() {
        assert_eq!(retriever().best("鱼油 价格", 1), BTreeSet::from([1]));
        assert_eq!(retriever().best("price", 5), BTreeSet::from([2]));
        assert!(retriever().best("钙", 5).is_empty());
    }
}

//! The second retriever of the evaluation, which was not used in training: the rewrites of all systems are searched with it too.
//!
//! A policy may learn what one retriever rewards and not what users mean. The lexical one is TF-IDF with cosine similarity over character
//! n-grams, which shares neither words, lexicon nor reranker with the embedded index; the semantic one is the vectors of an embedding model.
//!
//! Source: scikit-learn's `TfidfTransformer(smooth_idf=True, sublinear_tf=True, norm="l2")`. Departures: n-grams do not go over white space
//! and punctuation; the norm of the query, which changes no rank, is left out.

use crate::error::DataError;
use crate::retrieval::Passage;
use querl_core::ports::{Embedder, LocalModelError};
use querl_core::text::{char_ngrams, text_runs};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Size of n-grams, in characters, for scripts without spaces: most Chinese words have two characters.
const N_UNSPACED: usize = 2;
/// Size of n-grams, in characters, for other scripts.
const N_SPACED: usize = 3;

const PASSAGES_PER_CALL: usize = 1024;

/// An in-memory retriever over the passages of a knowledge base.
pub struct SecondRetriever {
    ids: Vec<String>,
    index: SecondIndex,
}

enum SecondIndex {
    Ngrams(NgramIndex),
    Vectors { embedder: Arc<dyn Embedder>, vectors: Vec<Vec<f32>> },
}

impl SecondRetriever {
    /// A lexical retriever: TF-IDF over character n-grams of title and text, with cosine similarity.
    pub fn lexical(passages: &[Passage]) -> Self {
        let index = NgramIndex::new(passages.iter().map(Passage::full_text));
        Self { ids: ids(passages), index: SecondIndex::Ngrams(index) }
    }

    /// A semantic retriever: dot products of the embeddings of passages and rewrite.
    ///
    /// # Errors
    /// The embedding model failed.
    pub fn semantic(passages: &[Passage], embedder: Arc<dyn Embedder>) -> Result<Self, DataError> {
        let mut vectors = Vec::with_capacity(passages.len());
        for passages in passages.chunks(PASSAGES_PER_CALL) {
            let text = |passage: &Passage| format!("{}{}", embedder.passage_prefix(), passage.full_text());
            let texts: Vec<String> = passages.iter().map(text).collect();
            let made = embedder.embed(&texts.iter().map(String::as_str).collect::<Vec<_>>());
            let of_model = |problem: String| DataError::setting("eval.embedding_path", problem);
            vectors.extend(made.map_err(|error| of_model(format!("names an embedding model that failed: {error}")))?);
        }
        if vectors.len() != passages.len() {
            let problem = format!("made {} vectors of {} passages", vectors.len(), passages.len());
            return Err(DataError::setting("eval.embedding_path", problem));
        }
        Ok(Self { ids: ids(passages), index: SecondIndex::Vectors { embedder, vectors } })
    }

    /// Name of the retriever in records and reports: `lexical` or `semantic`.
    pub fn name(&self) -> &'static str {
        match self.index {
            SecondIndex::Ngrams(_) => "lexical",
            SecondIndex::Vectors { .. } => "semantic",
        }
    }

    /// Ids of at most `top_k` passages for `text`, best first; ties in the order of the knowledge base. Empty for a blank text.
    ///
    /// # Errors
    /// The embedding model failed.
    pub fn search(&self, text: &str, top_k: usize) -> Result<Vec<String>, LocalModelError> {
        if text.trim().is_empty() {
            return Ok(Vec::new());
        }
        let scored = match &self.index {
            SecondIndex::Ngrams(index) => index.scores(text),
            SecondIndex::Vectors { embedder, vectors } => {
                let text = format!("{}{text}", embedder.query_prefix());
                let query = embedder.embed(&[&text])?.pop().unwrap_or_default();
                vectors.iter().map(|vector| dot(vector, &query)).enumerate().collect()
            }
        };
        Ok(best(scored, top_k).into_iter().map(|position| self.ids[position].clone()).collect())
    }
}

fn ids(passages: &[Passage]) -> Vec<String> {
    passages.iter().map(|passage| passage.id.clone()).collect()
}

fn dot(one: &[f32], other: &[f32]) -> f64 {
    one.iter().zip(other).map(|(one, other)| f64::from(*one) * f64::from(*other)).sum()
}

/// Positions by descending score.
fn best(mut scored: Vec<(usize, f64)>, top_k: usize) -> Vec<usize> {
    scored.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
    scored.into_iter().take(top_k).map(|(position, _)| position).collect()
}

/// The passages with an n-gram, by n-gram.
#[derive(Default)]
struct NgramIndex {
    postings: HashMap<String, Postings>,
}

#[derive(Default)]
struct Postings {
    idf: f64,
    /// Position of a passage and the n-gram's weight in it; the weights of a passage are L2-normalised.
    weights: Vec<(u32, f32)>,
}

impl NgramIndex {
    fn new(texts: impl Iterator<Item = String>) -> Self {
        let mut postings: HashMap<String, Postings> = HashMap::new();
        let mut n_texts = 0;
        for text in texts {
            for (ngram, weight) in term_frequencies(&text) {
                postings.entry(ngram).or_default().weights.push((n_texts, weight as f32));
            }
            n_texts += 1;
        }
        let mut squares = vec![0.0; n_texts as usize];
        // In alphabetical order, so that sums are the same in each process.
        let mut ngrams: Vec<(&String, &mut Postings)> = postings.iter_mut().collect();
        ngrams.sort_by_key(|(ngram, _)| *ngram);
        for (_, Postings { idf, weights }) in &mut ngrams {
            *idf = ((1.0 + f64::from(n_texts)) / (1.0 + weights.len() as f64)).ln() + 1.0;
            for (position, weight) in weights.iter_mut() {
                *weight = (f64::from(*weight) * *idf) as f32;
                squares[*position as usize] += f64::from(*weight) * f64::from(*weight);
            }
        }
        for (position, weight) in postings.values_mut().flat_map(|postings| &mut postings.weights) {
            *weight = (f64::from(*weight) / squares[*position as usize].sqrt()) as f32;
        }
        Self { postings }
    }

    /// Positions of the passages that share an n-gram with `text`, each with its similarity.
    fn scores(&self, text: &str) -> Vec<(usize, f64)> {
        let mut scores: BTreeMap<u32, f64> = BTreeMap::new();
        for (ngram, frequency) in term_frequencies(text) {
            let Some(Postings { idf, weights }) = self.postings.get(&ngram) else { continue };
            for (position, weight) in weights {
                *scores.entry(*position).or_default() += frequency * idf * f64::from(*weight);
            }
        }
        scores.into_iter().map(|(position, score)| (position as usize, score)).collect()
    }
}

/// `1 + ln(count)` of each n-gram, in alphabetical order.
fn term_frequencies(text: &str) -> BTreeMap<String, f64> {
    let mut counts: BTreeMap<String, f64> = BTreeMap::new();
    for run in text_runs(text) {
        for ngram in char_ngrams(&run.text, if run.is_unspaced { N_UNSPACED } else { N_SPACED }) {
            *counts.entry(ngram).or_default() += 1.0;
        }
    }
    counts.values_mut().for_each(|count| *count = 1.0 + count.ln());
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passages(texts: &[&str]) -> Vec<Passage> {
        let passage = |(index, text): (usize, &&str)| Passage {
            id: format!("p{index}"),
            title: String::new(),
            text: (*text).to_owned(),
        };
        texts.iter().enumerate().map(passage).collect()
    }

    const TEXTS: [&str; 4] = ["鱼油胶囊每日两粒", "蛋白粉冲泡方法", "鱼油鱼油价格", "Fish oil, twice a day"];

    #[test]
    fn passages_rank_by_shared_ngrams() {
        let retriever = SecondRetriever::lexical(&passages(&TEXTS));
        assert_eq!(retriever.search("鱼油多少钱，价格", 3).unwrap(), ["p2", "p0"]);
        assert_eq!(retriever.search("蛋白粉怎么冲泡？", 3).unwrap(), ["p1"]);
        assert_eq!(retriever.search("ＦＩＳＨ OIL", 1).unwrap(), ["p3"]);
        assert!(retriever.search("完全无关", 3).unwrap().is_empty() && retriever.search(" ", 3).unwrap().is_empty());
    }

    #[test]
    fn equal_passages_keep_their_order() {
        let retriever = SecondRetriever::lexical(&passages(&["鱼油", "鱼油", "鱼油"]));
        assert_eq!(retriever.search("鱼油", 2).unwrap(), ["p0", "p1"]);
    }

    /// numpy: tf = 1 + ln(count), idf = ln((1 + n) / (1 + df)) + 1, rows divided by their norms.
    #[test]
    fn similarities_are_those_of_sublinear_tf_idf() {
        let index = NgramIndex::new(TEXTS.iter().map(|text| (*text).to_owned()));
        let scores = index.scores("鱼油价格");
        let expected = [(0, 0.462_898_799), (2, 2.674_897_710)];
        assert_eq!(scores.len(), expected.len());
        for ((position, score), (expected_position, expected)) in scores.into_iter().zip(expected) {
            assert_eq!(position, expected_position);
            assert!((score - expected).abs() < 1e-6, "{position}: {score} and {expected}");
        }
    }

    struct Letters;

    impl Embedder for Letters {
        /// Shares of the letters a and b.
        fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, LocalModelError> {
            let vector = |text: &&str| {
                let [a, b] = ["a", "b"].map(|letter| text.matches(letter).count() as f32);
                let norm = (a * a + b * b).sqrt().max(1e-6);
                vec![a / norm, b / norm]
            };
            Ok(texts.iter().map(vector).collect())
        }

        fn dimension(&self) -> usize {
            2
        }

        fn digest(&self) -> &str {
            "letters"
        }
    }

    #[test]
    fn semantic_search_ranks_by_dot_product() {
        let retriever = SecondRetriever::semantic(&passages(&["aaab", "bbb", "ab"]), Arc::new(Letters)).unwrap();
        assert_eq!(retriever.search("aa", 2).unwrap(), ["p0", "p2"]);
        assert_eq!(retriever.name(), "semantic");
    }
}

//! Reranker over the tenant's lexicon: how well a passage answers a query in its context, 0 to 1.
//!
//! Product, intent and remaining words of query, history and profile are compared with those of a passage, both through the tenant's
//! lexicon. The rewrite is not an input: repeating words, listing products or emptying the query cannot raise a score. Deterministic. The
//! traits of passages are computed when they are indexed.

use crate::judge::lexicon::{Lexicon, QueryIntent};
use crate::retrieval::Passage;
use querl_core::records::{Context, logistic};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

/// Weights of the score. Chosen by hand so that product and intent together give more than 0.8, the right product with another intent 0.4
/// to 0.55, a similar product with the right intent 0.3 to 0.5, neither less than 0.2; shared words change a score within these ranges. Not
/// fitted to data.
mod weight {
    pub(super) const BIAS: f64 = -2.5;
    pub(super) const PRODUCT: f64 = 2.2;
    pub(super) const INTENT: f64 = 2.0;
    /// Factor of the intent's weight in a passage about another product.
    pub(super) const INTENT_ALONE: f64 = 0.4;
    pub(super) const WORDS: f64 = 1.6;
    /// Weight of a word of the profile, relative to a word of the query.
    pub(super) const PROFILE_WORD: f64 = 0.25;
    /// Product match of a passage about another product that mentions the product of the query.
    pub(super) const MENTIONED: f64 = 0.25;
    /// Product match of every passage if the query's product is unknown.
    pub(super) const UNKNOWN: f64 = 0.5;
}

/// Score without products of a passage that has no word of the query: such scores do not distinguish relevant passages, so they are above
/// the usual thresholds.
const FLOOR: f64 = 0.6;

/// Reranker with the lexicon of a tenant, for the passages of one knowledge base.
#[derive(Debug)]
pub(crate) struct LexiconReranker {
    lexicon: Arc<Lexicon>,
    /// Similarity of two product names, 0 to 1.
    name_likeness: Vec<Vec<f64>>,
}

/// Features of a passage for the reranker: product, mentioned products, intents and terms.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct PassageTraits {
    product: Option<usize>,
    mentioned: Vec<usize>,
    intents: Vec<f64>,
    /// Sorted terms of the passage: words, and synonym groups in the form of [`term`].
    pub(crate) terms: Vec<String>,
}

/// Document frequencies in a knowledge base.
pub(crate) trait CorpusCounts {
    fn n_passages(&self) -> usize;

    fn n_with(&self, term: &str) -> usize;
}

/// Product, intents and terms of a query, with the IDF weight of each term in one knowledge base.
#[derive(Debug)]
pub(crate) struct WeightedIntent {
    query_intent: QueryIntent,
    terms: Vec<(String, f64)>,
}

impl LexiconReranker {
    pub(crate) fn new(lexicon: Arc<Lexicon>) -> Self {
        let name_likeness = name_likeness(&lexicon);
        Self { lexicon, name_likeness }
    }

    pub(crate) fn query_intent(&self, query: &str, context: &Context) -> QueryIntent {
        QueryIntent::read(&self.lexicon, query, context)
    }

    /// Weighs the terms of a query by IDF in a knowledge base; a term without passages counts like one with a single passage.
    pub(crate) fn weigh(&self, query_intent: QueryIntent, corpus: &impl CorpusCounts) -> WeightedIntent {
        let groups = query_intent.wording.synonyms.iter().map(|group| (group_term(*group), 1.0));
        let of_word = |word: &String| term(&self.lexicon, word);
        let query = query_intent.wording.words.iter().filter_map(|word| Some((of_word(word)?, 1.0)));
        let profile = query_intent.profile_words.iter().filter_map(|word| Some((of_word(word)?, weight::PROFILE_WORD)));
        let mut terms: Vec<(String, f64)> = Vec::new();
        for (term, share) in groups.chain(query).chain(profile) {
            if terms.iter().all(|(known, _)| *known != term) {
                let rarity = corpus.n_passages() as f64 / corpus.n_with(&term).max(1) as f64;
                terms.push((term, share * rarity.ln().max(0.0)));
            }
        }
        WeightedIntent { query_intent, terms }
    }

    /// True if the lexicon has no products, so that passages cannot be ranked by product and intent.
    pub(crate) fn has_no_products(&self) -> bool {
        self.lexicon.products().is_empty()
    }

    /// Relevance of a passage, 0 to 1. If the lexicon has no products, the share of the query's terms in the passage, scaled to [`FLOOR`]
    /// to 1.
    pub(crate) fn score(&self, weighed: &WeightedIntent, passage: &PassageTraits) -> f64 {
        if self.has_no_products() {
            return FLOOR + (1.0 - FLOOR) * weighed.share_held(passage);
        }
        let query_intent = &weighed.query_intent;
        let product = self.product_match(query_intent, passage);
        let intent = intent_match(query_intent, passage);
        let logit = weight::BIAS
            + weight::PRODUCT * product
            + weight::INTENT * intent * (weight::INTENT_ALONE + (1.0 - weight::INTENT_ALONE) * product)
            + weight::WORDS * weighed.share_held(passage);
        logistic(logit)
    }

    fn product_match(&self, query_intent: &QueryIntent, passage: &PassageTraits) -> f64 {
        match (query_intent.product, passage.product) {
            (None, _) => weight::UNKNOWN,
            (Some(wanted), Some(product)) if wanted == product => 1.0,
            (Some(wanted), product) => {
                let alike = product.map_or(0.0, |product| self.name_likeness[wanted][product]);
                let mentioned = if passage.mentioned.contains(&wanted) { weight::MENTIONED } else { 0.0 };
                mentioned.max(0.5 * alike)
            }
        }
    }

    pub(crate) fn traits(&self, passage: &Passage) -> PassageTraits {
        let lexicon = &self.lexicon;
        let (title_products, title) = lexicon.products_in(&lexicon.phrase_form(&passage.title));
        let (text_products, text) = lexicon.products_in(&lexicon.phrase_form(&passage.text));
        let words = lexicon.words(&title.iter().chain([&' ']).chain(&text).collect::<String>());
        let words = words.iter().filter_map(|word| term(lexicon, word));
        let groups = lexicon.synonyms_in(&text).into_iter().map(|found| group_term(found.value));
        let named = |canonical: bool| title_products.iter().find(|found| found.value.canonical == canonical);
        PassageTraits {
            product: named(true).or(named(false)).map(|found| found.value.product),
            mentioned: sorted(text_products.iter().map(|found| found.value.product)),
            intents: passage_intents(lexicon, &title, &text),
            terms: sorted(words.chain(groups)),
        }
    }
}

impl WeightedIntent {
    fn share_held(&self, passage: &PassageTraits) -> f64 {
        let (mut held, mut all) = (0.0, 1.0);
        for (term, value) in &self.terms {
            all += value;
            held += if passage.terms.binary_search(term).is_ok() { *value } else { 0.0 };
        }
        held / all
    }
}

fn sorted<T: Ord>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.collect::<BTreeSet<T>>().into_iter().collect()
}

fn intent_match(query_intent: &QueryIntent, passage: &PassageTraits) -> f64 {
    if query_intent.intent().is_none() {
        return weight::UNKNOWN;
    }
    query_intent.intents.iter().zip(&passage.intents).map(|(wanted, held)| wanted * held).sum()
}

/// Shares of the intents in a passage, sum 1 or all 0. Intents of the title weigh more than those of the text.
fn passage_intents(lexicon: &Lexicon, title: &[char], text: &[char]) -> Vec<f64> {
    const TITLE: f64 = 10.0;
    let mut shares = vec![0.0; lexicon.intents().len()];
    for (words, value) in [(title, TITLE), (text, 1.0)] {
        for intent in sorted(lexicon.intents_in(words).iter().map(|found| found.value.intent)) {
            shares[intent] += value;
        }
    }
    let sum: f64 = shares.iter().sum();
    if sum > 0.0 {
        shares.iter_mut().for_each(|share| *share /= sum);
    }
    shares
}

/// A word as a term: its synonym group, else the word itself; `None` for a single character without synonyms.
fn term(lexicon: &Lexicon, word: &str) -> Option<String> {
    match lexicon.synonym_group(word) {
        Some(group) => Some(group_term(group)),
        None => (word.chars().count() > 1).then(|| word.to_owned()),
    }
}

fn group_term(group: usize) -> String {
    format!("#{group}")
}

/// Dice coefficient of two names, of their characters or, with spaces, of their words.
fn name_likeness(lexicon: &Lexicon) -> Vec<Vec<f64>> {
    let parts = |name: &str| -> HashSet<String> {
        let name = lexicon.phrase_form(name);
        match lexicon.is_spaced() {
            true => name.split(' ').map(str::to_owned).collect(),
            false => name.chars().map(String::from).collect(),
        }
    };
    let names: Vec<HashSet<String>> = lexicon.products().iter().map(|product| parts(&product.name)).collect();
    let alike =
        |a: &HashSet<String>, b: &HashSet<String>| 2.0 * a.intersection(b).count() as f64 / (a.len() + b.len()) as f64;
    names.iter().map(|a| names.iter().map(|b| alike(a, b)).collect()).collect()
}

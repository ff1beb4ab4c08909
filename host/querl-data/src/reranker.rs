//! A small reranker: how well a passage answers a query in its context, 0 to 1.
//!
//! It reads the need (product, intent, remaining words) from the query, its history and its profile, and what a passage is
//! about from the passage's title and text, both through the tenant's lexicon. It never sees a rewrite: repeating words, listing
//! products or emptying the query cannot raise a score. It is deterministic.

use crate::lexicon::Lexicon;
use crate::need::Need;
use crate::passages::Passage;
use crate::segment::words;
use crate::text::normalise;
use querl_core::records::Context;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Chosen so that product and intent together give more than 0.8, the right product with another intent 0.4 to 0.55, a sibling
/// product with the right intent 0.3 to 0.5, neither less than 0.2; shared words move a score within these bands. Set by hand
/// from those bands, not fitted.
mod weight {
    pub(super) const BIAS: f64 = -2.5;
    pub(super) const PRODUCT: f64 = 2.2;
    pub(super) const INTENT: f64 = 2.0;
    /// Share of the intent's weight that counts even for another product.
    pub(super) const INTENT_ALONE: f64 = 0.4;
    pub(super) const WORDS: f64 = 1.6;
    /// A word of the profile against one of the query.
    pub(super) const PROFILE_WORD: f64 = 0.25;
    /// A passage that only speaks of the product, on another's page.
    pub(super) const MENTIONED: f64 = 0.25;
    /// Where nothing names a product, all are equally likely.
    pub(super) const UNKNOWN: f64 = 0.5;
}

/// Scores the passages of one knowledge base.
#[derive(Debug)]
pub struct Reranker {
    lexicon: Arc<Lexicon>,
    passages: Vec<PassageTraits>,
    /// Passages that hold a term, for its weight.
    document_frequency: HashMap<Term, usize>,
    /// How alike two product names are, 0 to 1.
    name_likeness: Vec<Vec<f64>>,
}

/// What a passage is about, read once.
#[derive(Debug)]
struct PassageTraits {
    product: Option<usize>,
    mentioned: HashSet<usize>,
    intents: Vec<f64>,
    terms: HashSet<Term>,
}

/// A word, or the group of synonyms it belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Term {
    Word(String),
    Group(usize),
}

impl Reranker {
    /// Reads what each passage is about.
    pub fn new(lexicon: Arc<Lexicon>, passages: &[Passage]) -> Self {
        let traits: Vec<PassageTraits> =
            passages.iter().map(|passage| PassageTraits::read(&lexicon, passage)).collect();
        let mut document_frequency = HashMap::new();
        for term in traits.iter().flat_map(|passage| &passage.terms) {
            *document_frequency.entry(term.clone()).or_insert(0) += 1;
        }
        let name_likeness = name_likeness(&lexicon);
        Self { lexicon, passages: traits, document_frequency, name_likeness }
    }

    /// What a query asks for, in its context.
    pub fn need(&self, query: &str, context: &Context) -> Need {
        Need::read(&self.lexicon, query, context)
    }

    /// How well the passage at `index` answers the need, 0 to 1.
    pub fn score(&self, need: &Need, index: usize) -> f64 {
        let passage = &self.passages[index];
        let product = self.product_match(need, passage);
        let intent = intent_match(need, passage);
        let logit = weight::BIAS
            + weight::PRODUCT * product
            + weight::INTENT * intent * (weight::INTENT_ALONE + (1.0 - weight::INTENT_ALONE) * product)
            + weight::WORDS * self.word_match(need, passage);
        1.0 / (1.0 + (-logit).exp())
    }

    /// Positions of all passages, best first; of equal scores the earlier passage first.
    pub fn rank_all(&self, need: &Need) -> Vec<(usize, f64)> {
        let mut ranked: Vec<(usize, f64)> =
            (0..self.passages.len()).map(|index| (index, self.score(need, index))).collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        ranked
    }

    fn product_match(&self, need: &Need, passage: &PassageTraits) -> f64 {
        match (need.product, passage.product) {
            (None, _) => weight::UNKNOWN,
            (Some(wanted), Some(product)) if wanted == product => 1.0,
            (Some(wanted), product) => {
                let alike = product.map_or(0.0, |product| self.name_likeness[wanted][product]);
                let mentioned = if passage.mentioned.contains(&wanted) { weight::MENTIONED } else { 0.0 };
                mentioned.max(0.5 * alike)
            }
        }
    }

    /// Share of the query's words that the passage holds, rare words counting more; a word that no passage holds counts as the
    /// rarest.
    fn word_match(&self, need: &Need, passage: &PassageTraits) -> f64 {
        let groups = need.wording.synonyms.iter().map(|group| (Term::Group(*group), 1.0));
        let term = |word: &String| Term::of(&self.lexicon, word);
        let query = need.wording.words.iter().filter_map(|word| Some((term(word)?, 1.0)));
        let profile = need.profile_words.iter().filter_map(|word| Some((term(word)?, weight::PROFILE_WORD)));
        let (mut held, mut all) = (0.0, 1.0);
        let mut seen = HashSet::new();
        for (term, share) in groups.chain(query).chain(profile) {
            let frequency = self.document_frequency.get(&term).copied().unwrap_or(1);
            let value = share * (self.passages.len() as f64 / frequency as f64).ln().max(0.0);
            if seen.insert(term.clone()) {
                all += value;
                held += if passage.terms.contains(&term) { value } else { 0.0 };
            }
        }
        held / all
    }
}

fn intent_match(need: &Need, passage: &PassageTraits) -> f64 {
    if need.intent().is_none() {
        return weight::UNKNOWN;
    }
    need.intents.iter().zip(&passage.intents).map(|(wanted, held)| wanted * held).sum()
}

impl PassageTraits {
    fn read(lexicon: &Lexicon, passage: &Passage) -> Self {
        let (title_products, title) = lexicon.products_in(&normalise(&passage.title));
        let (text_products, text) = lexicon.products_in(&normalise(&passage.text));
        let terms: Vec<String> = words(&title.iter().chain(&text).collect::<String>());
        let mut terms: HashSet<Term> = terms.iter().filter_map(|word| Term::of(lexicon, word)).collect();
        terms.extend(lexicon.synonyms_in(&text).iter().map(|found| Term::Group(found.value)));
        let named = |canonical: bool| title_products.iter().find(|found| found.value.canonical == canonical);
        Self {
            product: named(true).or(named(false)).map(|found| found.value.product),
            mentioned: text_products.iter().map(|found| found.value.product).collect(),
            intents: passage_intents(lexicon, &title, &text),
            terms,
        }
    }
}

/// Shares of the intents in a passage, sum 1 or all 0; a title says what a text is about, its words only what it touches.
fn passage_intents(lexicon: &Lexicon, title: &[char], text: &[char]) -> Vec<f64> {
    const TITLE: f64 = 10.0;
    let mut shares = vec![0.0; lexicon.intents().len()];
    for (place, value) in [(title, TITLE), (text, 1.0)] {
        let touched: HashSet<usize> = lexicon.intents_in(place).iter().map(|found| found.value.intent).collect();
        for intent in touched {
            shares[intent] += value;
        }
    }
    let sum: f64 = shares.iter().sum();
    if sum > 0.0 {
        shares.iter_mut().for_each(|share| *share /= sum);
    }
    shares
}

impl Term {
    /// `None` for a single character that no list of synonyms holds: too many of those are particles.
    fn of(lexicon: &Lexicon, word: &str) -> Option<Self> {
        match lexicon.synonym_group(word) {
            Some(group) => Some(Self::Group(group)),
            None => (word.chars().count() > 1).then(|| Self::Word(word.to_owned())),
        }
    }
}

/// Dice coefficient of the characters of two names.
fn name_likeness(lexicon: &Lexicon) -> Vec<Vec<f64>> {
    let names: Vec<HashSet<char>> =
        lexicon.products().iter().map(|product| normalise(&product.name).chars().collect()).collect();
    let alike =
        |a: &HashSet<char>, b: &HashSet<char>| 2.0 * a.intersection(b).count() as f64 / (a.len() + b.len()) as f64;
    names.iter().map(|a| names.iter().map(|b| alike(a, b)).collect()).collect()
}

#[cfg(test)]
#[path = "reranker_tests.rs"]
mod tests;

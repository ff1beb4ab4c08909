//! Lexicon of a tenant: products with aliases, intents with the phrases that express them, synonyms. Detects product and intents of a
//! query.

use crate::error::DataError;
use crate::retrieval::vocabulary::Segmenter;
use crate::table::MAX_VOCABULARY_BYTES;
use crate::text::simplified;
use querl_core::fsx::{json_problem, read_text_bounded};
use querl_core::records::Context;
use serde::Deserialize;
use std::collections::HashMap;
use std::path::Path;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LexiconFile {
    products: Vec<Product>,
    intents: Vec<Intent>,
    #[serde(default)]
    synonyms: Vec<Vec<String>>,
    /// Characters that customers confuse, one text per sound; the first character is the correct one.
    #[serde(default)]
    homophones: Vec<String>,
}

/// A product in the lexicon of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Product {
    /// Stable identifier.
    pub id: String,
    /// Name of the product in the knowledge base.
    pub name: String,
    /// Other names of the product that customers use, common misspellings included.
    #[serde(default)]
    pub aliases: Vec<String>,
}

/// An intent of customers' queries, such as asking for the price of a product.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Intent {
    /// Stable identifier.
    pub id: String,
    /// Display name.
    pub name: String,
    /// Words for the intent in the knowledge base.
    pub house: Vec<String>,
    /// Words for the intent that customers and other models use.
    #[serde(default)]
    pub general: Vec<String>,
    /// Phrases that imply the intent without naming it.
    #[serde(default)]
    pub cues: Vec<String>,
}

/// The kind of phrase by which a query expresses an intent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Expression {
    /// A phrase that implies the intent (`cues`).
    Cue,
    /// A word that customers use (`general`).
    General,
    /// A word of the knowledge base (`house`).
    House,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProductMention {
    /// Index of the product in [`Lexicon::products`].
    pub(crate) product: usize,
    pub(crate) canonical: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IntentMention {
    /// Index of the intent in [`Lexicon::intents`].
    pub(crate) intent: usize,
    pub(crate) expression: Expression,
}

/// A tenant's lexicon, indexed for lookups.
#[derive(Debug, Clone)]
pub struct Lexicon {
    file: LexiconFile,
    product_phrases: PhraseTable<ProductMention>,
    intent_phrases: PhraseTable<IntentMention>,
    synonym_group: HashMap<String, usize>,
    synonym_phrases: PhraseTable<usize>,
    homophones: HashMap<char, char>,
    segmenter: Segmenter,
}

impl Lexicon {
    /// Reads a lexicon from a JSON file with `products`, `intents`, `synonyms` and `homophones`.
    ///
    /// # Errors
    /// The file cannot be read, does not have this form, or has no product or no intent.
    pub fn read(path: &Path) -> Result<Self, DataError> {
        let text = read_text_bounded(path, MAX_VOCABULARY_BYTES).map_err(|error| {
            let problem = format!("cannot be read: {error}; check retrieval.lexicon");
            DataError::reading(path, &error, || DataError::file(path, problem))
        })?;
        let remedy = "correct the file, or leave retrieval.lexicon out";
        Self::parse(&text).map_err(|problem| DataError::file(path, format!("not a lexicon: {problem}; {remedy}")))
    }

    /// Parses a lexicon from JSON text.
    ///
    /// # Errors
    /// The problem, as the end of a sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: LexiconFile = serde_json::from_str(text).map_err(|error| json_problem(&error))?;
        if file.products.is_empty() || file.intents.is_empty() {
            return Err("it needs at least one product and one intent".into());
        }
        Ok(Self::new(file, Segmenter::default()))
    }

    /// A lexicon without entries, which only segments texts into words.
    pub(crate) fn empty(segmenter: Segmenter) -> Self {
        Self::new(LexiconFile::default(), segmenter)
    }

    fn new(file: LexiconFile, segmenter: Segmenter) -> Self {
        let form = |text: &str| segmenter.phrase_form(text);
        let whole_words = segmenter.is_spaced();
        let groups = file.synonyms.iter().enumerate();
        let synonyms: Vec<(String, usize)> =
            groups.flat_map(|(group, words)| words.iter().map(move |word| (form(word), group))).collect();
        // In the characters of the phrase form.
        let sounds: Vec<String> = file.homophones.iter().map(|sound| simplified(sound).into_owned()).collect();
        let sounds = sounds.iter().filter_map(|sound| Some((sound.chars().next()?, sound.chars())));
        let homophones: HashMap<char, char> =
            sounds.flat_map(|(first, all)| all.map(move |character| (character, first))).collect();
        let names = product_phrases(&file.products, form)
            .into_iter()
            .map(|(name, mention)| (sound(&homophones, &name), mention));
        Self {
            product_phrases: PhraseTable::new(names, whole_words),
            homophones,
            intent_phrases: PhraseTable::new(intent_phrases(&file.intents, form), whole_words),
            synonym_phrases: PhraseTable::new(synonyms.iter().cloned(), whole_words),
            synonym_group: synonyms.into_iter().rev().collect(),
            file,
            segmenter,
        }
    }

    pub(crate) fn with_segmenter(self, segmenter: Segmenter) -> Self {
        Self::new(self.file, segmenter)
    }

    /// Normalises a text into the form in which phrases are matched.
    pub(crate) fn phrase_form(&self, text: &str) -> String {
        self.segmenter.phrase_form(text)
    }

    /// True if words are separated by spaces (languages other than Chinese).
    pub(crate) fn is_spaced(&self) -> bool {
        self.segmenter.is_spaced()
    }

    pub(crate) fn words(&self, text: &str) -> Vec<String> {
        self.segmenter.words(text)
    }

    /// The products, in the order of the file.
    pub fn products(&self) -> &[Product] {
        &self.file.products
    }

    /// The intents, in the order of the file.
    pub fn intents(&self) -> &[Intent] {
        &self.file.intents
    }

    /// Mentions of products in a normalised text, in order, and the rest of the text.
    pub(crate) fn products_in(&self, normalised: &str) -> (Vec<PhraseMatch<ProductMention>>, Vec<char>) {
        // Homophones are replaced one to one, for names only: positions do not change.
        let sounds: Vec<char> = sound(&self.homophones, normalised).chars().collect();
        let found = self.product_phrases.find(&sounds);
        let text: Vec<char> = normalised.chars().collect();
        let rest = without(&text, &found);
        (found, rest)
    }

    pub(crate) fn intents_in(&self, rest: &[char]) -> Vec<PhraseMatch<IntentMention>> {
        self.intent_phrases.find(rest)
    }

    pub(crate) fn synonym_group(&self, word: &str) -> Option<usize> {
        self.synonym_group.get(word).copied()
    }

    pub(crate) fn synonyms_in(&self, text: &[char]) -> Vec<PhraseMatch<usize>> {
        self.synonym_phrases.find(text)
    }
}

fn sound(homophones: &HashMap<char, char>, text: &str) -> String {
    text.chars().map(|character| homophones.get(&character).copied().unwrap_or(character)).collect()
}

fn product_phrases(products: &[Product], form: impl Fn(&str) -> String + Copy) -> Vec<(String, ProductMention)> {
    let names = products
        .iter()
        .enumerate()
        .map(|(product, entry)| (form(&entry.name), ProductMention { product, canonical: true }));
    let aliases = products.iter().enumerate().flat_map(|(product, entry)| {
        entry.aliases.iter().map(move |alias| (form(alias), ProductMention { product, canonical: false }))
    });
    names.chain(aliases).collect()
}

fn intent_phrases(intents: &[Intent], form: impl Fn(&str) -> String + Copy) -> Vec<(String, IntentMention)> {
    let words = |pick: fn(&Intent) -> &[String], expression| {
        intents.iter().enumerate().flat_map(move |(intent, entry)| {
            pick(entry).iter().map(move |word| (form(word), IntentMention { intent, expression }))
        })
    };
    // Of equal phrases the first one is kept: words of the knowledge base before general words before cues.
    words(|intent| &intent.house, Expression::House)
        .chain(words(|intent| std::slice::from_ref(&intent.name), Expression::House))
        .chain(words(|intent| &intent.general, Expression::General))
        .chain(words(|intent| &intent.cues, Expression::Cue))
        .collect()
}

/// A set of phrases that are searched in texts, each with a value.
#[derive(Debug, Clone)]
pub(crate) struct PhraseTable<T> {
    /// Phrases by first character, longest first.
    entries: HashMap<char, Vec<(Vec<char>, T)>>,
    /// True if phrases must begin and end at a space or an end of the text.
    whole_words: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PhraseMatch<T> {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) value: T,
}

impl<T: Copy> PhraseTable<T> {
    /// Builds the table; phrases must be normalised like the texts that are searched. Of equal phrases the first one counts.
    pub(crate) fn new(phrases: impl IntoIterator<Item = (String, T)>, whole_words: bool) -> Self {
        let mut entries: Vec<(Vec<char>, T)> =
            phrases.into_iter().map(|(phrase, value)| (phrase.chars().collect(), value)).collect();
        entries.retain(|(phrase, _)| !phrase.is_empty());
        entries.sort_by_key(|(phrase, _)| std::cmp::Reverse(phrase.len()));
        let mut by_first: HashMap<char, Vec<(Vec<char>, T)>> = HashMap::new();
        for entry in entries {
            by_first.entry(entry.0[0]).or_default().push(entry);
        }
        Self { entries: by_first, whole_words }
    }

    /// All matches in `text`, in order of their position.
    pub(crate) fn find(&self, text: &[char]) -> Vec<PhraseMatch<T>> {
        let mut found = Vec::new();
        let mut start = 0;
        while start < text.len() {
            let mut entries = self.entries.get(&text[start]).into_iter().flatten();
            match entries.find(|(phrase, _)| self.is_at(phrase, text, start)) {
                Some((phrase, value)) => {
                    found.push(PhraseMatch { start, len: phrase.len(), value: *value });
                    start += phrase.len();
                }
                None => start += 1,
            }
        }
        found
    }

    fn is_at(&self, phrase: &[char], text: &[char], start: usize) -> bool {
        let is_edge =
            |position: Option<usize>| position.and_then(|position| text.get(position)).is_none_or(|c| *c == ' ');
        text[start..].starts_with(phrase)
            && (!self.whole_words || is_edge(start.checked_sub(1)) && is_edge(Some(start + phrase.len())))
    }
}

/// `text` with the matches replaced by a space each.
pub(crate) fn without<T>(text: &[char], found: &[PhraseMatch<T>]) -> Vec<char> {
    let mut rest = Vec::with_capacity(text.len());
    let mut position = 0;
    for phrase in found {
        rest.extend_from_slice(&text[position..phrase.start]);
        rest.push(' ');
        position = phrase.start + phrase.len;
    }
    rest.extend_from_slice(&text[position..]);
    rest
}

/// Product and intents of a query, derived from the query with its context.
#[derive(Debug, Clone, PartialEq)]
pub struct QueryIntent {
    /// The product that the query is about, as index into [`Lexicon::products`]; `None` if unknown.
    pub product: Option<usize>,
    /// All products named in the query, as indices into [`Lexicon::products`].
    pub named_products: Vec<usize>,
    /// Weight of each intent of the lexicon, 0 to 1; the strongest has 1. All 0 if the query expresses none.
    pub intents: Vec<f64>,
    /// Terms of the query without product names.
    pub wording: TermSet,
    /// Terms of the query without product names and intent phrases: details that a rewrite should keep.
    pub particulars: TermSet,
    /// Words of the profile.
    pub profile_words: Vec<String>,
}

/// Words of a text and their synonym groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TermSet {
    /// Distinct words, in order.
    pub words: Vec<String>,
    /// Indices of the synonym groups with a word in the text.
    pub synonyms: Vec<usize>,
}

impl TermSet {
    pub(crate) fn read(lexicon: &Lexicon, text: &[char]) -> Self {
        let synonyms = lexicon.synonyms_in(text).iter().map(|found| found.value).collect();
        Self { words: lexicon.words(&text.iter().collect::<String>()), synonyms }
    }
}

impl QueryIntent {
    /// Derives product and intents from a query in its context.
    pub fn read(lexicon: &Lexicon, query: &str, context: &Context) -> Self {
        let query = lexicon.phrase_form(query);
        let (mentions, rest) = lexicon.products_in(&query);
        let (past, _) = lexicon.products_in(&lexicon.phrase_form(&context.history_summary));
        // A history summary is in order: its last product is the current one.
        let in_history = past.last().map(|mention| mention.value.product);
        let product = match mentions.first() {
            Some(first) if in_history.is_some() && is_only_compared(&query, first.start) => in_history,
            Some(first) => Some(first.value.product),
            None => in_history,
        };
        let phrases = lexicon.intents_in(&rest);
        Self {
            product,
            named_products: mentions.iter().map(|mention| mention.value.product).collect(),
            intents: intents(lexicon, &phrases),
            wording: TermSet::read(lexicon, &rest),
            particulars: TermSet::read(lexicon, &without(&rest, &phrases)),
            profile_words: lexicon.words(&lexicon.phrase_form(&context.user_profile)),
        }
    }

    /// The intent with the largest weight, as index into [`Lexicon::intents`]; `None` if the query expresses none.
    pub fn intent(&self) -> Option<usize> {
        let strongest = self.intents.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)))?;
        (*strongest.1 > 0.0).then_some(strongest.0)
    }
}

/// True if a product is named only for comparison: after a pronoun (`它里面有没有DHA`), or after `with`, `than`.
fn is_only_compared(query: &str, start: usize) -> bool {
    const POINTING_BACK: [&str; 6] = ["它", "这个", "这款", "那个", "那款", "这俩"];
    const JOINING: [char; 5] = ['跟', '和', '与', '比', '同'];
    let before: String = query.chars().take(start).collect();
    POINTING_BACK.iter().any(|word| before.contains(word)) || before.ends_with(JOINING)
}

fn intents(lexicon: &Lexicon, phrases: &[PhraseMatch<IntentMention>]) -> Vec<f64> {
    let mut weights = vec![0.0; lexicon.intents().len()];
    for found in phrases {
        // Longer phrases have more weight, and words more than cues.
        let kind = if found.value.expression == Expression::Cue { 1.0 } else { 1.2 };
        weights[found.value.intent] += kind * (found.len as f64).sqrt();
    }
    let strongest = weights.iter().copied().fold(0.0, f64::max);
    if strongest > 0.0 {
        weights.iter_mut().for_each(|weight| *weight /= strongest);
    }
    weights
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_phrase_wins() {
        let table = PhraseTable::new([("适宜人群".to_owned(), 3), ("不适宜人群".to_owned(), 2)], false);
        let text: Vec<char> = "看不适宜人群".chars().collect();
        assert_eq!(table.find(&text), [PhraseMatch { start: 1, len: 5, value: 2 }]);
    }

    #[test]
    fn a_traditional_lexicon_reads_simplified_and_traditional_queries() {
        let lexicon = r#"{"products": [{"id": "a", "name": "魚油"}], "homophones": ["魚餘"],
                          "intents": [{"id": "u", "name": "服用方法", "house": ["怎麼吃"]}]}"#;
        let lexicon = Lexicon::parse(lexicon).unwrap();
        for query in ["魚油怎麼吃", "餘油怎麼吃", "余油怎么吃"] {
            let found = QueryIntent::read(&lexicon, query, &Context::default());
            assert_eq!((found.product, found.intent()), (Some(0), Some(0)), "{query}");
        }
    }

    #[test]
    fn phrases_of_spaced_languages_match_whole_words() {
        let table = PhraseTable::new([("tea".to_owned(), 1)], true);
        let found = |text: &str| table.find(&text.chars().collect::<Vec<_>>()).len();
        assert_eq!([found("steam"), found("tea"), found("a tea cup"), found("teas")], [0, 1, 1, 0]);
    }
}

//! Expansions of queries, as in supervised query expansion: weighted words of query and history ([`weighting`]), and expansion terms, which
//! are title words of passages that query and history predict. One logistic regression for each title word of several examples: rows of train,
//! whose words of query and history predict the titles of their gold passages, and passages, whose texts predict their own titles.
//!
//! Input: rows with gold ids, passages. Output: an [`ExpansionModel`], and for each row the parts of an expansion by a model that was fitted
//! without the row's group.

mod logistic;
mod weighting;

use crate::dataset::splits::group_digest;
use crate::error::DataError;
use crate::retrieval::vocabulary::OwnWords;
use crate::retrieval::{Passage, WordSegmenter, scan_passages};
use crate::text::fold;
use logistic::Features;
use querl_core::config::Language;
use querl_core::edits::{joined, recent_history, with_history};
use querl_core::fsx::write_json;
use querl_core::records::{QueryRow, logistic};
use querl_core::text::{char_ngrams, text_runs};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;
use weighting::{WeightedRow, Weighting, WordWeights};

/// C of scikit-learn: the inverse of the weight of the L1 penalty.
const C: f64 = 30.0;
/// Largest distance of a partial derivative from that of a minimum, in units of the penalty's weight.
const TOLERANCE: f64 = 0.3;
/// Probability above which a word is an expansion term.
const MIN_PROBABILITY: f64 = 0.1;
/// Probability above which a term is likely.
const MIN_PROBABILITY_OF_LIKELY: f64 = 0.8;
/// Number of examples, rows and passages, whose titles must have a word.
const MIN_EXAMPLES_OF_TERM: usize = 3;
/// Maximum number of words that are predicted: those of most rows.
const MAX_MODELLED_TERMS: usize = 500;
/// Number of rows of a fit from which no further group is added.
const MAX_ROWS: usize = 5000;
/// Maximum number of passages of a fit.
const MAX_PASSAGES: usize = 1000;
/// Maximum number of characters of a passage: the first ones.
const MAX_PASSAGE_CHARS: usize = 400;
const N_FOLDS: usize = 5;
/// Seed of the folds, which must not be those of the splits.
const FOLD_SEED: u64 = 0x0065_7870_616e_6400;
/// Seed of the choice of passages, which must not be that of the folds: a group may be named by its gold passage, and the rows of a fit are
/// those of the groups with the smallest digests.
const PASSAGE_SEED: u64 = FOLD_SEED + 1;
/// Prefix of the features of words in the history.
const OF_HISTORY: &str = "history:";
/// Prefix of the features of characters and pairs of characters, where words are written without spaces.
const OF_CHARACTERS: &str = "char:";

/// A model of expansions.
#[derive(Debug, Clone)]
pub struct ExpansionModel {
    segmenter: WordSegmenter,
    max_terms: usize,
    form: ExpansionForm,
    /// Terms with their intercepts.
    terms: Vec<(String, f32)>,
    /// Positions of terms with their weights, by feature.
    by_feature: HashMap<String, Vec<(usize, f32)>>,
    weights: WordWeights,
}

/// The model's file. It has all that segmentation depends on, so that a deployment needs no other file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct ExpansionFile {
    format: u32,
    language: Language,
    /// Words that the user dictionary and synonyms add to the default dictionary of Chinese words, with their frequencies.
    dictionary: OwnWords,
    max_terms: usize,
    form: ExpansionForm,
    terms: Vec<Term>,
    word_weights: WordWeights,
}

/// What a file of any version has.
#[derive(Deserialize)]
struct FileFormat {
    format: u32,
}

/// Logistic regression of one title word.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Term {
    /// The word as most titles write it.
    term: String,
    intercept: f32,
    /// Weights by feature: a word of query or history, `history:` and a word of the history, or `char:` and one or two characters of either.
    /// Words are stemmed.
    weights: BTreeMap<String, f32>,
}

/// The terms that an expansion has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TermSelection {
    /// No terms.
    None,
    /// All terms; likely ones are written twice in a row, so that retrieval gives them twice the weight.
    All,
    /// Only the likely terms, once.
    Likely,
}

/// What an expansion is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpansionForm {
    /// The words of query and history are weighted.
    pub is_weighted: bool,
    /// The terms that it has.
    pub terms: TermSelection,
}

impl ExpansionForm {
    /// All forms but the query and its history as they are.
    pub const ALL: [Self; 5] = [
        Self { is_weighted: false, terms: TermSelection::All },
        Self { is_weighted: false, terms: TermSelection::Likely },
        Self { is_weighted: true, terms: TermSelection::None },
        Self { is_weighted: true, terms: TermSelection::All },
        Self { is_weighted: true, terms: TermSelection::Likely },
    ];

    /// The expansion with these parts.
    pub fn text(self, query: &str, history: &str, parts: &ExpansionParts) -> String {
        let terms = parts.terms(self.terms);
        if self.is_weighted { joined(&[&parts.weighted, &terms]) } else { with_history(query, history, &terms) }
    }
}

/// What expansions of a query are made of.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExpansionParts {
    /// The query and its history with weighted words: those of small weights are left out, those of large ones written twice.
    weighted: String,
    /// Expansion terms with their probabilities, the most probable first.
    terms: Vec<(String, f64)>,
}

impl ExpansionParts {
    /// The selected terms, separated by spaces.
    fn terms(&self, selection: TermSelection) -> String {
        let count = |probability: f64| {
            let is_likely = probability > MIN_PROBABILITY_OF_LIKELY;
            match selection {
                TermSelection::None => 0,
                TermSelection::All => 1 + usize::from(is_likely),
                TermSelection::Likely => usize::from(is_likely),
            }
        };
        let terms = self.terms.iter().flat_map(|(term, probability)| vec![term.as_str(); count(*probability)]);
        terms.collect::<Vec<_>>().join(" ")
    }
}

/// A model, and the parts of expansions of the rows of train.
#[derive(Debug)]
pub struct FittedExpansion {
    /// The model, fitted on all of the rows.
    pub model: ExpansionModel,
    /// Why the model has no expansion terms.
    pub no_terms: Option<NoTerms>,
    /// Out-of-fold parts of each row: of a model that was fitted without a fifth of the groups, to which the row belongs.
    pub out_of_fold: Vec<ExpansionParts>,
    /// Positions of the rows that were fitted.
    pub fitted: Vec<usize>,
}

/// Why there is no model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoExpansion {
    /// No row has gold ids.
    #[error("no row of train has gold ids; name their column in data.gold_column")]
    NoGoldIds,
    /// The rows with gold ids are of too few groups.
    #[error(
        "train has {0} group(s) of rows with gold ids, expected at least {min}; add queries about more passages, or name a column of groups in data.group_column",
        min = ExpansionModel::MIN_GROUPS
    )]
    FewGroups(usize),
}

/// Why a model has no expansion terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoTerms {
    /// The gold passages have no titles.
    #[error("the gold passages have no titles; add a `title` to the passages of retrieval.knowledge_base")]
    NoTitles,
    /// No word is in the titles of several examples.
    #[error(
        "no title word occurs in {MIN_EXAMPLES_OF_TERM} examples, which are the rows of train (by the titles of their gold passages) and the passages; add queries about the same passages"
    )]
    NoSharedWord,
}

impl ExpansionModel {
    /// Version of the file and of what expansions are.
    pub const FORMAT: u32 = 4;
    /// Number of groups of rows below which no model is fitted, and no expansions are compared.
    pub const MIN_GROUPS: usize = 20;

    fn new(segmenter: WordSegmenter, max_terms: usize, terms: Vec<Term>, weights: WordWeights) -> Self {
        let mut by_feature: HashMap<String, Vec<(usize, f32)>> = HashMap::new();
        let mut intercepts = Vec::new();
        for (position, Term { term, intercept, weights }) in terms.into_iter().enumerate() {
            intercepts.push((term, intercept));
            for (feature, weight) in weights {
                by_feature.entry(feature).or_default().push((position, weight));
            }
        }
        Self { segmenter, max_terms, form: ExpansionForm::ALL[0], terms: intercepts, by_feature, weights }
    }

    /// Fits a model on the rows of train that have gold ids, and on passages.
    ///
    /// # Errors
    /// No row has gold ids, or the rows are of too few groups.
    pub fn fit(
        rows: &[&QueryRow],
        passages: &ExamplePassages,
        segmenter: &WordSegmenter,
        max_terms: usize,
    ) -> Result<FittedExpansion, NoExpansion> {
        Self::fit_at_most(MAX_ROWS, rows, passages, segmenter, max_terms)
    }

    fn fit_at_most(
        max_rows: usize,
        rows: &[&QueryRow],
        passages: &ExamplePassages,
        segmenter: &WordSegmenter,
        max_terms: usize,
    ) -> Result<FittedExpansion, NoExpansion> {
        let groups: HashSet<&str> =
            rows.iter().filter(|row| !row.gold_ids.is_empty()).map(|row| row.group.as_str()).collect();
        match groups.len() {
            0 => return Err(NoExpansion::NoGoldIds),
            n_groups if n_groups < Self::MIN_GROUPS => return Err(NoExpansion::FewGroups(n_groups)),
            _ => {}
        }
        let examples = Examples::new(rows, passages, segmenter, max_rows);
        let weighted_row = |at: &usize| {
            let row = rows[*at];
            let history = recent_history(&row.history_summary);
            WeightedRow { query: &row.original_query, history, group: &row.group, gold_ids: &row.gold_ids }
        };
        let weighted_rows: Vec<WeightedRow<'_>> = examples.fitted.iter().map(weighted_row).collect();
        let gold_ids = examples.fitted.iter().flat_map(|row| &rows[*row].gold_ids).collect::<BTreeSet<_>>();
        let gold = gold_ids.into_iter().filter_map(|id| passages.gold.get(id));
        let weighting = Weighting::new(&weighted_rows, &passages.examples, gold, segmenter);
        let model = |rows: &[usize]| Self::new(segmenter.clone(), max_terms, examples.fit(rows), weighting.fit(rows));
        let whole = model(&(0..examples.fitted.len()).collect::<Vec<_>>());
        let no_terms = match whole.terms.is_empty() {
            true if !passages.gold.values().any(has_title) => Some(NoTerms::NoTitles),
            true => Some(NoTerms::NoSharedWord),
            false => None,
        };
        let mut out_of_fold = vec![ExpansionParts::default(); rows.len()];
        for fold in 0..N_FOLDS {
            let is_held_out = |row: &usize| examples.fold_of[*row] == fold;
            let others: Vec<usize> =
                (0..examples.fitted.len()).filter(|at| !is_held_out(&examples.fitted[*at])).collect();
            let without = model(&others);
            for row in (0..rows.len()).filter(is_held_out) {
                out_of_fold[row] = without.parts(&rows[row].original_query, &rows[row].history_summary);
            }
        }
        Ok(FittedExpansion { model: whole, no_terms, out_of_fold, fitted: examples.fitted })
    }

    /// Reads a model from its file.
    ///
    /// # Errors
    /// The file cannot be read, or is not a model of this version.
    pub fn read(path: &Path) -> Result<Self, DataError> {
        let bytes = std::fs::read(path).map_err(|error| DataError::read(path, error))?;
        let invalid = |error| {
            let remedy = "put the file of the run back, or run `querl convert CONFIG --from convert` to make it again";
            DataError::file(path, format!("is not a model of expansions: {error}; {remedy}"))
        };
        let FileFormat { format } = serde_json::from_slice(&bytes).map_err(invalid)?;
        if format != Self::FORMAT {
            let problem = format!(
                "has format {format}, and this version of querl reads {}; run `querl run CONFIG --from convert` to train with new expansions, and deploy again what was deployed",
                Self::FORMAT
            );
            return Err(DataError::file(path, problem));
        }
        let file: ExpansionFile = serde_json::from_slice(&bytes).map_err(invalid)?;
        let segmenter = WordSegmenter::of(file.language, file.dictionary);
        Ok(Self::new(segmenter, file.max_terms, file.terms, file.word_weights).with_form(file.form))
    }

    /// Writes the model to a file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), DataError> {
        write_json(path, &self.file()).map_err(|error| DataError::write(path, error))
    }

    fn file(&self) -> ExpansionFile {
        let of_term = |(term, intercept): &(String, f32)| Term {
            term: term.clone(),
            intercept: *intercept,
            weights: BTreeMap::new(),
        };
        let mut terms: Vec<Term> = self.terms.iter().map(of_term).collect();
        for (feature, weights) in &self.by_feature {
            for (position, weight) in weights {
                terms[*position].weights.insert(feature.clone(), *weight);
            }
        }
        ExpansionFile {
            format: Self::FORMAT,
            language: self.segmenter.language(),
            dictionary: self.segmenter.own_words().clone(),
            max_terms: self.max_terms,
            form: self.form,
            terms,
            word_weights: self.weights.clone(),
        }
    }

    /// The model with expansions of this form, without what they do not need.
    #[must_use]
    pub fn with_form(mut self, form: ExpansionForm) -> Self {
        if !form.is_weighted {
            self.weights = WordWeights::default();
        }
        if form.terms == TermSelection::None {
            (self.terms, self.by_feature) = (Vec::new(), HashMap::new());
        }
        Self { form, ..self }
    }

    /// The expansion of a query: what `&` stands for.
    pub fn expansion(&self, query: &str, history: &str) -> String {
        // Servers call this for each query: only the parts of the form are made.
        let parts = ExpansionParts {
            weighted: if self.form.is_weighted { self.weighted(query, history) } else { String::new() },
            terms: if self.form.terms == TermSelection::None { Vec::new() } else { self.terms(query, history) },
        };
        self.form.text(query, history, &parts)
    }

    /// Number of words that are predicted.
    pub fn n_terms(&self) -> usize {
        self.terms.len()
    }

    /// The parts of the expansions of a query in all forms.
    fn parts(&self, query: &str, history: &str) -> ExpansionParts {
        ExpansionParts { weighted: self.weighted(query, history), terms: self.terms(query, history) }
    }

    /// The query and its history with weighted words.
    fn weighted(&self, query: &str, history: &str) -> String {
        let weighted = |text: &str, is_history: bool| self.weights.weighted(&self.segmenter, text, is_history);
        // A query of words that count little is searched as it is.
        let of_query = weighted(query, false).unwrap_or_else(|| query.to_owned());
        let of_history = weighted(&recent_history(history), true).unwrap_or_default();
        joined(&[&of_query, &of_history])
    }

    /// Expansion terms of a query and its history, with their probabilities.
    fn terms(&self, query: &str, history: &str) -> Vec<(String, f64)> {
        let mut logits: Vec<f64> = self.terms.iter().map(|(_, intercept)| f64::from(*intercept)).collect();
        for feature in features_of(&self.segmenter, query, history) {
            for (term, weight) in self.by_feature.get(&feature).into_iter().flatten() {
                logits[*term] += f64::from(*weight);
            }
        }
        let probabilities = logits.into_iter().map(logistic).enumerate();
        let mut found: Vec<(usize, f64)> =
            probabilities.filter(|(_, probability)| *probability > MIN_PROBABILITY).collect();
        // On ties in the order of the file.
        found.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        found.truncate(self.max_terms);
        let with_word = |(term, probability): (usize, f64)| (self.terms[term].0.clone(), probability);
        found.into_iter().map(with_word).collect()
    }
}

/// Passages that a model is fitted on, with the first characters of their texts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExamplePassages {
    /// Gold passages by id.
    gold: BTreeMap<String, Passage>,
    /// Passages that depend neither on the order of the file nor on what is gold, so that the gold passages of queries of train are as probable
    /// among them as those of other queries.
    examples: Vec<Passage>,
}

impl ExamplePassages {
    /// Reads the passages that a model is fitted on, and the gold passages of rows.
    ///
    /// # Errors
    /// As [`read_passages`](crate::read_passages).
    pub fn read(knowledge_base: &Path, gold_ids: &HashSet<&str>) -> Result<Self, DataError> {
        let (mut gold, mut examples) = (BTreeMap::new(), BTreeMap::new());
        scan_passages(knowledge_base, |mut passage| {
            passage.text = passage.text.chars().take(MAX_PASSAGE_CHARS).collect();
            if gold_ids.contains(passage.id.as_str()) {
                gold.insert(passage.id.clone(), passage.clone());
            }
            examples.insert((group_digest(PASSAGE_SEED, &passage.id), passage.id.clone()), passage);
            if examples.len() > MAX_PASSAGES {
                examples.pop_last();
            }
        })?;
        Ok(Self { gold, examples: examples.into_values().collect() })
    }

    /// Example passages with titles.
    fn titled(&self) -> impl Iterator<Item = &Passage> {
        self.examples.iter().filter(|passage| has_title(passage))
    }

    /// Number of passages that a model is fitted on.
    pub fn n_examples(&self) -> usize {
        self.examples.len()
    }
}

fn has_title(passage: &Passage) -> bool {
    !passage.title.trim().is_empty()
}

/// Distinct features, in alphabetical order.
fn features_of(segmenter: &WordSegmenter, query: &str, history: &str) -> BTreeSet<String> {
    let (query, history) = (fold(query), fold(&recent_history(history)));
    let of_history = segmenter.words(&history);
    let mut features: BTreeSet<String> = segmenter.words(&query).into_iter().collect();
    features.extend(of_history.iter().map(|word| format!("{OF_HISTORY}{word}")));
    features.extend(of_history);
    for run in [query, history].iter().flat_map(|text| text_runs(text)).filter(|run| run.is_unspaced) {
        let characters = [1, 2].into_iter().flat_map(|n| char_ngrams(&run.text, n));
        features.extend(characters.map(|text| format!("{OF_CHARACTERS}{text}")));
    }
    features
}

/// Rows and passages as numbers of features and title words.
struct Examples {
    /// Names of the features.
    features: Vec<String>,
    /// Title words, each as most titles write it.
    words: Vec<String>,
    /// Of each fitted row, then of each passage.
    features_of: Vec<Vec<usize>>,
    /// Title words of the gold passages of each fitted row, then of each passage, without repetitions.
    words_of: Vec<Vec<usize>>,
    /// Of each row.
    fold_of: Vec<usize>,
    /// The rows that models are fitted on, in an order that does not depend on that of the table.
    fitted: Vec<usize>,
}

impl Examples {
    fn new(rows: &[&QueryRow], passages: &ExamplePassages, segmenter: &WordSegmenter, max_rows: usize) -> Self {
        let digests: Vec<u128> = rows.iter().map(|row| group_digest(FOLD_SEED, &row.group)).collect();
        let groups: Vec<u128> = digests.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
        let fold_of = |digest: &u128| groups.binary_search(digest).unwrap_or_default() % N_FOLDS;
        let mut fitted: Vec<usize> = (0..rows.len()).filter(|row| !rows[*row].gold_ids.is_empty()).collect();
        fitted.sort_by_key(|row| (digests[*row], &rows[*row].id));
        // Groups stay whole.
        let n_fitted =
            (max_rows..fitted.len()).find(|at| digests[fitted[*at]] != digests[fitted[at.saturating_sub(1)]]);
        fitted.truncate(n_fitted.unwrap_or(fitted.len()));
        let title_words = TitleWords::new(passages, segmenter);
        let of_row = |row: &usize| features_of(segmenter, &rows[*row].original_query, &rows[*row].history_summary);
        let mut features: Vec<BTreeSet<String>> = fitted.par_iter().map(of_row).collect();
        let words = fitted.iter().map(|row| rows[*row].gold_ids.iter().flat_map(|id| title_words.of(id)).collect());
        let titled: Vec<&Passage> = passages.titled().collect();
        features.par_extend(titled.par_iter().map(|passage| features_of(segmenter, &passage.text, "")));
        let words = words.chain(titled.iter().map(|passage| title_words.of(&passage.id).into_iter().collect()));
        let (features, features_of) = numbered(features);
        let (words, words_of) = numbered(words.collect::<Vec<BTreeSet<String>>>());
        let words = words.iter().map(|word| title_words.form(word)).collect();
        Self { features, words, features_of, words_of, fold_of: digests.iter().map(fold_of).collect(), fitted }
    }

    /// Fits a model for each title word of several examples: `rows`, which are positions in the fitted rows, and all passages.
    fn fit(&self, rows: &[usize]) -> Vec<Term> {
        let passages = self.fitted.len()..self.features_of.len();
        let examples: Vec<usize> = rows.iter().copied().chain(passages).collect();
        let examples_of_words = by_item(examples.iter().map(|at| &self.words_of[*at]), self.words.len());
        let n_examples_of = |word: usize| examples_of_words[word].len();
        let n_rows_of = |word: usize| examples_of_words[word].partition_point(|at| (*at as usize) < rows.len());
        let is_modelled = |word: &usize| (MIN_EXAMPLES_OF_TERM..examples.len()).contains(&n_examples_of(*word));
        let mut modelled: Vec<usize> = (0..self.words.len()).filter(is_modelled).collect();
        // The words that users need most; on ties in alphabetical order.
        modelled.sort_by_cached_key(|word| std::cmp::Reverse((n_rows_of(*word), n_examples_of(*word))));
        modelled.truncate(MAX_MODELLED_TERMS);
        let rows_of = by_item(examples.iter().map(|at| &self.features_of[*at]), self.features.len());
        let features = Features { n_rows: examples.len(), rows_of };
        let fit = |word: &usize| {
            let mut labels = vec![false; examples.len()];
            examples_of_words[*word].iter().for_each(|row| labels[*row as usize] = true);
            let fitted = logistic::fit(&features, &labels, 1.0 / C, TOLERANCE / C);
            let weights = fitted.of_features.iter().map(|(at, weight)| (self.features[*at].clone(), *weight as f32));
            Term { term: self.words[*word].clone(), intercept: fitted.intercept as f32, weights: weights.collect() }
        };
        modelled.par_iter().map(fit).collect()
    }
}

/// All items in alphabetical order, and each set as positions in them.
fn numbered(sets: Vec<BTreeSet<String>>) -> (Vec<String>, Vec<Vec<usize>>) {
    let all: BTreeSet<&String> = sets.iter().flatten().collect();
    let all: Vec<String> = all.into_iter().cloned().collect();
    let number = |item: &String| all.binary_search(item).unwrap_or_default();
    let numbers = sets.iter().map(|set| set.iter().map(number).collect()).collect();
    (all, numbers)
}

/// For each item the positions of the lists that have it.
fn by_item<'a>(lists: impl Iterator<Item = &'a Vec<usize>>, n_items: usize) -> Vec<Vec<u32>> {
    let mut lists_of = vec![Vec::new(); n_items];
    for (position, items) in lists.enumerate() {
        items.iter().for_each(|item| lists_of[*item].push(position as u32));
    }
    lists_of
}

/// Words of titles, and how titles write them.
struct TitleWords {
    words_of: HashMap<String, Vec<String>>,
    forms: HashMap<String, BTreeMap<String, usize>>,
}

impl TitleWords {
    fn new(passages: &ExamplePassages, segmenter: &WordSegmenter) -> Self {
        let titled = passages.gold.values().chain(&passages.examples).filter(|passage| has_title(passage));
        let titles: BTreeMap<&String, &String> = titled.map(|passage| (&passage.id, &passage.title)).collect();
        let mut forms: HashMap<String, BTreeMap<String, usize>> = HashMap::new();
        for title in titles.values() {
            for piece in segmenter.pieces(title) {
                if let [word] = &segmenter.words(&fold(piece))[..] {
                    *forms.entry(word.clone()).or_default().entry(fold(piece).to_lowercase()).or_default() += 1;
                }
            }
        }
        let words = |(id, title): (&String, &String)| (id.clone(), segmenter.words(&fold(title)));
        Self { words_of: titles.into_iter().map(words).collect(), forms }
    }

    fn of(&self, id: &str) -> Vec<String> {
        self.words_of.get(id).cloned().unwrap_or_default()
    }

    /// The most frequent form of a word, on ties the first in alphabetical order; the word itself if no title has it alone, as a part of a
    /// longer Chinese word.
    fn form(&self, word: &str) -> String {
        let forms = self.forms.get(word).into_iter().flatten().rev();
        forms.max_by_key(|(_, count)| **count).map_or_else(|| word.to_owned(), |(form, _)| form.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(number: usize, query: &str, history: &str, gold: &str) -> QueryRow {
        QueryRow {
            id: format!("q{number}"),
            original_query: query.into(),
            history_summary: history.into(),
            gold_ids: vec![gold.into()],
            group: format!("g{number}"),
            ..QueryRow::default()
        }
    }

    /// 48 rows: the title has "refunds" where the user wants money back, and the product of the history.
    fn rows() -> Vec<QueryRow> {
        let wishes = ["my money back", "give back the money please", "when does it leave", "which pier"];
        let products = [("a commuter pass", "saltpass"), ("a cabin at night", "samphire")];
        let row = |number: usize| {
            let (wish, (history, product)) = (wishes[number % 4], products[number / 4 % 2]);
            let topic = if number % 4 < 2 { "refund" } else { "timetable" };
            row(number, wish, &format!("bought {history}"), &format!("{product}-{topic}"))
        };
        (0..48).map(row).collect()
    }

    fn passages_of(titles: &[(&str, &str)]) -> ExamplePassages {
        let passage = |(id, title): &(&str, &str)| Passage {
            id: (*id).to_owned(),
            title: (*title).to_owned(),
            text: "without further words".to_owned(),
        };
        let examples: Vec<Passage> = titles.iter().map(passage).collect();
        ExamplePassages {
            gold: examples.iter().map(|passage| (passage.id.clone(), passage.clone())).collect(),
            examples,
        }
    }

    fn passages() -> ExamplePassages {
        passages_of(&[
            ("saltpass-refund", "Saltpass: Refunds"),
            ("samphire-refund", "Samphire refunds"),
            ("saltpass-timetable", "Saltpass timetable"),
            ("samphire-timetable", "Timetable of Samphire"),
            ("pier", "Piers"),
        ])
    }

    fn english() -> WordSegmenter {
        WordSegmenter::of(Language::En, Vec::new())
    }

    fn fitted(rows: &[QueryRow], max_terms: usize) -> Result<FittedExpansion, NoExpansion> {
        ExpansionModel::fit(&rows.iter().collect::<Vec<_>>(), &passages(), &english(), max_terms)
    }

    /// All terms, the likely ones twice.
    fn terms(model: &ExpansionModel, query: &str, history: &str) -> String {
        model.parts(query, history).terms(TermSelection::All)
    }

    fn sorted(terms: &str) -> Vec<&str> {
        let mut terms: Vec<&str> = terms.split(' ').collect();
        terms.sort_unstable();
        terms
    }

    #[test]
    fn words_of_the_users_predict_words_of_the_titles() {
        let model = fitted(&rows(), 10).unwrap().model;
        let of = |query, history| terms(&model, query, history);
        assert_eq!(
            sorted(&of("money back!", "bought a commuter pass")),
            ["refunds", "refunds", "saltpass", "saltpass"]
        );
        let of_pier = of("Which PIERS?", "bought a cabin");
        assert!(["samphire", "timetable"].iter().all(|term| of_pier.contains(term)), "{of_pier}");
        assert!(!of_pier.contains("refunds"), "{of_pier}");
        assert_eq!(terms(&fitted(&rows(), 1).unwrap().model, "money back", ""), "refunds refunds");
    }

    #[test]
    fn terms_are_all_or_the_likely_ones() {
        let terms = [("refunds", 0.9), ("saltpass", 0.8), ("samphire", 0.2)];
        let terms = terms.map(|(term, probability)| (term.to_owned(), probability)).into();
        let parts = ExpansionParts { terms, ..ExpansionParts::default() };
        let of = |selection| parts.terms(selection);
        assert_eq!(of(TermSelection::All), "refunds refunds saltpass samphire");
        assert_eq!((of(TermSelection::Likely), of(TermSelection::None)), ("refunds".into(), String::new()));
    }

    /// Words that no user has used are learned from the texts of passages.
    #[test]
    fn words_of_the_texts_predict_words_of_the_titles() {
        let has_lantern = |text: &str| {
            let mut passages = passages();
            passages.examples.extend((0..4).map(|number| Passage {
                id: format!("lantern-{number}"),
                title: format!("Lantern {number}"),
                text: text.into(),
            }));
            let rows = rows();
            let model = ExpansionModel::fit(&rows.iter().collect::<Vec<_>>(), &passages, &english(), 10).unwrap().model;
            terms(&model, "bicycle", "").contains("lantern")
        };
        assert!(has_lantern("a place for bicycles") && !has_lantern("a place for horses"));
    }

    #[test]
    fn characters_are_features_where_words_have_no_spaces() {
        let chinese = WordSegmenter::of(Language::Zh, Vec::new());
        let features = features_of(&chinese, "退票 ticket", "改签");
        for feature in ["char:退", "char:退票", "char:改签", "char:签", "ticket", "history:改签"] {
            assert!(features.contains(feature), "{feature}: {features:?}");
        }
        assert!(!features.iter().any(|feature| feature == "char:票改" || feature.contains("char:t")), "{features:?}");
    }

    #[test]
    fn an_expansion_has_the_parts_of_its_form() {
        let weights = WordWeights::of_words(&[("pier", 3.0), ("bought", 0.1)]);
        let model = ExpansionModel { weights, ..fitted(&rows(), 10).unwrap().model };
        let (query, history) = ("money back, at which pier?", "bought\na cabin");
        let parts = model.parts(query, history);
        let [all, likely] = [TermSelection::All, TermSelection::Likely].map(|selection| parts.terms(selection));
        let weighted = &parts.weighted;
        assert_eq!(weighted, "money back, at which pier pier a cabin");
        assert_eq!(
            model.parts("bought?", "bought").weighted,
            "bought?",
            "without other words the query stays, its history does not"
        );
        let expected = [
            format!("{query} bought a cabin {all}"),
            format!("{query} bought a cabin {likely}"),
            weighted.clone(),
            format!("{weighted} {all}"),
            format!("{weighted} {likely}"),
        ];
        assert_eq!(ExpansionForm::ALL.map(|form| model.clone().with_form(form).expansion(query, history)), expected);
        let without = ExpansionParts { weighted: query.into(), terms: Vec::new() };
        for form in ExpansionForm::ALL {
            assert_eq!(form.text(query, "", &without), query);
        }
    }

    #[test]
    fn a_row_is_not_predicted_by_a_model_that_was_fitted_on_its_group() {
        let mut rows = rows();
        // Paraphrases of one question with words that no other row has.
        for number in 48..54 {
            rows.push(QueryRow { group: "alone".into(), ..row(number, "zebra crossing", "", "pier") });
        }
        // And one without gold ids in the same group.
        rows.push(QueryRow { group: "alone".into(), gold_ids: Vec::new(), ..row(54, "zebra", "", "") });
        let FittedExpansion { model, out_of_fold, fitted, .. } = fitted(&rows, 10).unwrap();
        assert_eq!(fitted.len(), 54);
        assert!(terms(&model, "zebra", "").contains("piers"));
        let without = |parts: &ExpansionParts| !parts.terms(TermSelection::All).contains("piers");
        assert!(out_of_fold[48..].iter().all(without), "{:?}", &out_of_fold[48..]);
        assert_eq!(sorted(&out_of_fold[0].terms(TermSelection::All)), ["refunds", "refunds", "saltpass", "saltpass"]);
    }

    #[test]
    fn the_order_of_rows_makes_no_difference() {
        let mut rows = rows();
        let first = fitted(&rows, 10).unwrap();
        rows.reverse();
        let second = fitted(&rows, 10).unwrap();
        assert_eq!(first.model.file(), second.model.file());
        assert!(first.out_of_fold.iter().eq(second.out_of_fold.iter().rev()));
    }

    #[test]
    fn a_model_is_read_back_with_its_words() {
        let (_folder, path) = crate::scratch_file("expansion.json");
        let words = vec![("航线卡".to_owned(), None)];
        let chinese = WordSegmenter::of(Language::Zh, words);
        let rows: Vec<QueryRow> = (0..24)
            .map(|number| {
                row(number, if number % 2 == 0 { "航线卡怎么退" } else { "几点开船" }, "", ["pass", "time"][number % 2])
            })
            .collect();
        let passages = passages_of(&[("pass", "航线卡退款"), ("time", "开船时间")]);
        let model = ExpansionModel::fit(&rows.iter().collect::<Vec<_>>(), &passages, &chinese, 10).unwrap().model;
        let model = model.with_form(ExpansionForm { is_weighted: true, terms: TermSelection::Likely });
        model.write(&path).unwrap();
        let read = ExpansionModel::read(&path).unwrap();
        assert_eq!(read.file(), model.file());
        let terms = terms(&model, "航线卡", "");
        assert!(terms.contains("航线卡") && terms.contains("退款"), "{terms}");
        assert_eq!(read.expansion("我的航线卡", ""), model.expansion("我的航线卡", ""));
    }

    #[test]
    fn another_file_is_refused() {
        let (_folder, path) = crate::scratch_file("expansion.json");
        for (text, problem) in [("{}", "is not a model of expansions"), ("", "is not a model of expansions")] {
            std::fs::write(&path, text).unwrap();
            let error = ExpansionModel::read(&path).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("--from convert"), "{error}");
        }
        std::fs::write(&path, r#"{"format":3,"form":{"with_history":true,"terms":"all"},"terms":[]}"#).unwrap();
        let error = ExpansionModel::read(&path).unwrap_err().to_string();
        assert!(error.contains("has format 3") && error.contains("--from convert"), "{error}");
    }

    #[test]
    fn without_a_model_the_reason_is_given() {
        let without = |rows: &[QueryRow]| fitted(rows, 10).unwrap_err();
        assert_eq!(without(&rows()[..12]), NoExpansion::FewGroups(12));
        let mut unknown = rows();
        unknown.iter_mut().for_each(|row| row.gold_ids.clear());
        assert_eq!(without(&unknown), NoExpansion::NoGoldIds);
        assert_eq!(without(&[]), NoExpansion::NoGoldIds);
    }

    #[test]
    fn without_terms_the_reason_is_given() {
        let no_terms = |rows: &[QueryRow], passages: &ExamplePassages| {
            let rows: Vec<&QueryRow> = rows.iter().collect();
            let FittedExpansion { model, no_terms, .. } = ExpansionModel::fit(&rows, passages, &english(), 10).unwrap();
            assert_eq!(model.n_terms(), 0);
            no_terms
        };
        let alone: Vec<QueryRow> = (0..30).map(|number| row(number, "refund", "", &format!("p{number}"))).collect();
        assert_eq!(no_terms(&alone, &passages_of(&[("p1", "Refunds")])), Some(NoTerms::NoSharedWord));
        let untitled = passages_of(&[("saltpass-refund", " "), ("pier", "")]);
        assert_eq!(no_terms(&rows(), &untitled), Some(NoTerms::NoTitles));
        assert_eq!(fitted(&rows(), 10).unwrap().no_terms, None);
    }

    #[test]
    fn of_many_rows_whole_groups_are_fitted() {
        let rows: Vec<QueryRow> = (0..90)
            .map(|number| QueryRow { group: format!("g{}", number / 3), ..rows()[number % 48].clone() })
            .collect();
        let rows: Vec<&QueryRow> = rows.iter().collect();
        let of = |max_rows| ExpansionModel::fit_at_most(max_rows, &rows, &passages(), &english(), 10).unwrap();
        let FittedExpansion { out_of_fold, fitted, .. } = of(64);
        assert_eq!(fitted.len(), 66);
        let groups: HashSet<&str> = fitted.iter().map(|row| rows[*row].group.as_str()).collect();
        assert_eq!(groups.len(), 22);
        assert!(out_of_fold.iter().all(|parts| !parts.terms.is_empty()));
        assert_eq!(of(90).fitted.len(), 90);
    }

    /// Gold passages are no more probable examples than others: terms of train are then not better than those of later queries.
    #[test]
    fn examples_depend_neither_on_the_order_of_passages_nor_on_what_is_gold() {
        let (_folder, path) = crate::scratch_file("kb.jsonl");
        let text = "x".repeat(MAX_PASSAGE_CHARS + 1);
        let line = |number: usize| {
            json!({"id": format!("p{number}"), "title": format!("T{number}"), "text": text}).to_string()
        };
        let untitled = json!({"id": "b", "text": "y"}).to_string();
        let read = |lines: Vec<String>, gold_ids: &[&str]| {
            std::fs::write(&path, [vec![untitled.clone()], lines].concat().join("\n")).unwrap();
            ExamplePassages::read(&path, &gold_ids.iter().copied().collect()).unwrap()
        };
        let n = MAX_PASSAGES + 20;
        let all = read((0..n).map(line).collect(), &["b", "p5", "p7"]);
        assert_eq!(all.gold.keys().collect::<Vec<_>>(), ["b", "p5", "p7"]);
        assert_eq!(all.examples.len(), MAX_PASSAGES);
        assert_ne!(
            group_digest(PASSAGE_SEED, "p1"),
            group_digest(FOLD_SEED, "p1"),
            "rows of a fit are chosen by the latter"
        );
        let is_cut = |passage: &Passage| !has_title(passage) || passage.text.len() == MAX_PASSAGE_CHARS;
        assert!(all.examples.iter().chain(all.gold.values()).all(is_cut));
        assert_eq!(read((0..n).rev().map(line).collect(), &["p1"]).examples, all.examples);
        let few = read((0..20).map(line).collect(), &[]);
        assert_eq!((few.examples.len(), few.titled().count()), (21, 20));
    }
}

//! Weights of the words of a query and its history: how much each word counts in retrieval. Words that many queries have and that lead to
//! wrong passages ("do", "my") have small weights, words that lead to the gold passage large ones.
//!
//! The loss is the softmax cross-entropy of a row's gold passages, with equal shares, among these and the example passages, where the score of
//! a passage is BM25 with weighted words, times a common factor. The logarithm of a weight is a linear function of [`N_FEATURES`] features of
//! the word, and of the word itself where queries of several groups have it.
//!
//! Source: BM25 is Lucene's, with its `k1` and `b`; the optimiser is Adam (Kingma and Ba 2015) with PyTorch's defaults but for the learning rate.
//!
//! Limits: of a long Chinese word the whole counts, where the index also has its parts; synonyms are ignored. Gold passages that are no
//! examples have no competitor for words that no example has. In the fit each word is in one group at least, that of its row, which a word
//! of a new query need not be.

use crate::retrieval::{Passage, WordSegmenter};
use crate::text::fold;
use querl_core::text::text_runs;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};

const K1: f64 = 1.2;
const B: f64 = 0.75;
/// Penalty of the squares of the words' log weights, in units of the loss of one row.
const PENALTY_OF_WORDS: f64 = 3.0;
/// Penalty of the squares of the features' coefficients.
const PENALTY_OF_FEATURES: f64 = 0.5;
const N_STEPS: usize = 200;
const LEARNING_RATE: f64 = 0.05;
/// Number of groups of rows with a word from which it has a log weight of its own.
const MIN_GROUPS_OF_WORD: usize = 2;
/// Words of a smaller weight are left out of the text.
const MIN_WEIGHT: f64 = 0.4;
/// Words of a larger weight are written twice.
const MIN_WEIGHT_OF_DOUBLED: f64 = 1.4;

/// Features of a word: IDF in [`UNIT_OF_IDF`], 1 if a title has it, 1 in a history, ln(1 + groups of rows with it), characters in
/// [`UNIT_OF_LENGTH`].
const N_FEATURES: usize = 5;
const OF_IDF: usize = 0;
const OF_HISTORY: usize = 2;
const OF_LENGTH: usize = 4;
const UNIT_OF_IDF: f64 = 3.0;
const UNIT_OF_LENGTH: f64 = 5.0;
/// Number of characters from which words have the same length: a pasted key must not outweigh all other words.
const MAX_LENGTH: usize = 30;
/// Largest absolute log weight.
const MAX_LOG_WEIGHT: f64 = 10.0;

/// Log weights of words, relative to the mean weight of the words of train that passages have.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct WordWeights {
    /// Added for a word of the history.
    of_history: f64,
    /// Times a fifth of the number of a word's characters, at most 30.
    of_length: f64,
    /// Of a word that is not in `words`.
    of_others: f64,
    /// By stemmed word: those of passages, and of queries of several groups.
    words: BTreeMap<String, f32>,
}

impl WordWeights {
    #[cfg(test)]
    pub(super) fn of_words(words: &[(&str, f64)]) -> Self {
        let words = words.iter().map(|(word, weight)| ((*word).to_owned(), weight.ln() as f32));
        Self { words: words.collect(), ..Self::default() }
    }

    /// Weight of a stemmed word.
    fn of(&self, word: &str, is_history: bool) -> f64 {
        let of_word = self.words.get(word).map_or(self.of_others, |weight| f64::from(*weight));
        let log_weight = of_word + self.of_length * length(word) + if is_history { self.of_history } else { 0.0 };
        log_weight.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    }

    /// `text` on one line, without the words of a small weight and with those of a large weight twice. A space or mark next to such a word
    /// becomes a space. `None` if no word is left.
    pub(super) fn weighted(&self, segmenter: &WordSegmenter, text: &str, is_history: bool) -> Option<String> {
        let count = |piece: &str| {
            let word = word_of(segmenter, piece)?;
            let weight = if is_weighted(segmenter, piece) { self.of(&word, is_history) } else { 1.0 };
            Some(usize::from(weight >= MIN_WEIGHT) + usize::from(weight > MIN_WEIGHT_OF_DOUBLED))
        };
        // How often each word is written; `None` for the text between words.
        let pieces: Vec<(&str, Option<usize>)> =
            segmenter.pieces(text).into_iter().map(|piece| (piece, count(piece))).collect();
        if pieces.iter().all(|(_, count)| count.is_none_or(|count| count == 0)) {
            return None;
        }
        let is_edited = |count: Option<usize>| count.is_some_and(|count| count != 1);
        let mut weighted = String::new();
        for (position, (piece, count)) in pieces.iter().enumerate() {
            let neighbours = &pieces[position.saturating_sub(1)..(position + 2).min(pieces.len())];
            match count {
                None if neighbours.iter().any(|(_, count)| is_edited(*count)) => weighted.push(' '),
                None | Some(1) => weighted.push_str(piece),
                Some(count) => weighted.push_str(&format!(" {} ", vec![*piece; *count].join(" "))),
            }
        }
        Some(weighted.split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

/// The stemmed word of a piece of a text; `None` for the text between words.
fn word_of(segmenter: &WordSegmenter, piece: &str) -> Option<String> {
    // A long Chinese word comes after its parts.
    segmenter.words(&fold(piece)).pop()
}

/// False for a piece in a script without spaces where words are separated by spaces: it may be one character of a word.
fn is_weighted(segmenter: &WordSegmenter, piece: &str) -> bool {
    !segmenter.is_spaced() || !text_runs(piece).iter().any(|run| run.is_unspaced)
}

/// Length of a word, as a feature.
fn length(word: &str) -> f64 {
    word.chars().take(MAX_LENGTH).count() as f64 / UNIT_OF_LENGTH
}

fn words_of(segmenter: &WordSegmenter, text: &str) -> Vec<String> {
    let pieces = segmenter.pieces(text).into_iter().filter(|piece| is_weighted(segmenter, piece));
    pieces.filter_map(|piece| word_of(segmenter, piece)).collect()
}

/// A row of train.
pub(super) struct WeightedRow<'a> {
    pub(super) query: &'a str,
    pub(super) history: String,
    pub(super) group: &'a str,
    pub(super) gold_ids: &'a [String],
}

/// Rows and passages as numbers of words.
pub(super) struct Weighting {
    n_examples: usize,
    /// Words of the example passages and of the rows, in alphabetical order.
    words: Vec<String>,
    /// IDF of each word, and 1 if a title has it.
    of_words: Vec<[f64; 2]>,
    idf_of_unknown: f64,
    /// Example passages with each word, and its part of their scores.
    postings: Vec<Vec<(u32, f64)>>,
    rows: Vec<NumberedRow>,
}

struct NumberedRow {
    /// Distinct words of the query and of the history, each with true if it is of the history.
    words: Vec<(usize, bool)>,
    /// Number of the row's group.
    group: usize,
    /// Gold passages that are examples.
    gold: Vec<u32>,
    /// Of the other gold passages: the part of each of the row's words in the score.
    other_gold: Vec<Vec<f64>>,
}

impl NumberedRow {
    fn has_gold(&self) -> bool {
        self.gold.len() + self.other_gold.len() > 0
    }
}

impl Weighting {
    /// `examples` are the passages that statistics of words are taken from, `gold` are gold passages of the rows.
    pub(super) fn new<'a>(
        rows: &[WeightedRow<'_>],
        examples: &'a [Passage],
        gold: impl Iterator<Item = &'a Passage>,
        segmenter: &WordSegmenter,
    ) -> Self {
        let mut positions: HashMap<&str, usize> = HashMap::new();
        let mut passages: Vec<&Passage> = Vec::new();
        for passage in examples.iter().chain(gold) {
            positions.entry(&passage.id).or_insert_with(|| {
                passages.push(passage);
                passages.len() - 1
            });
        }
        let n_examples = examples.len();
        let of_passages: Vec<Vec<String>> =
            passages.par_iter().map(|passage| words_of(segmenter, &passage.full_text())).collect();
        let of_rows: Vec<[Vec<String>; 2]> =
            rows.par_iter().map(|row| [row.query, &row.history].map(|text| words_of(segmenter, text))).collect();
        let of_titles: BTreeSet<String> =
            examples.iter().flat_map(|passage| words_of(segmenter, &passage.title)).collect();
        let all: BTreeSet<&String> =
            of_passages[..n_examples].iter().chain(of_rows.iter().flatten()).flatten().collect();
        let words: Vec<String> = all.into_iter().cloned().collect();
        let number: HashMap<&str, usize> = words.iter().map(String::as_str).zip(0..).collect();

        let counts_of = |passage: usize| {
            let mut counts: BTreeMap<usize, f64> = BTreeMap::new();
            for word in of_passages[passage].iter().filter_map(|word| number.get(word.as_str())) {
                *counts.entry(*word).or_default() += 1.0;
            }
            counts
        };
        let mut postings: Vec<Vec<(u32, f64)>> = vec![Vec::new(); words.len()];
        for passage in 0..n_examples {
            counts_of(passage).into_iter().for_each(|(word, count)| postings[word].push((passage as u32, count)));
        }
        let n_words: usize = of_passages[..n_examples].iter().map(Vec::len).sum();
        let mean_length = (n_words as f64 / n_examples.max(1) as f64).max(1.0);
        let idf = |n_with: usize| (1.0 + (n_examples as f64 - n_with as f64 + 0.5) / (n_with as f64 + 0.5)).ln();
        let of_word = |(word, postings): (&String, &Vec<(u32, f64)>)| {
            [idf(postings.len()), f64::from(u8::from(of_titles.contains(word)))]
        };
        let of_words: Vec<[f64; 2]> = words.iter().zip(&postings).map(of_word).collect();
        let part = |word: usize, count: f64, passage: usize| {
            let length = of_passages[passage].len() as f64 / mean_length;
            of_words[word][0] * count * (K1 + 1.0) / (count + K1 * (1.0 - B + B * length))
        };
        for (word, postings) in postings.iter_mut().enumerate() {
            postings.iter_mut().for_each(|(passage, count)| *count = part(word, *count, *passage as usize));
        }
        let groups: BTreeSet<&str> = rows.iter().map(|row| row.group).collect();
        let groups: Vec<&str> = groups.into_iter().collect();
        let numbered = |(row, [query, history]): (&WeightedRow<'_>, &[Vec<String>; 2])| {
            let numbers =
                |texts: &[String]| -> BTreeSet<usize> { texts.iter().map(|word| number[word.as_str()]).collect() };
            let of_query = numbers(query).into_iter().map(|word| (word, false));
            let of_history = numbers(history).into_iter().map(|word| (word, true));
            let words: Vec<(usize, bool)> = of_query.chain(of_history).collect();
            let gold: BTreeSet<usize> =
                row.gold_ids.iter().filter_map(|id| positions.get(id.as_str()).copied()).collect();
            let (gold, others): (Vec<usize>, Vec<usize>) = gold.into_iter().partition(|passage| *passage < n_examples);
            let parts_of = |passage: &usize| {
                let counts = counts_of(*passage);
                words
                    .iter()
                    .map(|(word, _)| counts.get(word).map_or(0.0, |count| part(*word, *count, *passage)))
                    .collect()
            };
            NumberedRow {
                group: groups.binary_search(&row.group).unwrap_or_default(),
                gold: gold.into_iter().map(|passage| passage as u32).collect(),
                other_gold: others.iter().map(parts_of).collect(),
                words,
            }
        };
        let rows = rows.iter().zip(&of_rows).map(numbered).collect();
        Self { n_examples, idf_of_unknown: idf(0), of_words, postings, rows, words }
    }

    /// Weights that are learned from these rows.
    pub(super) fn fit(&self, rows: &[usize]) -> WordWeights {
        let rows: Vec<&NumberedRow> = rows.iter().map(|row| &self.rows[*row]).filter(|row| row.has_gold()).collect();
        let mut groups_of: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); self.words.len()];
        for row in &rows {
            for (word, _) in &row.words {
                groups_of[*word].insert(row.group);
            }
        }
        let n_groups: Vec<usize> = groups_of.iter().map(BTreeSet::len).collect();
        let is_own = |word: usize| n_groups[word] >= MIN_GROUPS_OF_WORD;
        let of_word = |(word, [idf, is_of_title]): (usize, &[f64; 2])| {
            let count = (1.0 + n_groups[word] as f64).ln();
            [idf / UNIT_OF_IDF, *is_of_title, 0.0, count, length(&self.words[word])]
        };
        let of_words: Vec<[f64; N_FEATURES]> = self.of_words.iter().enumerate().map(of_word).collect();
        let features = |word: usize, is_history: bool| {
            let mut features = of_words[word];
            features[OF_HISTORY] = f64::from(u8::from(is_history));
            features
        };
        // Parameters: the coefficients of the features, a factor of all scores, and the words' own log weights.
        let at_word = |word: usize| N_FEATURES + 1 + word;
        let mut adam = Adam::new(at_word(self.words.len()));
        let log_weight = |parameters: &[f64], word: usize, is_history: bool| -> f64 {
            let of_features = features(word, is_history).iter().zip(parameters).map(|(x, y)| x * y).sum::<f64>();
            of_features + if is_own(word) { parameters[at_word(word)] } else { 0.0 }
        };
        let n_rows = rows.len().max(1) as f64;
        for _ in 0..N_STEPS {
            let parameters = &adam.parameters;
            let factor = parameters[N_FEATURES].exp();
            let of_rows: Vec<(Vec<f64>, f64)> = rows
                .par_iter()
                .map(|row| {
                    let weights: Vec<f64> =
                        row.words.iter().map(|(word, is)| factor * log_weight(parameters, *word, *is).exp()).collect();
                    self.gradients(row, &weights)
                })
                .collect();
            let mut gradient = vec![0.0; parameters.len()];
            for (row, (of_words, of_factor)) in rows.iter().zip(of_rows) {
                gradient[N_FEATURES] += of_factor;
                for ((word, is_history), of_word) in row.words.iter().zip(of_words) {
                    let features = features(*word, *is_history);
                    features.iter().zip(&mut gradient).for_each(|(feature, gradient)| *gradient += feature * of_word);
                    gradient[at_word(*word)] += if is_own(*word) { of_word } else { 0.0 };
                }
            }
            for (at, (gradient, parameter)) in gradient.iter_mut().zip(parameters).enumerate() {
                let penalty = match at {
                    N_FEATURES => 0.0,
                    at if at < N_FEATURES => PENALTY_OF_FEATURES,
                    _ => PENALTY_OF_WORDS,
                };
                *gradient = (*gradient + 2.0 * penalty * parameter) / n_rows;
            }
            adam.step(&gradient);
        }
        let parameters = &adam.parameters;
        let with_postings = rows.iter().flat_map(|row| &row.words).filter(|(word, _)| !self.postings[*word].is_empty());
        let (sum, n) = with_postings.fold((0.0, 0.0), |(sum, n): (f64, f64), (word, is_history)| {
            (sum + log_weight(parameters, *word, *is_history).exp(), n + 1.0)
        });
        let log_mean = if n > 0.0 { (sum / n).ln() } else { 0.0 };
        let of_length = parameters[OF_LENGTH];
        let without_length = |word: usize| {
            (log_weight(parameters, word, false) - of_length * length(&self.words[word]) - log_mean) as f32
        };
        // Words of one user, such as names, are not written to the file.
        let is_known = |word: &usize| is_own(*word) || !self.postings[*word].is_empty();
        let known = (0..self.words.len()).filter(is_known);
        WordWeights {
            of_history: parameters[OF_HISTORY],
            of_length,
            of_others: parameters[OF_IDF] * self.idf_of_unknown / UNIT_OF_IDF - log_mean,
            words: known.map(|word| (self.words[word].clone(), without_length(word))).collect(),
        }
    }

    /// Derivatives of a row's loss with respect to the logarithm of each of its words' weights and to that of a common factor.
    fn gradients(&self, row: &NumberedRow, weights: &[f64]) -> (Vec<f64>, f64) {
        let mut scores = vec![0.0; self.n_examples];
        for ((word, _), weight) in row.words.iter().zip(weights) {
            self.postings[*word].iter().for_each(|(passage, part)| scores[*passage as usize] += weight * part);
        }
        let score = |parts: &Vec<f64>| parts.iter().zip(weights).map(|(part, weight)| weight * part).sum::<f64>();
        scores.extend(row.other_gold.iter().map(score));
        let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut of_scores: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
        let sum: f64 = of_scores.iter().sum();
        of_scores.iter_mut().for_each(|of_score| *of_score /= sum);
        let of_other_gold = self.n_examples..scores.len();
        let gold = row.gold.iter().map(|gold| *gold as usize).chain(of_other_gold.clone());
        let share = 1.0 / (row.gold.len() + row.other_gold.len()) as f64;
        gold.for_each(|gold| of_scores[gold] -= share);
        let of_word = |(at, ((word, _), weight)): (usize, (&(usize, bool), &f64))| {
            let of_examples = self.postings[*word].iter().map(|(passage, part)| of_scores[*passage as usize] * part);
            let others = of_scores[of_other_gold.clone()].iter().zip(&row.other_gold);
            weight * of_examples.chain(others.map(|(of_score, parts)| of_score * parts[at])).sum::<f64>()
        };
        let of_factor = of_scores.iter().zip(&scores).map(|(of_score, score)| of_score * score).sum();
        (row.words.iter().zip(weights).enumerate().map(of_word).collect(), of_factor)
    }
}

struct Adam {
    parameters: Vec<f64>,
    first: Vec<f64>,
    second: Vec<f64>,
    n_steps: i32,
}

impl Adam {
    fn new(n_parameters: usize) -> Self {
        let zeros = vec![0.0; n_parameters];
        Self { parameters: zeros.clone(), first: zeros.clone(), second: zeros, n_steps: 0 }
    }

    fn step(&mut self, gradient: &[f64]) {
        const BETAS: (f64, f64) = (0.9, 0.999);
        const EPSILON: f64 = 1e-8;
        self.n_steps += 1;
        let corrections = (1.0 - BETAS.0.powi(self.n_steps), 1.0 - BETAS.1.powi(self.n_steps));
        for (at, gradient) in gradient.iter().enumerate() {
            self.first[at] = BETAS.0 * self.first[at] + (1.0 - BETAS.0) * gradient;
            self.second[at] = BETAS.1 * self.second[at] + (1.0 - BETAS.1) * gradient * gradient;
            let step = self.first[at] / corrections.0 / ((self.second[at] / corrections.1).sqrt() + EPSILON);
            self.parameters[at] -= LEARNING_RATE * step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::config::Language;

    #[derive(Deserialize)]
    struct Golden {
        n_examples: usize,
        passages: Vec<Passage>,
        rows: Vec<GoldenRow>,
        weights: WordWeights,
    }

    #[derive(Deserialize)]
    struct GoldenRow {
        query: String,
        history: String,
        group: String,
        gold_ids: Vec<String>,
    }

    impl GoldenRow {
        fn row(&self) -> WeightedRow<'_> {
            let Self { query, history, group, gold_ids } = self;
            WeightedRow { query, history: history.clone(), group, gold_ids }
        }
    }

    fn english() -> WordSegmenter {
        WordSegmenter::of(Language::En, Vec::new())
    }

    /// Weights of torch (`tests/reference/word_weights.py`): autograd and its Adam.
    #[test]
    fn weights_are_those_of_torch() {
        let text = include_str!("../../../../tests/reference/golden/word_weights.json");
        let Golden { n_examples, passages, rows, weights }: Golden = serde_json::from_str(text).unwrap();
        let (examples, gold_alone) = passages.split_at(n_examples);
        assert!(!gold_alone.is_empty());
        let rows: Vec<WeightedRow<'_>> = rows.iter().map(GoldenRow::row).collect();
        let weighting = Weighting::new(&rows, examples, gold_alone.iter(), &english());
        let found = weighting.fit(&(0..rows.len()).collect::<Vec<_>>());
        assert!(found.words.keys().eq(weights.words.keys()), "{found:?}");
        let of = |weights: &WordWeights| {
            let of_words = weights.words.values().map(|weight| f64::from(*weight));
            [weights.of_history, weights.of_length, weights.of_others].into_iter().chain(of_words).collect::<Vec<_>>()
        };
        let furthest =
            of(&found).iter().zip(of(&weights)).map(|(own, theirs)| (own - theirs).abs()).fold(0.0, f64::max);
        assert!(furthest < 1e-5, "{furthest}");
    }

    #[test]
    fn words_are_left_out_kept_or_doubled() {
        let weights = WordWeights::of_words(&[("do", 0.1), ("visa", 2.0), ("get", 1.0), ("came", 0.2), ("my", 0.1)]);
        let of = |text| weights.weighted(&english(), text, false).unwrap_or_default();
        assert_eq!(of("Do I get my Visa, after all?"), "I get Visa Visa after all?");
        assert_eq!(of("visas came down!"), "visas visas down!");
        assert_eq!(of("I, too."), "I, too.");
        assert_eq!(weights.weighted(&english(), "my, do ...?!", false), None);
        assert_eq!(weights.weighted(&english(), "?!", false), None);
        let chinese = WordSegmenter::of(Language::Zh, Vec::new());
        let weights = WordWeights::of_words(&[("怎么", 0.1), ("套餐", 3.0)]);
        assert_eq!(weights.weighted(&chinese, "我的套餐，怎么改", false).as_deref(), Some("我的 套餐 套餐 改"));
    }

    /// Where words have spaces, Chinese and Thai are split into characters.
    #[test]
    fn scripts_without_spaces_are_not_weighted_among_words_with_spaces() {
        let of_others = 0.1_f64.ln();
        let weights = WordWeights { of_others, ..WordWeights::of_words(&[("refund", 1.0)]) };
        let of = |text| weights.weighted(&english(), text, false).unwrap_or_default();
        assert_eq!(of("please refund 退款 ขอคืนเงิน now"), "refund 退款 ขอคืนเงิน");
    }

    #[test]
    fn words_of_the_history_have_a_weight_of_their_own() {
        let weights =
            WordWeights { of_history: 0.3_f64.ln(), of_length: 0.5, ..WordWeights::of_words(&[("visa", 1.0)]) };
        let near = |found: f64, expected: f64| (found - expected).abs() < 1e-6;
        assert!(near(weights.of("visa", false), 0.4_f64.exp()) && near(weights.of("visa", true), 0.3 * 0.4_f64.exp()));
        assert!(near(weights.of("elephant", false), 0.8_f64.exp()));
        assert!(near(weights.of(&"x".repeat(5000), false), 3.0_f64.exp()));
        let large = WordWeights { of_length: 1e3, ..WordWeights::default() };
        assert!(large.of("elephant", false).is_finite());
    }

    #[test]
    fn without_gold_passages_all_words_have_the_weight_1() {
        let row =
            WeightedRow { query: "my visa", history: String::new(), group: "a", gold_ids: &["absent".to_owned()] };
        let passage = Passage { id: "p".into(), title: "Visas".into(), text: "my text".into() };
        let weighting = Weighting::new(&[row], &[passage], [].iter(), &english());
        let found = weighting.fit(&[0]);
        assert_eq!((found.of("visa", false), found.of("other", true)), (1.0, 1.0));
        assert_eq!(found.weighted(&english(), "My visa?", true).as_deref(), Some("My visa?"));
    }
}

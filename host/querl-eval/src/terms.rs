//! Overlap of words between texts: what a rewrite keeps of its query, and what it adds from a passage.
//!
//! A word is a run of letters or digits; where words are written without spaces (Chinese), each pair of neighbouring characters is one.
//! This needs no dictionary and is the same for all languages and tenants.

use querl_core::text::{char_ngrams, text_runs};
use std::collections::BTreeSet;

/// The words of a text in order, with repeats.
pub(crate) fn terms(text: &str) -> Vec<String> {
    let of_run = |run: querl_core::text::TextRun| match run.is_unspaced {
        true => char_ngrams(&run.text, 2),
        false => vec![run.text],
    };
    text_runs(text).into_iter().flat_map(of_run).collect()
}

fn distinct_terms(text: &str) -> BTreeSet<String> {
    terms(text).into_iter().collect()
}

fn share(n: usize, of: usize) -> Option<f64> {
    (of > 0).then(|| n as f64 / of as f64)
}

/// Share of the query's words that also occur in the rewrite, 0 to 1; `None` for a query without words.
pub(crate) fn kept_terms(query: &str, rewrite: &str) -> Option<f64> {
    let (query, rewrite) = (distinct_terms(query), distinct_terms(rewrite));
    share(query.intersection(&rewrite).count(), query.len())
}

/// Share of the rewrite's words that occur in one of the passages `gold` but not in the query, 0 to 1; `None` without passages or for a
/// rewrite without words.
pub fn new_gold_terms(query: &str, rewrite: &str, gold: &[String]) -> Option<f64> {
    if gold.is_empty() {
        return None;
    }
    let (query, rewrite) = (distinct_terms(query), distinct_terms(rewrite));
    let gold: BTreeSet<String> = gold.iter().flat_map(|text| terms(text)).collect();
    let n_new = rewrite.iter().filter(|term| gold.contains(*term) && !query.contains(*term)).count();
    share(n_new, rewrite.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_words_are_counted_once_and_without_case_and_width() {
        assert_eq!(kept_terms("Fish oil, fish OIL dose", "ＦＩＳＨ dose per day"), Some(2.0 / 3.0));
        // 鱼油, 油吃, 吃几, 几粒: the first is kept.
        assert_eq!(kept_terms("鱼油吃几粒", "鱼油 食用量"), Some(0.25));
        assert_eq!(kept_terms("？", "鱼油"), None);
    }

    #[test]
    fn new_words_of_a_gold_passage_are_neither_the_querys_nor_the_rewrites_own() {
        let gold = ["take two capsules of fish oil a day".to_owned(), "store it dry".to_owned()];
        let share = new_gold_terms("fish oil how many", "fish oil capsules day please", &gold);
        assert_eq!(share, Some(2.0 / 5.0));
        assert_eq!(new_gold_terms("fish oil", "store dry", &gold), Some(1.0));
        assert_eq!((new_gold_terms("a", "b", &[]), new_gold_terms("a", "", &gold)), (None, None));
    }
}

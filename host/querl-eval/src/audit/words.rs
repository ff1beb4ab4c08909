//! Units and tokens of a text, for Chinese, English and a mix of both.

use crate::terms::terms;
use querl_core::text::{TextRun, char_ngrams, text_runs};
use std::collections::BTreeSet;

/// Maximum length, in characters, of a whitespace-separated text that is a token.
const LONGEST_WORD: usize = 16;

/// Splits a text into units: single characters in unspaced writing (Chinese), otherwise runs of letters and digits.
pub(super) fn units(text: &str) -> Vec<String> {
    let of_run = |run: TextRun| match run.is_unspaced {
        true => char_ngrams(&run.text, 1),
        false => vec![run.text],
    };
    text_runs(text).into_iter().flat_map(of_run).collect()
}

/// Distinct terms, units and lower-case whitespace-separated words of a text, in which the rules look for markers: one Chinese character
/// can be one.
pub(super) fn tokens(text: &str) -> BTreeSet<String> {
    let words = text.split_whitespace().filter(|word| word.chars().count() <= LONGEST_WORD).map(str::to_lowercase);
    terms(text).into_iter().chain(units(text)).chain(words).collect()
}

/// The text in lower case, with each run of white space as one space.
pub(super) fn normalised(text: &str) -> String {
    text.to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chinese_has_pairs_of_characters_and_english_words() {
        assert_eq!(units("鱼油 DHA, x"), ["鱼", "油", "dha", "x"]);
        assert_eq!(terms("深海鱼油 一 Omega-3"), ["深海", "海鱼", "鱼油", "一", "omega", "3"]);
        assert_eq!(terms("胶原。蛋白"), ["胶原", "蛋白"], "no pair over punctuation");
        assert!(terms(" ,。").is_empty() && units("").is_empty());
    }

    #[test]
    fn tokens_are_terms_characters_and_words_between_spaces() {
        let found = tokens("鱼油 注意事项");
        // Symptom: a marker of one character, written next to other ones, was in no token.
        assert!(found.contains("鱼") && !tokens("fish oil").contains("f"), "{found:?}");
        assert!(found.contains("注意事项") && found.contains("意事") && found.contains("鱼油"), "{found:?}");
        assert_eq!(normalised("  Fish\n OIL "), "fish oil");
    }
}

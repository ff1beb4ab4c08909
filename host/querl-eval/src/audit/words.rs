//! Units, terms and tokens of a text, for Chinese, English and a mix of both.

use std::collections::BTreeSet;

/// Longest text between spaces that is a token of its own, in characters.
const LONGEST_WORD: usize = 16;

/// CJK, kana and Hangul: a character is a unit. In other scripts a word is.
fn is_ideograph(c: char) -> bool {
    matches!(c, '\u{2e80}'..='\u{2fdf}' | '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{9fff}' | '\u{ac00}'..='\u{d7af}'
        | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}')
}

/// The units of a text in lower case: a CJK character, or a run of other letters and digits. Punctuation and spaces are left out. The
/// second value is false where something was left out before the unit.
fn units_with_joins(text: &str) -> Vec<(String, bool)> {
    let (mut units, mut word, mut follows) = (Vec::new(), String::new(), false);
    for c in text.chars().flat_map(char::to_lowercase) {
        if c.is_alphanumeric() && !is_ideograph(c) {
            word.push(c);
            continue;
        }
        if !word.is_empty() {
            units.push((std::mem::take(&mut word), follows));
            follows = true;
        }
        if c.is_alphanumeric() {
            units.push((c.to_string(), follows));
            follows = true;
        } else {
            follows = false;
        }
    }
    if !word.is_empty() {
        units.push((word, follows));
    }
    units
}

/// The units of a text.
pub(super) fn units(text: &str) -> Vec<String> {
    units_with_joins(text).into_iter().map(|(unit, _)| unit).collect()
}

fn is_character(unit: &str) -> bool {
    unit.chars().all(is_ideograph)
}

/// Search terms: words, pairs of CJK characters that follow each other, and CJK characters that have no neighbour.
pub(super) fn terms(text: &str) -> Vec<String> {
    let units = units_with_joins(text);
    let mut terms = Vec::with_capacity(units.len());
    for (index, (unit, follows)) in units.iter().enumerate() {
        if !is_character(unit) {
            terms.push(unit.clone());
            continue;
        }
        let before =
            index.checked_sub(1).map(|before| &units[before].0).filter(|before| *follows && is_character(before));
        let has_next = units.get(index + 1).is_some_and(|(next, follows)| *follows && is_character(next));
        match before {
            Some(before) => terms.push(format!("{before}{unit}")),
            None if !has_next => terms.push(unit.clone()),
            None => {}
        }
    }
    terms
}

/// What a rule may look for: search terms, and what stands between spaces.
pub(super) fn tokens(text: &str) -> BTreeSet<String> {
    let words = text.split_whitespace().filter(|word| word.chars().count() <= LONGEST_WORD).map(str::to_lowercase);
    terms(text).into_iter().chain(words).collect()
}

/// The text in lower case with single spaces.
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
    fn tokens_are_terms_and_words_between_spaces() {
        let found = tokens("鱼油 注意事项");
        assert!(found.contains("注意事项") && found.contains("意事") && found.contains("鱼油"), "{found:?}");
        assert_eq!(normalised("  Fish\n OIL "), "fish oil");
    }
}

//! One way to fold text for comparison, shared by tables, lexicon and index.

use querl_core::config::TextWidth;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Full-width forms become half-width and letters lower-case; nothing is removed, so positions in characters stay.
pub(crate) fn fold(text: &str) -> String {
    text.chars().map(fold_char).flat_map(char::to_lowercase).collect()
}

/// What is left of a text for comparison: folded, without white space and punctuation.
pub fn normalise(text: &str) -> String {
    fold(text).chars().filter(|character| character.is_alphanumeric()).collect()
}

/// The text with the full-width forms that `width` names as half-width ones.
pub(crate) fn with_width(text: &str, width: TextWidth) -> String {
    let changed = |character: char| match width {
        TextWidth::Keep => character,
        TextWidth::Letters => {
            let half = fold_char(character);
            if half.is_ascii_alphanumeric() || half == ' ' { half } else { character }
        }
        TextWidth::All => fold_char(character),
    };
    text.chars().map(changed).collect::<String>().trim().to_owned()
}

/// The same number for the same value within one run of the program; no number to be kept.
pub(crate) fn hash_of(value: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

fn fold_char(character: char) -> char {
    match character {
        '\u{3000}' => ' ',
        // The full-width forms stand in ASCII's order.
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(character as u32 - 0xfee0).unwrap_or(character),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn width_case_space_and_punctuation_do_not_count() {
        assert_eq!(normalise("ＶＣ 泡腾片，怎么吃？"), normalise("vc泡腾片怎么吃"));
    }

    #[test]
    fn width_is_changed_as_far_as_it_is_set() {
        let changed = [TextWidth::Keep, TextWidth::Letters, TextWidth::All]
            .map(|width| with_width("ＶＣ　１片，怎么吃？", width));
        assert_eq!(changed, ["ＶＣ　１片，怎么吃？", "VC 1片，怎么吃？", "VC 1片,怎么吃?"]);
    }
}

//! Text normalisation for tables, lexicon and index, and hashes.

use querl_core::config::TextWidth;
use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};

/// `text` in half-width and lower case, with the same character positions.
pub(crate) fn fold(text: &str) -> String {
    text.chars().map(fold_char).flat_map(char::to_lowercase).collect()
}

/// `text` for comparisons: half-width, lower case, without white space and punctuation.
pub fn normalise(text: &str) -> String {
    fold(text).chars().filter(|character| character.is_alphanumeric()).collect()
}

/// Converts the full-width characters that `width` names to half-width, and trims.
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

pub(crate) fn separates_ids(character: char) -> bool {
    character.is_whitespace() || [',', ';', '，', '；', '、'].contains(&character)
}

/// Control characters other than tab and line break, and the other characters that XML does not allow.
fn is_control(character: char) -> bool {
    (character < ' ' && !matches!(character, '\t' | '\n')) || matches!(character, '\u{fffe}' | '\u{ffff}')
}

/// True if a text has characters that [`without_control_characters`] removes. A carriage return does not count.
pub(crate) fn has_control_characters(text: &str) -> bool {
    text.contains(|character: char| character != '\r' && is_control(character))
}

/// `text` with `\n` as line break and without C0 control characters: XML, and so a workbook, cannot hold them, and no search query needs
/// them.
pub(crate) fn without_control_characters(text: &str) -> Cow<'_, str> {
    match text.contains(is_control) {
        true => Cow::Owned(text.replace("\r\n", "\n").replace('\r', "\n").replace(is_control, "")),
        false => Cow::Borrowed(text),
    }
}

/// Hash of a value. It may differ between builds of the program, so it must not be written to files.
pub(crate) fn hash_of(value: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

fn fold_char(character: char) -> char {
    match character {
        '\u{3000}' => ' ',
        // Full-width forms are in the order of ASCII.
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(character as u32 - 0xfee0).unwrap_or(character),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalised_texts_ignore_width_case_space_and_punctuation() {
        assert_eq!(normalise("ＶＣ 泡腾片，怎么吃？"), normalise("vc泡腾片怎么吃"));
    }

    #[test]
    fn control_characters_are_removed() {
        assert_eq!(without_control_characters("甲\r\n乙\r丙\u{8}\u{1b}\t丁\n"), "甲\n乙\n丙\t丁\n");
        assert!(matches!(without_control_characters("甲\t乙\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn width_conversion_follows_the_setting() {
        let changed = [TextWidth::Keep, TextWidth::Letters, TextWidth::All]
            .map(|width| with_width("ＶＣ　１片，怎么吃？", width));
        assert_eq!(changed, ["ＶＣ　１片，怎么吃？", "VC 1片，怎么吃？", "VC 1片,怎么吃?"]);
    }
}

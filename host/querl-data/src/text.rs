//! Text normalisation for tables, lexicon and index, and hashes.

use encoding_rs::GBK;
use hanconv::RawDictionary;
use querl_core::config::TextWidth;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::LazyLock;

/// Traditional characters that GB 2312 has too, although Simplified texts have them in names and quotations alone.
const TRADITIONAL_IN_GB_2312: [char; 6] = ['後', '於', '摺', '菸', '徵', '醣'];

/// Simplified forms, of as many bytes, by Traditional character. Characters of GB 2312 are not keys, since Simplified texts use them
/// (`乾隆`, `覆盖`, `哪吒`), except [`TRADITIONAL_IN_GB_2312`].
static SIMPLIFIED: LazyLock<HashMap<char, char>> = LazyLock::new(|| {
    let of_one_length = RawDictionary::TSCharacters.iter().filter(|(from, to)| from.len() == to.len());
    let pairs = of_one_length.filter_map(|(from, to)| Some((from.chars().next()?, to.chars().next()?)));
    let is_traditional = |character: char| TRADITIONAL_IN_GB_2312.contains(&character) || !is_in_gb_2312(character);
    pairs.filter(|(from, to)| from != to && is_traditional(*from)).collect()
});

/// Simplified characters that have a Traditional form.
static SIMPLIFIED_FORMS: LazyLock<HashSet<char>> = LazyLock::new(|| SIMPLIFIED.values().copied().collect());

fn is_in_gb_2312(character: char) -> bool {
    let mut buffer = [0; 4];
    let (bytes, _, has_replacement) = GBK.encode(character.encode_utf8(&mut buffer));
    // GB 2312 has its Chinese characters in rows 16 to 87 of this part of GBK.
    !has_replacement && matches!(*bytes, [0xb0..=0xf7, 0xa1..=0xfe])
}

/// `text` with Traditional Chinese characters replaced by their Simplified forms, with the same character and byte positions.
pub(crate) fn simplified(text: &str) -> Cow<'_, str> {
    let form = |character: char| SIMPLIFIED.get(&character).copied();
    match !text.is_ascii() && text.contains(|character: char| form(character).is_some()) {
        true => Cow::Owned(text.chars().map(|character| form(character).unwrap_or(character)).collect()),
        false => Cow::Borrowed(text),
    }
}

/// Whether texts have more Traditional Chinese characters than Simplified ones, of those whose two forms differ.
pub fn is_mostly_traditional<'a>(texts: impl IntoIterator<Item = &'a str>) -> bool {
    let (mut n_traditional, mut n_simplified) = (0_usize, 0_usize);
    for character in texts.into_iter().flat_map(str::chars) {
        n_traditional += usize::from(SIMPLIFIED.contains_key(&character));
        n_simplified += usize::from(SIMPLIFIED_FORMS.contains(&character));
    }
    n_traditional > n_simplified
}

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
    fn traditional_characters_are_simplified_at_the_same_positions() {
        for (traditional, expected) in
            [("信用卡遺失掛失補發", "信用卡遗失挂失补发"), ("臺灣銀行存摺，貸款後徵信", "台湾银行存折，贷款后征信")]
        {
            assert_eq!(simplified(traditional), expected);
            assert_eq!(traditional.len(), expected.len());
        }
        // Simplified texts use these characters, in names and set phrases: their segmentation must not change.
        let text = "乾隆 著作 瞭望 哪吒 大阪 覆盖 狼藉 彷徨 蒜薹 夥同 头发和发展，里面的皇后 EPA 𠮷";
        assert!(matches!(simplified(text), Cow::Borrowed(_)));
        assert!(is_mostly_traditional(["後續查詢帳戶", "手机"]) && !is_mostly_traditional(["挂失补发，魚"]));
        assert!(!is_mostly_traditional([""]));
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

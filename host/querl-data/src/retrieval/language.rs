//! Segmentation into words of texts in languages other than Chinese, and detection of the language of a knowledge base.

use crate::retrieval::passages;
use querl_core::config::{Language, RetrievalConfig};
use rust_stemmers::{Algorithm, Stemmer};
use std::path::Path;
use unicode_normalization::UnicodeNormalization;
use unicode_normalization::char::is_combining_mark;
use unicode_segmentation::UnicodeSegmentation;
use whatlang::Lang;

/// Share of Chinese characters among the letters of a knowledge base from which it counts as Chinese.
const CHINESE_SHARE: f64 = 0.2;
/// Number of passages that are read to detect the language.
const N_PASSAGES: usize = 500;
/// Number of bytes that are read.
const MAX_BYTES: usize = 256 << 10;

/// The configured language of retrieval; `auto` is detected from the first passages of the knowledge base. If these cannot be read it is
/// Chinese, whose segmentation also splits words of other scripts.
pub fn retrieval_language(config: &RetrievalConfig) -> Language {
    match (config.language, config.knowledge_base.as_deref()) {
        (Language::Auto, Some(path)) => detect(&sample(path)),
        (Language::Auto, None) => Language::Zh,
        (language, _) => language,
    }
}

fn sample(path: &Path) -> String {
    let mut text = String::new();
    let Ok(passages) = passages(path) else { return text };
    for (_, passage) in passages.take(N_PASSAGES).filter_map(Result::ok) {
        text.push_str(&passage.full_text());
        text.push('\n');
        if text.len() > MAX_BYTES {
            break;
        }
    }
    text
}

/// Detects the language of a text: Chinese by its script, other languages by their words.
pub(crate) fn detect(text: &str) -> Language {
    let n_letters = text.chars().filter(|character| character.is_alphabetic()).count();
    let n_chinese = text.chars().filter(|character| is_chinese(*character)).count();
    if n_letters == 0 || n_chinese as f64 >= CHINESE_SHARE * n_letters as f64 {
        return Language::Zh;
    }
    match whatlang::detect_lang(text) {
        Some(Lang::Ara) => Language::Ar,
        Some(Lang::Dan) => Language::Da,
        Some(Lang::Nld) => Language::Nl,
        Some(Lang::Eng) => Language::En,
        Some(Lang::Fin) => Language::Fi,
        Some(Lang::Fra) => Language::Fr,
        Some(Lang::Deu) => Language::De,
        Some(Lang::Ell) => Language::El,
        Some(Lang::Hun) => Language::Hu,
        Some(Lang::Ita) => Language::It,
        Some(Lang::Nob) => Language::No,
        Some(Lang::Por) => Language::Pt,
        Some(Lang::Ron) => Language::Ro,
        Some(Lang::Rus) => Language::Ru,
        Some(Lang::Spa) => Language::Es,
        Some(Lang::Swe) => Language::Sv,
        Some(Lang::Tam) => Language::Ta,
        Some(Lang::Tur) => Language::Tr,
        _ => Language::Other,
    }
}

fn algorithm(language: Language) -> Option<Algorithm> {
    Some(match language {
        Language::Ar => Algorithm::Arabic,
        Language::Da => Algorithm::Danish,
        Language::Nl => Algorithm::Dutch,
        Language::En => Algorithm::English,
        Language::Fi => Algorithm::Finnish,
        Language::Fr => Algorithm::French,
        Language::De => Algorithm::German,
        Language::El => Algorithm::Greek,
        Language::Hu => Algorithm::Hungarian,
        Language::It => Algorithm::Italian,
        Language::No => Algorithm::Norwegian,
        Language::Pt => Algorithm::Portuguese,
        Language::Ro => Algorithm::Romanian,
        Language::Ru => Algorithm::Russian,
        Language::Es => Algorithm::Spanish,
        Language::Sv => Algorithm::Swedish,
        Language::Ta => Algorithm::Tamil,
        Language::Tr => Algorithm::Turkish,
        Language::Auto | Language::Zh | Language::Other => return None,
    })
}

/// Splits a lower-case text into stemmed words without accents and punctuation, also at `:` and `_` between letters. `chinese` splits runs
/// of Chinese characters.
pub(crate) fn spaced_words(text: &str, language: Language, chinese: impl Fn(&str) -> Vec<String>) -> Vec<String> {
    let stemmer = algorithm(language).map(Stemmer::create);
    let mut words = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let in_run = is_chinese(first);
        let end = rest.find(|character| is_chinese(character) != in_run).unwrap_or(rest.len());
        let (run, others) = rest.split_at(end);
        if in_run {
            words.extend(chinese(run));
        } else {
            words.extend(run.unicode_words().flat_map(parts).map(|word| stem(word, stemmer.as_ref())));
        }
        rest = others;
    }
    words
}

/// The words of a text and the text between them, unchanged and in order; words are split as by [`spaced_words`].
pub(crate) fn spaced_pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    for word in text.split_word_bounds() {
        let mut end = 0;
        for part in parts(word) {
            if end > 0 {
                // `:` or `_`.
                pieces.push(&word[end..=end]);
                end += 1;
            }
            pieces.push(part);
            end += part.len();
        }
    }
    pieces
}

/// Splits a word of UAX 29 at `:` and `_` between letters, so that `bürger:innen` has the word `bürger`.
fn parts(word: &str) -> Vec<&str> {
    let is_letter = |character: Option<char>| character.is_some_and(char::is_alphabetic);
    let (mut parts, mut start) = (Vec::new(), 0);
    for (at, _) in word.match_indices([':', '_']) {
        if is_letter(word[..at].chars().next_back()) && is_letter(word[at + 1..].chars().next()) {
            parts.push(&word[start..at]);
            start = at + 1;
        }
    }
    parts.push(&word[start..]);
    parts
}

fn stem(word: &str, stemmer: Option<&Stemmer>) -> String {
    // The stemmers support only the ASCII apostrophe.
    let word = word.replace('\u{2019}', "'");
    let stemmed = stemmer.map_or_else(|| word.clone(), |stemmer| stemmer.stem(&word).into_owned());
    stemmed.nfd().filter(|character| !is_combining_mark(*character)).collect()
}

fn is_chinese(character: char) -> bool {
    matches!(character, '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_language_is_detected_by_script_and_words() {
        let texts = [
            ("深海鱼油软胶囊 EPA 的食用方法，每日两粒", Language::Zh),
            (
                "The particulate filter must be rinsed with cold water every three months and dried completely.",
                Language::En,
            ),
            (
                "Der Partikelfilter muss alle drei Monate mit kaltem Wasser gespült und vollständig getrocknet werden.",
                Language::De,
            ),
            (
                "Le filtre doit être rincé à l'eau froide tous les trois mois et complètement séché avant usage.",
                Language::Fr,
            ),
            ("Фильтр необходимо промывать холодной водой каждые три месяца и полностью высушивать.", Language::Ru),
            ("", Language::Zh),
        ];
        for (text, language) in texts {
            assert_eq!(detect(text), language, "{text}");
        }
    }

    /// Symptom: a table counted as Chinese, because it was read as JSON lines.
    #[test]
    fn the_language_of_a_table_is_detected() {
        let (_folder, path) = crate::scratch_file("kb.csv");
        std::fs::write(&path, "id,text\na,The filter must be rinsed with cold water every three months.\n").unwrap();
        assert_eq!(detect(&sample(&path)), Language::En);
    }

    #[test]
    fn words_are_stemmed_and_have_no_accents() {
        let words = |text, language| spaced_words(text, language, |run| vec![run.to_owned()]);
        let expected = ["clean", "the", "custom", "dishwash", "60cm"];
        assert_eq!(words("cleaning the customer’s dishwashers, 60cm", Language::En), expected);
        assert_eq!(words("state-of-the-art", Language::En), ["state", "of", "the", "art"]);
        assert_eq!(words("größe", Language::Other), ["große"]);
        assert_eq!(words("kettle 水壶 boils", Language::En), ["kettl", "水壶", "boil"]);
        assert_eq!(words("", Language::En), Vec::<String>::new());
    }

    /// Symptom: the query `Bürger` did not find `Bürger:innen`, which was one word.
    #[test]
    fn words_are_split_at_colon_and_underscore_between_letters() {
        let words = |text, language| spaced_words(text, language, |run| vec![run.to_owned()]);
        for text in ["bürger:innen", "bürger_innen", "bürger*innen"] {
            assert_eq!(words(text, Language::Other), ["burger", "innen"], "{text}");
            assert_eq!(words(text, Language::De)[0], words("bürger", Language::De)[0], "{text}");
        }
        assert_eq!(words("snake_case_name", Language::Other), ["snake", "case", "name"]);
        assert_eq!(words("10:30 10_000 v1_2", Language::Other), ["10", "30", "10_000", "v1_2"]);
    }
}

//! Entities of a knowledge base: a prefix that several titles share is taken as the name of a product, a contract or a place.

use super::phrases::Phrases;
use querl_data::WordSegmenter;

/// Minimum length of a prefix in characters; a shorter one is a word that two titles share by chance. A Chinese character counts as about
/// half a word.
const MIN_CHARS_SPACED: usize = 5;
const MIN_CHARS_UNSPACED: usize = 3;

/// Entity of each title: the longest run of words that both this title and another one begin with. `None` if there is none, if it is short,
/// or if it is the start of a question.
pub(super) fn entities(titles: &[&str], segmenter: &WordSegmenter, phrases: &Phrases) -> Vec<Option<String>> {
    let mut sorted: Vec<&str> = titles.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let min_chars = if segmenter.is_spaced() { MIN_CHARS_SPACED } else { MIN_CHARS_UNSPACED };
    let entity = |title: &&str| {
        // In sorted order, the longest common prefix is with an adjacent title.
        let at = sorted.partition_point(|other| other < title);
        let neighbours = [at.checked_sub(1), Some(at + 1)].into_iter().flatten();
        let shared = neighbours.filter_map(|index| sorted.get(index)).map(|other| n_shared_bytes(title, other)).max();
        let entity = whole_words(title, shared.unwrap_or_default(), segmenter);
        (entity.chars().count() >= min_chars && !phrases.begins_question(entity)).then(|| entity.to_owned())
    };
    titles.iter().map(entity).collect()
}

/// The part of a title after its entity; the whole title if it has no entity.
pub(super) fn topic<'t>(title: &'t str, entity: Option<&str>) -> &'t str {
    let rest = entity.and_then(|entity| title.strip_prefix(entity));
    rest.map_or(title, |rest| rest.trim_start_matches(is_separator)).trim()
}

fn n_shared_bytes(title: &str, other: &str) -> usize {
    let pairs = title.chars().zip(other.chars());
    pairs.take_while(|(own, theirs)| own == theirs).map(|(own, _)| own.len_utf8()).sum()
}

/// The complete words within the first bytes of a title, without trailing punctuation.
fn whole_words<'t>(title: &'t str, n_bytes: usize, segmenter: &WordSegmenter) -> &'t str {
    let mut end = 0;
    for piece in segmenter.pieces(title) {
        if end + piece.len() > n_bytes {
            break;
        }
        end += piece.len();
    }
    title[..end].trim_end_matches(is_separator)
}

/// True for whitespace, punctuation, and the Chinese particle between a name and a statement about it.
fn is_separator(character: char) -> bool {
    !character.is_alphanumeric() || character == '的'
}

#[cfg(test)]
mod tests {
    use super::super::testing::segmenter;
    use super::*;
    use querl_core::config::Language;

    fn found(language: Language, titles: &[&str]) -> Vec<Option<String>> {
        entities(titles, &segmenter(language), &Phrases::of(language))
    }

    #[test]
    fn titles_share_an_entity_up_to_the_end_of_a_word() {
        let titles =
            ["AquaLine 60: cleaning the filter", "AquaLine 60: fault code E15", "AquaLine 80: salt", "Returns"];
        let expected = [Some("AquaLine 60"), Some("AquaLine 60"), Some("AquaLine"), None];
        assert_eq!(found(Language::En, &titles), expected.map(|entity| entity.map(str::to_owned)));
    }

    #[test]
    fn chinese_titles_share_an_entity_without_a_separator() {
        let titles = ["胶原蛋白肽饮的食用方法", "胶原蛋白肽饮 不适宜人群", "物流"];
        let entity = Some("胶原蛋白肽饮".to_owned());
        assert_eq!(found(Language::Zh, &titles), [entity.clone(), entity, None]);
    }

    #[test]
    fn equal_titles_and_questions_have_no_entity() {
        assert_eq!(found(Language::En, &["Warranty terms", "Warranty terms"]), [None, None]);
        assert_eq!(found(Language::En, &["How do I clean it", "How do I store it"]), [None, None]);
        assert_eq!(found(Language::En, &["", ""]), [None, None]);
    }

    #[test]
    fn the_topic_is_the_rest_of_the_title() {
        assert_eq!(topic("AquaLine 60: fault code E15", Some("AquaLine 60")), "fault code E15");
        assert_eq!(topic("胶原蛋白肽饮的食用方法", Some("胶原蛋白肽饮")), "食用方法");
        assert_eq!((topic("Returns", None), topic("AquaLine", Some("AquaLine"))), ("Returns", ""));
    }
}

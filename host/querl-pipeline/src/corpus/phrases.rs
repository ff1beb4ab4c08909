//! Question words and remarks about earlier turns, by language. They are general words; none is from a query table.

use querl_core::config::Language;

/// Placeholder in a remark for the name of the entity.
pub(super) const ENTITY: &str = "ENTITY";
/// Placeholder in a remark for the name of another entity, which is mentioned but not meant.
pub(super) const OTHER: &str = "OTHER";

/// Question words and remarks of one language. If the lists of question words are empty, queries have no question word.
#[derive(Debug, Clone, Copy)]
pub(super) struct Phrases {
    /// Question words in front of a query.
    pub(super) before: &'static [&'static str],
    /// Question words after a query.
    pub(super) after: &'static [&'static str],
    /// History summaries with the placeholder [`ENTITY`], some also with [`OTHER`].
    pub(super) histories: &'static [&'static str],
}

/// Summaries that contain no words of any language.
const PLAIN: &[&str] = &["ENTITY", "OTHER; ENTITY"];

impl Phrases {
    /// The phrases of Chinese in Traditional characters.
    pub(super) const TRADITIONAL: Self = Self {
        before: &["怎麼", "請問", "如何", "能不能", "什麼時候", "誰", "為什麼"],
        after: &["嗎", "是什麼", "呢", "多少", "在哪裡", "怎麼辦"],
        histories: &["諮詢ENTITY", "先問OTHER，後問ENTITY", "已辦理ENTITY", "先看OTHER，後選了ENTITY", "正在用ENTITY"],
    };

    pub(super) fn of(language: Language) -> Self {
        let before = |before: &'static [&'static str]| Self { before, after: &[], histories: PLAIN };
        match language {
            Language::Zh => Self {
                before: &["怎么", "请问", "如何", "能不能", "什么时候", "谁", "为什么"],
                after: &["吗", "是什么", "呢", "多少", "在哪里", "怎么办"],
                histories: &[
                    "咨询ENTITY",
                    "先问OTHER，后问ENTITY",
                    "已办理ENTITY",
                    "先看OTHER，后选了ENTITY",
                    "正在用ENTITY",
                ],
            },
            Language::En => Self {
                before: &[
                    "how",
                    "what",
                    "why does",
                    "can i",
                    "does",
                    "is",
                    "my",
                    "where is",
                    "when",
                    "do i need",
                    "who",
                ],
                after: &[],
                histories: &[
                    "asked about the ENTITY",
                    "asked about the OTHER, then bought the ENTITY",
                    "has the ENTITY",
                    "owns the ENTITY",
                    "compared the OTHER and the ENTITY, chose the ENTITY",
                ],
            },
            Language::De => before(&["wie", "was ist", "warum", "kann ich", "wo", "wann", "welche", "brauche ich"]),
            Language::Fr => before(&["comment", "pourquoi", "est-ce que", "puis-je", "où", "quand", "quel"]),
            Language::Es => before(&["cómo", "qué", "por qué", "puedo", "dónde", "cuándo", "cuál"]),
            Language::It => before(&["come", "cosa", "perché", "posso", "dove", "quando", "quale"]),
            Language::Pt => before(&["como", "o que", "por que", "posso", "onde", "quando", "qual"]),
            Language::Nl => before(&["hoe", "wat", "waarom", "kan ik", "waar", "wanneer", "welke"]),
            Language::Da => before(&["hvordan", "hvad", "hvorfor", "kan jeg", "hvor", "hvornår"]),
            Language::No => before(&["hvordan", "hva", "hvorfor", "kan jeg", "hvor", "når"]),
            Language::Sv => before(&["hur", "vad", "varför", "kan jag", "var", "när"]),
            Language::Fi => before(&["miten", "mikä", "miksi", "voinko", "missä", "milloin"]),
            Language::Ro => before(&["cum", "ce", "de ce", "pot", "unde", "când"]),
            Language::Hu => before(&["hogyan", "mi", "miért", "lehet", "hol", "mikor"]),
            Language::Ru => before(&["как", "что", "почему", "можно ли", "где", "когда", "сколько"]),
            Language::El => before(&["πώς", "τι", "γιατί", "μπορώ", "πού", "πότε"]),
            Language::Tr => before(&["nasıl", "ne", "neden", "nerede", "ne zaman", "hangi"]),
            Language::Ar => before(&["كيف", "ما", "لماذا", "هل", "أين", "متى"]),
            Language::Ta => before(&["எப்படி", "என்ன", "ஏன்", "எங்கே", "எப்போது"]),
            Language::Auto | Language::Other => before(&[]),
        }
    }

    /// Whether a text begins with a question word, as titles of FAQ entries do.
    pub(super) fn begins_question(&self, text: &str) -> bool {
        let text = text.to_lowercase();
        let begins = |phrase: &str| {
            let first = phrase.split(' ').next().unwrap_or(phrase);
            let rest = text.strip_prefix(first);
            // Chinese has no space after the word.
            let is_chinese = first.starts_with(|character: char| ('\u{4e00}'..='\u{9fff}').contains(&character));
            rest.is_some_and(|rest| is_chinese || !rest.starts_with(char::is_alphanumeric))
        };
        self.before.iter().any(|phrase| begins(phrase))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_known_by_their_first_word() {
        let english = Phrases::of(Language::En);
        assert!(english.begins_question("How do I") && english.begins_question("Where"));
        assert!(!english.begins_question("Whatman filter") && !english.begins_question("Canister"));
        let chinese = Phrases::of(Language::Zh);
        assert!(chinese.begins_question("如何办理") && !chinese.begins_question("套餐"));
        assert!(!Phrases::of(Language::Other).begins_question("how"));
    }

    #[test]
    fn every_remark_names_the_entity() {
        let of_languages = [Language::Zh, Language::En, Language::De, Language::Other].map(Phrases::of);
        for Phrases { histories, .. } in of_languages.into_iter().chain([Phrases::TRADITIONAL]) {
            assert!(histories.iter().all(|history| history.contains(ENTITY)), "{histories:?}");
            assert!(histories.iter().any(|history| !history.contains(OTHER)), "{histories:?}");
        }
    }
}

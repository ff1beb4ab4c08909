//! Coverage of the tokenizer: number of tokens of the tenant's texts, and number of tokens that are only a part of a character.

use super::advice::{Advice, Level, percent, share};
use super::data::{Script, TextFacts};
use querl_model::{ModelError, TextTokenizer};
use serde::Serialize;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

/// Maximum number of characters of a text.
const MAX_CHARS: usize = 2000;
/// Shares of fragments. A byte-level tokenizer splits an unknown Chinese character into three: 5 % are about one unknown character in
/// fifty, 20 % one in ten.
const WEAK_FRAGMENTS: f64 = 0.05;
/// Small byte-level vocabularies with good results are below it: a third with examples/tiny-qwen3.
const BAD_FRAGMENTS: f64 = 0.5;

/// Tokens per character above which a tokenizer is weak, and bad, for texts of a script. Byte-level BPE on the knowledge bases of the examples:
/// trained on Chinese, 1.5 with 512 tokens, 1.0 with 1,024 and 0.6 with 4,096; trained on English, 2.8 of Chinese. On English, 0.7 with 300
/// tokens and 0.2 with 4,096; trained on Chinese, 1.0 of English: each letter is a token, and none is a part of a character. Those of other
/// scripts are not measured: a character has two or three bytes.
fn most_tokens_per_char(script: Option<Script>) -> (f64, f64) {
    match script {
        None => (f64::INFINITY, f64::INFINITY),
        Some(Script::Han | Script::Kana | Script::Hangul) => (1.2, 2.0),
        Some(Script::Latin) => (0.6, 0.9),
        Some(_) => (1.0, 1.5),
    }
}

/// Token counts of a set of texts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Coverage {
    /// Number of characters.
    pub n_chars: usize,
    /// Number of tokens.
    pub n_tokens: usize,
    /// Number of tokens that are a part of a character (byte fallback) or the unknown token.
    pub n_fragments: usize,
    /// The script with the most letters; `None` without letters.
    pub script: Option<Script>,
}

impl Coverage {
    /// Mean number of tokens per character.
    pub fn tokens_per_char(&self) -> f64 {
        share(self.n_tokens, self.n_chars)
    }

    /// Share of tokens that are a part of a character or the unknown token.
    pub fn fragment_share(&self) -> f64 {
        share(self.n_fragments, self.n_tokens)
    }

    fn level(&self) -> Level {
        let (weak, bad) = most_tokens_per_char(self.script);
        let is_above =
            |tokens: f64, fragments: f64| self.tokens_per_char() > tokens || self.fragment_share() > fragments;
        if is_above(bad, BAD_FRAGMENTS) {
            Level::Bad
        } else if is_above(weak, WEAK_FRAGMENTS) {
            Level::Weak
        } else {
            Level::Ok
        }
    }

    /// `0.98 tokens per character of queries (at most 0.6 expected), 0 % of them parts of a character`.
    fn brief(&self, what: &str) -> String {
        let (n_tokens, (most, _)) = (self.tokens_per_char(), most_tokens_per_char(self.script));
        let expected = if n_tokens > most { format!(" (at most {most} expected)") } else { String::new() };
        let fragments = percent(self.fragment_share());
        format!("{n_tokens:.2} tokens per character of {what}{expected}, {fragments} of them parts of a character")
    }
}

/// True if a token's text is not a complete character: its bytes decode to U+FFFD; unknown and special tokens decode to nothing.
fn is_fragment(text: &str) -> bool {
    text.is_empty() || text.contains('\u{fffd}') || (text.starts_with("<0x") && text.ends_with('>'))
}

/// Characters that are encoded as several byte tokens, since the vocabulary has no token for them.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct UnknownChars {
    /// Share of these characters among all characters other than spaces.
    pub share: f64,
    /// The most frequent of these characters.
    pub examples: String,
}

impl UnknownChars {
    /// Share from which unknown characters cause a weak coverage: each has about three fragments.
    const MANY: f64 = 0.02;

    /// `counts`: number of occurrences of each character; `n_chars`: number of all characters but spaces.
    fn of(counts: BTreeMap<char, usize>, n_chars: usize) -> Self {
        const N_EXAMPLES: usize = 12;
        let n_unknown: usize = counts.values().sum();
        let mut unknown: Vec<(usize, char)> = counts.into_iter().map(|(character, n)| (n, character)).collect();
        unknown.sort_by_key(|(n, character)| (std::cmp::Reverse(*n), *character));
        let examples = unknown.iter().take(N_EXAMPLES).map(|(_, character)| *character).collect();
        Self { share: share(n_unknown, n_chars), examples }
    }
}

/// Counts the tokens of texts and the characters without a token; of each text at most the first 2,000 characters.
///
/// # Errors
/// The tokenizer fails.
pub(super) fn coverage<'a>(
    tokenizer: &TextTokenizer,
    texts: impl IntoIterator<Item = &'a str>,
) -> Result<(Coverage, UnknownChars), ModelError> {
    let texts: Vec<&str> = texts.into_iter().collect();
    let script = TextFacts::of(texts.iter().copied()).main_script();
    let mut coverage = Coverage { script, ..Coverage::default() };
    // Token ids that were classified as fragments or not.
    let mut known: HashMap<u32, bool> = HashMap::new();
    let (mut n_visible, mut unknown) = (0, BTreeMap::<char, usize>::new());
    for text in texts {
        let text: String = text.chars().take(MAX_CHARS).collect();
        coverage.n_chars += text.chars().count();
        n_visible += text.chars().filter(|character| !character.is_whitespace()).count();
        let ids = tokenizer.encode(&text)?;
        for id in &ids {
            if let Entry::Vacant(entry) = known.entry(*id) {
                entry.insert(is_fragment(&tokenizer.decode(&[*id])?));
            }
        }
        coverage.n_tokens += ids.len();
        for fragments in ids.chunk_by(|one, other| known[one] == known[other]).filter(|run| known[&run[0]]) {
            coverage.n_fragments += fragments.len();
            let text = tokenizer.decode(fragments)?;
            for character in text.chars().filter(|character| !character.is_whitespace() && *character != '\u{fffd}') {
                *unknown.entry(character).or_default() += 1;
            }
        }
    }
    Ok((coverage, UnknownChars::of(unknown, n_visible)))
}

/// Coverage of queries and passages by the tokenizer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenizerFacts {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Tokenizer statistics of a sample of the queries.
    pub unknown_query_chars: UnknownChars,
    /// Tokenizer statistics of a sample of the queries.
    pub queries: Coverage,
    /// Tokenizer statistics of a sample of the passages; `None` if the passages are not known.
    pub passages: Option<Coverage>,
}

impl TokenizerFacts {
    /// The coverage as advice in words, by the worse of queries and passages.
    pub fn advice(&self) -> Advice {
        let passages = self.passages.as_ref().map(|passages| format!("; {}", passages.brief("passages")));
        let mut finding = format!("{}{}", self.queries.brief("queries"), passages.unwrap_or_default());
        let level = self.passages.iter().map(Coverage::level).fold(self.queries.level(), Level::max);
        let UnknownChars { share, examples } = &self.unknown_query_chars;
        let lacks_chars = *share > UnknownChars::MANY;
        if level > Level::Unknown && lacks_chars {
            finding += &format!("; {} of the queries' characters have no token, such as {examples}", percent(*share));
        }
        let action = match level {
            Level::Bad | Level::Weak if lacks_chars => {
                "for your own small model: append everyday texts with these characters to its corpus as `text`, and pretrain again; otherwise \
                 take a model whose tokenizer knows them"
            }
            Level::Bad => {
                "take a model whose tokenizer knows this language, or pretrain one on its texts; fine-tuning cannot change it"
            }
            Level::Weak => "try a model whose tokenizer knows more of this language, or raise rl.max_new_tokens",
            _ => "nothing to do",
        };
        Advice::new("tokenizer", level, finding, action)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_model::{TokenizerSettings, train_tokenizer};

    #[test]
    fn fragments_are_bytes_and_unknown_tokens() {
        let fragments = ["", "\u{fffd}", "a\u{fffd}", "<0xE4>"];
        assert!(fragments.iter().all(|text| is_fragment(text)));
        assert!(["a", " ", "维", "<b>"].iter().all(|text| !is_fragment(text)));
    }

    #[test]
    fn the_worse_of_queries_and_passages_decides() {
        let of = |n_tokens, n_fragments| Coverage { n_chars: 100, n_tokens, n_fragments, script: None };
        let facts = |queries, passages| TokenizerFacts {
            vocab_size: 9,
            unknown_query_chars: UnknownChars::default(),
            queries,
            passages,
        };
        assert_eq!(facts(of(60, 1), Some(of(60, 3))).advice().level, Level::Ok);
        assert_eq!(facts(of(60, 1), Some(of(60, 4))).advice().level, Level::Weak);
        let bad = facts(of(300, 290), None).advice();
        assert_eq!(bad.level, Level::Bad);
        assert_eq!(bad.finding, "3.00 tokens per character of queries, 97 % of them parts of a character");
        assert_eq!(Coverage::default().tokens_per_char(), 0.0);
    }

    /// Regression: characters of queries that no passage has were not named, and the advice was what had been done: pretrain on the texts.
    #[test]
    fn characters_without_a_token_are_named_with_what_gives_them_one() {
        let folder = tempfile::tempdir().unwrap();
        let special_tokens = &["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
        let settings = TokenizerSettings { vocab_size: 400, special_tokens };
        let texts = vec!["挂 失 银 行 卡 ".repeat(20); 20];
        train_tokenizer(&texts, &settings, &folder.path().join("tokenizer.json")).unwrap();
        let special = r#"{"eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}"#;
        std::fs::write(folder.path().join("tokenizer_config.json"), special).unwrap();
        let tokenizer = TextTokenizer::load(folder.path()).unwrap();
        let queries = ["我 银行卡 我", "啥挂失"];
        let (queries, unknown_query_chars) = coverage(&tokenizer, queries).unwrap();
        assert_eq!(unknown_query_chars, UnknownChars { share: 3.0 / 8.0, examples: "我啥".into() });
        let advice = TokenizerFacts { vocab_size: 400, unknown_query_chars, queries, passages: None }.advice();
        let named = "38 % of the queries' characters have no token, such as 我啥";
        assert!(advice.finding.ends_with(named), "{advice:?}");
        assert!(advice.action.contains("as `text`, and pretrain again"), "{advice:?}");
    }

    /// Regression: a tokenizer that was trained on Chinese makes a token of each English letter, none of them a part of a character, and was ok.
    #[test]
    fn many_tokens_per_character_are_judged_by_script() {
        let advice = |script, n_tokens| {
            let queries = Coverage { n_chars: 100, n_tokens, n_fragments: 0, script: Some(script) };
            let unknown_query_chars = UnknownChars::default();
            TokenizerFacts { vocab_size: 9, unknown_query_chars, queries, passages: None }.advice()
        };
        let levels = |script, n_tokens: [usize; 3]| n_tokens.map(|n| advice(script, n).level);
        let expected = [Level::Ok, Level::Weak, Level::Bad];
        assert_eq!(levels(Script::Latin, [60, 61, 98]), expected);
        assert_eq!(levels(Script::Han, [105, 149, 280]), expected);
        assert_eq!(levels(Script::Cyrillic, [100, 120, 180]), expected);
        let finding = "0.98 tokens per character of queries (at most 0.6 expected), 0 % of them parts of a character";
        assert_eq!(advice(Script::Latin, 98).finding, finding);
    }
}

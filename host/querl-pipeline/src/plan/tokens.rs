//! Coverage of the tokenizer: how many tokens the tenant's texts take, and how many of those are parts of a character.

use super::advice::{Advice, Level, percent, share};
use querl_model::{ModelError, TextTokenizer};
use serde::Serialize;
use std::collections::HashMap;

/// Most characters of a text that are counted.
const MAX_CHARS: usize = 2000;
/// Shares of fragments. A byte-level tokenizer makes three of a Chinese character that it does not know: 5 % are about one unknown
/// character in fifty, 20 % one in ten.
const WEAK_FRAGMENTS: f64 = 0.05;
/// Small byte-level vocabularies that learn well are below it: a third with examples/tiny-qwen3.
const BAD_FRAGMENTS: f64 = 0.5;

/// Tokens of a set of texts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Coverage {
    /// Characters.
    pub n_chars: usize,
    /// Tokens.
    pub n_tokens: usize,
    /// Tokens that are a part of a character (byte fallback), or unknown.
    pub n_fragments: usize,
}

impl Coverage {
    /// Tokens per character.
    pub fn tokens_per_char(&self) -> f64 {
        share(self.n_tokens, self.n_chars)
    }

    /// Share of tokens that are parts of a character or unknown.
    pub fn fragment_share(&self) -> f64 {
        share(self.n_fragments, self.n_tokens)
    }

    /// Counts the tokens of texts, of each at most 2,000 characters.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn of<'a>(tokenizer: &TextTokenizer, texts: impl IntoIterator<Item = &'a str>) -> Result<Self, ModelError> {
        let (mut coverage, mut known) = (Self::default(), HashMap::new());
        for text in texts {
            let text: String = text.chars().take(MAX_CHARS).collect();
            coverage.n_chars += text.chars().count();
            for id in tokenizer.encode(&text)? {
                let is_fragment = match known.get(&id) {
                    Some(is_fragment) => *is_fragment,
                    None => {
                        let found = is_fragment(&tokenizer.decode(&[id])?);
                        known.insert(id, found);
                        found
                    }
                };
                coverage.n_tokens += 1;
                coverage.n_fragments += usize::from(is_fragment);
            }
        }
        Ok(coverage)
    }
}

/// Whether the text of one token is no whole character: bytes of one decode to U+FFFD, unknown and special tokens to nothing.
fn is_fragment(text: &str) -> bool {
    text.is_empty() || text.contains('\u{fffd}') || (text.starts_with("<0x") && text.ends_with('>'))
}

/// Coverage of queries and passages.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenizerFacts {
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Of a sample of the queries.
    pub queries: Coverage,
    /// Of a sample of the passages.
    pub passages: Option<Coverage>,
}

impl TokenizerFacts {
    fn worst(&self) -> f64 {
        self.passages.iter().chain([&self.queries]).map(Coverage::fragment_share).fold(0.0, f64::max)
    }

    /// In words.
    pub fn advice(&self) -> Advice {
        let of = |what: &str, coverage: &Coverage| {
            format!(
                "{:.2} tokens per character of {what}, {} of them parts of a character",
                coverage.tokens_per_char(),
                percent(coverage.fragment_share())
            )
        };
        let passages = self.passages.as_ref().map(|passages| format!("; {}", of("passages", passages)));
        let finding = format!("{}{}", of("queries", &self.queries), passages.unwrap_or_default());
        let worst = self.worst();
        let (level, action) = match worst {
            _ if worst > BAD_FRAGMENTS => {
                (Level::Bad, "take a model whose tokenizer knows this language; fine-tuning cannot mend it")
            }
            _ if worst > WEAK_FRAGMENTS => (
                Level::Weak,
                "compare a model whose tokenizer knows more of this language; allow more rl.max_new_tokens",
            ),
            _ => (Level::Ok, "nothing to do"),
        };
        Advice::new("tokenizer", level, finding, action)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_are_bytes_and_unknown_tokens() {
        let fragments = ["", "\u{fffd}", "a\u{fffd}", "<0xE4>"];
        assert!(fragments.iter().all(|text| is_fragment(text)));
        assert!(["a", " ", "维", "<b>"].iter().all(|text| !is_fragment(text)));
    }

    #[test]
    fn the_worse_of_queries_and_passages_decides() {
        let of = |n_tokens, n_fragments| Coverage { n_chars: 100, n_tokens, n_fragments };
        let facts = |queries, passages| TokenizerFacts { vocab_size: 9, queries, passages };
        assert_eq!(facts(of(60, 1), Some(of(60, 3))).advice().level, Level::Ok);
        assert_eq!(facts(of(60, 1), Some(of(60, 4))).advice().level, Level::Weak);
        let bad = facts(of(300, 290), None).advice();
        assert_eq!(bad.level, Level::Bad);
        assert_eq!(bad.finding, "3.00 tokens per character of queries, 97 % of them parts of a character");
        assert_eq!(Coverage::default().tokens_per_char(), 0.0);
    }
}

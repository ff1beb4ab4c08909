//! Words of a Chinese text, as index and reranker see them.

use crate::error::DataError;
use crate::text::fold;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use tantivy::tokenizer::{LowerCaser, TextAnalyzer, Token, TokenStream, Tokenizer};
use tantivy_jieba::jieba_rs::{Jieba, TokenizeMode};

/// Loaded once: the dictionary has 350,000 words.
static DEFAULT: LazyLock<Arc<Jieba>> = LazyLock::new(|| Arc::new(Jieba::new()));

/// Cuts texts into words: jieba's search mode with its hidden Markov model, letters lower-case. Clones share the dictionary.
#[derive(Clone)]
pub(crate) struct Segmenter(Arc<Jieba>);

impl Default for Segmenter {
    fn default() -> Self {
        Self(DEFAULT.clone())
    }
}

impl std::fmt::Debug for Segmenter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Segmenter")
    }
}

impl Segmenter {
    /// The usual dictionary with a tenant's words besides: a file with a word a line, in jieba's form (`word [frequency] [tag]`),
    /// and `words`. Without a frequency, a word gets one at which it stays whole.
    ///
    /// # Errors
    /// The file cannot be read, or a frequency is no number.
    pub(crate) fn with_words<'a>(
        dictionary: Option<&Path>,
        words: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, DataError> {
        let mut jieba = Jieba::new();
        if let Some(path) = dictionary {
            for (word, frequency) in read_dictionary(path)? {
                jieba.add_word(&word, frequency, None);
            }
        }
        for word in words {
            jieba.add_word(&fold(word), None, None);
        }
        Ok(Self(Arc::new(jieba)))
    }

    /// The analyser of the index.
    pub(crate) fn analyser(&self) -> TextAnalyzer {
        TextAnalyzer::builder(self.clone()).filter(LowerCaser).build()
    }

    /// The distinct words of a text in order of appearance, punctuation and white space left out.
    pub(crate) fn words(&self, text: &str) -> Vec<String> {
        let mut words: Vec<String> = Vec::new();
        for token in self.0.tokenize(text, TokenizeMode::Search, true) {
            let word = token.word.to_lowercase();
            if word.chars().any(char::is_alphanumeric) && !words.contains(&word) {
                words.push(word);
            }
        }
        words
    }
}

fn read_dictionary(path: &Path) -> Result<Vec<(String, Option<usize>)>, DataError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| DataError::file(path, format!("cannot be read: {error}; check retrieval.user_dictionary")))?;
    let lines = text.lines().zip(1..).map(|(line, number)| (line.trim(), number));
    let entries = lines.filter(|(line, _)| !line.is_empty() && !line.starts_with('#'));
    entries
        .map(|(line, number)| {
            let mut parts = line.split_whitespace();
            let word = fold(parts.next().unwrap_or_default());
            let Some(frequency) = parts.next() else { return Ok((word, None)) };
            match frequency.parse() {
                Ok(frequency) => Ok((word, Some(frequency))),
                Err(_) => Err(DataError::file(
                    path,
                    format!("line {number} has the frequency `{frequency}`; expected `word [frequency] [tag]`"),
                )),
            }
        })
        .collect()
}

impl Tokenizer for Segmenter {
    type TokenStream<'a> = Words;

    fn token_stream<'a>(&'a mut self, text: &'a str) -> Words {
        let found = self.0.tokenize(text, TokenizeMode::Search, true).into_iter();
        let tokens: Vec<Token> = found
            .map(|token| {
                let offset_from = token.word.as_ptr() as usize - text.as_ptr() as usize;
                Token {
                    offset_from,
                    offset_to: offset_from + token.word.len(),
                    position: token.start,
                    text: token.word.to_owned(),
                    position_length: token.end - token.start,
                }
            })
            .collect();
        Words { tokens, n_passed: 0 }
    }
}

/// The tokens of one text.
pub(crate) struct Words {
    tokens: Vec<Token>,
    n_passed: usize,
}

impl TokenStream for Words {
    fn advance(&mut self) -> bool {
        self.n_passed += 1;
        self.n_passed <= self.tokens.len()
    }

    fn token(&self) -> &Token {
        &self.tokens[self.n_passed - 1]
    }

    fn token_mut(&mut self) -> &mut Token {
        &mut self.tokens[self.n_passed - 1]
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_tenant_stay_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("words.txt");
        std::fs::write(&path, "# ours\n雨生红球藻片\n轻盈小绿瓶 100000 nz\n").unwrap();
        let plain = Segmenter::default().words("雨生红球藻片和轻盈小绿瓶");
        assert!(!plain.contains(&"雨生红球藻片".to_owned()), "{plain:?}");
        let own = Segmenter::with_words(Some(&path), ["蓝帽标"]).unwrap();
        let words = own.words("雨生红球藻片和轻盈小绿瓶看蓝帽标");
        for word in ["雨生红球藻片", "轻盈小绿瓶", "蓝帽标"] {
            assert!(words.contains(&word.to_owned()), "{words:?}");
        }
    }

    #[test]
    fn a_dictionary_with_a_broken_line_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("words.txt");
        std::fs::write(&path, "甲\n乙 many\n").unwrap();
        let error = Segmenter::with_words(Some(&path), []).unwrap_err().to_string();
        assert!(error.ends_with("line 2 has the frequency `many`; expected `word [frequency] [tag]`"), "{error}");
    }

    #[test]
    fn the_analyser_sees_the_same_words() {
        let text = "深海鱼油软胶囊 EPA 的食用方法";
        let mut analyser = Segmenter::default().analyser();
        let mut stream = analyser.token_stream(text);
        let mut seen = Vec::new();
        while let Some(token) = stream.next() {
            assert_eq!(text[token.offset_from..token.offset_to].to_lowercase(), token.text);
            seen.push(token.text.clone());
        }
        assert!(Segmenter::default().words(text).iter().all(|word| seen.contains(word)), "{seen:?}");
    }
}

//! Words of a Chinese text, as index and reranker see them.

use tantivy::tokenizer::{LowerCaser, TextAnalyzer};
use tantivy_jieba::JiebaTokenizer;

/// The analyser of the index: jieba's search mode, letters lower-case.
pub(crate) fn analyser() -> TextAnalyzer {
    TextAnalyzer::builder(JiebaTokenizer::new()).filter(LowerCaser).build()
}

/// The distinct words of a text in order of appearance, punctuation and white space left out.
pub(crate) fn words(text: &str) -> Vec<String> {
    let mut analyser = analyser();
    let mut stream = analyser.token_stream(text);
    let mut words: Vec<String> = Vec::new();
    while let Some(token) = stream.next() {
        if token.text.chars().any(char::is_alphanumeric) && !words.contains(&token.text) {
            words.push(token.text.clone());
        }
    }
    words
}

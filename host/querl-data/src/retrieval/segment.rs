//! Words of a Chinese text, as index and reranker see them.

use crate::error::DataError;
use crate::table::read_text;
use crate::text::fold;
use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
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
    /// The default dictionary with a tenant's words added: a file with a word a line, in jieba's form (`word [frequency] [tag]`),
    /// and `words`. Without a frequency, a word gets one at which it stays whole. Words of the file that are cut all the same, for a
    /// space in them or a low frequency, are warned of.
    pub(crate) fn with_words<'a>(
        dictionary: Option<&Path>,
        words: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, DataError> {
        let entries = dictionary.map_or_else(|| Ok(Vec::new()), read_dictionary)?;
        let own = entries.iter().map(|entry| (entry.word.clone(), entry.frequency));
        let segmenter = Self(shared(own.chain(words.into_iter().map(|word| (fold(word), None))).collect()));
        if let (Some(path), Some(warning)) = (dictionary, segmenter.cut_entries(&entries)) {
            tracing::warn!("{}: {warning}", path.display());
        }
        Ok(segmenter)
    }

    fn cut_entries(&self, entries: &[Entry]) -> Option<String> {
        let cut: Vec<&Entry> = entries.iter().filter(|entry| !self.keeps_whole(&entry.word)).collect();
        let Entry { word, line, .. } = cut.first()?;
        Some(format!(
            "{} word(s) are cut into smaller ones all the same, the first in line {line}: `{word}`",
            cut.len()
        ))
    }

    pub(crate) fn keeps_whole(&self, word: &str) -> bool {
        self.tokens(word).iter().any(|token| token == word)
    }

    pub(crate) fn analyser(&self) -> TextAnalyzer {
        TextAnalyzer::builder(self.clone()).filter(LowerCaser).build()
    }

    /// The words of a text in order of appearance, punctuation and white space left out. A long word comes after its parts.
    pub(crate) fn tokens(&self, text: &str) -> Vec<String> {
        let words = self.0.tokenize(text, TokenizeMode::Search, true).into_iter();
        words.map(|token| token.word.to_lowercase()).filter(|word| word.chars().any(char::is_alphanumeric)).collect()
    }

    pub(crate) fn words(&self, text: &str) -> Vec<String> {
        let mut seen = HashSet::new();
        let mut words = self.tokens(text);
        words.retain(|word| seen.insert(word.clone()));
        words
    }
}

type OwnWords = Vec<(String, Option<usize>)>;

/// The usual dictionary with these words, the same one for all who have the same: the index and the rubric judge of a tenant.
fn shared(words: OwnWords) -> Arc<Jieba> {
    static KNOWN: Mutex<Vec<(OwnWords, Weak<Jieba>)>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|(_, jieba)| jieba.strong_count() > 0);
    if let Some(jieba) = known.iter().find(|(own, _)| *own == words).and_then(|(_, jieba)| jieba.upgrade()) {
        return jieba;
    }
    let mut jieba = Jieba::new();
    for (word, frequency) in &words {
        jieba.add_word(word, *frequency, None);
    }
    let jieba = Arc::new(jieba);
    known.push((words, Arc::downgrade(&jieba)));
    jieba
}

/// A line of a user dictionary.
#[derive(Debug)]
struct Entry {
    word: String,
    frequency: Option<usize>,
    line: usize,
}

fn read_dictionary(path: &Path) -> Result<Vec<Entry>, DataError> {
    let text = read_text(path)?;
    let lines = text.lines().map(str::trim).zip(1..).filter(|(text, _)| !text.is_empty() && !text.starts_with('#'));
    let entry = |(text, line): (&str, usize)| {
        entry(text, line).map_err(|frequency| {
            let problem = format!("line {line} has the frequency `{frequency}`; expected `word [frequency] [tag]`");
            DataError::file(path, problem)
        })
    };
    lines.map(entry).collect()
}

/// Read from its end, as jieba does: a word may have spaces in it.
fn entry(text: &str, line: usize) -> Result<Entry, String> {
    let last = |text, is_it: fn(char) -> bool| match str::rsplit_once(text, char::is_whitespace) {
        Some((rest, last)) if last.chars().all(is_it) => (rest.trim_end(), Some(last)),
        _ => (text, None),
    };
    let (text, _tag) = last(text, |c| c.is_ascii_lowercase());
    let (word, frequency) = last(text, |c| c.is_ascii_digit());
    let frequency = frequency.map(|number| number.parse().map_err(|_| number.to_owned())).transpose()?;
    Ok(Entry { word: fold(word), frequency, line })
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

    /// The lines are those of the sample that comes with jieba.
    #[test]
    fn a_dictionary_is_read_from_the_end_of_its_lines() {
        let read = |text| entry(text, 1).map(|entry| (entry.word, entry.frequency));
        for (line, word, frequency) in [
            ("云计算 5", "云计算", Some(5)),
            ("李小福 2 nr", "李小福", Some(2)),
            ("创新办 3 i", "创新办", Some(3)),
            ("easy_install 3 eng", "easy_install", Some(3)),
            ("好用 300", "好用", Some(300)),
            ("韩玉赏鉴 3 nz", "韩玉赏鉴", Some(3)),
            ("八一双鹿 3 nz", "八一双鹿", Some(3)),
            ("台中", "台中", None),
            ("凱特琳 nz", "凱特琳", None),
            ("Edu Trust认证 2000", "edu trust认证", Some(2000)),
        ] {
            assert_eq!(read(line), Ok((word.to_owned(), frequency)), "{line}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("words.txt");
        std::fs::write(&path, "甲\n乙 99999999999999999999999 n\n").unwrap();
        let error = Segmenter::with_words(Some(&path), []).unwrap_err().to_string();
        let expected = "line 2 has the frequency `99999999999999999999999`; expected `word [frequency] [tag]`";
        assert!(error.ends_with(expected), "{error}");
    }

    /// Regression: words of a list that changes nothing, unsaid.
    #[test]
    fn words_that_are_cut_all_the_same_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("words.txt");
        std::fs::write(&path, "维生素c\nvitamin c 3\nEdu Trust认证 2000\n").unwrap();
        let entries = read_dictionary(&path).unwrap();
        let segmenter = Segmenter::with_words(Some(&path), []).unwrap();
        let said = segmenter.cut_entries(&entries).unwrap();
        assert_eq!(said, "2 word(s) are cut into smaller ones all the same, the first in line 2: `vitamin c`");
        assert!(segmenter.words(&fold("每天吃维生素C吗")).contains(&"维生素c".to_owned()));
    }

    /// Regression: the first word of a list saved by a spreadsheet that never matches, a list in GB18030 that is refused.
    #[test]
    fn a_dictionary_may_begin_with_a_byte_order_mark_or_be_gb18030() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("words.txt");
        let text = "雨生红球藻片\n轻盈小绿瓶\n";
        for bytes in [format!("\u{feff}{text}").into_bytes(), encoding_rs::GB18030.encode(text).0.into_owned()] {
            std::fs::write(&path, bytes).unwrap();
            let words = Segmenter::with_words(Some(&path), []).unwrap().words("雨生红球藻片和轻盈小绿瓶");
            assert!(["雨生红球藻片", "轻盈小绿瓶"].iter().all(|word| words.contains(&(*word).to_owned())), "{words:?}");
        }
    }

    /// Regression: 350,000 words in memory for each who reads them.
    #[test]
    fn who_has_the_same_words_shares_a_dictionary() {
        let with = |word| Segmenter::with_words(None, [word]).unwrap();
        let (first, second, third) = (with("蓝帽标一"), with("蓝帽标一"), with("蓝帽标二"));
        assert!(Arc::ptr_eq(&first.0, &second.0) && !Arc::ptr_eq(&first.0, &third.0));
    }

    /// Regression: a long text of distinct words that takes minutes.
    #[test]
    fn distinct_words_of_a_long_text_are_found_quickly() {
        let text: String = (0..200_000).map(|number| format!("{number} ")).collect();
        let started = std::time::Instant::now();
        assert_eq!(Segmenter::default().words(&text).len(), 200_000);
        assert!(started.elapsed() < std::time::Duration::from_secs(5), "{:?}", started.elapsed());
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

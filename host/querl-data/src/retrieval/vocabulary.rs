//! Vocabulary of a tenant for index, reranker and rubric judge: segmentation of Chinese text into words with a user dictionary, and
//! synonyms. A query with one entry of a synonym group finds passages with any entry of it.

use crate::error::DataError;
use crate::retrieval::language::{retrieval_language, spaced_pieces, spaced_words};
use crate::table::read_text;
use crate::text::{fold, normalise, simplified};
use querl_core::config::{Language, RetrievalConfig};
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use tantivy::tokenizer::{LowerCaser, TextAnalyzer, Token, TokenStream, Tokenizer};
use tantivy_jieba::jieba_rs::{Jieba, TokenizeMode};

/// A tenant's user dictionary and synonyms.
pub(crate) struct Vocabulary {
    pub(crate) segmenter: Segmenter,
    pub(crate) synonyms: Synonyms,
}

impl Vocabulary {
    /// Reads the configured user dictionary and synonyms. Synonyms are added to the user dictionary.
    pub(crate) fn open(config: &RetrievalConfig) -> Result<Self, DataError> {
        Self::open_in(config, retrieval_language(config))
    }

    /// Like [`open`](Self::open), for a known language, which is not detected.
    pub(crate) fn open_in(config: &RetrievalConfig, language: Language) -> Result<Self, DataError> {
        let synonyms = config.synonyms.as_deref().map_or_else(|| Ok(Synonyms::default()), Synonyms::read)?;
        let segmenter = match (&config.user_dictionary, &config.synonyms) {
            (None, None) => Segmenter::default(),
            (dictionary, _) => Segmenter::with_words(dictionary.as_deref(), synonyms.entries())?,
        };
        let segmenter = segmenter.in_language(language);
        let synonyms = synonyms.segmented_by(&segmenter);
        Ok(Self { segmenter, synonyms })
    }
}

/// The default dictionary of 350,000 words.
static DEFAULT: LazyLock<Arc<Jieba>> = LazyLock::new(|| Arc::new(Jieba::new()));

/// Segmentation into lower-case words: Chinese by jieba's search mode with its hidden Markov model, in Simplified characters, other
/// languages by spaces, with stemming. Clones share the dictionary.
#[derive(Clone)]
pub(crate) struct Segmenter {
    jieba: Arc<Jieba>,
    /// Words that were added to the default dictionary of `jieba`.
    own_words: Arc<OwnWords>,
    language: Language,
}

impl Default for Segmenter {
    fn default() -> Self {
        Self { jieba: DEFAULT.clone(), own_words: Arc::default(), language: Language::Zh }
    }
}

impl std::fmt::Debug for Segmenter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Segmenter")
    }
}

impl Segmenter {
    /// A segmenter for Chinese with the default dictionary and `own_words`.
    fn of(own_words: OwnWords) -> Self {
        Self { jieba: shared(&own_words), own_words: own_words.into(), language: Language::Zh }
    }

    pub(crate) fn in_language(self, language: Language) -> Self {
        Self { language, ..self }
    }

    pub(crate) fn language(&self) -> Language {
        self.language
    }

    /// True if words are separated by spaces (languages other than Chinese).
    pub(crate) fn is_spaced(&self) -> bool {
        self.language != Language::Zh
    }

    /// The form of a text in which phrases of a lexicon are matched: Chinese text in Simplified characters without spaces and punctuation,
    /// in other languages the stemmed words separated by spaces.
    pub(crate) fn phrase_form(&self, text: &str) -> String {
        if self.is_spaced() { self.tokens(&fold(text)).join(" ") } else { normalise(&simplified(text)) }
    }

    /// Adds `words` and the words of a file in jieba's format (one `word [frequency] [tag]` per line) to the default dictionary. A word
    /// without a frequency gets one with which it is not split. Logs a warning for words of the file that are split anyway, because of a
    /// space or a low frequency.
    pub(crate) fn with_words<'a>(
        dictionary: Option<&Path>,
        words: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, DataError> {
        let entries = dictionary.map_or_else(|| Ok(Vec::new()), read_dictionary)?;
        let own = entries.iter().map(|entry| (simplified(&entry.word).into_owned(), entry.frequency));
        let words = words.into_iter().map(|word| (simplified(&fold(word)).into_owned(), None));
        let segmenter = Self::of(own.chain(words).collect());
        if let (Some(path), Some(warning)) = (dictionary, segmenter.split_entries(&entries)) {
            tracing::warn!("{}: {warning}", path.display());
        }
        Ok(segmenter)
    }

    fn split_entries(&self, entries: &[DictionaryEntry]) -> Option<String> {
        let split: Vec<&DictionaryEntry> = entries.iter().filter(|entry| !self.is_one_word(&entry.word)).collect();
        let DictionaryEntry { word, line, .. } = split.first()?;
        Some(format!(
            "{} word(s) are cut into smaller ones all the same, the first in line {line}: `{word}`",
            split.len()
        ))
    }

    pub(crate) fn is_one_word(&self, word: &str) -> bool {
        let word = simplified(word);
        self.tokens(&word).iter().any(|token| *token == word)
    }

    pub(crate) fn analyser(&self) -> TextAnalyzer {
        TextAnalyzer::builder(self.clone()).filter(LowerCaser).build()
    }

    /// The words of a text in order, without punctuation and white space. A long word comes after its parts.
    pub(crate) fn tokens(&self, text: &str) -> Vec<String> {
        match self.is_spaced() {
            true => spaced_words(&text.to_lowercase(), self.language, |run| self.by_jieba(run)),
            false => self.by_jieba(text),
        }
    }

    fn by_jieba(&self, text: &str) -> Vec<String> {
        let text = simplified(text);
        let words = self.jieba.tokenize(&text, TokenizeMode::Search, true).into_iter();
        words.map(|token| token.word.to_lowercase()).filter(|word| word.chars().any(char::is_alphanumeric)).collect()
    }

    /// Splits a text into words and the text between them, in order.
    fn pieces<'a>(&self, text: &'a str) -> Vec<&'a str> {
        match self.is_spaced() {
            true => spaced_pieces(text),
            false => {
                let folded = simplified(text);
                let tokens = self.jieba.cut(&folded, true);
                tokens.iter().map(|token| &text[token.byte_start..token.byte_end]).collect()
            }
        }
    }

    pub(crate) fn words(&self, text: &str) -> Vec<String> {
        let mut seen = HashSet::new();
        let mut words = self.tokens(text);
        words.retain(|word| seen.insert(word.clone()));
        words
    }
}

/// Word segmentation with the configured user dictionary and synonyms, also available if retrieval is a service; without them it uses the
/// default dictionary.
#[derive(Debug, Clone, Default)]
pub struct WordSegmenter(Segmenter);

impl WordSegmenter {
    /// Opens the configured user dictionary and synonyms.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn open(config: &RetrievalConfig) -> Result<Self, DataError> {
        Ok(Self(Vocabulary::open(config)?.segmenter))
    }

    /// The segmenter of a language with words of its own: [`language`](Self::language) and [`own_words`](Self::own_words) of another one.
    pub(crate) fn of(language: Language, own_words: OwnWords) -> Self {
        let segmenter = if own_words.is_empty() { Segmenter::default() } else { Segmenter::of(own_words) };
        Self(segmenter.in_language(language))
    }

    /// Words that were added to the default dictionary, with their frequencies.
    pub(crate) fn own_words(&self) -> &OwnWords {
        &self.0.own_words
    }

    /// The words of a text in order, lower-case, without punctuation and white space. A long word comes after its parts.
    pub fn words(&self, text: &str) -> Vec<String> {
        self.0.tokens(text)
    }

    /// The language that texts are segmented in: the configured one, or the one detected from the passages; never `auto`.
    pub fn language(&self) -> Language {
        self.0.language()
    }

    /// True if words are separated by spaces (languages other than Chinese).
    pub fn is_spaced(&self) -> bool {
        self.0.is_spaced()
    }

    /// Splits a text into words and the text between them, unchanged and in order.
    pub fn pieces<'a>(&self, text: &'a str) -> Vec<&'a str> {
        self.0.pieces(text)
    }

    /// `text` without the words that `other` also has; one space replaces each removed part.
    pub fn text_without_words_of(&self, text: &str, other: &str) -> String {
        let known: HashSet<String> = self.0.tokens(&fold(other)).into_iter().collect();
        let is_new = |word: &str| {
            let words = self.0.tokens(&fold(word));
            !words.is_empty() && words.iter().any(|word| !known.contains(word))
        };
        let mut remaining = String::new();
        let mut is_apart = false;
        for word in self.0.pieces(text) {
            if is_new(word) {
                if is_apart && !remaining.is_empty() {
                    remaining.push(' ');
                }
                remaining.push_str(word);
                is_apart = false;
            } else {
                is_apart = true;
            }
        }
        remaining
    }
}

pub(crate) type OwnWords = Vec<(String, Option<usize>)>;

/// The default dictionary with `words`, shared by all segmenters with the same words (index and rubric judge of a tenant).
fn shared(words: &OwnWords) -> Arc<Jieba> {
    static KNOWN: Mutex<Vec<(OwnWords, Weak<Jieba>)>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|(_, jieba)| jieba.strong_count() > 0);
    if let Some(jieba) = known.iter().find(|(own, _)| own == words).and_then(|(_, jieba)| jieba.upgrade()) {
        return jieba;
    }
    let mut jieba = Jieba::new();
    for (word, frequency) in words {
        jieba.add_word(word, *frequency, None);
    }
    let jieba = Arc::new(jieba);
    known.push((words.clone(), Arc::downgrade(&jieba)));
    jieba
}

#[derive(Debug)]
struct DictionaryEntry {
    word: String,
    frequency: Option<usize>,
    line: usize,
}

fn read_dictionary(path: &Path) -> Result<Vec<DictionaryEntry>, DataError> {
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

/// Parses a line from its end, as jieba does: a word may contain spaces.
fn entry(text: &str, line: usize) -> Result<DictionaryEntry, String> {
    let last = |text, is_it: fn(char) -> bool| match str::rsplit_once(text, char::is_whitespace) {
        Some((rest, last)) if last.chars().all(is_it) => (rest.trim_end(), Some(last)),
        _ => (text, None),
    };
    let (text, _tag) = last(text, |c| c.is_ascii_lowercase());
    let (word, frequency) = last(text, |c| c.is_ascii_digit());
    let frequency = frequency.map(|number| number.parse().map_err(|_| number.to_owned())).transpose()?;
    Ok(DictionaryEntry { word: fold(word), frequency, line })
}

impl Tokenizer for Segmenter {
    type TokenStream<'a> = Words;

    fn token_stream<'a>(&'a mut self, text: &'a str) -> Words {
        if self.is_spaced() {
            let token = |(position, text)| Token { position, text, ..Token::default() };
            return Words { tokens: self.tokens(text).into_iter().enumerate().map(token).collect(), n_passed: 0 };
        }
        let text = simplified(text);
        let found = self.jieba.tokenize(&text, TokenizeMode::Search, true).into_iter();
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

/// Words of one text.
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

/// Groups of synonymous words and phrases.
#[derive(Debug, Clone, Default)]
pub(crate) struct Synonyms {
    groups: Vec<Vec<String>>,
    group_of: HashMap<String, usize>,
    segmented: SegmentedGroups,
}

#[derive(Debug, Clone, Default)]
struct SegmentedGroups {
    groups: Vec<Vec<Vec<String>>>,
    /// By the first word of an entry: its words and its group, long entries first.
    by_first: HashMap<String, Vec<(Vec<String>, usize)>>,
}

#[derive(Debug, PartialEq)]
pub(crate) enum QueryPart<'a> {
    Word(&'a str),
    Group(&'a [Vec<String>]),
}

impl Synonyms {
    /// Reads a file with one group per line, separated by commas (`,` or `，`). Skips empty lines and lines that begin with `#`.
    pub(crate) fn read(path: &Path) -> Result<Self, DataError> {
        let text = read_text(path)?;
        let mut synonyms = Self::default();
        for (line, number) in text.lines().zip(1..) {
            let line = line.trim();
            if !line.is_empty() && !line.starts_with('#') {
                synonyms.add(line).map_err(|problem| DataError::file(path, format!("line {number} {problem}")))?;
            }
        }
        Ok(synonyms)
    }

    fn add(&mut self, line: &str) -> Result<(), String> {
        let mut entries: Vec<String> = line.split([',', '，']).map(|entry| fold(entry.trim())).collect();
        entries.retain(|entry| !entry.is_empty());
        entries.dedup();
        if entries.len() < 2 {
            return Err(format!("has `{line}`; expected words of one meaning, separated by commas"));
        }
        for entry in &entries {
            if self.group_of.insert(entry.clone(), self.groups.len()).is_some() {
                return Err(format!("has `{entry}`, which is in this or an earlier line already; join the two"));
            }
        }
        self.groups.push(entries);
        Ok(())
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flatten().map(String::as_str)
    }

    /// Segments the entries of all groups with `segmenter`, as queries are. An entry of several words (`vitamin c`) matches these words
    /// in sequence.
    pub(crate) fn segmented_by(mut self, segmenter: &Segmenter) -> Self {
        let words = |entry: &String| match segmenter.is_one_word(entry) {
            true => vec![simplified(entry).into_owned()],
            false => segmenter.tokens(entry),
        };
        self.segmented = SegmentedGroups::default();
        for (group, entries) in self.groups.iter().enumerate() {
            let entries: Vec<Vec<String>> = entries.iter().map(words).filter(|words| !words.is_empty()).collect();
            for words in &entries {
                self.segmented.by_first.entry(words[0].clone()).or_default().push((words.clone(), group));
            }
            self.segmented.groups.push(entries);
        }
        let by_first = self.segmented.by_first.values_mut();
        by_first.for_each(|entries| entries.sort_by_key(|(words, _)| std::cmp::Reverse(words.len())));
        self
    }

    /// The words of a query as query parts: single words with the number of times that the query has them, and synonym groups, each once,
    /// since a long word and its part may be of one group.
    pub(crate) fn parts<'a>(&'a self, words: &'a [String]) -> Vec<(QueryPart<'a>, usize)> {
        let (mut parts, mut rest) = (Vec::<(QueryPart<'a>, usize)>::new(), words);
        let (mut seen_words, mut seen_groups) = (HashMap::<&String, usize>::new(), HashSet::new());
        while let [first, others @ ..] = rest {
            let mut entries = self.segmented.by_first.get(first).into_iter().flatten();
            match entries.find(|(words, _)| rest.starts_with(words)) {
                Some((words, group)) => {
                    if seen_groups.insert(*group) {
                        parts.push((QueryPart::Group(&self.segmented.groups[*group]), 1));
                    }
                    rest = &rest[words.len()..];
                }
                None => {
                    let part = *seen_words.entry(first).or_insert_with(|| {
                        parts.push((QueryPart::Word(first), 0));
                        parts.len() - 1
                    });
                    parts[part].1 += 1;
                    rest = others;
                }
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn user_words_are_not_split() {
        let (_folder, path) = crate::scratch_file("words.txt");
        std::fs::write(&path, "# ours\n雨生红球藻片\n轻盈小绿瓶 100000 nz\n").unwrap();
        let plain = Segmenter::default().words("雨生红球藻片和轻盈小绿瓶");
        assert!(!plain.contains(&"雨生红球藻片".to_owned()), "{plain:?}");
        let own = Segmenter::with_words(Some(&path), ["蓝帽标"]).unwrap();
        let words = own.words("雨生红球藻片和轻盈小绿瓶看蓝帽标");
        for word in ["雨生红球藻片", "轻盈小绿瓶", "蓝帽标"] {
            assert!(words.contains(&word.to_owned()), "{words:?}");
        }
    }

    /// Symptom: of 60 queries in Traditional Chinese, 39 found nothing.
    #[test]
    fn traditional_and_simplified_texts_have_the_same_words() {
        let (_folder, path) = crate::scratch_file("words.txt");
        std::fs::write(&path, "鳳凰轉帳卡\n").unwrap();
        let segmenter = Segmenter::with_words(Some(&path), ["雙幣約定"]).unwrap();
        let (traditional, simplified) = ("鳳凰轉帳卡遺失後的掛失與雙幣約定", "凤凰转帐卡遗失后的挂失与双币约定");
        let words = segmenter.words(traditional);
        assert_eq!(words, segmenter.words(simplified));
        assert!(["凤凰转帐卡", "挂失", "双币约定"].iter().all(|word| words.contains(&(*word).to_owned())), "{words:?}");
        assert_eq!(segmenter.phrase_form(traditional), simplified);
        assert_eq!(segmenter.pieces(traditional).concat(), traditional);
        let segmenter = WordSegmenter(segmenter);
        assert_eq!(segmenter.text_without_words_of("掛失 手續費", "挂失"), "手續費");
    }

    /// The lines are from jieba's sample dictionary.
    #[test]
    fn dictionary_lines_are_parsed_from_their_end() {
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
        let (_folder, path) = crate::scratch_file("words.txt");
        std::fs::write(&path, "甲\n乙 99999999999999999999999 n\n").unwrap();
        let error = Segmenter::with_words(Some(&path), []).unwrap_err().to_string();
        let expected = "line 2 has the frequency `99999999999999999999999`; expected `word [frequency] [tag]`";
        assert!(error.ends_with(expected), "{error}");
    }

    /// Regression: no warning for words without effect.
    #[test]
    fn split_user_words_are_reported() {
        let (_folder, path) = crate::scratch_file("words.txt");
        std::fs::write(&path, "维生素c\nvitamin c 3\nEdu Trust认证 2000\n").unwrap();
        let entries = read_dictionary(&path).unwrap();
        let segmenter = Segmenter::with_words(Some(&path), []).unwrap();
        let warning = segmenter.split_entries(&entries).unwrap();
        assert_eq!(warning, "2 word(s) are cut into smaller ones all the same, the first in line 2: `vitamin c`");
        assert!(segmenter.words(&fold("每天吃维生素C吗")).contains(&"维生素c".to_owned()));
    }

    /// Regression: the first word after a byte order mark never matched, and GB18030 was rejected.
    #[test]
    fn a_dictionary_may_have_a_byte_order_mark_or_be_gb18030() {
        let (_folder, path) = crate::scratch_file("words.txt");
        let text = "雨生红球藻片\n轻盈小绿瓶\n";
        for bytes in [format!("\u{feff}{text}").into_bytes(), encoding_rs::GB18030.encode(text).0.into_owned()] {
            std::fs::write(&path, bytes).unwrap();
            let words = Segmenter::with_words(Some(&path), []).unwrap().words("雨生红球藻片和轻盈小绿瓶");
            assert!(["雨生红球藻片", "轻盈小绿瓶"].iter().all(|word| words.contains(&(*word).to_owned())), "{words:?}");
        }
    }

    /// Regression: each segmenter held 350,000 words.
    #[test]
    fn segmenters_with_the_same_words_share_a_dictionary() {
        let with = |word| Segmenter::with_words(None, [word]).unwrap();
        let (first, second, third) = (with("蓝帽标一"), with("蓝帽标一"), with("蓝帽标二"));
        assert!(Arc::ptr_eq(&first.jieba, &second.jieba) && !Arc::ptr_eq(&first.jieba, &third.jieba));
    }

    /// Regression: quadratic time for a long text of distinct words.
    #[test]
    fn distinct_words_of_a_long_text_are_found_quickly() {
        let text: String = (0..200_000).map(|number| format!("{number} ")).collect();
        let started = std::time::Instant::now();
        assert_eq!(Segmenter::default().words(&text).len(), 200_000);
        assert!(started.elapsed() < std::time::Duration::from_secs(5), "{:?}", started.elapsed());
    }

    #[test]
    fn the_analyser_produces_the_same_words() {
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

    #[test]
    fn what_a_text_adds_to_another_remains() {
        let chinese = WordSegmenter::default();
        assert_eq!(chinese.text_without_words_of("鱼油 食用方法", "鱼油怎么吃"), "食用方法");
        assert_eq!(chinese.text_without_words_of("鱼油", "鱼油怎么吃"), "");
        let english = WordSegmenter(Segmenter::default().in_language(Language::En));
        let rest = english
            .text_without_words_of("HydroJet kettle: limescale removal cycle", "how do I remove scale from kettles");
        assert_eq!(rest, "HydroJet limescale cycle");
        // Symptom: `Bürger` remained, since `Bürger:innen` was one piece of two words.
        let german = WordSegmenter(Segmenter::default().in_language(Language::De));
        assert_eq!(german.text_without_words_of("Bürger:innen Antrag", "Bürger"), "innen Antrag");
        let expected = ["Bürger", ":", "innen", ",", " ", "snake", "_", "case"];
        assert_eq!(german.pieces("Bürger:innen, snake_case"), expected);
    }

    fn read_synonyms(text: &str) -> Result<Synonyms, String> {
        let (_folder, path) = crate::scratch_file("synonyms.txt");
        std::fs::write(&path, text).unwrap();
        Synonyms::read(&path).map_err(|error| error.to_string())
    }

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn an_entry_matches_its_group_and_words_are_counted() {
        let synonyms = read_synonyms("\u{feff}多少钱， 价格,ＰＲＩＣＥ\n# others\n\n维生素c,vitamin c\n").unwrap();
        assert_eq!(synonyms.entries().count(), 5);
        let segmenter = Segmenter::with_words(None, synonyms.entries()).unwrap();
        let synonyms = synonyms.segmented_by(&segmenter);
        let (prices, vitamins) = (
            [strings(&["多少钱"]), strings(&["价格"]), strings(&["price"])],
            [strings(&["维生素c"]), strings(&["vitamin", "c"])],
        );
        let words = strings(&["鱼油", "价格", "vitamin", "c", "多少钱", "鱼油", "vitamin", "e"]);
        let expected = [
            (QueryPart::Word("鱼油"), 2),
            (QueryPart::Group(&prices), 1),
            (QueryPart::Group(&vitamins), 1),
            (QueryPart::Word("vitamin"), 1),
            (QueryPart::Word("e"), 1),
        ];
        assert_eq!(synonyms.parts(&words), expected);
        // Symptom: one clause for each of the words took 19 seconds.
        assert_eq!(synonyms.parts(&vec!["鱼油".to_owned(); 20_000]), [(QueryPart::Word("鱼油"), 20_000)]);
    }

    #[test]
    fn invalid_groups_are_reported() {
        assert!(
            read_synonyms("价格\n")
                .unwrap_err()
                .ends_with("line 1 has `价格`; expected words of one meaning, separated by commas")
        );
        assert!(
            read_synonyms("甲,乙\n丙,甲\n")
                .unwrap_err()
                .ends_with("line 2 has `甲`, which is in this or an earlier line already; join the two")
        );
    }
}

//! Number, size and language of queries and passages.

use super::advice::{Advice, Level, percent, share};
use querl_core::config::Language;
use serde::Serialize;
use std::collections::BTreeMap;

/// Expected minimum number of training rows; `stages/funnel.rs` warns below the same number.
const FEW_TRAINING_ROWS: usize = 240;

/// Writing system of a letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Script {
    Han,
    Kana,
    Hangul,
    Latin,
    Cyrillic,
    Greek,
    Hebrew,
    Arabic,
    Devanagari,
    Thai,
    Other,
}

impl Script {
    /// Script of a letter; `None` for digits, punctuation and spaces.
    fn of(character: char) -> Option<Self> {
        if !character.is_alphabetic() {
            return None;
        }
        // Blocks of the Unicode standard.
        Some(match u32::from(character) {
            0x3400..=0x4dbf | 0x4e00..=0x9fff | 0xf900..=0xfaff | 0x20000..=0x323af => Self::Han,
            0x3040..=0x30ff | 0x31f0..=0x31ff | 0xff66..=0xff9f => Self::Kana,
            0x1100..=0x11ff | 0x3130..=0x318f | 0xac00..=0xd7af => Self::Hangul,
            0x0041..=0x024f | 0x1e00..=0x1eff | 0xff21..=0xff5a => Self::Latin,
            0x0370..=0x03ff => Self::Greek,
            0x0400..=0x052f => Self::Cyrillic,
            0x0590..=0x05ff => Self::Hebrew,
            0x0600..=0x06ff | 0x0750..=0x077f => Self::Arabic,
            0x0900..=0x097f => Self::Devanagari,
            0x0e00..=0x0e7f => Self::Thai,
            _ => Self::Other,
        })
    }
}

/// Size and scripts of a set of texts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TextFacts {
    /// Number of texts.
    pub n_texts: usize,
    /// Mean length of a text in characters.
    pub mean_chars: f64,
    /// Share of each script among the letters.
    pub scripts: BTreeMap<Script, f64>,
    /// Language or script guessed from `scripts`, such as `Chinese` or `Latin script`.
    pub language: &'static str,
}

impl TextFacts {
    /// Counts the characters and scripts of texts.
    pub fn of<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut n_texts, mut n_chars, mut counts) = (0, 0, BTreeMap::<Script, usize>::new());
        for text in texts {
            n_texts += 1;
            for character in text.chars() {
                n_chars += 1;
                if let Some(script) = Script::of(character) {
                    *counts.entry(script).or_default() += 1;
                }
            }
        }
        let n_letters: usize = counts.values().sum();
        let scripts: BTreeMap<Script, f64> =
            counts.into_iter().map(|(script, n)| (script, n as f64 / n_letters as f64)).collect();
        let language = language(&scripts);
        Self { n_texts, mean_chars: n_chars as f64 / n_texts.max(1) as f64, scripts, language }
    }

    /// The script with the most letters; `None` without letters.
    pub fn main_script(&self) -> Option<Script> {
        self.scripts.iter().max_by(|one, other| one.1.total_cmp(other.1)).map(|(script, _)| *script)
    }

    /// A finding with a remedy if queries and `passages` are in different scripts. Texts of one language may be: Japanese has two.
    pub(super) fn script_mismatch(&self, passages: &Self) -> Option<String> {
        let (own, theirs) = (self.main_script()?, passages.main_script()?);
        (own != theirs && self.language != passages.language).then(|| {
            format!(
                "queries ({}) and passages ({}) are in different scripts: save the table as UTF-8 if its characters are not right; else use an \
                 embedding model of both languages, or let the teacher translate",
                self.language, passages.language
            )
        })
    }

    fn brief(&self, what: &str) -> String {
        let main = self.scripts.values().copied().fold(0.0, f64::max);
        let (n, n_chars, language) = (self.n_texts, self.mean_chars, self.language);
        format!("{n} {what} of {n_chars:.0} characters on average, {language} ({} of letters)", percent(main))
    }
}

/// The language by the shares of scripts. Japanese mixes kana with Han characters; Korean may mix Han characters with Hangul.
fn language(scripts: &BTreeMap<Script, f64>) -> &'static str {
    let share = |script| scripts.get(&script).copied().unwrap_or(0.0);
    if share(Script::Kana) > 0.05 {
        return "Japanese";
    }
    if share(Script::Hangul) > 0.3 {
        return "Korean";
    }
    let main = scripts.iter().max_by(|one, other| one.1.total_cmp(other.1));
    match main.filter(|(_, share)| **share >= 0.5).map(|(script, _)| *script) {
        Some(Script::Han) => "Chinese",
        Some(Script::Latin) => "Latin script",
        Some(Script::Cyrillic) => "Cyrillic script",
        Some(Script::Greek) => "Greek",
        Some(Script::Hebrew) => "Hebrew",
        Some(Script::Arabic) => "Arabic script",
        Some(Script::Devanagari) => "Devanagari script",
        Some(Script::Thai) => "Thai",
        Some(Script::Kana | Script::Hangul | Script::Other) => "other script",
        None if scripts.is_empty() => "no letters",
        None => "mixed scripts",
    }
}

/// Facts about the query table, and about the splits if the data stages are finished.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DataFacts {
    /// Size and scripts of the queries.
    pub queries: TextFacts,
    /// Size and scripts of the passages; `None` if the passages are not known.
    pub passages: Option<TextFacts>,
    /// Language of the passages of an embedded index, configured or detected (`retrieval.language`).
    pub passage_language: Option<Language>,
    /// Number of queries whose gold passages are known.
    pub n_with_gold: usize,
    /// Number of queries with a history summary.
    pub n_with_history: usize,
    /// Number of rows of train, val and test; before the data stages, computed from the configured shares.
    pub n_rows: [usize; 3],
    /// Number of query groups of the test split; paraphrases of one query form one group.
    pub n_test_groups: usize,
    /// Number of training rows whose rewrite passed the filters; `None` before the data stages.
    pub n_targets: Option<usize>,
}

impl DataFacts {
    /// The facts about the data as advice in words.
    pub fn advice(&self) -> Advice {
        let [train, val, test] = self.n_rows;
        let passages = self.passages.as_ref().map(|passages| format!("; {}", passages.brief("passages")));
        let language = self.passage_language.map(|language| format!(", language {language:?}").to_lowercase());
        let source = if self.n_targets.is_some() { "" } else { " (expected)" };
        let history = match self.n_with_history {
            0 => String::new(),
            n => format!(", {n} ({}) with a history", percent(share(n, self.queries.n_texts))),
        };
        let finding = format!(
            "{}{}{}; {train} train, {val} val, {test} test rows{source}, {} queries with gold passages{history}",
            self.queries.brief("queries"),
            passages.unwrap_or_default(),
            language.unwrap_or_default(),
            self.n_with_gold
        );
        let n_train = self.n_targets.unwrap_or(train);
        let rows = match self.n_targets {
            Some(n) if n < train => format!("{n} rows of train have a rewrite that passed the filters, for SFT: these"),
            _ => format!("{n_train} rows to train on"),
        };
        let mismatch = self.passages.as_ref().and_then(|passages| self.queries.script_mismatch(passages));
        let (level, action) = match mismatch {
            Some(mismatch) => (Level::Weak, mismatch),
            _ if n_train < FEW_TRAINING_ROWS => (
                Level::Weak,
                format!("add queries: {rows} are few, {FEW_TRAINING_ROWS} or more are usual"),
            ),
            _ if self.n_with_gold == 0 => (
                Level::Weak,
                "name gold passages for val and test at least (data.gold_column): without them only reranker scores are compared".to_owned(),
            ),
            _ => (Level::Ok, "nothing to do".to_owned()),
        };
        Advice::new("data", level, finding, action)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_follow_from_their_scripts() {
        for (text, expected) in [
            ("胶原蛋白肽怎么吃?", "Chinese"),
            ("ビタミンの飲み方", "Japanese"),
            ("비타민 복용법", "Korean"),
            ("How do I take vitamin D3?", "Latin script"),
            ("Как принимать", "Cyrillic script"),
            ("12345 ?!", "no letters"),
            ("维生素 vita 병원", "mixed scripts"),
        ] {
            assert_eq!(TextFacts::of([text]).language, expected, "{text}");
        }
        let facts = TextFacts::of(["维生素C", "abcd"]);
        assert_eq!((facts.n_texts, facts.mean_chars), (2, 4.0));
        assert_eq!(facts.scripts, [(Script::Han, 0.375), (Script::Latin, 0.625)].into());
    }

    fn facts(query: &str, passage: &str, n_train: usize, n_with_gold: usize) -> DataFacts {
        DataFacts {
            queries: TextFacts::of([query]),
            passages: Some(TextFacts::of([passage])),
            passage_language: Some(Language::En),
            n_with_gold,
            n_with_history: 0,
            n_rows: [n_train, 40, 40],
            n_test_groups: 40,
            n_targets: Some(n_train),
        }
    }

    #[test]
    fn data_that_is_too_small_or_in_two_languages_is_reported_with_what_to_do() {
        let of = |facts: DataFacts| facts.advice();
        assert_eq!(of(facts("query", "passage", 500, 9)).level, Level::Ok);
        // Symptom: a Korean table that was read as GB18030.
        let garbled = of(facts("鉴埃", "빨간불", 500, 9)).action;
        let expected = "queries (Chinese) and passages (Korean) are in different scripts: save the table as UTF-8 if its characters";
        assert!(garbled.starts_with(expected), "{garbled}");
        let japanese = of(facts("住民票取得方法は", "これはかなのおおい文です", 500, 9));
        assert_eq!(japanese.level, Level::Ok, "{japanese:?}");
        assert!(of(facts("query", "passage", 239, 9)).action.starts_with("add queries: 239 rows"));
        assert!(of(facts("query", "passage", 240, 0)).action.contains("data.gold_column"));
        // Regression: fewer rows than the line has as `train` were not explained, and histories not counted.
        let filtered = of(DataFacts { n_rows: [250, 40, 40], n_with_history: 1, ..facts("query", "passage", 153, 9) });
        let expected =
            "add queries: 153 rows of train have a rewrite that passed the filters, for SFT: these are few, ";
        assert!(filtered.action.starts_with(expected), "{filtered:?}");
        assert!(filtered.finding.ends_with(", 9 queries with gold passages, 1 (100 %) with a history"), "{filtered:?}");
        let text = of(facts("query", "passage", 500, 9)).finding;
        let expected = "1 queries of 5 characters on average, Latin script (100 % of letters); 1 passages of 7 characters on average, Latin \
                        script (100 % of letters), language en; 500 train, 40 val, 40 test rows, 9 queries with gold passages";
        assert_eq!(text, expected);
    }
}

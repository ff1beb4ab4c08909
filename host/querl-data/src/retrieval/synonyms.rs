//! A tenant's synonyms for the index: a query for one entry of a group finds passages with any.

use crate::error::DataError;
use crate::retrieval::segment::Segmenter;
use crate::table::read_text;
use crate::text::fold;
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// Groups of entries that mean the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Synonyms {
    groups: Vec<Vec<String>>,
    group_of: HashMap<String, usize>,
    cut: SegmentedGroups,
}

/// The same, cut into words.
#[derive(Debug, Clone, Default)]
struct SegmentedGroups {
    groups: Vec<Vec<Vec<String>>>,
    /// By an entry's first word: its words and its group, long entries first.
    by_first: HashMap<String, Vec<(Vec<String>, usize)>>,
}

/// A part of a query.
#[derive(Debug, PartialEq)]
pub(crate) enum QueryPart<'a> {
    Word(&'a str),
    Group(&'a [Vec<String>]),
}

impl Synonyms {
    /// Reads a file with a group a line, its entries separated by commas (`,` or `，`); empty lines and those that begin with `#` are
    /// passed over.
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
                return Err(format!("has `{entry}`, which stands there or in an earlier line already; join the two"));
            }
        }
        self.groups.push(entries);
        Ok(())
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flatten().map(String::as_str)
    }

    /// The same groups, found in queries that `segmenter` cuts. An entry that is several words for it (`vitamin c`) is found where
    pub(crate) fn segmented_by(mut self, segmenter: &Segmenter) -> Self {
        let words = |entry: &String| match segmenter.keeps_whole(entry) {
            true => vec![entry.clone()],
            false => segmenter.tokens(entry),
        };
        self.cut = SegmentedGroups::default();
        for (group, entries) in self.groups.iter().enumerate() {
            let entries: Vec<Vec<String>> = entries.iter().map(words).filter(|words| !words.is_empty()).collect();
            for words in &entries {
                self.cut.by_first.entry(words[0].clone()).or_default().push((words.clone(), group));
            }
            self.cut.groups.push(entries);
        }
        self.cut
            .by_first
            .values_mut()
            .for_each(|entries| entries.sort_by_key(|(words, _)| std::cmp::Reverse(words.len())));
        self
    }

    /// The words of a query as parts, each word and each group once, however often it is named.
    pub(crate) fn parts<'a>(&'a self, words: &'a [String]) -> Vec<QueryPart<'a>> {
        let (mut parts, mut rest) = (Vec::new(), words);
        let (mut seen_words, mut seen_groups) = (HashSet::new(), HashSet::new());
        while let [first, others @ ..] = rest {
            let mut entries = self.cut.by_first.get(first).into_iter().flatten();
            match entries.find(|(words, _)| rest.starts_with(words)) {
                Some((words, group)) => {
                    if seen_groups.insert(*group) {
                        parts.push(QueryPart::Group(&self.cut.groups[*group]));
                    }
                    rest = &rest[words.len()..];
                }
                None => {
                    if seen_words.insert(first) {
                        parts.push(QueryPart::Word(first));
                    }
                    rest = others;
                }
            }
        }
        parts
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Synonyms, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("synonyms.txt");
        std::fs::write(&path, text).unwrap();
        Synonyms::read(&path).map_err(|error| error.to_string())
    }

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn an_entry_stands_for_its_group_and_a_group_counts_once() {
        let synonyms = read("\u{feff}多少钱， 价格,ＰＲＩＣＥ\n# others\n\n维生素c,vitamin c\n").unwrap();
        assert_eq!(synonyms.entries().count(), 5);
        let segmenter = Segmenter::with_words(None, synonyms.entries()).unwrap();
        let synonyms = synonyms.segmented_by(&segmenter);
        let (prices, vitamins) = (
            [strings(&["多少钱"]), strings(&["价格"]), strings(&["price"])],
            [strings(&["维生素c"]), strings(&["vitamin", "c"])],
        );
        let words = strings(&["鱼油", "价格", "vitamin", "c", "多少钱", "鱼油", "vitamin", "e"]);
        let expected = [
            QueryPart::Word("鱼油"),
            QueryPart::Group(&prices),
            QueryPart::Group(&vitamins),
            QueryPart::Word("vitamin"),
            QueryPart::Word("e"),
        ];
        assert_eq!(synonyms.parts(&words), expected);
    }

    #[test]
    fn groups_that_are_none_are_named() {
        assert!(
            read("价格\n")
                .unwrap_err()
                .ends_with("line 1 has `价格`; expected words of one meaning, separated by commas")
        );
        assert!(
            read("甲,乙\n丙,甲\n")
                .unwrap_err()
                .ends_with("line 2 has `甲`, which stands there or in an earlier line already; join the two")
        );
    }
}

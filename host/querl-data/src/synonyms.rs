//! A tenant's synonyms for the index: a query for one word finds passages with any of its group.

use crate::error::DataError;
use crate::text::fold;
use std::collections::HashMap;
use std::path::Path;

/// Groups of words that mean the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Synonyms {
    groups: Vec<Vec<String>>,
    group_of: HashMap<String, usize>,
}

impl Synonyms {
    /// Reads a file with a group a line, its words separated by commas (`,` or `，`); empty lines and those that begin with `#` are
    /// passed over.
    ///
    /// # Errors
    /// The file cannot be read, a group has one word alone, a word stands in two groups.
    pub(crate) fn read(path: &Path) -> Result<Self, DataError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| DataError::file(path, format!("cannot be read: {error}; check retrieval.synonyms")))?;
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
        let mut words: Vec<String> = line.split([',', '，']).map(|word| fold(word.trim())).collect();
        words.retain(|word| !word.is_empty());
        words.dedup();
        if words.len() < 2 {
            return Err(format!("has `{line}`; expected words of one meaning, separated by commas"));
        }
        for word in &words {
            if self.group_of.insert(word.clone(), self.groups.len()).is_some() {
                return Err(format!("has `{word}`, which stands there or in an earlier line already; join the two"));
            }
        }
        self.groups.push(words);
        Ok(())
    }

    /// All words.
    pub(crate) fn words(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flatten().map(String::as_str)
    }

    /// The words that mean the same as a folded word, itself among them.
    pub(crate) fn of<'a>(&'a self, word: &'a str) -> Vec<&'a str> {
        match self.group_of.get(word) {
            Some(group) => self.groups[*group].iter().map(String::as_str).collect(),
            None => vec![word],
        }
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

    #[test]
    fn a_word_stands_for_its_group() {
        let synonyms = read("# prices\n多少钱， 价格,ＰＲＩＣＥ\n\n怎么吃,食用方法\n").unwrap();
        assert_eq!(synonyms.of("价格"), ["多少钱", "价格", "price"]);
        assert_eq!(synonyms.of("鱼油"), ["鱼油"]);
        assert_eq!(synonyms.words().count(), 5);
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

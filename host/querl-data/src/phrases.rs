//! Finding known phrases in a text: leftmost first, the longest at each place, never overlapping.

use std::collections::HashMap;

/// A set of phrases, each with what it stands for.
#[derive(Debug, Clone)]
pub(crate) struct PhraseTable<T> {
    /// By first character, longest first: a text of a hundred characters is looked through once, not once for each phrase.
    entries: HashMap<char, Vec<(Vec<char>, T)>>,
}

/// One phrase found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Found<T> {
    /// First character.
    pub(crate) start: usize,
    /// Characters.
    pub(crate) len: usize,
    /// What the phrase stands for.
    pub(crate) value: T,
}

impl<T: Copy> PhraseTable<T> {
    /// Phrases are compared as they come: normalise both sides alike. Of equal phrases the first wins.
    pub(crate) fn new(phrases: impl IntoIterator<Item = (String, T)>) -> Self {
        let mut entries: Vec<(Vec<char>, T)> =
            phrases.into_iter().map(|(phrase, value)| (phrase.chars().collect(), value)).collect();
        entries.retain(|(phrase, _)| !phrase.is_empty());
        entries.sort_by_key(|(phrase, _)| std::cmp::Reverse(phrase.len()));
        let mut by_first: HashMap<char, Vec<(Vec<char>, T)>> = HashMap::new();
        for entry in entries {
            by_first.entry(entry.0[0]).or_default().push(entry);
        }
        Self { entries: by_first }
    }

    /// All phrases in `text`, in order.
    pub(crate) fn find(&self, text: &[char]) -> Vec<Found<T>> {
        let mut found = Vec::new();
        let mut start = 0;
        while start < text.len() {
            let mut entries = self.entries.get(&text[start]).into_iter().flatten();
            match entries.find(|(phrase, _)| text[start..].starts_with(phrase)) {
                Some((phrase, value)) => {
                    found.push(Found { start, len: phrase.len(), value: *value });
                    start += phrase.len();
                }
                None => start += 1,
            }
        }
        found
    }
}

/// `text` with the found phrases cut out; a space stands in each place, so that its neighbours do not join.
pub(crate) fn without<T>(text: &[char], found: &[Found<T>]) -> Vec<char> {
    let mut rest = Vec::with_capacity(text.len());
    let mut position = 0;
    for phrase in found {
        rest.extend_from_slice(&text[position..phrase.start]);
        rest.push(' ');
        position = phrase.start + phrase.len;
    }
    rest.extend_from_slice(&text[position..]);
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_phrase_wins_and_hides_what_it_contains() {
        let table = PhraseTable::new([("适宜人群".to_owned(), 3), ("不适宜人群".to_owned(), 2)]);
        let text: Vec<char> = "看不适宜人群".chars().collect();
        assert_eq!(table.find(&text), [Found { start: 1, len: 5, value: 2 }]);
    }
}

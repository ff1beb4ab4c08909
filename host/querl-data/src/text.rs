//! One way to fold text for comparison, shared by tables, lexicon and index.

/// Full-width forms become half-width and letters lower-case; nothing is removed, so positions in characters stay.
pub(crate) fn fold(text: &str) -> String {
    text.chars().map(fold_char).flat_map(char::to_lowercase).collect()
}

/// What is left of a text for comparison: folded, without white space and punctuation.
pub fn normalise(text: &str) -> String {
    fold(text).chars().filter(|character| character.is_alphanumeric()).collect()
}

fn fold_char(character: char) -> char {
    match character {
        '\u{3000}' => ' ',
        // The full-width forms stand in ASCII's order.
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(character as u32 - 0xfee0).unwrap_or(character),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn width_case_space_and_punctuation_do_not_count() {
        assert_eq!(normalise("ＶＣ 泡腾片，怎么吃？"), normalise("vc泡腾片怎么吃"));
    }
}

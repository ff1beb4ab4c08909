//! Passages as lines of text: sentences, and pieces that fit into a small model's context.

/// Maximum number of characters of a line of text, including its title: 100 to 500 tokens with a tokenizer for the text's language.
const MAX_CHARS: usize = 400;

/// The sentences of a text, without the white space around them.
pub(super) fn sentences(text: &str) -> Vec<&str> {
    sentence_spans(text).into_iter().map(str::trim).filter(|sentence| !sentence.is_empty()).collect()
}

/// Splits a passage into lines of at most 400 characters that each begin with the title, split between sentences. A sentence that is too
/// long is split itself.
pub(super) fn text_pieces(title: &str, text: &str) -> Vec<String> {
    let heading = if title.is_empty() { String::new() } else { format!("{title}\n") };
    let budget = MAX_CHARS.saturating_sub(heading.chars().count()).max(MAX_CHARS / 2);
    let spans = sentence_spans(text).into_iter().flat_map(|sentence| char_chunks(sentence, budget));
    let mut bodies: Vec<(String, usize)> = Vec::new();
    for span in spans {
        let n_chars = span.chars().count();
        match bodies.last_mut().filter(|(_, n)| *n + n_chars <= budget) {
            Some((body, n)) => {
                body.push_str(span);
                *n += n_chars;
            }
            None => bodies.push((span.to_owned(), n_chars)),
        }
    }
    let bodies = bodies.iter().map(|(body, _)| body.trim()).filter(|body| !body.is_empty());
    bodies.map(|body| format!("{heading}{body}")).collect()
}

/// Splits a text after the ends of its sentences, without losing characters.
fn sentence_spans(text: &str) -> Vec<&str> {
    let mut spans = Vec::new();
    let mut start = 0;
    let mut characters = text.char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        let next = characters.peek().map(|(_, next)| *next);
        if ends_sentence(character, next) {
            let end = at + character.len_utf8();
            spans.push(&text[start..end]);
            start = end;
        }
    }
    if start < text.len() {
        spans.push(&text[start..]);
    }
    spans
}

/// True if a character ends a sentence. A full stop within `4.5` or `a.b` does not.
fn ends_sentence(character: char, next: Option<char>) -> bool {
    match character {
        '。' | '！' | '？' | '；' | '؟' | '।' | '\n' => true,
        '.' | '!' | '?' | ';' => next.is_none_or(char::is_whitespace),
        _ => false,
    }
}

/// Splits a text into parts of `n` characters; the last one may be shorter.
fn char_chunks(text: &str, n: usize) -> Vec<&str> {
    let mut bounds: Vec<usize> = text.char_indices().map(|(at, _)| at).step_by(n).collect();
    bounds.push(text.len());
    bounds.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_end_at_marks_of_both_scripts_and_not_within_numbers() {
        let found = sentences("Rinse it at 4.5 bar. Dry it!  Then refit\nthe cover");
        assert_eq!(found, ["Rinse it at 4.5 bar.", "Dry it!", "Then refit", "the cover"]);
        assert_eq!(sentences("每日1瓶（50 mL）；冷藏。开瓶后喝完"), ["每日1瓶（50 mL）；", "冷藏。", "开瓶后喝完"]);
        assert!(sentences(" \n ").is_empty());
    }

    #[test]
    fn a_short_passage_is_one_line_with_its_title() {
        assert_eq!(text_pieces("Salt", "Refill it. Close it."), ["Salt\nRefill it. Close it."]);
        assert_eq!(text_pieces("", "Refill it."), ["Refill it."]);
    }

    #[test]
    fn a_long_passage_is_cut_between_sentences_and_loses_nothing() {
        let sentence = "冷藏到4℃口感更清爽，开瓶后两小时内喝完。";
        let text = sentence.repeat(60);
        let pieces = text_pieces("食用方法", &text);
        assert!(pieces.len() > 2, "{}", pieces.len());
        for piece in &pieces {
            assert!(piece.starts_with("食用方法\n") && piece.ends_with('。'), "{piece}");
            assert!(piece.chars().count() <= MAX_CHARS);
        }
        let bodies: String = pieces.iter().map(|piece| &piece["食用方法\n".len()..]).collect();
        assert_eq!(bodies, text);
    }

    #[test]
    fn a_sentence_without_an_end_is_cut_too() {
        let text = "a".repeat(1000);
        let pieces = text_pieces("", &text);
        assert_eq!(pieces.iter().map(String::len).collect::<Vec<_>>(), [400, 400, 200]);
    }
}

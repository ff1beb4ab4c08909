//! Text in columns of a terminal, where a Chinese character takes two.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// `text` with spaces behind it, `width` columns in all.
pub(crate) fn left(text: &str, width: usize) -> String {
    format!("{text}{}", " ".repeat(width.saturating_sub(text.width())))
}

/// `text` with spaces before it, `width` columns in all.
pub(crate) fn right(text: &str, width: usize) -> String {
    format!("{}{text}", " ".repeat(width.saturating_sub(text.width())))
}

/// White space of any sort as one space.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// At most `width` columns of `text`; what is left out leaves an ellipsis.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let (mut kept, mut used) = (String::new(), 1);
    for c in text.chars() {
        used += c.width().unwrap_or(0);
        if used > width {
            break;
        }
        kept.push(c);
    }
    kept + "…"
}

/// `text` broken at spaces into lines of at most `width` columns; a longer word is cut.
pub(crate) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace().map(|word| cut(word, width)) {
        match lines.last_mut() {
            Some(line) if line.width() + 1 + word.width() <= width => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chinese_character_takes_two_columns() {
        assert_eq!((left("鱼油", 6), right("鱼油", 6)), ("鱼油  ".into(), "  鱼油".into()));
        assert_eq!((cut("深海鱼油", 8), cut("深海鱼油", 7)), ("深海鱼油".into(), "深海鱼…".into()));
        assert_eq!(one_line(" 深海\n\t鱼油"), "深海 鱼油");
    }

    #[test]
    fn lines_break_at_spaces() {
        assert_eq!(wrapped("一 天 几 粒", 5), ["一 天", "几 粒"]);
        assert!(wrapped("", 5).is_empty());
    }
}

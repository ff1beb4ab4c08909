//! Formatting of text and numbers for terminals and pages: column widths, digits, removal of control characters.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Maximum line length of a text for a terminal, in columns.
pub(crate) const MAX_WIDTH: usize = 100;

/// `text` with U+FFFD for each character that [disturbs](querl_core::text::disturbs) its surroundings, such as escape sequences
/// and bidirectional overrides: codes, names and texts come from plugins and services. Line breaks, tabs and joiners stay.
pub(crate) fn printable(text: &str) -> String {
    let stays = |c: char| matches!(c, '\n' | '\t' | '\u{200C}' | '\u{200D}') || !querl_core::text::disturbs(c);
    text.chars().map(|c| if stays(c) { c } else { '\u{FFFD}' }).collect()
}

/// `text` padded at the end to `width` terminal columns; a Chinese character takes two.
pub(crate) fn left(text: &str, width: usize) -> String {
    format!("{text}{}", " ".repeat(width.saturating_sub(text.width())))
}

/// `text` padded at the start to `width` terminal columns.
pub(crate) fn right(text: &str, width: usize) -> String {
    format!("{}{text}", " ".repeat(width.saturating_sub(text.width())))
}

/// Rows of cells, the first row being the head, as lines of at most [`MAX_WIDTH`] terminal columns. The columns in `to_left` are aligned
/// to the left, the others to the right.
pub(crate) fn aligned<R: AsRef<[String]>>(rows: &[R], to_left: &[usize]) -> Vec<String> {
    let n_columns = rows.iter().map(|row| row.as_ref().len()).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.as_ref().get(column)).map(|cell| cell.width()).max();
    let widths: Vec<usize> = (0..n_columns).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &R| {
        let cells = row.as_ref().iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            if to_left.contains(&column) { left(cell, *width) } else { right(cell, *width) }
        });
        cut(cells.collect::<Vec<_>>().join("  ").trim_end(), MAX_WIDTH)
    };
    rows.iter().map(line).collect()
}

/// `text` with each run of white space replaced by one space.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// `text` truncated to `width` terminal columns, with an ellipsis where something was cut.
pub fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let (mut start, mut used) = (String::new(), 1);
    for c in text.chars() {
        used += c.width().unwrap_or(0);
        if used > width {
            break;
        }
        start.push(c);
    }
    start + "…"
}

/// `text` wrapped into lines of at most `width` terminal columns without loss: at spaces, and within a word that is longer. All lines but
/// the first are indented by two more columns.
pub fn folded(text: &str, width: usize) -> Vec<String> {
    let n_indent = text.chars().take_while(|c| *c == ' ').count() + 2;
    let indent = " ".repeat(n_indent.min(width / 2));
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split_inclusive(' ') {
        if !line.trim().is_empty() && line.width() + word.trim_end().width() > width {
            lines.push(std::mem::replace(&mut line, indent.clone()));
        }
        for c in word.chars() {
            if c != ' ' && line.width() + c.width().unwrap_or(0) > width {
                lines.push(std::mem::replace(&mut line, indent.clone()));
            }
            line.push(c);
        }
    }
    lines.push(line);
    lines.into_iter().map(|line| line.trim_end().to_owned()).collect()
}

/// `text` broken at spaces into lines of at most `width` terminal columns; a longer word is truncated.
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

/// Number format of a table column: four digits for the largest value, so that numbers line up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Digits {
    Decimals(usize),
    /// Scientific notation, for values below 1e-3 or from 1e9.
    Scientific,
}

impl Digits {
    pub(crate) fn for_values(values: impl Iterator<Item = f64>) -> Self {
        let largest = values.map(f64::abs).fold(0.0, f64::max);
        match largest {
            0.0 => Self::Decimals(3),
            largest if (1e-3..1e9).contains(&largest) => {
                Self::Decimals((3.0 - largest.log10().floor()).clamp(0.0, 6.0) as usize)
            }
            _ => Self::Scientific,
        }
    }

    pub(crate) fn plain(self, value: f64) -> String {
        self.number(value, "")
    }

    /// A difference with its sign, formatted.
    pub(crate) fn signed(self, value: f64) -> String {
        self.number(value, plus(value))
    }

    fn number(self, value: f64, sign: &str) -> String {
        without_sign_of_zero(match self {
            Self::Decimals(decimals) => format!("{sign}{value:.decimals$}"),
            Self::Scientific => format!("{sign}{value:.3e}"),
        })
    }
}

/// `+` for a positive value, otherwise empty: a negative value is formatted with its sign.
pub(crate) fn plus(value: f64) -> &'static str {
    if value > 0.0 { "+" } else { "" }
}

/// `text` without the sign of a value that is rounded to zero, such as `-0.000` or `+0.000`.
pub(crate) fn without_sign_of_zero(text: String) -> String {
    if text.bytes().any(|byte| (b'1'..=b'9').contains(&byte)) { text } else { text.replace(['+', '-'], "") }
}

/// Text for a value that does not apply.
pub(crate) const NOT_APPLICABLE: &str = "-";

pub(crate) fn or_dash<T>(value: Option<T>, format: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| NOT_APPLICABLE.to_owned(), format)
}

/// A count with its percentage: `12 (40.0 %)`.
pub(crate) fn counted(n: u64, of: u64) -> String {
    if of == 0 { n.to_string() } else { format!("{n} ({:.1} %)", 100.0 * n as f64 / of as f64) }
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

    #[test]
    fn the_largest_has_four_digits_and_zero_no_sign() {
        let digits = Digits::for_values([0.25, -1.0].into_iter());
        assert_eq!(
            (digits.plain(-0.25), digits.signed(0.25), digits.signed(-1e-7)),
            ("-0.250".into(), "+0.250".into(), "0.000".into())
        );
        assert_eq!(Digits::for_values([123.4].into_iter()).plain(123.4), "123.4");
        assert_eq!(Digits::for_values([1e-12].into_iter()).signed(1e-12), "+1.000e-12");
        assert_eq!(Digits::for_values(std::iter::empty()).plain(0.0), "0.000");
    }
}

//! Texts that come from guests, made safe to print.

/// `text` on one line: control characters and those that reorder or hide text are left out, line breaks and tabs become
/// spaces, and after `max_bytes` the rest is cut.
pub(crate) fn printable(text: &str, max_bytes: usize) -> String {
    let mut line = String::with_capacity(text.len().min(max_bytes));
    for c in text.chars() {
        let c = if matches!(c, '\n' | '\r' | '\t') { ' ' } else { c };
        if c.is_control() || is_deceptive(c) {
            continue;
        }
        if line.len() + c.len_utf8() > max_bytes {
            line.push('…');
            break;
        }
        line.push(c);
    }
    line
}

/// Overrides of writing direction, and characters without width.
fn is_deceptive(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// 1 to 64 characters that `allowed` holds of.
pub(crate) fn is_name(text: &str, allowed: impl Fn(char) -> bool) -> bool {
    (1..=64).contains(&text.len()) && text.chars().all(allowed)
}

/// A code or the name of a component: `a` to `z`, `0` to `9`, `_`.
pub(crate) fn is_code(text: &str) -> bool {
    is_name(text, |c| matches!(c, 'a'..='z' | '0'..='9' | '_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_and_reordering_are_stripped() {
        assert_eq!(printable("a\u{1b}[31mred\u{7}\nb\u{202e}c", 100), "a[31mred bc");
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(printable("胶原蛋白", 7), "胶原…");
    }

    #[test]
    fn codes_are_short_and_plain() {
        assert!(is_code("top1_below_threshold"));
        for code in ["", "Top", "a b", "胶", &"a".repeat(65)] {
            assert!(!is_code(code), "{code}");
        }
    }
}

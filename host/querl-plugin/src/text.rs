//! Texts that come from guests: which are names, and how the others are shown.

pub(crate) use querl_core::text::printable;

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
    fn codes_are_short_and_plain() {
        assert!(is_code("top1_below_threshold"));
        for code in ["", "Top", "a b", "胶", &"a".repeat(65)] {
            assert!(!is_code(code), "{code}");
        }
    }
}

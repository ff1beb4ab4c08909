//! Text of others made harmless to a terminal and to a page.

/// `text` with a replacement character for each one that could disturb what stands around it: controls (ANSI escapes begin with
/// one) other than line break and tab, and changes of writing direction. Plugins and services choose codes, names and texts.
pub(crate) fn printable(text: &str) -> String {
    let disturbs = |c: char| {
        (c.is_control() && c != '\n' && c != '\t') || matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().map(|c| if disturbs(c) { '\u{FFFD}' } else { c }).collect()
}

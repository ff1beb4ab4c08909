//! Text of others made harmless to a terminal and to a page.

/// `text` with a replacement character for each one that [disturbs](querl_core::text::disturbs) what stands around it. Plugins and
/// services choose codes, names and texts.
///
/// Line breaks and tabs stay, and so do joiners, which emoji and some scripts are written with: these are the user's own texts.
pub(crate) fn printable(text: &str) -> String {
    let stays = |c: char| matches!(c, '\n' | '\t' | '\u{200C}' | '\u{200D}') || !querl_core::text::disturbs(c);
    text.chars().map(|c| if stays(c) { c } else { '\u{FFFD}' }).collect()
}

//! Sanitises untrusted text (plugins, bundles, registries, services) for terminals; n-grams of characters.

/// `text` on one line: line breaks and tabs become spaces, every other character for which [`disturbs`] is true is removed,
/// and text beyond `max_bytes` bytes is replaced by an ellipsis.
pub fn printable(text: &str, max_bytes: usize) -> String {
    let mut line = String::with_capacity(text.len().min(max_bytes));
    for c in text.chars() {
        let c = if matches!(c, '\n' | '\r' | '\t') { ' ' } else { c };
        if disturbs(c) {
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

/// True for control characters (ANSI escapes, line breaks), bidirectional controls, zero-width characters and tags.
///
/// Zero-width joiners are included, since they allow two names that look alike; variation selectors are not.
pub fn disturbs(c: char) -> bool {
    let is_invisible = matches!(c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}');
    c.is_control() || is_invisible
}

/// True if a text has no visible character: only white space, characters for which [`disturbs`] is true, and others that are not drawn.
///
/// Source: Unicode's property `Default_Ignorable_Code_Point`, and the empty Braille pattern.
pub fn is_blank(text: &str) -> bool {
    let is_invisible = |c: char| {
        matches!(c,
            '\u{34f}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{2800}' | '\u{3164}'
                | '\u{fe00}'..='\u{fe0f}' | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}' | '\u{1bca0}'..='\u{1bca3}'
                | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
    };
    text.chars().all(|c| c.is_whitespace() || disturbs(c) || is_invisible(c))
}

/// A number with its noun: `1 group`, `2 groups`.
pub fn plural(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// Formats a number with thousands separators: `12,345`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The known names that are similar to `name`, the most similar first: for "did you mean".
pub fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
    // Jaro-Winkler similarity; below this, suggestions (`lr` for `learning_rate`) are no longer useful.
    const ALIKE: f64 = 0.75;
    // Long names would make the comparison slow, and are not typing errors.
    let name: String = name.chars().take(64).collect();
    let similar = known.map(|candidate| (strsim::jaro_winkler(&name, candidate), candidate));
    let mut similar: Vec<(f64, &str)> = similar.filter(|(likeness, _)| *likeness >= ALIKE).collect();
    similar.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    similar.into_iter().map(|(_, candidate)| candidate).collect()
}

/// The known name that `name` is probably a misspelling of: at most 1 edit away, or 2 if `name` has six characters or more.
pub fn misspelt<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    let most_edits = if name.chars().count() < 6 { 1 } else { 2 };
    nearest(name, known).into_iter().take(8).find(|near| strsim::osa_distance(name, near) <= most_edits)
}

/// A run of adjacent letters and digits, converted to lower case and half width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextRun {
    /// Text of the run, at least one character.
    pub text: String,
    /// True for Chinese characters, kana and Thai, which are written without spaces between words.
    pub is_unspaced: bool,
}

/// The runs of a text, in order. A run ends at white space, punctuation and symbols, and where unspaced writing begins or ends.
pub fn text_runs(text: &str) -> Vec<TextRun> {
    let mut runs: Vec<TextRun> = Vec::new();
    let mut continues = false;
    for c in text.chars().map(half_width).flat_map(char::to_lowercase) {
        if !c.is_alphanumeric() {
            continues = false;
            continue;
        }
        let is_unspaced = is_unspaced(c);
        match runs.last_mut().filter(|run| continues && run.is_unspaced == is_unspaced) {
            Some(run) => run.text.push(c),
            None => runs.push(TextRun { text: c.into(), is_unspaced }),
        }
        continues = true;
    }
    runs
}

/// All substrings of `n` characters (`n` at least 1); a shorter text is the only element, and an empty text has none.
pub fn char_ngrams(text: &str, n: usize) -> Vec<String> {
    let characters: Vec<char> = text.chars().collect();
    match characters.len() {
        0 => Vec::new(),
        length if length <= n => vec![text.to_owned()],
        _ => characters.windows(n).map(|window| window.iter().collect()).collect(),
    }
}

fn is_unspaced(c: char) -> bool {
    matches!(c, '\u{e00}'..='\u{e7f}' | '\u{3005}'..='\u{3007}' | '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{9fff}'
        | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}')
}

/// Converts a full-width character to ASCII; both ranges have the same order.
fn half_width(c: char) -> char {
    match c {
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(c as u32 - 0xfee0).unwrap_or(c),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_at_spaces_punctuation_and_changes_of_script() {
        let runs = text_runs("ＶC泡腾片，Omega-3 怎么吃？");
        let texts: Vec<(&str, bool)> = runs.iter().map(|run| (run.text.as_str(), run.is_unspaced)).collect();
        assert_eq!(texts, [("vc", false), ("泡腾片", true), ("omega", false), ("3", false), ("怎么吃", true)]);
        assert!(text_runs(" ？! ").is_empty());
    }

    #[test]
    fn ngrams_overlap_and_a_short_text_is_its_own() {
        assert_eq!(char_ngrams("泡腾片", 2), ["泡腾", "腾片"]);
        assert_eq!(char_ngrams("vc", 3), ["vc"]);
        assert!(char_ngrams("", 2).is_empty());
    }

    #[test]
    fn escapes_and_reordering_are_stripped() {
        assert_eq!(printable("a\u{1b}[31mred\u{7}\nb\u{202e}c\td", 100), "a[31mred bc d");
        assert_eq!(printable("The \u{200b}pol\u{ad}icy\u{feff} \u{2066}胶\u{e0041}\u{85}", 100), "The policy 胶");
    }

    #[test]
    fn visible_text_stays_as_it_is() {
        let text = "Größe: 胶原蛋白 – عربي ❤\u{fe0f} 😀 \u{fffd}";
        assert_eq!(printable(text, 100), text);
    }

    #[test]
    fn text_without_a_visible_character_is_blank() {
        for text in ["", " \n\u{3000}", "\u{200b}\u{200d}\u{feff}", "\u{3164}\u{fe0f}\u{2800}\u{ad}"] {
            assert!(is_blank(text), "{text:?}");
        }
        assert!(!is_blank("\u{200b}胶\u{200b}") && !is_blank("？") && !is_blank("❤\u{fe0f}"));
    }

    #[test]
    fn digits_are_grouped_by_three() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(printable("胶原蛋白", 12), "胶原蛋白");
        assert_eq!(printable("胶原蛋白", 7), "胶原…");
        assert_eq!(printable("ab\u{200b}", 2), "ab", "no visible character was cut off");
    }
}

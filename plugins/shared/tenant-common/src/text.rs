//! Text functions for both parsers.

use querl_sdk::Rejection;

/// The answer after a model's thinking.
///
/// # Errors
/// The thinking is not closed, so that there is no answer.
pub(crate) fn after_thinking(text: &str) -> Result<String, Rejection> {
    // A chat template may already have opened the `<think>` block in the prompt, so only its end is searched.
    let rest = text.rsplit_once("</think>").map_or(text, |(_, rest)| rest);
    match rest.find("<think>") {
        Some(_) => Err(Rejection::new("unfinished_thinking", "the answer ends before its thinking does")),
        None => Ok(rest.trim().to_owned()),
    }
}

/// Maximum number of opening braces at which a JSON object is tried. It limits the quadratic cost of an answer of nested braces, which is
/// parsed again from each of them.
const MAX_STARTS: usize = 100;

/// The first JSON object in `text` with the key `key`, with any text around it. Only objects at the first `MAX_STARTS` opening braces are
/// found.
pub(crate) fn json_object_with(text: &str, key: &str) -> Option<serde_json::Map<String, serde_json::Value>> {
    text.match_indices('{').take(MAX_STARTS).find_map(|(start, _)| {
        let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<serde_json::Value>();
        match values.next() {
            Some(Ok(serde_json::Value::Object(object))) if object.contains_key(key) => Some(object),
            _ => None,
        }
    })
}

/// Converts full-width letters, digits and signs to ASCII: `４．５` to `4.5`.
pub(crate) fn half_width(text: &str) -> String {
    let fold = |c: char| match c {
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(u32::from(c) - 0xfee0).unwrap_or(c),
        '\u{3000}' => ' ',
        _ => c,
    };
    text.chars().map(fold).collect()
}

//! Cleaning that both kinds of answer need.

use querl_sdk::Rejection;

/// The answer after a model's thinking.
///
/// # Errors
/// The thinking never ended, so that there is no answer.
pub(crate) fn after_thinking(text: &str) -> Result<String, Rejection> {
    // A chat template may have opened the block already: only its end counts.
    let rest = text.rsplit_once("</think>").map_or(text, |(_, rest)| rest);
    match rest.find("<think>") {
        Some(_) => Err(Rejection::new("unfinished_thinking", "the answer ends before its thinking does")),
        None => Ok(rest.trim().to_owned()),
    }
}

/// Braces at which an object is looked for. An answer of nothing but nested braces would otherwise be read again from each of
/// them, as deep as the parser goes.
const MAX_STARTS: usize = 100;

/// The first JSON object in `text` that holds `key`, whatever stands around it; one that begins after a hundred braces is not
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

/// Full-width letters, digits and signs as ASCII: `４．５` as `4.5`.
pub(crate) fn half_width(text: &str) -> String {
    let fold = |c: char| match c {
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(u32::from(c) - 0xfee0).unwrap_or(c),
        '\u{3000}' => ' ',
        _ => c,
    };
    text.chars().map(fold).collect()
}

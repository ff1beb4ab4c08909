//! Parsing of the texts to classify, from a file or stdin.

use serde_json::Value;

const QUESTION: &str = "用户问题：";
const ANSWER: &str = "回答：";

/// Parses the texts of a file, in their order. Formats:
/// - a JSON list;
/// - JSON Lines, if the first line is a JSON object or string. In both, a text is a string or the field `input` of an object;
/// - plain text: one text per line. A line that begins with `回答：` continues the line before it if that begins with `用户问题：`.
///
/// # Errors
/// A message with the number of the line or item: a blank line before the end, invalid JSON, or an item without text.
pub fn texts_of(content: &str) -> Result<Vec<String>, String> {
    if let Ok(Value::Array(items)) = serde_json::from_str(content.trim_start_matches('\u{feff}')) {
        return items.iter().enumerate().map(|(index, item)| text_of(&format!("item {}", index + 1), item)).collect();
    }
    let lines: Vec<&str> = content.strip_prefix('\u{feff}').unwrap_or(content).trim_end().lines().collect();
    if let Some(index) = lines.iter().position(|line| line.trim().is_empty()) {
        return Err(format!("line {} is blank; expected a text in each line", index + 1));
    }
    match lines.first().is_some_and(|line| is_json(line)) {
        true => lines.iter().enumerate().map(|(index, line)| json_text(index + 1, line)).collect(),
        false => Ok(joined(&lines)),
    }
}

fn is_json(line: &str) -> bool {
    matches!(serde_json::from_str(line), Ok(Value::Object(_) | Value::String(_)))
}

fn json_text(number: usize, line: &str) -> Result<String, String> {
    let value: Value = serde_json::from_str(line).map_err(|error| format!("line {number}: no JSON: {error}"))?;
    text_of(&format!("line {number}"), &value)
}

fn text_of(location: &str, value: &Value) -> Result<String, String> {
    let text = match value {
        Value::Object(object) => object.get("input").unwrap_or(&Value::Null),
        other => other,
    };
    match text.as_str().filter(|text| !text.trim().is_empty()) {
        Some(text) => Ok(text.to_owned()),
        None => Err(format!("{location}: no text there; expected a JSON string, or an object with one in `input`")),
    }
}

fn joined(lines: &[&str]) -> Vec<String> {
    let mut texts: Vec<String> = Vec::new();
    for line in lines {
        let open = texts.last_mut().filter(|last| last.starts_with(QUESTION) && !last.contains('\n'));
        match open.filter(|_| line.starts_with(ANSWER)) {
            Some(question) => {
                question.push('\n');
                question.push_str(line);
            }
            None => texts.push((*line).to_owned()),
        }
    }
    texts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a dialogue was classified as two separate halves.
    #[test]
    fn question_and_answer_in_two_lines_are_one_text() {
        let content =
            "用户问题：坏了。\n回答：给您换新的。\n冷水洗。\n用户问题：在？\n用户问题：怎么洗？\r\n回答：冷水洗。\n\n";
        let expected = [
            "用户问题：坏了。\n回答：给您换新的。",
            "冷水洗。",
            "用户问题：在？",
            "用户问题：怎么洗？\n回答：冷水洗。",
        ];
        assert_eq!(texts_of(content).unwrap(), expected);
        let alone = "回答：好。\n用户问题：在？\n回答：在。\n回答：请讲。\n";
        assert_eq!(texts_of(alone).unwrap(), ["回答：好。", "用户问题：在？\n回答：在。", "回答：请讲。"]);
    }

    #[test]
    fn a_list_of_json_holds_a_text_in_each_item() {
        assert_eq!(texts_of("[\n{\"input\": \"坏了。\"},\n\n\"冷水洗。\"]\n").unwrap(), ["坏了。", "冷水洗。"]);
        let problem = texts_of("[{\"text\": \"a\"}]").unwrap_err();
        assert!(problem.starts_with("item 1: no text there; expected"), "{problem}");
        assert_eq!(texts_of("[笑] 坏了。").unwrap(), ["[笑] 坏了。"]);
    }

    #[test]
    fn lines_of_json_hold_a_text_each() {
        let content = "{\"input\": \"用户问题：坏了。\\n回答：换。\", \"label\": \"售后\"}\n\"冷水洗。\"\n";
        assert_eq!(texts_of(content).unwrap(), ["用户问题：坏了。\n回答：换。", "冷水洗。"]);
    }

    #[test]
    fn a_line_without_a_text_is_named() {
        let rejected = |content: &str| texts_of(content).unwrap_err();
        assert_eq!(rejected("好\n\n行\n"), "line 2 is blank; expected a text in each line");
        assert!(rejected("\"好\"\n{").starts_with("line 2: no JSON: "), "{}", rejected("\"好\"\n{"));
        let expected = "line 2: no text there; expected a JSON string, or an object with one in `input`";
        for line in ["{\"text\": \"好\"}", "{\"input\": \" \"}", "7"] {
            assert_eq!(rejected(&format!("\"好\"\n{line}")), expected);
        }
        assert!(texts_of(" \n").unwrap().is_empty());
    }
}

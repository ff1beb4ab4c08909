//! What models answer when they should not.

use super::texts;

/// As long as a long text, about 100 kB.
const LONG_BYTES: usize = 100_000;

/// Answers that a rewrite is to be read from.
pub(crate) fn for_rewrite() -> Vec<String> {
    let mut answers = common();
    answers.extend(
        ["胶原蛋白肽的服用方法", "“胶原蛋白肽的服用方法”", "改写后的查询：", "- ", "1.", "**", "好的："]
            .map(str::to_owned),
    );
    let values = ["null", "5", "[]", "{}", "\"\"", "\" \"", "\"\\u0000\"", "\"\\ud800\"", "NaN"];
    answers.extend(values.iter().map(|value| format!("{{\"rewritten_query\": {value}}}")));
    answers
}

/// Answers that a judgement is to be read from.
pub(crate) fn for_judgement() -> Vec<String> {
    let mut answers = common();
    let values = [
        "4.5",
        "0",
        "5",
        "-0.0",
        "-1",
        "-1e-300",
        "5.0000001",
        "1e999",
        "-1e999",
        "1e-999",
        "NaN",
        "Infinity",
        "null",
        "true",
        "[4]",
        "{\"score\": 4}",
        "\"4.5\"",
        "\"高\"",
        "\"\"",
        "\"90/100\"",
        "\"四分\"",
        "\"４．５\"",
        "\"∞\"",
    ];
    for value in values {
        answers.push(format!("{{\"综合得分\": {value}, \"评分理由\": \"清楚\"}}"));
        answers.push(format!("{{\"score\": {value}, \"reason\": \"清楚\"}}"));
        answers.push(value.to_owned());
        answers.push(format!("综合得分：{value}"));
    }
    answers.push(format!("{{\"综合得分\": {}}}", "9".repeat(LONG_BYTES)));
    answers.push(format!("综合得分：0.{}", "4".repeat(LONG_BYTES)));
    answers
}

/// Garbage for either.
fn common() -> Vec<String> {
    let mut answers: Vec<_> = texts::odd().into_iter().map(|(_, text)| text.to_owned()).collect();
    let fragments =
        ["{", "}", "{\"", "{\"a\":", "[", "```", "```json\n{", "<think>", "</think>", "<think></think>", "null"];
    answers.extend(fragments.map(str::to_owned));
    answers.push(texts::long());
    let repeated = ["{", "[", "{\"a\":", "\"", "\n", "<think>", "</think>", "```\n", "：", "\u{200b}", "- ", "“”"];
    answers.extend(repeated.map(|text| text.repeat(LONG_BYTES / text.len())));
    answers
}

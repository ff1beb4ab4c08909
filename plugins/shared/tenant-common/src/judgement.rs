//! Parser of a judge's answer.

use crate::text::{after_thinking, half_width, json_object_with};
use querl_sdk::{JudgeScore, Rejection};
use serde_json::Value;

const SCORE: &str = "综合得分";
const REASON: &str = "评分理由";

/// The judgement in a judge's answer: `{"综合得分": 4.5, "评分理由": "..."}`, with or without a code fence or text around it. The number may be
/// a text and may have full-width digits. Without a JSON object, `综合得分：4.5` in the text is used.
///
/// # Errors
/// The answer has no score, or one outside of 0 to 5.
pub fn parse_judgement(text: &str) -> Result<JudgeScore, Rejection> {
    let answer = after_thinking(text)?;
    let (score, reason) = match json_object_with(&answer, SCORE) {
        Some(object) => {
            let reason = object.get(REASON).and_then(Value::as_str).unwrap_or_default();
            (object.get(SCORE).and_then(number), reason.to_owned())
        }
        None => (labelled_number(&answer), String::new()),
    };
    let score = score.ok_or_else(|| Rejection::new("no_score", "the answer holds no 综合得分 that is a number"))?;
    if (0.0..=5.0).contains(&score) {
        return Ok(JudgeScore { score, reason });
    }
    Err(Rejection::new("score_out_of_range", format!("综合得分 is {score}; expected 0 to 5")))
}

fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => leading_number(&half_width(text)),
        _ => None,
    }
}

/// The number after `综合得分` and punctuation such as `”：**`.
fn labelled_number(text: &str) -> Option<f64> {
    let after = half_width(text.split_once(SCORE)?.1);
    leading_number(after.trim_start_matches([' ', ':', '"', '\'', '“', '”', '*', '=', '是', '为']))
}

/// The number at the start of a text, which may be followed by a unit or the scale: `4.5`, `4.5分`, `4.5/5`. `None` for another scale
/// (`90/100`) or a percentage.
fn leading_number(text: &str) -> Option<f64> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '-').unwrap_or(text.len());
    let rest = text[end..].trim_start();
    let scaled_otherwise =
        rest.strip_prefix('/').is_some_and(|scale| !matches!(scale.trim_start(), s if s.starts_with('5')));
    if scaled_otherwise || rest.starts_with('%') { None } else { text[..end].parse().ok() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::parse_judgement;

    #[test]
    fn scores_are_read_in_every_form() {
        let answers = [
            r#"{"综合得分": 4.5, "评分理由": "清楚"}"#,
            "```json\n{\"综合得分\": 4.5, \"评分理由\": \"清楚\"}\n```",
            r#"{"综合得分": "4.5", "评分理由": "清楚"}"#,
            r#"{"综合得分": "４．５", "评分理由": "清楚"}"#,
            r#"{"综合得分": "4.5/5", "评分理由": "清楚"}"#,
            r#"{"综合得分": "4.5分", "评分理由": "清楚"}"#,
            r#"<think>{好}</think>评分如下：{"综合得分": 4.5, "评分理由": "清楚"} 以上。"#,
        ];
        for answer in answers {
            let parsed = parse_judgement(answer).unwrap();
            assert_eq!((parsed.score, parsed.reason.as_str()), (4.5, "清楚"), "{answer}");
        }
    }

    #[test]
    fn labelled_score_without_json_is_read() {
        for answer in ["综合得分：4.5", "**综合得分**：４．５分", "“综合得分”： 4.5 / 5"] {
            assert_eq!(parse_judgement(answer).unwrap().score, 4.5, "{answer}");
        }
    }

    #[test]
    fn answers_without_a_usable_score_are_rejected() {
        let code = |answer| parse_judgement(answer).unwrap_err().code;
        for answer in ["", "很好", "4.5", r#"{"综合得分": null}"#, r#"{"综合得分": "高"}"#, r#"{"综合得分": "90/100"}"#]
        {
            assert_eq!(code(answer), "no_score", "{answer}");
        }
        assert_eq!(code(r#"{"综合得分": 5.5}"#), "score_out_of_range");
        assert_eq!(code(r#"{"综合得分": -1}"#), "score_out_of_range");
        assert_eq!(code("<think>综合得分：4"), "unfinished_thinking");
    }

    // Regression: an answer of many braces used up the fuel of a call.
    #[test]
    fn braces_without_end_are_given_up() {
        let judged = r#"{"综合得分": 4}"#;
        assert_eq!(parse_judgement(&format!("{}{judged}", "{".repeat(99))).unwrap().score, 4.0);
        assert_eq!(parse_judgement(&format!("{}{judged}", "{".repeat(100))).unwrap().score, 4.0, "by its label");
        assert_eq!(parse_judgement(&"{\"a\":".repeat(20_000)).unwrap_err().code, "no_score");
    }
}

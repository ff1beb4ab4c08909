//! Parser of the rewrite in a model's answer.

use crate::text::{after_thinking, json_object_with};
use querl_sdk::Rejection;

/// Labels that models write before the rewrite. A label comes before any shorter label that it begins with.
const PREFIXES: [&str; 17] = [
    "改写后的查询",
    "改写后的问题",
    "改写后的query",
    "改写后查询",
    "改写后query",
    "改写查询",
    "改写结果",
    "改写后",
    "改写",
    "优化后的查询",
    "优化后",
    "查询",
    "输出",
    "答案",
    "rewritten query",
    "rewritten_query",
    "rewrite",
];

const QUOTES: [(&str, &str); 11] = [
    ("**", "**"),
    ("\"", "\""),
    ("'", "'"),
    ("`", "`"),
    ("“", "”"),
    ("‘", "’"),
    ("「", "」"),
    ("『", "』"),
    ("＂", "＂"),
    ("【", "】"),
    ("”", "“"),
];

/// The rewrite in a model's answer: its first line after removal of thinking, code fences, JSON, labels and quotes. A line that ends in a
/// colon is skipped if another one follows.
///
/// # Errors
/// No text is left, or the thinking is not closed.
pub fn parse_rewrite(text: &str) -> Result<String, Rejection> {
    let answer = after_thinking(text)?;
    if let Some(object) = json_object_with(&answer, "rewritten_query") {
        let value = object.get("rewritten_query").and_then(|value| value.as_str()).unwrap_or_default();
        return first_line(value.lines());
    }
    first_line(answer.lines().filter(|line| !line.trim_start().starts_with("```")))
}

fn first_line<'a>(lines: impl Iterator<Item = &'a str>) -> Result<String, Rejection> {
    let mut lines = lines.map(clean).filter(|line| !line.is_empty()).peekable();
    while let Some(line) = lines.next() {
        let announces = line.ends_with([':', '：']) && lines.peek().is_some();
        if !announces {
            return Ok(line);
        }
    }
    Err(Rejection::new("empty_rewrite", "the answer holds no rewrite"))
}

/// Removes labels, list marks and quotes from a line until none is left.
fn clean(line: &str) -> String {
    let mut rest = line.trim();
    loop {
        let shorter = without_prefix(without_quotes(without_mark(rest))).trim();
        if shorter == rest {
            return rest.to_owned();
        }
        rest = shorter;
    }
}

fn without_mark(line: &str) -> &str {
    let marks = ["- ", "* ", "> ", "# ", "## ", "### "];
    marks.iter().find_map(|mark| line.strip_prefix(mark)).unwrap_or(line).trim()
}

/// Removes a label. A label must end in a colon, which may be inside or outside of bold marks.
fn without_prefix(line: &str) -> &str {
    let bare = line.trim_start_matches("**");
    let after_name = PREFIXES.iter().find_map(|prefix| strip_prefix_ignoring_case(bare, prefix));
    let Some(after_name) = after_name else { return line };
    let after_name = after_name.trim_start_matches("**").trim_start();
    match after_name.strip_prefix([':', '：']) {
        Some(rest) if bare.len() < line.len() => rest.trim().strip_prefix("**").unwrap_or(rest).trim(),
        Some(rest) => rest.trim(),
        None => line,
    }
}

fn strip_prefix_ignoring_case<'a>(line: &'a str, prefix: &str) -> Option<&'a str> {
    let head = line.get(..prefix.len())?;
    head.eq_ignore_ascii_case(prefix).then(|| &line[prefix.len()..])
}

/// Removes quotes if they enclose the complete line, unlike in `"A"和"B"`.
fn without_quotes(line: &str) -> &str {
    let inner = QUOTES.iter().find_map(|(open, close)| {
        let inner = line.strip_prefix(open)?.strip_suffix(close)?;
        (!inner.contains(open) && !inner.contains(close)).then_some(inner)
    });
    inner.unwrap_or(line)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::parse_rewrite;

    const REWRITE: &str = "胶原蛋白肽的服用方法";

    #[test]
    fn dressed_answers_give_the_bare_rewrite() {
        let answers = [
            "胶原蛋白肽的服用方法",
            "  胶原蛋白肽的服用方法\n",
            "\"胶原蛋白肽的服用方法\"",
            "“胶原蛋白肽的服用方法”",
            "「胶原蛋白肽的服用方法」",
            "'胶原蛋白肽的服用方法'",
            "改写后的查询：胶原蛋白肽的服用方法",
            "改写后的查询: “胶原蛋白肽的服用方法”",
            "改写后的Query：胶原蛋白肽的服用方法",
            "**改写后的查询：** 胶原蛋白肽的服用方法",
            "**改写后的查询**：胶原蛋白肽的服用方法",
            "**改写：胶原蛋白肽的服用方法**",
            "改写结果：\n\n胶原蛋白肽的服用方法\n\n说明：补充了产品名。",
            "Rewritten query: 胶原蛋白肽的服用方法",
            "<think>\n用户问怎么吃\n</think>\n\n胶原蛋白肽的服用方法",
            "用户问怎么吃\n</think>\n胶原蛋白肽的服用方法",
            "```\n胶原蛋白肽的服用方法\n```",
            "```json\n{\"rewritten_query\": \"胶原蛋白肽的服用方法\"}\n```",
            "{\"rewritten_query\": \"胶原蛋白肽的服用方法\", \"reason\": \"补充\"}",
            "结果如下 {\"rewritten_query\": \"改写：胶原蛋白肽的服用方法\"}",
            "- 胶原蛋白肽的服用方法",
            "好的，以下是改写后的查询：\n胶原蛋白肽的服用方法",
            "Sure, here it is:\n\n**好的，改写如下：**\n```\n胶原蛋白肽的服用方法\n```\n说明：补充了产品名。",
        ];
        for answer in answers {
            assert_eq!(parse_rewrite(answer).as_deref(), Ok(REWRITE), "{answer}");
        }
    }

    #[test]
    fn text_that_only_looks_dressed_stays() {
        for text in ["\"A\"和\"B\"的区别", "查询订单物流", "改写后", "输出功率多大", "3:1 的配比怎么冲", "成分表："]
        {
            assert_eq!(parse_rewrite(text).as_deref(), Ok(text));
        }
    }

    #[test]
    fn answers_without_a_rewrite_are_rejected() {
        for answer in
            ["", " \n ", "\"\"", "改写后的查询：", "```\n```", "<think>想</think>", "{\"rewritten_query\": null}"]
        {
            assert_eq!(parse_rewrite(answer).unwrap_err().code, "empty_rewrite", "{answer}");
        }
        assert_eq!(parse_rewrite("<think>还在想").unwrap_err().code, "unfinished_thinking");
    }
}

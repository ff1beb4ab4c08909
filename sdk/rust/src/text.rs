//! Text functions for plugins: normalisation, Chinese numerals, edit distance, n-gram overlap, repetition, length penalty.
//!
//! All are pure. The SDKs for Python and JavaScript have the same functions with bit-identical results, tested with
//! `sdk/testdata/text.jsonl`. A unit is the token of the overlap functions, see [`units`].

use std::collections::HashSet;

/// Normalises a text: a subset of Unicode's NFKC, in lower case.
///
/// Converts full-width forms (U+FF01 to U+FF5E) to ASCII and letters to lower case, code point by code point, removes U+200B and U+FEFF,
/// collapses runs of white space (Unicode `White_Space`) to one space, and strips both ends.
pub fn normalise(text: &str) -> String {
    let mut normalised = String::with_capacity(text.len());
    for c in text.chars().filter(|c| !matches!(c, '\u{200b}' | '\u{feff}')) {
        if c.is_whitespace() {
            if !normalised.is_empty() && !normalised.ends_with(' ') {
                normalised.push(' ');
            }
        } else {
            normalised.extend(half_width(c).to_lowercase());
        }
    }
    if normalised.ends_with(' ') {
        normalised.pop();
    }
    normalised
}

fn half_width(c: char) -> char {
    match c {
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(u32::from(c) - 0xfee0).unwrap_or(c),
        _ => c,
    }
}

/// The units of the [`normalise`]d text: each run of ASCII letters and digits, and each other character. White space and punctuation are
/// dropped.
pub fn units(text: &str) -> Vec<String> {
    let mut units: Vec<String> = Vec::new();
    let mut in_run = false;
    for c in normalise(text).chars() {
        let is_word = c.is_ascii_alphanumeric();
        match units.last_mut() {
            Some(run) if in_run && is_word => run.push(c),
            _ if c == ' ' || is_punctuation(c) => {}
            _ => units.push(c.to_string()),
        }
        in_run = is_word;
    }
    units
}

/// True for ASCII, Latin-1, general, CJK and vertical punctuation. Normalisation has already converted full-width forms to ASCII.
fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation()
        || matches!(c, '\u{a1}' | '\u{a7}' | '\u{ab}' | '\u{b6}' | '\u{b7}' | '\u{bb}' | '\u{bf}' | '\u{3030}')
        || matches!(c, '\u{2000}'..='\u{206f}' | '\u{3000}'..='\u{3003}' | '\u{3008}'..='\u{3011}' | '\u{3014}'..='\u{301f}')
        || matches!(c, '\u{fe30}'..='\u{fe4f}' | '\u{ff5f}'..='\u{ff65}')
}

/// Parses a text that is one number: `三百二十`, `一万零五`, `两千三` (2300), `二〇二四` (2024), `三点五`, `3.5万`, `１２`, `负二`,
/// `百分之五` (0.05). `None` for any other text, and for values of 2^53 or more.
pub fn number(text: &str) -> Option<f64> {
    let chars: Vec<char> = text.chars().map(half_width).collect();
    value(&chars)
}

/// Finds all numbers in a text, in order. At each position the longest number of at most 32 characters is taken: `一万零五` is one number.
/// Numerals within words (`一起`) are found too.
pub fn numbers(text: &str) -> Vec<f64> {
    let chars: Vec<char> = text.chars().map(half_width).collect();
    let (mut values, mut start) = (Vec::new(), 0);
    while start < chars.len() {
        let run = chars[start..].iter().take(32).take_while(|c| is_number_sign(**c)).count();
        let longest = (1..=run).rev().find_map(|n| value(&chars[start..start + n]).map(|value| (value, n)));
        start += longest.map_or(1, |(_, n)| n);
        values.extend(longest.map(|(value, _)| value));
    }
    values
}

fn is_number_sign(c: char) -> bool {
    digit(c).is_some() || unit(c).is_some() || matches!(c, '.' | '-' | '点' | '负' | '分' | '之')
}

/// 2^53: all integers below it are exact in f64.
const END: f64 = 9_007_199_254_740_992.0;

fn value(chars: &[char]) -> Option<f64> {
    let (negative, chars) = match chars {
        ['负' | '-', rest @ ..] => (true, rest),
        _ => (false, chars),
    };
    let (percent, chars) = match chars {
        ['百', '分', '之', rest @ ..] => (true, rest),
        _ => (false, chars),
    };
    let value = unsigned(chars)?;
    let value = if percent { value / 100.0 } else { value };
    (value < END).then_some(if negative { -value } else { value })
}

fn unsigned(chars: &[char]) -> Option<f64> {
    let n_ascii = chars.iter().take_while(|c| c.is_ascii_digit() || **c == '.').count();
    if n_ascii > 0 {
        let (number, units) = chars.split_at(n_ascii);
        let number = decimal(number.split(|c| *c == '.'))?;
        return units.iter().try_fold(number, |number, c| Some(number * unit(*c).filter(|unit| *unit >= 10_000.0)?));
    }
    match chars.iter().position(|c| *c == '点') {
        None => whole(chars),
        Some(point) => {
            let digits = whole(&chars[..point])?.to_string().chars().collect::<Vec<_>>();
            let fraction: Option<Vec<char>> =
                chars[point + 1..].iter().map(|c| char::from_digit(digit(*c)?, 10)).collect();
            decimal([&*digits, &*fraction?].into_iter())
        }
    }
}

/// The number of a non-empty integer part and at most one non-empty fraction; `None` for other parts.
fn decimal<'a>(parts: impl Iterator<Item = &'a [char]>) -> Option<f64> {
    let parts: Vec<String> = parts.map(|part| part.iter().collect()).collect();
    let well_formed = parts.len() <= 2 && parts.iter().all(|part| !part.is_empty());
    if well_formed { parts.join(".").parse().ok() } else { None }
}

/// An integer in Chinese numerals.
fn whole(chars: &[char]) -> Option<f64> {
    if !chars.is_empty() && chars.iter().all(|c| digit(*c).is_some()) {
        return chars.iter().try_fold(0.0, |value, c| Some(value * 10.0 + f64::from(digit(*c)?)));
    }
    // `total`: the value of the sections before, each ended by 万 or 亿. `section`: the current section, below 10,000. `pending`: a digit
    // whose unit has not been read.
    let (mut total, mut section, mut pending) = (0.0, 0.0, None);
    // `before`: the previous unit; a final digit directly after it counts tenths of it (两千三 is 2300). `below`: units within the section
    // must be smaller than this, since they descend.
    let (mut before, mut below) = (1.0, 10_000.0);
    for (index, c) in chars.iter().enumerate() {
        match (digit(*c), unit(*c)) {
            (Some(0), _) if index > 0 && pending.is_none() => before = 1.0,
            (Some(digit), _) if digit > 0 && pending.is_none() => pending = Some(f64::from(digit)),
            (_, Some(unit)) if unit < 10_000.0 && unit < below => {
                let leads = unit == 10.0 && index == 0;
                section += pending.take().or(leads.then_some(1.0))? * unit;
                (before, below) = (unit, unit);
            }
            (_, Some(unit)) if unit >= 10_000.0 => {
                section += pending.take().unwrap_or(0.0);
                let closed = total + section;
                if closed == 0.0 || (unit == 10_000.0 && total > 0.0 && section == 0.0) {
                    return None;
                }
                // 亿 multiplies everything before it, 万 only the section.
                total = if unit == 10_000.0 { total + section * unit } else { closed * unit };
                (section, before, below) = (0.0, unit, 10_000.0);
            }
            _ => return None,
        }
    }
    let last = pending.unwrap_or(0.0) * if before >= 100.0 { before / 10.0 } else { 1.0 };
    (!chars.is_empty()).then_some(total + section + last)
}

fn digit(c: char) -> Option<u32> {
    Some(match c {
        '0'..='9' => u32::from(c) - u32::from('0'),
        '〇' | '零' => 0,
        '一' | '壹' => 1,
        '二' | '两' | '贰' => 2,
        '三' | '叁' => 3,
        '四' | '肆' => 4,
        '五' | '伍' => 5,
        '六' | '陆' => 6,
        '七' | '柒' => 7,
        '八' | '捌' => 8,
        '九' | '玖' => 9,
        _ => return None,
    })
}

fn unit(c: char) -> Option<f64> {
    Some(match c {
        '十' | '拾' => 10.0,
        '百' | '佰' => 100.0,
        '千' | '仟' => 1000.0,
        '万' => 10_000.0,
        '亿' => 100_000_000.0,
        _ => return None,
    })
}

/// Levenshtein distance in code points: the least number of insertions, deletions and substitutions that convert `a` to `b`.
pub fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, of_a) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, of_b) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(of_a != *of_b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// ROUGE-L F1 over [`units`]: 2 lcs / (n + m), with the length lcs of the longest common subsequence. 0 if a text has no units.
///
/// Chin-Yew Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004, equations 2 to 4 with beta = 1.
pub fn rouge_l(a: &str, b: &str) -> f64 {
    let (a, b) = (units(a), units(b));
    let mut row = vec![0_usize; b.len() + 1];
    for of_a in &a {
        let mut diagonal = 0;
        for (j, of_b) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = if of_a == of_b { diagonal + 1 } else { above.max(row[j]) };
            diagonal = above;
        }
    }
    if a.is_empty() || b.is_empty() { 0.0 } else { 2.0 * row[b.len()] as f64 / (a.len() + b.len()) as f64 }
}

/// Jaccard similarity of the sets of `n`-grams over [`units`]: size of the intersection divided by size of the union; 0 if both sets are
/// empty. `n` is at least 1.
pub fn jaccard(a: &str, b: &str, n: usize) -> f64 {
    let (a, b) = (units(a), units(b));
    let (a, b): (HashSet<_>, HashSet<_>) = (a.windows(n).collect(), b.windows(n).collect());
    let n_union = a.union(&b).count();
    if n_union == 0 { 0.0 } else { a.intersection(&b).count() as f64 / n_union as f64 }
}

/// Share of repeated `n`-grams over [`units`], 0 to 1: 1 - distinct / all. 0 without `n`-grams. `n` is at least 1.
///
/// seq-rep-n of Welleck et al., "Neural Text Generation with Unlikelihood Training", 2020, equation 11.
pub fn repetition(text: &str, n: usize) -> f64 {
    let units = units(text);
    let n_all = units.windows(n).len();
    let distinct: HashSet<_> = units.windows(n).collect();
    if n_all == 0 { 0.0 } else { 1.0 - distinct.len() as f64 / n_all as f64 }
}

/// Soft overlong penalty, -1 to 0: 0 up to `max_length - buffer`, then linear to -1 at `max_length`, and -1 above. `buffer` is at most
/// `max_length`. The three arguments have the same unit, for example tokens or characters.
///
/// Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, equation 13.
pub fn soft_overlong(length: u32, max_length: u32, buffer: u32) -> f64 {
    let free = max_length.saturating_sub(buffer);
    match length {
        _ if length <= free => 0.0,
        _ if length <= max_length => (f64::from(free) - f64::from(length)) / f64::from(buffer),
        _ => -1.0,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn results_are_those_that_all_sdks_give() {
        let table = include_str!("../../testdata/text.jsonl");
        for (line, number_of_line) in table.lines().zip(1..) {
            let case: Value = serde_json::from_str(line).unwrap();
            let args = case["args"].as_array().unwrap();
            let text = |index: usize| args[index].as_str().unwrap();
            let n = |index: usize| args[index].as_u64().unwrap() as usize;
            let result = match case["function"].as_str().unwrap() {
                "normalise" => json!(normalise(text(0))),
                "units" => json!(units(text(0))),
                "number" => json!(number(text(0))),
                "numbers" => json!(numbers(text(0))),
                "edit_distance" => json!(edit_distance(text(0), text(1))),
                "rouge_l" => json!(rouge_l(text(0), text(1))),
                "jaccard" => json!(jaccard(text(0), text(1), n(2))),
                "repetition" => json!(repetition(text(0), n(1))),
                "soft_overlong" => json!(soft_overlong(n(0) as u32, n(1) as u32, n(2) as u32)),
                other => panic!("line {number_of_line}: no function `{other}`"),
            };
            // The table has integers without a decimal point: 1 is equal to 1.0.
            let as_numbers = |value: &Value| value.as_f64().map_or(value.to_string(), |number| number.to_string());
            let of_list = |value: &Value| match value.as_array() {
                Some(items) => items.iter().map(as_numbers).collect::<Vec<_>>().join(" "),
                None => as_numbers(value),
            };
            assert_eq!(of_list(&result), of_list(&case["result"]), "line {number_of_line}: {line}");
        }
    }
}

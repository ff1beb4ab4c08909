//! The request log of `querl serve rewrite`: a file of JSON lines for each day (UTC), [`day_file_name`].
//!
//! | kind | line |
//! |---|---|
//! | `rewrite` | [`LoggedRewrite`]: a query and what was returned for it |
//! | `feedback` | [`LoggedFeedback`]: what a user did with the passages of an earlier request |

use chrono::NaiveDate;
use serde::{Deserialize, Serialize};

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RequestLogLine {
    /// A query and its rewrite.
    Rewrite(LoggedRewrite),
    /// Feedback to an earlier request.
    Feedback(LoggedFeedback),
}

/// A query and its rewrite. The texts are `None` where the filter of the log removed them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoggedRewrite {
    /// RFC 3339, UTC.
    pub time: String,
    /// Id of the request, which feedback names.
    pub id: String,
    /// Tenant.
    pub tenant: String,
    /// Version of the tenant's model.
    pub version: String,
    /// What the user typed.
    pub query: Option<String>,
    /// User profile; empty if unknown.
    pub user_profile: Option<String>,
    /// Conversation history; empty without earlier turns.
    pub history: Option<String>,
    /// What was returned: the query itself for a fallback.
    pub rewrite: Option<String>,
    /// Why the query itself was returned.
    pub fallback: Option<String>,
    /// Whether the rewrite was one of the cache.
    pub cached: bool,
    /// Time of the rewrite.
    pub latency_ms: f64,
    /// Salted hash of the user's id.
    pub user: Option<String>,
    /// Why the texts are missing: code of the filter's verdict, `plugin_fault` or `too_long`.
    pub redacted: Option<String>,
}

/// Feedback to an earlier request.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoggedFeedback {
    /// RFC 3339, UTC.
    pub time: String,
    /// Id of the request.
    pub id: String,
    /// Tenant.
    pub tenant: String,
    /// Ids of passages that the user opened.
    pub clicked: Vec<String>,
    /// Whether `passage`, or without one the passages of `clicked`, answered the query.
    pub useful: Option<bool>,
    /// The same from 0 to 1.
    pub score: Option<f64>,
    /// Id of the passage that `useful` and `score` are about.
    pub passage: Option<String>,
}

/// A row of a query table that was made of a log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct LoggedQueryRow {
    pub(crate) original_query: String,
    pub(crate) user_profile: String,
    pub(crate) history_summary: String,
    pub(crate) gold_ids: Vec<String>,
    pub(crate) group: String,
    /// Requests of this query in this context.
    pub(crate) requests: u64,
    /// Those that were answered by the query itself.
    pub(crate) fallbacks: u64,
}

const PREFIX: &str = "requests-";
const SUFFIX: &str = ".jsonl";

/// Name of the file of a day, for example `2026-11-26`.
pub fn day_file_name(day: &str) -> String {
    format!("{PREFIX}{day}{SUFFIX}")
}

/// The day of a file's name; `None` for other files.
pub fn day_of_file_name(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX).filter(|day| is_day(day))
}

/// Whether a text is a date such as `2026-11-26`. Dates of this form are in the order of their texts.
pub fn is_day(text: &str) -> bool {
    // The parser takes signs and spaces too.
    text.len() == "2026-11-26".len() && text.parse::<NaiveDate>().is_ok_and(|day| day.to_string() == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_days_are_found_by_name() {
        assert_eq!(day_of_file_name(&day_file_name("2026-11-26")), Some("2026-11-26"));
        for other in ["requests-2026-13-01.jsonl", "requests-2026-11-26.jsonl.gz", "salt", "requests-.jsonl"] {
            assert_eq!(day_of_file_name(other), None, "{other}");
        }
        assert!(!is_day("2026-1-2"));
        assert!(!is_day("+026-11-26"));
        assert!(!is_day("2026-11-32"));
        assert!(!is_day("2026-02-30"));
        assert!(!is_day("2026-11-26-1"));
    }

    #[test]
    fn a_line_says_its_kind_and_keeps_missing_texts_missing() {
        let line = RequestLogLine::Rewrite(LoggedRewrite { id: "a".into(), ..LoggedRewrite::default() });
        let text = serde_json::to_string(&line).unwrap();
        assert!(text.starts_with("{\"kind\":\"rewrite\"") && text.contains("\"query\":null"), "{text}");
        assert_eq!(serde_json::from_str::<RequestLogLine>(&text).unwrap(), line);
    }
}

//! The request log of `querl serve rewrite`: a file of JSON lines for each day (UTC), [`day_file_name`].
//!
//! | kind | line |
//! |---|---|
//! | `rewrite` | [`LoggedRewrite`]: a query and what was returned for it |
//! | `feedback` | [`LoggedFeedback`]: what a user did with the passages of an earlier request |

use chrono::NaiveDate;
use serde::{Deserialize, Serialize};

/// A line of the request log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RequestLogLine {
    /// A query and its rewrite.
    Rewrite(LoggedRewrite),
    /// Feedback to an earlier request.
    Feedback(LoggedFeedback),
}

/// A logged rewrite request. The texts are `None` if the filter of the log removed them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoggedRewrite {
    /// Time of the request, RFC 3339 in UTC.
    pub time: String,
    /// Request id, by which feedback refers to the request.
    pub id: String,
    /// Id of the tenant.
    pub tenant: String,
    /// Version of the tenant's model that wrote the rewrite.
    pub version: String,
    /// The user's query.
    pub query: Option<String>,
    /// User profile; empty if unknown.
    pub user_profile: Option<String>,
    /// Conversation history; empty without earlier turns.
    pub history: Option<String>,
    /// The returned text; for a fallback this is the query itself.
    pub rewrite: Option<String>,
    /// The reason why the query itself was returned; `None` if the model's rewrite was.
    pub fallback: Option<String>,
    /// True if the rewrite came from the server's cache.
    pub cached: bool,
    /// Latency of the rewrite, in milliseconds.
    pub latency_ms: f64,
    /// Salted hash of the user id; `None` if the request had none.
    pub user: Option<String>,
    /// The reason why the texts were removed: code of the filter's verdict, `plugin_fault` or `too_long`; `None` if they were not.
    pub redacted: Option<String>,
}

/// Logged feedback on an earlier rewrite request.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoggedFeedback {
    /// Time of the feedback, RFC 3339 in UTC.
    pub time: String,
    /// Id of the rewrite request.
    pub id: String,
    /// Id of the tenant.
    pub tenant: String,
    /// Ids of passages that the user opened.
    pub clicked: Vec<String>,
    /// True if `passage` (or all of `clicked` if that is not set) answered the query; `None` without a judgement.
    pub useful: Option<bool>,
    /// Score of the passages from 0 to 1, in place of `useful`: 0.5 or more counts as useful.
    pub score: Option<f64>,
    /// Id of the passage that `useful` and `score` are about.
    pub passage: Option<String>,
}

/// A row of a query table made from a request log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct LoggedQueryRow {
    pub(crate) original_query: String,
    pub(crate) user_profile: String,
    pub(crate) history_summary: String,
    pub(crate) gold_ids: Vec<String>,
    pub(crate) group: String,
    /// Number of requests with this query in this context.
    pub(crate) requests: u64,
    /// Number of these requests that were answered with the query itself.
    pub(crate) fallbacks: u64,
}

const PREFIX: &str = "requests-";
const SUFFIX: &str = ".jsonl";

/// File name of the log of a day (`2026-11-26`).
pub fn day_file_name(day: &str) -> String {
    format!("{PREFIX}{day}{SUFFIX}")
}

/// The day of a log file, from its name; `None` for the name of another file.
pub fn day_of_file_name(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX).filter(|day| is_day(day))
}

/// True for a date such as `2026-11-26`. The text order of such dates is their order in time.
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

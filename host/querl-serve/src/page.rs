//! The page of a service: the routes of its OpenAPI document, and a form to try one.

use serde_json::Value;
use std::fmt::Write;

/// A page's text with the routes of a document in place of `{{rows}}`.
pub(crate) fn with_routes(page: &str, document: &Value) -> String {
    let mut rows = String::new();
    for (path, methods) in document["paths"].as_object().into_iter().flatten() {
        for (method, operation) in methods.as_object().into_iter().flatten() {
            let (method, summary) = (method.to_uppercase(), operation["summary"].as_str().unwrap_or_default());
            let _ = write!(rows, "<tr><td><code>{method} {path}</code></td><td>{summary}</td></tr>");
        }
    }
    page.replace("{{rows}}", &rows)
}

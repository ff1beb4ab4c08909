//! The page of a service: the routes of its OpenAPI document, and a form to try one. It needs no external resources.

use serde_json::Value;
use std::fmt::Write;

/// The form of a page.
pub(crate) struct Form {
    /// HTML before the field of the key.
    pub(crate) fields: &'static str,
    /// Text of the textarea `text`.
    pub(crate) text: &'static str,
    /// Where the request goes.
    pub(crate) route: &'static str,
    /// The request as a JavaScript expression of `element(ID).value`.
    pub(crate) request: &'static str,
}

pub(crate) fn page(title: &str, document: &Value, form: &Form) -> String {
    let mut rows = String::new();
    for (path, methods) in document["paths"].as_object().into_iter().flatten() {
        for (method, operation) in methods.as_object().into_iter().flatten() {
            let (method, summary) = (method.to_uppercase(), operation["summary"].as_str().unwrap_or_default());
            let _ = write!(rows, "<tr><td><code>{method} {path}</code></td><td>{summary}</td></tr>");
        }
    }
    let description = document["info"]["description"].as_str().unwrap_or_default();
    let Form { fields, text, route, request } = form;
    let values = [
        ("title", title),
        ("description", description),
        ("rows", &rows),
        ("fields", fields),
        ("text", text),
        ("route", route),
        ("request", request),
    ];
    let page = include_str!("page.html").to_owned();
    values.into_iter().fold(page, |page, (name, value)| page.replace(&format!("{{{{{name}}}}}"), value))
}

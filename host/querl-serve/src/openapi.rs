//! The parts that the OpenAPI documents of all services share, and a page of the routes with a form to try one, which needs no external
//! resources.

use serde_json::{Value, json};
use std::fmt::Write;

pub(crate) fn reference(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}

/// The OpenAPI description of a POST route with a JSON body. `errors`: HTTP statuses with their descriptions; their bodies have
/// the schema `error`.
pub(crate) fn post(
    summary: &str,
    request: &Value,
    response: &Value,
    (error, errors): (&str, &[(&str, &str)]),
) -> Value {
    let content = |schema: &Value| json!({"application/json": {"schema": schema}});
    let mut responses = json!({"200": {"description": "Success", "content": content(response)}});
    for (status, description) in errors {
        responses[*status] = json!({"description": description, "content": content(&reference(error))});
    }
    let body = json!({"required": true, "content": content(request)});
    json!({"post": {"summary": summary, "requestBody": body, "responses": responses}})
}

pub(crate) fn get(summary: &str) -> Value {
    json!({"get": {"summary": summary, "responses": {"200": {"description": "Success"}}}})
}

pub(crate) fn document(title: &str, description: &str, paths: &Value, schemas: &Value) -> Value {
    json!({
        "openapi": "3.1.0",
        "info": {"title": title, "version": env!("CARGO_PKG_VERSION"), "description": description},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    })
}

/// The form for trying a route on the HTML page.
pub(crate) struct Form {
    /// HTML fields before the field of the API key.
    pub(crate) fields: &'static str,
    /// Initial text of the textarea with the id `text`.
    pub(crate) text: &'static str,
    /// Path of the route that the form calls.
    pub(crate) route: &'static str,
    /// The request body as a JavaScript expression, in which `element(ID).value` is the value of a field.
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

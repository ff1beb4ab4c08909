//! HTML pages of reports: one file each, without scripts and requests, for light and dark mode.
//!
//! Rust computes texts and coordinates, the templates of this folder place them. Every value passes the HTML escaping of the
//! template engine, and a content security policy in each page forbids scripts and requests.

pub(crate) mod charts;

use crate::error::EvalError;
use crate::text::printable;
use serde::Serialize;

pub(crate) const REPORT: &str = include_str!("report.html");
pub(crate) const REPLAY: &str = include_str!("replay.html");
pub(crate) const AUDIT: &str = include_str!("audit.html");
pub(crate) const CLASSIFICATION: &str = include_str!("classification.html");

/// Renders `template` with the fields of `content`, the stylesheet as `css` and `line_chart.html` for imports.
pub(crate) fn render(template: &str, content: &impl Serialize) -> Result<String, EvalError> {
    let mut environment = minijinja::Environment::new();
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::Html);
    environment.set_undefined_behavior(minijinja::UndefinedBehavior::Strict);
    // The stylesheet is a constant of this crate; all other text is escaped.
    environment.add_global("css", minijinja::Value::from_safe_string(include_str!("report.css").to_owned()));
    environment.add_template("line_chart.html", include_str!("line_chart.html"))?;
    environment.add_template("page.html", template)?;
    let html = environment.get_template("page.html")?.render(minijinja::value::Serde(content))?;
    Ok(printable(&html))
}

//! The audit as an HTML page.

use super::measures::Measure;
use super::signs::Sign;
use super::suspicious::SuspiciousEpisode;
use super::{Audit, text};
use crate::error::EvalError;
use crate::page::{self, charts};
use serde::Serialize;

/// Renders the audit as an HTML page.
///
/// # Errors
/// The template engine failed, which no content of `audit` causes.
pub fn audit_html(audit: &Audit) -> Result<String, EvalError> {
    page::render(page::AUDIT, &Page::new(audit))
}

/// The fields of the template.
#[derive(Debug, Serialize)]
struct Page {
    head: String,
    windows: Option<String>,
    has_signs: bool,
    verdict: String,
    signs: Vec<String>,
    notes: Vec<String>,
    charts: Vec<charts::LineChart>,
    heads: [&'static str; 6],
    rows: Vec<MeasureRow>,
    training: Vec<String>,
    suspicious: Vec<Shown>,
    explanation: String,
}

#[derive(Debug, Serialize)]
struct MeasureRow {
    group: &'static str,
    cells: [String; 6],
}

#[derive(Debug, Serialize)]
struct Shown {
    id: String,
    line: usize,
    query: String,
    rewrite: String,
    scores: String,
    reasons: String,
}

impl Page {
    fn new(audit: &Audit) -> Self {
        let row = |one: &Measure| MeasureRow { group: text::title(one.kind), cells: text::cells(one) };
        Self {
            head: text::head(audit),
            windows: text::windows(audit),
            has_signs: !audit.signs.is_empty(),
            verdict: text::conclusion(audit),
            signs: audit.signs.iter().map(Sign::to_string).collect(),
            notes: audit.notes.clone(),
            charts: charts(audit),
            heads: text::HEADS,
            rows: audit.measures.iter().map(row).collect(),
            training: text::training(audit),
            suspicious: audit.suspicious.iter().map(Shown::new).collect(),
            explanation: text::explanation(audit),
        }
    }
}

/// The total, and the measures of quality, by step.
fn charts(audit: &Audit) -> Vec<charts::LineChart> {
    let curve = |label: &'static str, name: &str| {
        let points = audit.curves.get(name).filter(|points| points.len() > 1)?.clone();
        Some(charts::Points { label, name: name.to_owned(), points })
    };
    let quality =
        [("gold rank", "gold_rank"), ("second retriever", "second_retriever"), ("score of the best hit", "top1_score")];
    let quality = quality.into_iter().filter_map(|(label, name)| curve(label, name)).collect();
    let total = curve("total", "total").into_iter().collect();
    let total = charts::LineChart::new("Reward", "total", total);
    total.into_iter().chain(charts::LineChart::new("Quality", "mean", quality)).collect()
}

impl Shown {
    fn new(one: &SuspiciousEpisode) -> Self {
        Self {
            id: one.id.clone(),
            line: one.line,
            query: one.query.clone(),
            rewrite: one.rewrite.clone(),
            scores: text::scores(one),
            reasons: one.reasons.join("; "),
        }
    }
}

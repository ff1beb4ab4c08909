//! The metrics of a classifier as text for a terminal and as an HTML page.

use super::measures::Measures;
use crate::error::EvalError;
use crate::page;
use crate::page::charts::ReliabilityChart;
use crate::text::{left, printable, right, wrapped};
use serde::Serialize;
use unicode_width::UnicodeWidthStr;

/// Width of a number in terminal columns.
const WIDTH: usize = 9;

/// Renders the metrics, the per-class scores and the confusion matrix as text for a terminal. Ends with a line break.
pub fn classification_text(measures: &Measures) -> String {
    let percent = |value: f64| format!("{:.1}%", 100.0 * value);
    let (wilson, drawn, f1) = (measures.accuracy_wilson, measures.accuracy_bootstrap, measures.f1_macro_bootstrap);
    let mut lines = vec![
        format!(
            "eval_accuracy     {}  [{}, {}] Wilson, [{}, {}] bootstrap over {} groups",
            percent(measures.eval_accuracy),
            percent(wilson.low),
            percent(wilson.high),
            percent(drawn.low),
            percent(drawn.high),
            measures.n_groups
        ),
        format!("eval_f1_macro     {:.4}  [{:.3}, {:.3}]", measures.eval_f1_macro, f1.low, f1.high),
        format!("eval_f1_weighted  {:.4}", measures.eval_f1_weighted),
        format!(
            "log loss {:.4}, Brier score {:.4}, calibration error {:.4}",
            measures.log_loss, measures.brier, measures.expected_calibration_error
        ),
        format!(
            "always `{}`: {}; p-value against that {:.4}",
            printable(&measures.majority_class),
            percent(measures.majority_accuracy),
            measures.majority_p_value
        ),
        String::new(),
    ];
    lines.extend(class_lines(measures));
    lines.extend(measures.warnings.iter().flat_map(|warning| wrapped(&printable(&format!("note: {warning}")), 100)));
    lines.join("\n") + "\n"
}

/// One line per class: its scores and its row of the confusion matrix.
fn class_lines(measures: &Measures) -> Vec<String> {
    let names: Vec<String> = measures.classes.iter().map(|name| printable(name)).collect();
    let width = names.iter().map(|name| name.width()).max().unwrap_or(0).max(WIDTH);
    let heads = ["precision", "recall", "F1", "examples"].into_iter().map(String::from);
    let heads = heads.chain(names.iter().map(|name| format!("-> {name}")));
    let heads: Vec<String> = heads.map(|head| right(&head, head.width().max(WIDTH))).collect();
    let mut lines = vec![format!("{}  {}", left("", width), heads.join("  "))];
    for ((name, scores), row) in names.iter().zip(&measures.per_class).zip(&measures.confusion.counts) {
        let figures = [scores.precision, scores.recall, scores.f1].map(|value| format!("{value:.4}"));
        let counts = std::iter::once(scores.support).chain(row.iter().copied()).map(|count| count.to_string());
        let cells = figures.into_iter().chain(counts).zip(&heads).map(|(cell, head)| right(&cell, head.width()));
        lines.push(format!("{}  {}", left(name, width), cells.collect::<Vec<_>>().join("  ")));
    }
    lines
}

/// The input of [`classification_html`].
#[derive(Debug, Clone)]
pub struct ClassificationReport {
    /// Title of the page.
    pub title: String,
    /// (Name, value) pairs shown above the metrics, in order.
    pub facts: Vec<(String, String)>,
    /// (Name, metrics) of the classifier, then of the systems it is compared with on the same examples; at least one.
    pub systems: Vec<(String, Measures)>,
    /// Fitted temperature of the classifier's probabilities; `None` without temperature scaling.
    pub temperature: Option<f64>,
    /// Wrong predictions of the classifier, highest confidence first.
    pub mistakes: Vec<Mistake>,
    /// Warnings about the data or the metrics, one sentence each.
    pub notes: Vec<String>,
}

/// An example that the classifier predicts wrongly.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Mistake {
    /// Text of the example.
    pub text: String,
    /// True class.
    pub label: String,
    /// Predicted class.
    pub predicted: String,
    /// Probability of the predicted class.
    pub confidence: f64,
    /// Remark about the example, shown next to it; may be empty.
    pub note: String,
}

/// Renders the metrics as an HTML page.
///
/// # Errors
/// No system, or the template engine failed, which no content causes.
pub fn classification_html(report: &ClassificationReport) -> Result<String, EvalError> {
    let Some((name, first)) = report.systems.first() else {
        return Err(EvalError::Classification("a report needs at least one system".into()));
    };
    page::render(page::CLASSIFICATION, &Page::new(report, name, first))
}

#[derive(Debug, Serialize)]
struct Page<'a> {
    title: &'a str,
    name: &'a str,
    facts: &'a [(String, String)],
    cautions: Vec<&'a String>,
    systems: Vec<SystemRow<'a>>,
    classes: Vec<ClassRow<'a>>,
    class_names: &'a [String],
    reliability: ReliabilityChart,
    temperature: Option<String>,
    mistakes: Vec<ShownMistake<'a>>,
}

#[derive(Debug, Serialize)]
struct SystemRow<'a> {
    name: &'a str,
    accuracy: String,
    accuracy_range: String,
    f1_macro: String,
    f1_range: String,
    f1_weighted: String,
    log_loss: String,
    brier: String,
    calibration_error: String,
    p_value: String,
}

#[derive(Debug, Serialize)]
struct ClassRow<'a> {
    name: &'a str,
    precision: String,
    recall: String,
    f1: String,
    support: u64,
    cells: Vec<Cell>,
}

#[derive(Debug, Serialize)]
struct Cell {
    n: u64,
    /// Share of the examples of the class.
    percent: String,
    is_right: bool,
}

#[derive(Debug, Serialize)]
struct ShownMistake<'a> {
    #[serde(flatten)]
    mistake: &'a Mistake,
    shown_confidence: String,
}

impl<'a> Page<'a> {
    fn new(report: &'a ClassificationReport, name: &'a str, first: &'a Measures) -> Self {
        let shown =
            |mistake: &'a Mistake| ShownMistake { mistake, shown_confidence: format!("{:.2}", mistake.confidence) };
        Self {
            title: &report.title,
            name,
            facts: &report.facts,
            cautions: first.warnings.iter().chain(&report.notes).collect(),
            systems: report.systems.iter().map(|(name, measures)| system(name, measures)).collect(),
            classes: classes(first),
            class_names: &first.classes,
            reliability: ReliabilityChart::new(&first.reliability),
            temperature: report.temperature.map(|temperature| format!("{temperature:.3}")),
            mistakes: report.mistakes.iter().map(shown).collect(),
        }
    }
}

fn system<'a>(name: &'a str, measures: &Measures) -> SystemRow<'a> {
    let percent = |value: f64| format!("{:.1}%", 100.0 * value);
    let (drawn, f1) = (measures.accuracy_bootstrap, measures.f1_macro_bootstrap);
    SystemRow {
        name,
        accuracy: percent(measures.eval_accuracy),
        accuracy_range: format!("{} to {}", percent(drawn.low), percent(drawn.high)),
        f1_macro: format!("{:.3}", measures.eval_f1_macro),
        f1_range: format!("{:.3} to {:.3}", f1.low, f1.high),
        f1_weighted: format!("{:.3}", measures.eval_f1_weighted),
        log_loss: format!("{:.3}", measures.log_loss),
        brier: format!("{:.3}", measures.brier),
        calibration_error: format!("{:.3}", measures.expected_calibration_error),
        p_value: format!("{:.4}", measures.majority_p_value),
    }
}

fn classes(measures: &Measures) -> Vec<ClassRow<'_>> {
    let rows = measures.classes.iter().zip(&measures.per_class).zip(&measures.confusion.counts).enumerate();
    rows.map(|(class, ((name, scores), counts))| {
        let cell = |(predicted, n): (usize, &u64)| Cell {
            n: *n,
            percent: format!("{:.0}%", 100.0 * *n as f64 / scores.support.max(1) as f64),
            is_right: predicted == class,
        };
        ClassRow {
            name,
            precision: format!("{:.3}", scores.precision),
            recall: format!("{:.3}", scores.recall),
            f1: format!("{:.3}", scores.f1),
            support: scores.support,
            cells: counts.iter().enumerate().map(cell).collect(),
        }
    })
    .collect()
}

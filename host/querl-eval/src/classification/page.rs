//! The figures of a classifier as a page for a browser: one file, no script, no outside request.

use super::measures::Measures;
use crate::error::EvalError;
use crate::report::page;
use serde::Serialize;

/// Edges of the reliability curve's square, in units of its picture.
const LEFT: f64 = 40.0;
const TOP: f64 = 10.0;
const SIDE: f64 = 260.0;

/// What the page shows.
#[derive(Debug, Clone)]
pub struct ClassificationReport {
    /// Stands above it.
    pub title: String,
    /// Name and value, in order.
    pub facts: Vec<(String, String)>,
    /// What was measured on the same examples: the classifier first, then what it is compared with. At least one.
    pub systems: Vec<(String, Measures)>,
    /// The temperature that calibrates the first, where it was fitted.
    pub temperature: Option<f64>,
    /// The first one's mistakes, surest first.
    pub mistakes: Vec<Mistake>,
    /// Sentences to be read with the figures.
    pub notes: Vec<String>,
}

/// An example that was taken for another class.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Mistake {
    /// The text.
    pub text: String,
    /// What it is.
    pub label: String,
    /// What it was taken for.
    pub predicted: String,
    /// Probability of that.
    pub confidence: f64,
    /// What is known of the example besides; may be empty.
    pub note: String,
}

/// The page as HTML.
///
/// # Errors
/// No system, or the template engine failed; not for any content of a text.
pub fn classification_html(report: &ClassificationReport) -> Result<String, EvalError> {
    let Some((name, first)) = report.systems.first() else {
        return Err(EvalError::Classification("a report needs one system at least".into()));
    };
    page(include_str!("page.html"), &Page::new(report, name, first))
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
    reliability: Curve,
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
    /// Share of the class's examples.
    percent: String,
    is_right: bool,
}

#[derive(Debug, Serialize)]
struct Curve {
    left: f64,
    top: f64,
    right: f64,
    bottom: f64,
    line: String,
    points: Vec<Point>,
}

#[derive(Debug, Serialize)]
struct Point {
    x: String,
    y: String,
    radius: String,
    title: String,
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
            reliability: curve(first),
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

/// Confidence to the right, accuracy upwards; bins without predictions are left out.
fn curve(measures: &Measures) -> Curve {
    let n: usize = measures.reliability.iter().map(|bin| bin.n).sum();
    let points: Vec<Point> = measures
        .reliability
        .iter()
        .filter(|bin| bin.n > 0)
        .map(|bin| Point {
            x: format!("{:.1}", LEFT + SIDE * bin.confidence),
            y: format!("{:.1}", TOP + SIDE * (1.0 - bin.accuracy)),
            radius: format!("{:.1}", 2.0 + 10.0 * (bin.n as f64 / n.max(1) as f64).sqrt()),
            title: format!("{} predictions: confidence {:.3}, accuracy {:.3}", bin.n, bin.confidence, bin.accuracy),
        })
        .collect();
    let line: Vec<String> = points.iter().map(|point| format!("{},{}", point.x, point.y)).collect();
    Curve { left: LEFT, top: TOP, right: LEFT + SIDE, bottom: TOP + SIDE, line: line.join(" "), points }
}

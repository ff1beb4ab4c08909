//! The figures of a classifier as text for a terminal.

use super::measures::Measures;
use crate::printable::printable;
use crate::replay::width::{left, right, wrapped};
use unicode_width::UnicodeWidthStr;

/// Columns of a figure.
const WIDTH: usize = 9;

/// The figures, the classes and the confusion matrix. Ends with a line break.
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
    lines.extend(classes(measures));
    lines.extend(measures.warnings.iter().flat_map(|warning| wrapped(&printable(&format!("note: {warning}")), 100)));
    lines.join("\n") + "\n"
}

/// A line for each class: its scores, and what its examples were taken for.
fn classes(measures: &Measures) -> Vec<String> {
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

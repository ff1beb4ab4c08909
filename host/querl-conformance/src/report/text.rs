//! The report for a terminal.

use super::{Check, Cost, Outcome, Report};
use std::fmt::Write;
use unicode_width::UnicodeWidthStr;

pub(super) fn render(report: &Report) -> String {
    let mut text = format!("{}\n", report.title());
    if !report.digest.is_empty() {
        let _ = writeln!(text, "sha256 {}", report.digest);
    }
    // A line without a note needs no column: names of golden cases are long.
    let with_note = report.checks.iter().filter(|check| !note(check).is_empty());
    let width = with_note.map(|check| check.name.width()).max().unwrap_or(0);
    let mut group = "";
    for check in &report.checks {
        if check.group() != group {
            group = check.group();
            let _ = writeln!(text, "\n{group}");
        }
        push_check(&mut text, check, width);
    }
    push_costs(&mut text, &report.cost);
    let (n_passed, n_failed, n_skipped) = report.counts();
    let _ = writeln!(text, "\n{n_passed} passed, {n_failed} failed, {n_skipped} skipped");
    text
}

fn push_check(text: &mut String, check: &Check, width: usize) {
    let word = match &check.outcome {
        Outcome::Passed => "ok  ",
        Outcome::Failed(_) => "FAIL",
        Outcome::Skipped { .. } => "skip",
    };
    let padding = " ".repeat(width.saturating_sub(check.name.width()));
    let line = format!("  {word}  {}{padding}  {}", check.name, note(check));
    let _ = writeln!(text, "{}", line.trim_end());
    if let Outcome::Failed(failure) = &check.outcome {
        for (name, value) in [("sent", &failure.sent), ("returned", &failure.returned), ("contract", &failure.expected)]
        {
            let _ = writeln!(text, "        {name:<8}  {value}");
        }
    }
}

fn note(check: &Check) -> &str {
    match &check.outcome {
        Outcome::Skipped { why } => why,
        _ => &check.note,
    }
}

fn push_costs(text: &mut String, costs: &[Cost]) {
    if costs.is_empty() {
        return;
    }
    let row = |cells: [String; 6]| {
        let [kind, cells @ ..] = cells;
        let cells: Vec<_> = cells.iter().map(|cell| format!("{cell:>10}")).collect();
        format!("  {kind:<12}{}", cells.join("  "))
    };
    let header = ["", "fuel/item", "us/item", "memory", "size", "cold start"].map(str::to_owned);
    let _ = writeln!(text, "\ncost\n{}", row(header));
    for cost in costs {
        let cells = [
            cost.kind.name().to_owned(),
            grouped(cost.fuel_per_item.round() as u64),
            format!("{:.1}", cost.micros_per_item),
            bytes(cost.memory_bytes),
            bytes(cost.component_bytes),
            format!("{:.1} ms", cost.cold_start_ms),
        ];
        let _ = writeln!(text, "{}", row(cells));
    }
}

pub(crate) use querl_core::text::grouped;

fn bytes(n_bytes: usize) -> String {
    match n_bytes as f64 {
        n if n >= 1e6 => format!("{:.1} MB", n / 1e6),
        n => format!("{:.0} kB", n / 1e3),
    }
}

//! The tables of the report: systems, reward components, styles, data flow, stage times.

use crate::bootstrap::Interval;
use crate::evaluation::{Evaluation, Lookups};
use crate::facts::{FunnelStep, StageTiming};
use crate::metric::Metric;
use crate::table::system_title;
use serde::Serialize;

/// One row per metric and one column per system, which fits a phone.
#[derive(Debug, Serialize)]
pub(super) struct SystemsTable {
    heads: Vec<String>,
    rows: Vec<SystemsRow>,
}

#[derive(Debug, Serialize)]
struct SystemsRow {
    label: String,
    explanation: String,
    cells: Vec<Option<Cell>>,
}

#[derive(Debug, Serialize)]
struct Cell {
    mean: String,
    interval: String,
}

impl Cell {
    fn new(metric: Metric, found: Interval) -> Self {
        let [mean, low, high] = [found.mean, found.low, found.high].map(|value| metric.format(value));
        Self { mean, interval: format!("[{low}, {high}]") }
    }

    fn count(n: usize) -> Self {
        Self { mean: n.to_string(), interval: String::new() }
    }
}

pub(super) fn systems(evaluation: &Evaluation) -> SystemsTable {
    let systems = evaluation.systems_in_order();
    let has_retrieval = evaluation.lookups == Lookups::Made;
    let mut rows: Vec<SystemsRow> = Metric::ALL
        .into_iter()
        .filter(|metric| has_retrieval || !metric.needs_retrieval())
        .map(|metric| SystemsRow {
            label: metric.label().to_owned(),
            explanation: metric.explanation().to_owned(),
            cells: systems
                .iter()
                .map(|(_, system)| Some(Cell::new(metric, (*system.metrics.get(&metric)?)?)))
                .collect(),
        })
        .collect();
    rows.push(SystemsRow {
        label: "failed".to_owned(),
        explanation: if has_retrieval { "no rewrite, or retrieval failed" } else { "no response" }.to_owned(),
        cells: systems.iter().map(|(_, system)| Some(Cell::count(system.n_failed))).collect(),
    });
    if has_retrieval {
        rows.push(SystemsRow {
            label: "found nothing".to_owned(),
            explanation: "retrieval answered with an empty list".to_owned(),
            cells: systems.iter().map(|(_, system)| Some(Cell::count(system.n_empty))).collect(),
        });
    }
    SystemsTable { heads: heads(evaluation), rows }
}

pub(super) fn components(evaluation: &Evaluation) -> SystemsTable {
    let systems = evaluation.systems_in_order();
    let names: std::collections::BTreeSet<&String> =
        systems.iter().flat_map(|(_, system)| system.components.keys()).collect();
    let rows = names.into_iter().map(|name| SystemsRow {
        label: name.clone(),
        explanation: String::new(),
        cells: systems
            .iter()
            .map(|(_, system)| Some(Cell::new(Metric::Reward, (*system.components.get(name)?)?)))
            .collect(),
    });
    SystemsTable { heads: heads(evaluation), rows: rows.collect() }
}

pub(super) fn styles(evaluation: &Evaluation) -> SystemsTable {
    let systems = evaluation.systems_in_order();
    let Some(style) = &evaluation.style else { return SystemsTable { heads: Vec::new(), rows: Vec::new() } };
    let row = |label: String, explanation: &str, cell: &dyn Fn(&str) -> Option<Cell>| SystemsRow {
        label,
        explanation: explanation.to_owned(),
        cells: systems.iter().map(|(system, _)| cell(system)).collect(),
    };
    let mut rows = Vec::new();
    for (model, styles) in style.models() {
        for class in styles.classes() {
            let cell = |system: &str| Some(Cell::new(Metric::Reward, (*styles.systems.get(system)?.get(class)?)?));
            rows.push(row(format!("{class}{model}"), "", &cell));
        }
    }
    let n_chars = |system: &str| Some(Cell::new(Metric::LatencyMs, (*style.n_chars.get(system)?)?));
    rows.push(row("characters".to_owned(), "mean length of a response", &n_chars));
    let distinct = |system: &str| {
        style
            .distinct
            .get(system)
            .map(|share| Cell { mean: format!("{:.1} %", 100.0 * share), interval: String::new() })
    };
    rows.push(row("distinct responses".to_owned(), "share that differs from all before", &distinct));
    SystemsTable { heads: heads(evaluation), rows }
}

pub(super) fn style_shifts(evaluation: &Evaluation) -> SystemsTable {
    let pairs: Vec<(&str, &str)> = evaluation.pairs_in_order().map(|(first, second, _)| (first, second)).collect();
    let models = evaluation.style.iter().flat_map(|style| style.models());
    let rows = models.flat_map(|(model, styles)| {
        let cell = |(first, second): &(&str, &str), class: &str| {
            let found = (*styles.shifts.get(&format!("{first}-{second}"))?.get(class)?)?;
            let [mean, low, high] =
                [found.mean, found.low, found.high].map(|value| Metric::Reward.format_signed(value));
            let mark = if found.excludes_zero() { "*" } else { "" };
            Some(Cell { mean: format!("{mean}{mark}"), interval: format!("[{low}, {high}]") })
        };
        let row = |class: &str| SystemsRow {
            label: format!("{class}{model}"),
            explanation: String::new(),
            cells: pairs.iter().map(|pair| cell(pair, class)).collect(),
        };
        styles.classes().into_iter().map(row).collect::<Vec<_>>()
    });
    let rows = rows.collect();
    let head = |(first, second): &(&str, &str)| format!("{} − {}", system_title(first), system_title(second));
    SystemsTable { heads: pairs.iter().map(head).collect(), rows }
}

fn heads(evaluation: &Evaluation) -> Vec<String> {
    evaluation.systems_in_order().into_iter().map(|(name, _)| system_title(name).to_owned()).collect()
}

#[derive(Debug, Serialize)]
pub(super) struct FunnelRow {
    label: String,
    n: u64,
    /// Length relative to the longest bar.
    percent: String,
    parts: String,
}

pub(super) fn funnel(steps: &[FunnelStep]) -> Vec<FunnelRow> {
    let longest = steps.iter().map(|step| step.n).max().unwrap_or(0).max(1);
    let row = |step: &FunnelStep| FunnelRow {
        label: step.label.clone(),
        n: step.n,
        percent: format!("{:.1}", 100.0 * step.n as f64 / longest as f64),
        parts: step.parts.iter().map(|(label, n)| format!("{label} {n}")).collect::<Vec<_>>().join(" · "),
    };
    steps.iter().map(row).collect()
}

/// Stage and time, then the sum.
pub(super) fn timings(timings: &[StageTiming]) -> Vec<(String, String)> {
    if timings.is_empty() {
        return Vec::new();
    }
    let total = StageTiming { stage: "all".to_owned(), seconds: timings.iter().map(|timing| timing.seconds).sum() };
    timings.iter().chain([&total]).map(|timing| (timing.stage.clone(), duration(timing.seconds))).collect()
}

fn duration(seconds: f64) -> String {
    if seconds < 60.0 {
        return format!("{seconds:.1} s");
    }
    let whole = seconds.round() as u64;
    if whole < 3600 {
        format!("{} min {:02} s", whole / 60, whole % 60)
    } else {
        format!("{} h {:02} min", whole / 3600, whole / 60 % 60)
    }
}

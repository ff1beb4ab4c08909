//! Tables of the report: systems, reward components, styles, data flow, stage times.

use crate::bootstrap::Interval;
use crate::evaluation::{Difference, Evaluation, Lookups, RewriteControls, SecondEvaluation};
use crate::facts::{FunnelStep, StageTiming};
use crate::metric::Metric;
use crate::table::system_title;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A table with one row per metric and one column per system.
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

    /// A star marks an interval that excludes 0.
    fn difference(metric: Metric, found: Difference) -> Self {
        let [mean, low, high] = [found.mean, found.low, found.high].map(|value| metric.format_signed(value));
        let mark = if found.excludes_zero() { "*" } else { "" };
        Self { mean: format!("{mean}{mark}"), interval: format!("[{low}, {high}]") }
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
        .filter(|metric| systems.iter().any(|(_, system)| system.metrics.contains_key(metric)))
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
    let names: BTreeSet<&String> = systems.iter().flat_map(|(_, system)| system.components.keys()).collect();
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
    let Some(style) = &evaluation.style else { return SystemsTable { heads: Vec::new(), rows: Vec::new() } };
    let row = |label: String, explanation: &str, cell: &dyn Fn(&str) -> Option<Cell>| SystemsRow {
        label,
        explanation: explanation.to_owned(),
        cells: cells(evaluation, cell),
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
    let models = evaluation.style.iter().flat_map(|style| style.models());
    let rows = models.flat_map(|(model, styles)| {
        let cell =
            |pair: &str, class: &str| Some(Cell::difference(Metric::Reward, (*styles.shifts.get(pair)?.get(class)?)?));
        let row = |class: &str| SystemsRow {
            label: format!("{class}{model}"),
            explanation: String::new(),
            cells: pair_cells(evaluation, |pair| cell(pair, class)),
        };
        styles.classes().into_iter().map(row).collect::<Vec<_>>()
    });
    SystemsTable { heads: pair_heads(evaluation), rows: rows.collect() }
}

/// Top-1 accuracy and MRR on the second retriever; no rows if the run has none.
pub(super) fn second(evaluation: &Evaluation) -> SystemsTable {
    let row = |metric: Metric, second: &SecondEvaluation| SystemsRow {
        label: metric.label().to_owned(),
        explanation: metric.explanation().to_owned(),
        cells: cells(evaluation, |name| Some(Cell::new(metric, (*second.systems.get(name)?.get(&metric)?)?))),
    };
    let second = evaluation.second_retrieval.iter();
    let rows = second.flat_map(|second| SecondEvaluation::METRICS.map(|metric| row(metric, second)));
    SystemsTable { heads: heads(evaluation), rows: rows.collect() }
}

/// Paired differences: one row per metric, one column per pair of systems.
pub(super) fn differences(
    evaluation: &Evaluation,
    pairs: Option<&BTreeMap<String, BTreeMap<Metric, Option<Difference>>>>,
    metrics: &[Metric],
) -> SystemsTable {
    let cell = |pair: &str, metric: Metric| {
        let found = (*pairs?.get(pair)?.get(&metric)?)?;
        let Cell { mean, interval } = Cell::difference(metric, found);
        Some(Cell { mean, interval: format!("{interval} of {}", found.n) })
    };
    let rows = metrics.iter().map(|metric| SystemsRow {
        label: metric.label().to_owned(),
        explanation: String::new(),
        cells: pair_cells(evaluation, |pair| cell(pair, *metric)),
    });
    let rows = rows.filter(|row| row.cells.iter().any(Option::is_some)).collect();
    SystemsTable { heads: pair_heads(evaluation), rows }
}

/// Length and words of the rewrites; no rows if no system has an answer.
pub(super) fn controls(evaluation: &Evaluation) -> SystemsTable {
    let Some(controls) = &evaluation.controls else { return SystemsTable { heads: Vec::new(), rows: Vec::new() } };
    let row =
        |label: &str, explanation: &str, metric: Metric, part: fn(&RewriteControls) -> Option<Interval>| SystemsRow {
            label: label.to_owned(),
            explanation: explanation.to_owned(),
            cells: cells(evaluation, |name| Some(Cell::new(metric, part(controls.systems.get(name)?)?))),
        };
    let rows = vec![
        row("characters", "mean length of a rewrite", Metric::LatencyMs, |found| found.n_chars),
        row("kept words %", "share of the query's words in the rewrite", Metric::Top1, |found| found.kept_terms),
        row(
            "new gold words %",
            "share of the rewrite's words that a gold passage has and the query has not",
            Metric::Top1,
            |found| found.new_gold_terms,
        ),
    ];
    SystemsTable { heads: heads(evaluation), rows }
}

/// pass@k: one row for each k; no rows if no system has samples.
pub(super) fn pass_at_k(evaluation: &Evaluation) -> SystemsTable {
    let ks: BTreeSet<usize> = evaluation.pass_at_k.values().flat_map(|found| found.k.keys().copied()).collect();
    let row = |k: usize| SystemsRow {
        label: format!("pass@{k} %"),
        explanation: String::new(),
        cells: cells(evaluation, |name| Some(Cell::new(Metric::Top1, *evaluation.pass_at_k.get(name)?.k.get(&k)?))),
    };
    SystemsTable { heads: heads(evaluation), rows: ks.into_iter().map(row).collect() }
}

/// A cell for each system, by its name.
fn cells(evaluation: &Evaluation, cell: impl Fn(&str) -> Option<Cell>) -> Vec<Option<Cell>> {
    evaluation.systems_in_order().into_iter().map(|(name, _)| cell(name)).collect()
}

fn heads(evaluation: &Evaluation) -> Vec<String> {
    evaluation.systems_in_order().into_iter().map(|(name, _)| system_title(name).to_owned()).collect()
}

/// A cell for each pair of systems, by its name.
fn pair_cells(evaluation: &Evaluation, cell: impl Fn(&str) -> Option<Cell>) -> Vec<Option<Cell>> {
    evaluation.pairs_in_order().map(|(first, second, _)| cell(&format!("{first}-{second}"))).collect()
}

fn pair_heads(evaluation: &Evaluation) -> Vec<String> {
    let head = |first: &str, second: &str| format!("{} − {}", system_title(first), system_title(second));
    evaluation.pairs_in_order().map(|(first, second, _)| head(first, second)).collect()
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

/// (Stage, time) pairs, then the sum.
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

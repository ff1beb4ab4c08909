//! Paired differences as points with whiskers, one plot a metric.

use super::chart::{Axis, Tick};
use crate::evaluation::{Difference, Evaluation};
use crate::metric::Metric;
use crate::table::system_title;
use serde::Serialize;

const WIDTH: f64 = 360.0;
const LEFT: f64 = 104.0;
const RIGHT: f64 = 240.0;
const ROW_HEIGHT: f64 = 28.0;
const TOP: f64 = 6.0;
/// Room for tick labels and the axis label.
const FOOT: f64 = 36.0;

/// One plot.
#[derive(Debug, Serialize)]
pub(super) struct Forest {
    title: &'static str,
    explanation: &'static str,
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
    zero: String,
    ticks: Vec<Tick>,
    rows: Vec<ForestRow>,
}

/// One pair.
#[derive(Debug, Serialize)]
pub(super) struct ForestRow {
    y: f64,
    label: String,
    low: String,
    mean: String,
    high: String,
    mean_text: String,
    interval_text: String,
    /// `better`, `worse`, `open`: which side of 0 the whole interval lies on.
    verdict: &'static str,
    n: usize,
}

/// A plot for each metric that some pair has.
pub(super) fn forests(evaluation: &Evaluation) -> Vec<Forest> {
    Metric::COMPARED.iter().filter_map(|metric| forest(evaluation, *metric)).collect()
}

fn forest(evaluation: &Evaluation, metric: Metric) -> Option<Forest> {
    let found: Vec<(String, Difference)> = evaluation
        .pairs_in_order()
        .filter_map(|(first, second, differences)| {
            let label = format!("{} − {}", system_title(first), system_title(second));
            Some((label, differences.get(&metric).copied().flatten()?))
        })
        .collect();
    let bounds = found.iter().flat_map(|(_, difference)| [difference.low.abs(), difference.high.abs()]);
    let reach = bounds.max_by(f64::total_cmp)?.max(1e-9) * 1.05;
    // Shares are drawn as percentage points, as they are written.
    let scale = if matches!(metric, Metric::Top1 | Metric::WinRate) { 100.0 } else { 1.0 };
    let axis = Axis::new((-reach * scale, reach * scale), (LEFT, RIGHT));
    let bottom = TOP + ROW_HEIGHT * found.len() as f64;
    Some(Forest {
        title: metric.label(),
        explanation: metric.explanation(),
        width: WIDTH,
        height: bottom + FOOT,
        left: LEFT,
        right: RIGHT,
        top: TOP,
        bottom,
        zero: axis.at(0.0),
        ticks: axis.ticks(5),
        rows: found
            .into_iter()
            .enumerate()
            .map(|(index, (label, d))| row(index, label, d, metric, axis, scale))
            .collect(),
    })
}

fn row(index: usize, label: String, found: Difference, metric: Metric, axis: Axis, scale: f64) -> ForestRow {
    let [low, mean, high] = [found.low, found.mean, found.high].map(|value| metric.format_signed(value));
    ForestRow {
        y: TOP + ROW_HEIGHT * (index as f64 + 0.5),
        label,
        low: axis.at(found.low * scale),
        mean: axis.at(found.mean * scale),
        high: axis.at(found.high * scale),
        mean_text: mean,
        interval_text: format!("[{low}, {high}]"),
        verdict: match (found.low > 0.0, found.high < 0.0) {
            (true, _) => "better",
            (_, true) => "worse",
            _ => "open",
        },
        n: found.n,
    }
}

//! Coordinates of charts in SVG units: curves, paired differences, histograms, reliability. The templates draw them.

use crate::classification::ReliabilityBin;
use crate::evaluation::{Difference, Evaluation};
use crate::metric::Metric;
use crate::replay::Histogram;
use crate::table::system_title;
use serde::Serialize;
use std::cmp::Ordering;

const WIDTH: f64 = 360.0;
const RIGHT: f64 = 350.0;
/// Space below a plotting area for the tick labels and the label of the axis.
const FOOT: f64 = 36.0;

/// Size of a chart and edges of its plotting area.
#[derive(Debug, Clone, Copy, Serialize)]
struct Frame {
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

impl Frame {
    fn new((left, right): (f64, f64), (top, bottom): (f64, f64)) -> Self {
        Self { width: WIDTH, height: bottom + FOOT, left, right, top, bottom }
    }

    fn x(&self, values: (f64, f64)) -> Axis {
        Axis::new(values, (self.left, self.right))
    }

    fn y(&self, values: (f64, f64)) -> Axis {
        Axis::new(values, (self.bottom, self.top))
    }
}

/// A mark on an axis.
#[derive(Debug, Serialize)]
struct Tick {
    at: String,
    label: String,
}

/// A linear scale from data to SVG units.
#[derive(Debug, Clone, Copy)]
struct Axis {
    from: (f64, f64),
    to: (f64, f64),
}

impl Axis {
    fn new(from: (f64, f64), to: (f64, f64)) -> Self {
        Self { from, to }
    }

    /// Minimum and maximum, widened if they are equal. `None` without values.
    fn exact_range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
        let (low, high) =
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            return None;
        }
        let flat = high - low <= f64::EPSILON * high.abs().max(1.0);
        let margin = if low == 0.0 { 1.0 } else { 0.1 * low.abs() };
        Some(if flat { (low - margin, high + margin) } else { (low, high) })
    }

    fn padded_range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
        let (low, high) = Self::exact_range(values)?;
        let margin = 0.06 * (high - low);
        // The axis of a quantity that is never negative does not extend below 0.
        Some((if low >= 0.0 { (low - margin).max(0.0) } else { low - margin }, high + margin))
    }

    /// SVG position of `value`, with one decimal.
    fn at(&self, value: f64) -> String {
        format!("{:.1}", self.position(value))
    }

    fn position(&self, value: f64) -> f64 {
        let share = (value - self.from.0) / (self.from.1 - self.from.0);
        self.to.0 + share * (self.to.1 - self.to.0)
    }

    /// About `n` marks at round numbers.
    fn ticks(&self, n: usize) -> Vec<Tick> {
        let rough = (self.from.1 - self.from.0) / n as f64;
        let magnitude = 10f64.powf(rough.log10().floor());
        let step = magnitude * [1.0, 2.0, 5.0].into_iter().find(|factor| factor * magnitude >= rough).unwrap_or(10.0);
        let decimals = (-step.log10().floor()).clamp(0.0, 6.0) as usize;
        let (first, last) = ((self.from.0 / step).ceil() as i64, (self.from.1 / step).floor() as i64);
        let value = |index: i64| index as f64 * step;
        (first..=last)
            .map(|index| Tick { at: self.at(value(index)), label: tick_label(value(index), decimals) })
            .collect()
    }
}

fn tick_label(value: f64, decimals: usize) -> String {
    if value == 0.0 && decimals > 4 {
        "0".to_owned()
    } else if value.abs() >= 1e5 || decimals > 4 {
        format!("{value:.0e}")
    } else {
        format!("{value:.decimals$}")
    }
}

/// Curves with more points are drawn thin, with a moving average over them.
const SMOOTH_ABOVE: usize = 40;

/// A line chart of one or more curves over training steps.
#[derive(Debug, Serialize)]
pub(crate) struct LineChart {
    title: &'static str,
    y_label: &'static str,
    #[serde(flatten)]
    frame: Frame,
    x_ticks: Vec<Tick>,
    y_ticks: Vec<Tick>,
    series: Vec<Series>,
}

#[derive(Debug, Serialize)]
struct Series {
    label: &'static str,
    name: String,
    last: String,
    thin: String,
    thick: String,
    end: (String, String),
}

/// A curve of a line chart: its label, its name in `metrics.jsonl`, and its values by step.
#[derive(Debug)]
pub(crate) struct Points {
    pub(crate) label: &'static str,
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

impl LineChart {
    /// A line chart of `curves`; `None` if no curve has a point.
    pub(crate) fn new(title: &'static str, y_label: &'static str, curves: Vec<Points>) -> Option<Self> {
        let all = || curves.iter().flat_map(|curve| &curve.points);
        let n_longest = curves.iter().map(|curve| curve.points.len()).max()?;
        let frame = Frame { height: 200.0, ..Frame::new((58.0, RIGHT), (8.0, 162.0)) };
        let x = frame.x(Axis::exact_range(all().map(|point| point.0))?);
        let y = frame.y(Axis::padded_range(all().map(|point| point.1))?);
        let window = if n_longest > SMOOTH_ABOVE { (n_longest / 12) | 1 } else { 0 };
        let series = curves.into_iter().filter_map(|curve| Series::new(curve, &x, &y, window)).collect();
        Some(Self { title, y_label, frame, x_ticks: x.ticks(5), y_ticks: y.ticks(6), series })
    }
}

impl Series {
    fn new(curve: Points, x: &Axis, y: &Axis, window: usize) -> Option<Self> {
        let last = curve.points.last()?;
        let draw = |points: &[(f64, f64)]| -> String {
            points.iter().map(|point| format!("{},{}", x.at(point.0), y.at(point.1))).collect::<Vec<_>>().join(" ")
        };
        let smooth = window > 0 && curve.points.len() > SMOOTH_ABOVE;
        let thick = if smooth { moving_average(&curve.points, window) } else { curve.points.clone() };
        let end = thick.last().map_or_else(Default::default, |point| (x.at(point.0), y.at(point.1)));
        Some(Self {
            label: curve.label,
            name: curve.name,
            last: short(last.1),
            thin: if smooth { draw(&curve.points) } else { String::new() },
            thick: draw(&thick),
            end,
        })
    }
}

/// Centred; the windows at the two ends are shorter.
fn moving_average(points: &[(f64, f64)], window: usize) -> Vec<(f64, f64)> {
    let half = window / 2;
    let mean = |index: usize| {
        let near = &points[index.saturating_sub(half)..(index + half + 1).min(points.len())];
        near.iter().map(|point| point.1).sum::<f64>() / near.len() as f64
    };
    points.iter().enumerate().map(|(index, point)| (point.0, mean(index))).collect()
}

/// Three or four significant digits.
fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if !(1e-4..1e5).contains(&size) => format!("{value:.1e}"),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.1 => format!("{value:.3}"),
        _ => format!("{value:.4}"),
    }
}

const FOREST_ROW: f64 = 28.0;

/// Paired differences of one metric as points with intervals (a forest plot).
#[derive(Debug, Serialize)]
pub(crate) struct Forest {
    title: &'static str,
    explanation: &'static str,
    #[serde(flatten)]
    frame: Frame,
    zero: String,
    ticks: Vec<Tick>,
    rows: Vec<ForestRow>,
}

#[derive(Debug, Serialize)]
struct ForestRow {
    y: f64,
    label: String,
    low: String,
    mean: String,
    high: String,
    mean_text: String,
    interval_text: String,
    /// `better`, `worse`, or `open` if no difference is shown.
    verdict: &'static str,
    n: usize,
}

/// One forest plot for each metric for which some pair of systems has a difference.
pub(crate) fn forests(evaluation: &Evaluation) -> Vec<Forest> {
    Metric::COMPARED.iter().filter_map(|metric| Forest::new(evaluation, *metric)).collect()
}

impl Forest {
    fn new(evaluation: &Evaluation, metric: Metric) -> Option<Self> {
        let found: Vec<(String, Difference)> = evaluation
            .pairs_in_order()
            .filter_map(|(first, second, differences)| {
                let label = format!("{} − {}", system_title(first), system_title(second));
                Some((label, differences.get(&metric).copied().flatten()?))
            })
            .collect();
        let bounds = found.iter().flat_map(|(_, difference)| [difference.low.abs(), difference.high.abs()]);
        let reach = bounds.max_by(f64::total_cmp)?.max(1e-9) * 1.05;
        // Shares are drawn as percentage points, as in tables.
        let scale = if matches!(metric, Metric::Top1 | Metric::WinRate) { 100.0 } else { 1.0 };
        let frame = Frame::new((104.0, 240.0), (6.0, 6.0 + FOREST_ROW * found.len() as f64));
        let axis = frame.x((-reach * scale, reach * scale));
        let row = |(index, (label, found)): (usize, (String, Difference))| {
            let [low, mean, high] = [found.low, found.mean, found.high].map(|value| metric.format_signed(value));
            ForestRow {
                y: frame.top + FOREST_ROW * (index as f64 + 0.5),
                label,
                low: axis.at(found.low * scale),
                mean: axis.at(found.mean * scale),
                high: axis.at(found.high * scale),
                mean_text: mean,
                interval_text: format!("[{low}, {high}]"),
                verdict: match found.shown() {
                    Ordering::Greater => "better",
                    Ordering::Less => "worse",
                    Ordering::Equal => "open",
                },
                n: found.n,
            }
        };
        Some(Self {
            title: metric.label(),
            explanation: metric.explanation(),
            frame,
            zero: axis.at(0.0),
            ticks: axis.ticks(5),
            rows: found.into_iter().enumerate().map(row).collect(),
        })
    }
}

/// Left edge of the charts of a histogram.
const HISTOGRAM_LEFT: f64 = 48.0;
/// Height of one histogram of a pair, and the gap between the two.
const PANEL: f64 = 84.0;
const GAP: f64 = 18.0;

/// Two histograms over the same x axis: totals before (top) and after (bottom).
#[derive(Debug, Serialize)]
pub(crate) struct HistogramPair {
    #[serde(flatten)]
    frame: Frame,
    ticks: Vec<Tick>,
    /// SVG position of 0, if it is on the axis.
    zero: Option<String>,
    panels: Vec<Panel>,
}

#[derive(Debug, Serialize)]
struct Panel {
    label: &'static str,
    series: usize,
    top: f64,
    base: f64,
    longest: u64,
    bars: Vec<Bar>,
}

#[derive(Debug, Serialize)]
struct Bar {
    x: String,
    y: String,
    width: String,
    height: String,
    title: String,
}

impl HistogramPair {
    pub(crate) fn new(histogram: &Histogram) -> Self {
        let sides = [("before", 0, &histogram.before), ("after", 1, &histogram.after)];
        let sides: Vec<_> = sides.into_iter().filter(|(_, _, counts)| !counts.is_empty()).collect();
        let longest = sides.iter().flat_map(|side| side.2).copied().max().unwrap_or(0).max(1);
        let bottom = 16.0 + sides.len() as f64 * (PANEL + GAP) - if sides.is_empty() { 0.0 } else { GAP };
        let frame = Frame::new((HISTOGRAM_LEFT, RIGHT), (16.0, bottom));
        let axis = frame.x(ends(histogram));
        let panel = |(index, (label, series, counts)): (usize, (&'static str, usize, &Vec<u64>))| {
            let top = frame.top + index as f64 * (PANEL + GAP);
            let bars = bars(histogram, counts, axis, (top + PANEL, PANEL / longest as f64));
            Panel { label, series, top, base: top + PANEL, longest, bars }
        };
        let panels = sides.into_iter().enumerate().map(panel).collect();
        Self { frame, ticks: axis.ticks(5), zero: zero(histogram, axis), panels }
    }
}

fn bars(histogram: &Histogram, counts: &[u64], axis: Axis, (base, scale): (f64, f64)) -> Vec<Bar> {
    let labels = histogram.bin_labels();
    let bar = |((edges, n), label): ((&[f64], &u64), &String)| {
        // A count above 0 is always visible.
        let height = (*n as f64 * scale).max(1.0);
        let (from, to) = (axis.position(edges[0]), axis.position(edges[1]));
        (*n > 0).then(|| Bar {
            x: format!("{:.1}", from + 0.5),
            y: format!("{:.1}", base - height),
            width: format!("{:.1}", (to - from - 1.0).max(0.5)),
            height: format!("{height:.1}"),
            title: format!("{label}: {n}"),
        })
    };
    histogram.edges.windows(2).zip(counts).zip(&labels).filter_map(bar).collect()
}

/// Heat map of totals before (x) against totals after (y).
#[derive(Debug, Serialize)]
pub(crate) struct JointHistogram {
    #[serde(flatten)]
    frame: Frame,
    x_ticks: Vec<Tick>,
    y_ticks: Vec<Tick>,
    x_zero: Option<String>,
    y_zero: Option<String>,
    cells: Vec<HeatCell>,
}

#[derive(Debug, Serialize)]
struct HeatCell {
    #[serde(flatten)]
    bar: Bar,
    opacity: String,
}

impl JointHistogram {
    /// The heat map of `histogram`; `None` if no episode has a total before.
    pub(crate) fn new(histogram: &Histogram) -> Option<Self> {
        let frame = Frame::new((HISTOGRAM_LEFT, RIGHT), (8.0, 228.0));
        let (x, y) = (frame.x(ends(histogram)), frame.y(ends(histogram)));
        let most = histogram.joint.iter().flatten().copied().max().filter(|most| *most > 0)?;
        let labels = histogram.bin_labels();
        let edges: Vec<&[f64]> = histogram.edges.windows(2).collect();
        let mut cells = Vec::new();
        for (i, row) in histogram.joint.iter().enumerate() {
            for (j, n) in row.iter().enumerate().filter(|(_, n)| **n > 0) {
                let (from, to) = (x.position(edges[i][0]), x.position(edges[i][1]));
                let (low, high) = (y.position(edges[j][0]), y.position(edges[j][1]));
                let bar = Bar {
                    x: format!("{from:.1}"),
                    y: format!("{high:.1}"),
                    width: format!("{:.1}", to - from),
                    height: format!("{:.1}", low - high),
                    title: format!("before {}, after {}: {n}", labels[i], labels[j]),
                };
                // Logarithmic, so that a single episode is visible next to thousands.
                let opacity = 0.15 + 0.85 * (*n as f64).ln_1p() / (most as f64).ln_1p();
                cells.push(HeatCell { bar, opacity: format!("{opacity:.2}") });
            }
        }
        let (x_zero, y_zero) = (zero(histogram, x), zero(histogram, y));
        Some(Self { frame, x_ticks: x.ticks(5), y_ticks: y.ticks(5), x_zero, y_zero, cells })
    }
}

fn ends(histogram: &Histogram) -> (f64, f64) {
    histogram.edges.first().copied().zip(histogram.edges.last().copied()).unwrap_or((0.0, 1.0))
}

fn zero(histogram: &Histogram, axis: Axis) -> Option<String> {
    let (low, high) = ends(histogram);
    (low < 0.0 && high > 0.0).then(|| axis.at(0.0))
}

/// Accuracy (y) by confidence (x): a reliability diagram.
#[derive(Debug, Serialize)]
pub(crate) struct ReliabilityChart {
    left: f64,
    top: f64,
    right: f64,
    bottom: f64,
    line: String,
    points: Vec<ReliabilityPoint>,
}

#[derive(Debug, Serialize)]
struct ReliabilityPoint {
    x: String,
    y: String,
    radius: String,
    title: String,
}

impl ReliabilityChart {
    /// The diagram of `bins`; bins without predictions are left out.
    pub(crate) fn new(bins: &[ReliabilityBin]) -> Self {
        let (left, top, side) = (40.0, 10.0, 260.0);
        let n: usize = bins.iter().map(|bin| bin.n).sum();
        let point = |bin: &ReliabilityBin| ReliabilityPoint {
            x: format!("{:.1}", left + side * bin.confidence),
            y: format!("{:.1}", top + side * (1.0 - bin.accuracy)),
            radius: format!("{:.1}", 2.0 + 10.0 * (bin.n as f64 / n.max(1) as f64).sqrt()),
            title: format!("{} predictions: confidence {:.3}, accuracy {:.3}", bin.n, bin.confidence, bin.accuracy),
        };
        let points: Vec<_> = bins.iter().filter(|bin| bin.n > 0).map(point).collect();
        let line: Vec<String> = points.iter().map(|point| format!("{},{}", point.x, point.y)).collect();
        Self { left, top, right: left + side, bottom: top + side, line: line.join(" "), points }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        let labels = |low, high| -> Vec<String> {
            Axis::new((low, high), (0.0, 100.0)).ticks(4).into_iter().map(|tick| tick.label).collect()
        };
        assert_eq!(labels(0.0, 1.0), ["0.0", "0.5", "1.0"]);
        assert_eq!(labels(-0.013, 0.021), ["-0.01", "0.00", "0.01", "0.02"]);
        assert_eq!(labels(0.0, 3.2e-6), ["0", "1e-6", "2e-6", "3e-6"]);
    }

    #[test]
    fn constant_curve_and_single_point_have_finite_coordinates() {
        for points in [vec![(1.0, 0.0)], vec![(1.0, 2.5), (2.0, 2.5)]] {
            let chart = LineChart::new("t", "y", vec![Points { label: "l", name: "n".into(), points }]).unwrap();
            assert!(!chart.series[0].thick.contains("NaN") && !chart.series[0].thick.contains("inf"));
        }
    }

    #[test]
    fn moving_average_keeps_length_and_level() {
        let points: Vec<(f64, f64)> = (0..50).map(|step| (f64::from(step), 3.0)).collect();
        assert_eq!(moving_average(&points, 5), points);
    }
}

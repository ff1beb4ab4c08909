//! Coordinates of the two histograms and of the field of totals before and after.

use crate::replay::Histogram;
use crate::replay::text::bin_labels;
use crate::report::chart::{Axis, Tick};
use serde::Serialize;

const WIDTH: f64 = 360.0;
const LEFT: f64 = 48.0;
const RIGHT: f64 = 350.0;

/// Height of one histogram, and the room between the two.
const PANEL: f64 = 84.0;
const GAP: f64 = 18.0;
const TOP: f64 = 16.0;

/// Room below a chart for the numbers and the name of its axis.
const FOOT: f64 = 36.0;

/// Two histograms over one axis, before above after.
#[derive(Debug, Serialize)]
pub(super) struct HistogramPair {
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    bottom: f64,
    ticks: Vec<Tick>,
    /// Where 0 lies, if it does.
    zero: Option<String>,
    top: f64,
    panels: Vec<Panel>,
}

#[derive(Debug, Serialize)]
struct Panel {
    label: &'static str,
    /// Position of the colour among those of curves.
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
    pub(super) fn new(histogram: &Histogram) -> Self {
        let sides = [("before", 0, &histogram.before), ("after", 1, &histogram.after)];
        let sides: Vec<_> = sides.into_iter().filter(|(_, _, counts)| !counts.is_empty()).collect();
        let longest = sides.iter().flat_map(|side| side.2).copied().max().unwrap_or(0).max(1);
        let axis = axis(histogram, (LEFT, RIGHT));
        let panels: Vec<Panel> = sides
            .into_iter()
            .enumerate()
            .map(|(index, (label, series, counts))| {
                let top = TOP + index as f64 * (PANEL + GAP);
                let bars = bars(histogram, counts, axis, (top + PANEL, PANEL / longest as f64));
                Panel { label, series, top, base: top + PANEL, longest, bars }
            })
            .collect();
        let bottom = panels.last().map_or(TOP, |panel| panel.base);
        Self {
            width: WIDTH,
            height: bottom + FOOT,
            left: LEFT,
            right: RIGHT,
            bottom,
            ticks: axis.ticks(5),
            zero: zero(histogram, axis),
            top: TOP,
            panels,
        }
    }
}

fn bars(histogram: &Histogram, counts: &[u64], axis: Axis, (base, scale): (f64, f64)) -> Vec<Bar> {
    let labels = bin_labels(histogram);
    let bar = |((edges, n), label): ((&[f64], &u64), &String)| {
        // Every count that is not 0 is seen.
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

/// Totals before (across) against totals after (up): on the diagonal nothing changed.
#[derive(Debug, Serialize)]
pub(super) struct Joint {
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
    x_ticks: Vec<Tick>,
    y_ticks: Vec<Tick>,
    x_zero: Option<String>,
    y_zero: Option<String>,
    cells: Vec<Cell>,
}

#[derive(Debug, Serialize)]
struct Cell {
    place: Bar,
    opacity: String,
}

impl Joint {
    /// `None` where nothing was scored before.
    pub(super) fn new(histogram: &Histogram) -> Option<Self> {
        let (top, bottom) = (8.0, 8.0 + 220.0);
        let (x, y) = (axis(histogram, (LEFT, RIGHT)), axis(histogram, (bottom, top)));
        let most = histogram.joint.iter().flatten().copied().max().filter(|most| *most > 0)?;
        let labels = bin_labels(histogram);
        let edges: Vec<&[f64]> = histogram.edges.windows(2).collect();
        let mut cells = Vec::new();
        for (i, row) in histogram.joint.iter().enumerate() {
            for (j, n) in row.iter().enumerate().filter(|(_, n)| **n > 0) {
                let (from, to) = (x.position(edges[i][0]), x.position(edges[i][1]));
                let (low, high) = (y.position(edges[j][0]), y.position(edges[j][1]));
                let place = Bar {
                    x: format!("{from:.1}"),
                    y: format!("{high:.1}"),
                    width: format!("{:.1}", to - from),
                    height: format!("{:.1}", low - high),
                    title: format!("before {}, after {}: {n}", labels[i], labels[j]),
                };
                cells.push(Cell { place, opacity: format!("{:.2}", opacity(*n, most)) });
            }
        }
        Some(Self {
            width: WIDTH,
            height: bottom + FOOT,
            left: LEFT,
            right: RIGHT,
            top,
            bottom,
            x_ticks: x.ticks(5),
            y_ticks: y.ticks(5),
            x_zero: zero(histogram, x),
            y_zero: zero(histogram, y),
            cells,
        })
    }
}

/// By the logarithm: a single episode is still seen beside thousands.
fn opacity(n: u64, most: u64) -> f64 {
    0.15 + 0.85 * (n as f64).ln_1p() / (most as f64).ln_1p()
}

fn axis(histogram: &Histogram, to: (f64, f64)) -> Axis {
    let ends = histogram.edges.first().copied().zip(histogram.edges.last().copied());
    Axis::new(ends.unwrap_or((0.0, 1.0)), to)
}

fn zero(histogram: &Histogram, axis: Axis) -> Option<String> {
    let inside = histogram.edges.first()? < &0.0 && histogram.edges.last()? > &0.0;
    inside.then(|| axis.at(0.0))
}

//! Scales, ticks and coordinates of charts. The template draws; this file says where.

use serde::Serialize;

/// Size of a line chart in SVG units, and where its plotting area lies.
const WIDTH: f64 = 360.0;
const HEIGHT: f64 = 200.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 350.0;
const TOP: f64 = 8.0;
const BOTTOM: f64 = 162.0;

/// Above this many points a curve is drawn thin, with a moving average over it.
const SMOOTH_ABOVE: usize = 40;

/// One chart of one or more curves over training steps.
#[derive(Debug, Serialize)]
pub(crate) struct LineChart {
    pub(crate) title: &'static str,
    pub(crate) y_label: &'static str,
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
    x_ticks: Vec<Tick>,
    y_ticks: Vec<Tick>,
    /// Steps that the moving average takes in; 0 where there is none.
    window: usize,
    pub(crate) series: Vec<Series>,
}

/// A mark on an axis.
#[derive(Debug, Serialize)]
pub(crate) struct Tick {
    pub(crate) at: String,
    pub(crate) label: String,
}

/// One curve.
#[derive(Debug, Serialize)]
pub(crate) struct Series {
    pub(crate) label: &'static str,
    /// Name in `metrics.jsonl`.
    pub(crate) name: String,
    pub(crate) last: String,
    thin: String,
    thick: String,
    end: (String, String),
}

/// A curve as read: its label, its name in `metrics.jsonl` and its points by step.
#[derive(Debug)]
pub(crate) struct Points {
    pub(crate) label: &'static str,
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

impl LineChart {
    /// `None` where no curve has a point.
    pub(crate) fn new(title: &'static str, y_label: &'static str, curves: Vec<Points>) -> Option<Self> {
        let all = || curves.iter().flat_map(|curve| &curve.points);
        let n_longest = curves.iter().map(|curve| curve.points.len()).max()?;
        let x = Axis::new(Axis::exact_range(all().map(|point| point.0))?, (LEFT, RIGHT));
        let y = Axis::new(Axis::padded_range(all().map(|point| point.1))?, (BOTTOM, TOP));
        let window = if n_longest > SMOOTH_ABOVE { (n_longest / 12) | 1 } else { 0 };
        let series = curves.into_iter().filter_map(|curve| Series::new(curve, &x, &y, window)).collect();
        Some(Self {
            title,
            y_label,
            width: WIDTH,
            height: HEIGHT,
            left: LEFT,
            right: RIGHT,
            top: TOP,
            bottom: BOTTOM,
            x_ticks: x.ticks(5),
            y_ticks: y.ticks(6),
            window,
            series,
        })
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

/// Centred; at the ends over the points that there are.
fn moving_average(points: &[(f64, f64)], window: usize) -> Vec<(f64, f64)> {
    let half = window / 2;
    let mean = |index: usize| {
        let near = &points[index.saturating_sub(half)..(index + half + 1).min(points.len())];
        near.iter().map(|point| point.1).sum::<f64>() / near.len() as f64
    };
    points.iter().enumerate().map(|(index, point)| (point.0, mean(index))).collect()
}

/// A linear scale from data to SVG units.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Axis {
    from: (f64, f64),
    to: (f64, f64),
}

impl Axis {
    pub(crate) fn new(from: (f64, f64), to: (f64, f64)) -> Self {
        Self { from, to }
    }

    /// From the least to the greatest; widened where they are the same. `None` for no values.
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
        // A quantity that is never negative keeps its zero at the bottom instead of a stretch below it.
        Some((if low >= 0.0 { (low - margin).max(0.0) } else { low - margin }, high + margin))
    }

    /// Where `value` lies, in SVG units with one decimal.
    pub(crate) fn at(&self, value: f64) -> String {
        format!("{:.1}", self.position(value))
    }

    /// As [`Axis::at`], as a number.
    pub(crate) fn position(&self, value: f64) -> f64 {
        let share = (value - self.from.0) / (self.from.1 - self.from.0);
        self.to.0 + share * (self.to.1 - self.to.0)
    }

    /// About `wanted` marks at round numbers.
    pub(crate) fn ticks(&self, wanted: usize) -> Vec<Tick> {
        let rough = (self.from.1 - self.from.0) / wanted as f64;
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

/// Three or four digits that matter.
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
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

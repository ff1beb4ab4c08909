//! Where numbers lie: mean, spread, quantiles, and bins that two lists share.

use crate::bootstrap::quantile;
use serde::Serialize;

/// More bins than this are not told apart by eye.
const MAX_BINS: f64 = 20.0;

/// A quotient that falls short of an edge by no more than this lies on it: 0.3 / 0.1 is 2.9999999999999996.
const EDGE_TOLERANCE: f64 = 1e-9;

/// Location and spread of at least one number.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Distribution {
    /// Numbers.
    pub n: usize,
    /// Arithmetic mean.
    pub mean: f64,
    /// Standard deviation of a sample (n - 1); `None` for one number.
    pub sd: Option<f64>,
    /// The least.
    pub min: f64,
    /// 5% quantile; this and the following interpolate linearly, as numpy's default.
    pub p5: f64,
    /// 25% quantile.
    pub p25: f64,
    /// Median.
    pub p50: f64,
    /// 75% quantile.
    pub p75: f64,
    /// 95% quantile.
    pub p95: f64,
    /// The greatest.
    pub max: f64,
}

impl Distribution {
    /// `None` for no values, and for values so large that their sum is no number.
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |share| quantile(&sorted, share);
        let mean = mean(&sorted)?;
        let squares: f64 = sorted.iter().map(|value| (value - mean).powi(2)).sum();
        let sd = (sorted.len() > 1).then(|| (squares / (sorted.len() - 1) as f64).sqrt());
        Some(Self {
            n: sorted.len(),
            mean,
            sd: sd.filter(|sd| sd.is_finite()),
            min: *sorted.first()?,
            p5: at(0.05)?,
            p25: at(0.25)?,
            p50: at(0.5)?,
            p75: at(0.75)?,
            p95: at(0.95)?,
            max: *sorted.last()?,
        })
    }

    /// In the order of the tables, without `n`.
    pub(super) fn figures(&self) -> [Option<f64>; 9] {
        let Self { mean, sd, min, p5, p25, p50, p75, p95, max, .. } = *self;
        [Some(mean), sd, Some(min), Some(p5), Some(p25), Some(p50), Some(p75), Some(p95), Some(max)]
    }

    /// Names of [`Distribution::figures`].
    pub(super) const FIGURES: [&'static str; 9] = ["mean", "sd", "min", "5%", "25%", "50%", "75%", "95%", "max"];
}

/// The arithmetic mean, where it is a number.
pub(super) fn mean(values: &[f64]) -> Option<f64> {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    mean.is_finite().then_some(mean)
}

/// Counts in bins of one width whose edges are round numbers; 0 is an edge wherever it lies between the others.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Histogram {
    /// One more than bins, ascending. A bin holds its lower edge; the last holds its upper one too.
    pub edges: Vec<f64>,
    /// Totals before, by bin; empty where nothing was scored before.
    pub before: Vec<u64>,
    /// Totals after, by bin.
    pub after: Vec<u64>,
    /// `joint[i][j]`: episodes in bin `i` before and in bin `j` after; empty where nothing was scored before.
    pub joint: Vec<Vec<u64>>,
}

impl Histogram {
    /// `before` is empty or has one value for each of `after`. `None` for no values.
    pub(super) fn of(before: &[f64], after: &[f64]) -> Option<Self> {
        let bins = Bins::over(before.iter().chain(after))?;
        let count = |values: &[f64]| {
            let mut counts = vec![0; bins.n];
            values.iter().for_each(|value| counts[bins.index(*value)] += 1);
            counts
        };
        let mut joint = vec![vec![0; bins.n]; bins.n];
        before.iter().zip(after).for_each(|(before, after)| joint[bins.index(*before)][bins.index(*after)] += 1);
        let (is_paired, after) = (!before.is_empty(), count(after));
        Some(Self {
            edges: bins.edges(),
            before: if is_paired { count(before) } else { Vec::new() },
            after,
            joint: if is_paired { joint } else { Vec::new() },
        })
    }
}

/// Bins `first * width` to `(first + n) * width`.
struct Bins {
    width: f64,
    first: i64,
    n: usize,
}

impl Bins {
    fn over<'a>(values: impl Iterator<Item = &'a f64>) -> Option<Self> {
        let (low, high) =
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(*value), high.max(*value)));
        if !(high - low).is_finite() {
            return None;
        }
        // One value alone, or values that differ by rounding: one bin of the value's own scale.
        let flat = high - low <= EDGE_TOLERANCE * high.abs().max(1.0);
        let rough = if flat { 0.1 * high.abs().max(1.0) } else { (high - low) / (MAX_BINS - 1.0) };
        let magnitude = 10f64.powf(rough.log10().floor());
        let width = magnitude * [1.0, 2.0, 5.0].into_iter().find(|factor| factor * magnitude >= rough).unwrap_or(10.0);
        let first = (low / width + EDGE_TOLERANCE).floor() as i64;
        let end = (high / width - EDGE_TOLERANCE).ceil() as i64;
        let n = end.saturating_sub(first).clamp(1, MAX_BINS as i64 + 1) as usize;
        Some(Self { width, first, n })
    }

    fn index(&self, value: f64) -> usize {
        let index = ((value / self.width + EDGE_TOLERANCE).floor() as i64).saturating_sub(self.first);
        index.clamp(0, self.n as i64 - 1) as usize
    }

    fn edges(&self) -> Vec<f64> {
        // Divided where the width is below 1: 3 / 10 is the 0.3 that people mean, 3 * 0.1 is not.
        let edge = |index: i64| {
            let index = index as f64;
            if self.width < 1.0 { index / (1.0 / self.width).round() } else { index * self.width }
        };
        (0..=self.n as i64).map(|index| edge(self.first.saturating_add(index))).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn nothing_has_no_distribution_and_one_number_no_spread() {
        assert_eq!(Distribution::of(&[]), None);
        let one = Distribution::of(&[0.25]).unwrap();
        assert_eq!((one.n, one.mean, one.sd, one.p5, one.max), (1, 0.25, None, 0.25, 0.25));
        assert_eq!(Distribution::of(&[f64::MAX, f64::MAX]), None);
    }

    #[test]
    fn bins_are_round_and_zero_is_an_edge() {
        let histogram = Histogram::of(&[-0.31, 0.0, 0.3], &[0.0, 0.1, 0.55]).unwrap();
        assert_eq!(histogram.edges.first(), Some(&-0.35));
        assert!(histogram.edges.contains(&0.0) && histogram.edges.contains(&0.3), "{:?}", histogram.edges);
        let zero = histogram.edges.iter().position(|edge| *edge == 0.0).unwrap();
        assert_eq!((histogram.before[zero], histogram.after[zero], histogram.joint[zero][zero + 2]), (1, 1, 1));
        assert_eq!(histogram.before.iter().sum::<u64>(), 3);
    }

    #[test]
    fn the_last_bin_holds_its_upper_edge() {
        let histogram = Histogram::of(&[], &[0.0, 0.5, 1.0]).unwrap();
        assert_eq!((histogram.edges.last(), histogram.after.last()), (Some(&1.0), Some(&1)));
        assert!(histogram.before.is_empty() && histogram.joint.is_empty());
    }

    #[test]
    fn equal_and_enormous_values_have_bins() {
        for values in [vec![0.0; 3], vec![7.5], vec![1e300, -1e300], vec![1e15, 1e15 + 1.0], vec![1e-12, 3e-12]] {
            let histogram = Histogram::of(&[], &values).unwrap();
            assert_eq!(histogram.after.iter().sum::<u64>(), values.len() as u64);
            assert!(histogram.edges.iter().all(|edge| edge.is_finite()) && histogram.edges.len() <= 22);
        }
        assert_eq!(Histogram::of(&[], &[f64::MAX, f64::MIN]), None);
    }
}

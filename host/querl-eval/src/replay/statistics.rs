//! Statistics of total rewards: distribution, histogram, correlation, order of pairs.

use crate::bootstrap::quantile;
use serde::Serialize;

const MAX_BINS: f64 = 20.0;

/// Tolerance below a bin edge: 0.3 / 0.1 is 2.9999999999999996.
const EDGE_TOLERANCE: f64 = 1e-9;

/// Mean, standard deviation and quantiles of one or more values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Distribution {
    pub(crate) n: usize,
    pub(crate) mean: f64,
    /// Sample standard deviation (n - 1); `None` for a single value.
    pub(crate) sd: Option<f64>,
    pub(crate) min: f64,
    /// 5% quantile, with linear interpolation as numpy's default.
    pub(crate) p5: f64,
    pub(crate) p25: f64,
    pub(crate) p50: f64,
    pub(crate) p75: f64,
    pub(crate) p95: f64,
    pub(crate) max: f64,
}

impl Distribution {
    /// The distribution of `values`; `None` if there are none or their sum is not finite.
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

    pub(super) fn figures(&self) -> [Option<f64>; 9] {
        let Self { mean, sd, min, p5, p25, p50, p75, p95, max, .. } = *self;
        [Some(mean), sd, Some(min), Some(p5), Some(p25), Some(p50), Some(p75), Some(p95), Some(max)]
    }

    pub(super) const FIGURES: [&'static str; 9] = ["mean", "sd", "min", "5%", "25%", "50%", "75%", "95%", "max"];
}

/// The arithmetic mean; `None` if it is not finite.
pub(super) fn mean(values: &[f64]) -> Option<f64> {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    mean.is_finite().then_some(mean)
}

/// Histogram of totals before and after, in bins of equal width with round edges; 0 is an edge if it is within the range.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Histogram {
    /// Bin edges in ascending order, one more than bins. A bin includes its lower edge, the last bin also its upper edge.
    pub(crate) edges: Vec<f64>,
    /// Number of totals before in each bin; empty if no episode was scored before.
    pub(crate) before: Vec<u64>,
    pub(crate) after: Vec<u64>,
    /// `joint[i][j]` is the number of episodes in bin `i` before and in bin `j` after; empty if no episode was scored before.
    pub(crate) joint: Vec<Vec<u64>>,
}

impl Histogram {
    /// The histogram of totals; `before` is empty or has one value for each of `after`. `None` if there are no values.
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

    /// The range of each bin as text: `-0.50 to -0.45`.
    pub(crate) fn bin_labels(&self) -> Vec<String> {
        let width = self.edges.first().zip(self.edges.get(1)).map_or(1.0, |(first, second)| second - first);
        let decimals = (1e-6..1e9).contains(&width).then(|| (-width.log10().floor()).clamp(0.0, 7.0) as usize);
        let edge = |value: f64| match decimals {
            Some(decimals) => format!("{value:.decimals$}"),
            None => format!("{value:.3e}"),
        };
        self.edges.windows(2).map(|edges| format!("{} to {}", edge(edges[0]), edge(edges[1]))).collect()
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
        // One value, or values that differ only by rounding: one bin whose width depends on the value.
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
        // Divides if the width is below 1: 3 / 10 is 0.3, 3 * 0.1 is not.
        let edge = |index: i64| {
            let index = index as f64;
            if self.width < 1.0 { index / (1.0 / self.width).round() } else { index * self.width }
        };
        (0..=self.n as i64).map(|index| edge(self.first.saturating_add(index))).collect()
    }
}

/// Correlation coefficients of the totals before and after, -1 to 1; `None` for fewer than two episodes or constant totals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Correlation {
    pub(crate) pearson: Option<f64>,
    pub(crate) spearman: Option<f64>,
    /// Kendall's tau-b: (concordant - discordant pairs), normalised with a correction for ties.
    pub(crate) kendall_tau_b: Option<f64>,
}

impl Correlation {
    pub(super) fn of(before: &[f64], after: &[f64]) -> Self {
        let (before_rounded, after_rounded) = (rounded(before), rounded(after));
        Self {
            pearson: pearson(before, after),
            spearman: pearson(&ranks(&before_rounded), &ranks(&after_rounded)),
            kendall_tau_b: Pairs::of(&before_rounded, &after_rounded).tau_b(),
        }
    }
}

/// Totals rounded to 1e-9 (the tolerance of a tie), so that the same components summed in another order give ties.
pub(super) fn rounded(values: &[f64]) -> Vec<f64> {
    // Above a million, adjacent f64 values differ by about this much. Adding 0 converts -0 to 0.
    values.iter().map(|value| if value.abs() < 1e6 { (value * 1e9).round() / 1e9 + 0.0 } else { *value }).collect()
}

fn pearson(xs: &[f64], ys: &[f64]) -> Option<f64> {
    let is_constant = |values: &[f64]| values.iter().all(|value| *value == values[0]);
    if xs.is_empty() || is_constant(xs) || is_constant(ys) {
        return None;
    }
    let (x_mean, y_mean) = (mean(xs)?, mean(ys)?);
    let (mut xy, mut xx, mut yy) = (0.0, 0.0, 0.0);
    for (x, y) in xs.iter().zip(ys) {
        let (x, y) = (x - x_mean, y - y_mean);
        xy += x * y;
        xx += x * x;
        yy += y * y;
    }
    // This form gives exactly 1 for identical lists, and does not overflow for large values.
    let r = xy / xx * (xx / yy).sqrt();
    r.is_finite().then(|| r.clamp(-1.0, 1.0))
}

/// 1-based ranks; equal values get their mean rank.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0.0; values.len()];
    let mut n_ranked = 0;
    for ties in order.chunk_by(|a, b| values[*a] == values[*b]) {
        let rank = n_ranked as f64 + (ties.len() + 1) as f64 / 2.0;
        ties.iter().for_each(|index| ranks[*index] = rank);
        n_ranked += ties.len();
    }
    ranks
}

/// Number of pairs of episodes by their order before and after, as for Kendall's tau.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Pairs {
    pub(crate) n: u64,
    pub(crate) kept: u64,
    pub(crate) flipped: u64,
    pub(crate) became_tied: u64,
    pub(crate) became_ordered: u64,
    pub(crate) tied: u64,
}

impl Pairs {
    /// Counts the pairs of two lists of equal length in O(n log n).
    ///
    /// Source: Knight 1966, "A computer method for calculating Kendall's tau with ungrouped data".
    pub(super) fn of(before: &[f64], after: &[f64]) -> Self {
        let mut items: Vec<(f64, f64)> = before.iter().copied().zip(after.iter().copied()).collect();
        items.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let tied_before = pairs_in(items.chunk_by(|a, b| a.0 == b.0));
        let tied = pairs_in(items.chunk_by(|a, b| a == b));
        let mut after: Vec<f64> = items.into_iter().map(|item| item.1).collect();
        let mut scratch = after.clone();
        let flipped = sort_counting(&mut after, &mut scratch);
        let tied_after = pairs_in(after.chunk_by(|a, b| a == b));
        let n = choose_2(after.len());
        let (became_tied, became_ordered) = (tied_after - tied, tied_before - tied);
        Self { n, kept: n - flipped - became_tied - became_ordered - tied, flipped, became_tied, became_ordered, tied }
    }

    /// Kendall's tau-b; `None` if all values of a side are equal.
    fn tau_b(&self) -> Option<f64> {
        let ordered = self.kept + self.flipped;
        let (before, after) = (ordered + self.became_tied, ordered + self.became_ordered);
        let tau = (self.kept as f64 - self.flipped as f64) / (before as f64 * after as f64).sqrt();
        tau.is_finite().then(|| tau.clamp(-1.0, 1.0))
    }

    /// Number of pairs with different totals before.
    pub(crate) fn ordered_before(&self) -> u64 {
        self.kept + self.flipped + self.became_tied
    }

    /// Share of the pairs with different totals before whose order is reversed after; `None` if there are no such pairs.
    pub(crate) fn flip_share(&self) -> Option<f64> {
        let n_ordered = self.ordered_before();
        (n_ordered > 0).then(|| self.flipped as f64 / n_ordered as f64)
    }
}

impl std::ops::AddAssign for Pairs {
    fn add_assign(&mut self, other: Self) {
        self.n += other.n;
        self.kept += other.kept;
        self.flipped += other.flipped;
        self.became_tied += other.became_tied;
        self.became_ordered += other.became_ordered;
        self.tied += other.tied;
    }
}

fn choose_2(n: usize) -> u64 {
    let n = n as u64;
    n * n.saturating_sub(1) / 2
}

fn pairs_in<'a, T: 'a>(runs: impl Iterator<Item = &'a [T]>) -> u64 {
    runs.map(|run| choose_2(run.len())).sum()
}

/// Merge sort that returns the number of inversions.
fn sort_counting(values: &mut [f64], scratch: &mut [f64]) -> u64 {
    let n = values.len();
    if n < 2 {
        return 0;
    }
    let (left, right) = values.split_at_mut(n / 2);
    let mut n_swapped = sort_counting(left, &mut scratch[..n / 2]) + sort_counting(right, &mut scratch[n / 2..]);
    let (mut i, mut j) = (0, 0);
    for slot in scratch.iter_mut() {
        if j == right.len() || (i < left.len() && left[i] <= right[j]) {
            *slot = left[i];
            i += 1;
        } else {
            *slot = right[j];
            j += 1;
            n_swapped += (left.len() - i) as u64;
        }
    }
    values.copy_from_slice(scratch);
    n_swapped
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

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

    /// `tests/reference/replay.py` with numpy and scipy.
    const GOLDEN: &str = include_str!("../../../../tests/reference/golden/replay.json");

    fn numbers(value: &Value) -> Vec<f64> {
        value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    }

    fn agrees(found: Option<f64>, expected: &Value, what: &str) {
        match (found, expected.as_f64()) {
            (Some(found), Some(expected)) => {
                assert!((found - expected).abs() <= 1e-12 * expected.abs().max(1.0), "{what}: {found}, {expected}");
            }
            (found, expected) => assert_eq!(found, expected, "{what}"),
        }
    }

    #[test]
    fn correlations_agree_with_scipy() {
        let golden: Value = serde_json::from_str(GOLDEN).unwrap();
        for case in golden["correlation"].as_array().unwrap() {
            let name = case["name"].as_str().unwrap();
            let found = Correlation::of(&numbers(&case["before"]), &numbers(&case["after"]));
            agrees(found.pearson, &case["pearson"], name);
            agrees(found.spearman, &case["spearman"], name);
            agrees(found.kendall_tau_b, &case["kendall_tau_b"], name);
        }
    }

    #[test]
    fn distributions_agree_with_numpy() {
        let golden: Value = serde_json::from_str(GOLDEN).unwrap();
        for case in golden["distribution"].as_array().unwrap() {
            let found = serde_json::to_value(Distribution::of(&numbers(&case["values"]))).unwrap();
            for (key, expected) in case["expected"].as_object().unwrap() {
                agrees(found[key].as_f64(), expected, key);
            }
        }
    }

    #[test]
    fn pairs_are_counted_as_by_trying_each() {
        let before = [3.0, 1.0, 2.0, 2.0, 5.0, 1.0, 4.0, 2.0];
        let after = [1.0, 1.0, 3.0, 2.0, 4.0, 0.0, 4.0, 3.0];
        let mut expected = Pairs::default();
        for i in 0..before.len() {
            for j in 0..i {
                let sign = |values: &[f64; 8]| (values[i] - values[j]).partial_cmp(&0.0).unwrap() as i32;
                expected.n += 1;
                match (sign(&before), sign(&after)) {
                    (0, 0) => expected.tied += 1,
                    (0, _) => expected.became_ordered += 1,
                    (_, 0) => expected.became_tied += 1,
                    (a, b) if a == b => expected.kept += 1,
                    _ => expected.flipped += 1,
                }
            }
        }
        assert_eq!(Pairs::of(&before, &after), expected);
        assert!(expected.flipped > 0 && expected.became_tied > 0 && expected.became_ordered > 0 && expected.tied > 0);
    }

    #[test]
    fn rounding_noise_is_no_change_of_order() {
        for noise in [[0.1 + 0.2, 0.3], [-1e-17, 1e-17]] {
            let pairs = Pairs::of(&rounded(&noise), &rounded(&[noise[1], noise[0]]));
            assert_eq!((pairs.tied, pairs.flip_share()), (1, None));
        }
    }
}

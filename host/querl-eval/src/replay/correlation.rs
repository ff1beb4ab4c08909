//! How alike two lists of numbers are: linearly, by rank, and pair by pair.

use super::distribution::mean;
use serde::Serialize;

/// Agreement of the totals before and after, from -1 to 1; `None` for fewer than two episodes or where a side is constant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Correlation {
    /// Of the totals.
    pub pearson: Option<f64>,
    /// Of their ranks, ties getting their mean rank.
    pub spearman: Option<f64>,
    /// Kendall's tau-b: concordant minus discordant pairs, corrected for ties.
    pub kendall_tau_b: Option<f64>,
}

impl Correlation {
    pub(super) fn of(before: &[f64], after: &[f64]) -> Self {
        let (before_graded, after_graded) = (graded(before), graded(after));
        Self {
            pearson: pearson(before, after),
            spearman: pearson(&ranks(&before_graded), &ranks(&after_graded)),
            kendall_tau_b: Pairs::of(&before_graded, &after_graded).tau_b(),
        }
    }
}

/// Totals in grades of 1e-9, the tolerance of a draw, so that sums of the same parts in another order are ties.
pub(super) fn graded(values: &[f64]) -> Vec<f64> {
    // Above a million, neighbouring f64 are about that far apart anyway. Adding 0 makes -0 the 0 that it equals.
    values.iter().map(|value| if value.abs() < 1e6 { (value * 1e9).round() / 1e9 + 0.0 } else { *value }).collect()
}

/// Pearson's product-moment correlation.
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
    // In this form identical lists give exactly 1, and large values no overflow.
    let r = xy / xx * (xx / yy).sqrt();
    r.is_finite().then(|| r.clamp(-1.0, 1.0))
}

/// 1-based ranks; equal values share the mean of theirs.
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

/// All pairs of items, counted by how their order before relates to their order after.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Pairs {
    /// Pairs.
    pub n: u64,
    /// The same order before and after.
    pub kept: u64,
    /// Opposite orders.
    pub flipped: u64,
    /// Ordered before, tied after.
    pub became_tied: u64,
    /// Tied before, ordered after.
    pub became_ordered: u64,
    /// Tied before and after.
    pub tied: u64,
}

impl Pairs {
    /// Source: Knight 1966, "A computer method for calculating Kendall's tau with ungrouped data": O(n log n).
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

    /// Kendall's tau-b; `None` where a side has no two different values.
    fn tau_b(&self) -> Option<f64> {
        let ordered = self.kept + self.flipped;
        let (before, after) = (ordered + self.became_tied, ordered + self.became_ordered);
        let tau = (self.kept as f64 - self.flipped as f64) / (before as f64 * after as f64).sqrt();
        tau.is_finite().then(|| tau.clamp(-1.0, 1.0))
    }

    /// Pairs that are not tied before.
    pub fn ordered_before(&self) -> u64 {
        self.kept + self.flipped + self.became_tied
    }

    /// Share of the pairs ordered before whose order is the opposite after; `None` where there is no such pair.
    pub fn flip_share(&self) -> Option<f64> {
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

/// Merge sort that returns how many pairs stood in the wrong order.
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
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::super::distribution::Distribution;
    use super::*;
    use serde_json::Value;

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
            let pairs = Pairs::of(&graded(&noise), &graded(&[noise[1], noise[0]]));
            assert_eq!((pairs.tied, pairs.flip_share()), (1, None));
        }
    }
}

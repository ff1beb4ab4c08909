//! Changes of a measure over training, and correlations of two measures within queries.

use super::rows::{AuditRows, Window};
use crate::bootstrap::{Bootstrap, Interval};
use serde::Serialize;
use std::collections::BTreeMap;

/// Minimum number of queries in both windows for a paired comparison, and for the interval of a correlation; with fewer, the means of all
/// episodes are compared.
const LEAST_PAIRS: usize = 20;

/// Minimum number of values in each window for a [`Change`].
const LEAST_VALUES: usize = 20;

/// Change of a measure from the early to the late window, as late minus early.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Change {
    /// Mean in the early window: over the means of the paired queries, or over all episodes if `n_paired_queries` is 0.
    pub(crate) early: f64,
    pub(crate) late: f64,
    /// Mean difference with its 95% interval from a bootstrap over queries.
    #[serde(flatten)]
    pub(crate) interval: Interval,
    /// Mean difference divided by the standard deviation over episodes (Cohen's d).
    pub(crate) effect: f64,
    /// Effect size at the upper end of the 95% interval.
    #[serde(skip)]
    pub(super) effect_high: f64,
    /// Number of queries with values in both windows, over which the change is paired; 0 if the means of all episodes are compared.
    pub(crate) n_paired_queries: usize,
}

impl Change {
    pub(super) fn rises(&self) -> bool {
        self.interval.low > 0.0
    }

    pub(super) fn falls(&self) -> bool {
        self.interval.high < 0.0
    }
}

/// Sums and numbers of a query's values in the two windows.
#[derive(Debug, Clone, Copy, Default)]
struct WindowSums {
    early: (f64, f64),
    late: (f64, f64),
}

impl WindowSums {
    /// Early and late mean.
    fn means(self) -> Option<(f64, f64)> {
        let mean = |(sum, n): (f64, f64)| (n > 0.0).then(|| sum / n);
        Some((mean(self.early)?, mean(self.late)?))
    }

    /// Late mean minus early mean.
    fn difference(self) -> Option<f64> {
        self.means().map(|(early, late)| late - early)
    }

    fn plus(self, other: &Self) -> Self {
        let add = |a: (f64, f64), b: (f64, f64)| (a.0 + b.0, a.1 + b.1);
        Self { early: add(self.early, other.early), late: add(self.late, other.late) }
    }
}

/// Change of `values` (one per row) from the first to the second window; `None` if a window has too few values.
pub(super) fn change(
    values: &[Option<f64>],
    rows: &AuditRows<'_>,
    (from, to): (&Window, &Window),
    bootstrap: Bootstrap,
) -> Option<Change> {
    let of = |window: &Window| -> Vec<f64> { rows.within(window).filter_map(|index| values[index]).collect() };
    let (early, late) = (of(from), of(to));
    if early.len().min(late.len()) < LEAST_VALUES {
        return None;
    }
    let mut by_query: BTreeMap<usize, WindowSums> = BTreeMap::new();
    for (row, value) in rows.rows.iter().zip(values) {
        let Some(value) = *value else { continue };
        let sums = by_query.entry(row.query).or_default();
        let step = row.recorded.step;
        for (window, sum) in [(from, &mut sums.early), (to, &mut sums.late)] {
            if window.contains(step) {
                sum.0 += value;
                sum.1 += 1.0;
            }
        }
    }
    let name = |query: usize| rows.queries[query].as_str();
    let pairs = by_query.iter().filter_map(|(query, sums)| Some((name(*query), sums.difference()?)));
    let pairs: Vec<(&str, f64)> = pairs.collect();
    let is_paired = pairs.len() >= LEAST_PAIRS;
    let n_paired_queries = if is_paired { pairs.len() } else { 0 };
    let interval = if is_paired {
        bootstrap.interval(pairs)
    } else {
        let (queries, sums): (Vec<&str>, Vec<WindowSums>) =
            by_query.iter().map(|(query, sums)| (name(*query), *sums)).unzip();
        bootstrap.interval_of(&queries, |drawn| {
            let all = drawn.iter().fold(WindowSums::default(), |all, index| all.plus(&sums[*index]));
            all.difference().unwrap_or(f64::NAN)
        })
    };
    let interval = interval?;
    let means: Vec<(f64, f64)> = by_query.values().filter_map(|sums| sums.means()).collect();
    let mean_of = |side: fn(&(f64, f64)) -> f64, all: &[f64]| match is_paired {
        true => mean(&means.iter().map(side).collect::<Vec<_>>()),
        false => mean(all),
    };
    let spread = ((variance(&early) + variance(&late)) / 2.0).sqrt().max(1e-9);
    let effect = |value: f64| value / spread;
    Some(Change {
        early: mean_of(|both| both.0, &early),
        late: mean_of(|both| both.1, &late),
        interval,
        effect: effect(interval.mean),
        effect_high: effect(interval.high),
        n_paired_queries,
    })
}

pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn variance(values: &[f64]) -> f64 {
    let mean = mean(values);
    values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len().saturating_sub(1).max(1) as f64
}

/// Pearson correlation within queries: of the deviations of `x` and `y` from their mean over the responses to the same query. If no query
/// repeats, the correlation over all episodes. `None` if `x` or `y` is constant.
pub(super) fn correlation(x: &[Option<f64>], y: &[Option<f64>], rows: &AuditRows<'_>) -> Option<f64> {
    correlation_of(products(x, y, rows).values())
}

/// [`correlation`] with its 95% interval from a bootstrap over queries; `None` with few queries or if no query repeats.
pub(super) fn correlation_interval(
    x: &[Option<f64>],
    y: &[Option<f64>],
    rows: &AuditRows<'_>,
    bootstrap: Bootstrap,
) -> Option<Interval> {
    let by_query = products(x, y, rows);
    if by_query.len() < LEAST_PAIRS {
        return None;
    }
    let (queries, products): (Vec<&str>, Vec<[f64; 3]>) =
        by_query.into_iter().map(|(query, products)| (rows.queries[query].as_str(), products)).unzip();
    bootstrap
        .interval_of(&queries, |drawn| correlation_of(drawn.iter().map(|index| &products[*index])).unwrap_or(f64::NAN))
}

/// For each query the sums of products of deviations from its means: x by y, x by x, y by y. If queries do not repeat, computed over all
/// episodes as one query.
fn products(x: &[Option<f64>], y: &[Option<f64>], rows: &AuditRows<'_>) -> BTreeMap<usize, [f64; 3]> {
    let repeats = rows.rows.len() >= 2 * rows.queries.len();
    let mut by_query: BTreeMap<usize, Vec<(f64, f64)>> = BTreeMap::new();
    for (row, pair) in rows.rows.iter().zip(x.iter().zip(y)) {
        if let (Some(x), Some(y)) = pair {
            by_query.entry(if repeats { row.query } else { 0 }).or_default().push((*x, *y));
        }
    }
    let products = |pairs: Vec<(f64, f64)>| {
        let n = pairs.len() as f64;
        let x_mean = pairs.iter().map(|pair| pair.0).sum::<f64>() / n;
        let y_mean = pairs.iter().map(|pair| pair.1).sum::<f64>() / n;
        let deviations = pairs.into_iter().map(|(x, y)| (x - x_mean, y - y_mean));
        deviations.fold([0.0; 3], |[xy, xx, yy], (x, y)| [xy + x * y, xx + x * x, yy + y * y])
    };
    by_query.into_iter().map(|(query, pairs)| (query, products(pairs))).collect()
}

fn correlation_of<'a>(products: impl Iterator<Item = &'a [f64; 3]>) -> Option<f64> {
    let [xy, xx, yy] = products.fold([0.0; 3], |[xy, xx, yy], one| [xy + one[0], xx + one[1], yy + one[2]]);
    let r = xy / (xx * yy).sqrt();
    // For constants, rounding leaves a tiny variance.
    (r.is_finite() && xx > 1e-12 && yy > 1e-12).then(|| r.clamp(-1.0, 1.0))
}

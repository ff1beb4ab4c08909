//! Confidence intervals by the cluster bootstrap.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A mean with its 95% interval.
///
/// Unless its source says otherwise, the interval is a percentile interval of a cluster bootstrap: each resample draws as many groups as
/// there are, with replacement, and takes the mean over all queries of the drawn groups. Paraphrases of one question are not independent;
/// drawing single queries would make intervals too narrow. With fewer than about 20 groups the percentile interval is still somewhat too
/// narrow; with one group its width is 0.
///
/// Source: Efron 1979, "Bootstrap methods: another look at the jackknife"; Field and Welsh 2007, "Bootstrapping clustered data".
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Mean of the sample, not of the resamples.
    pub mean: f64,
    /// Lower end; of a bootstrap the 2.5% quantile of the resampled means.
    pub low: f64,
    /// Upper end; of a bootstrap the 97.5% quantile of the resampled means.
    pub high: f64,
}

/// 97.5% quantiles of Student's t distribution for 1 to 18 degrees of freedom (`scipy.stats.t.ppf(0.975, df)`).
const T_QUANTILES: [f64; 18] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101,
];
/// 97.5% quantile of the standard normal distribution.
pub(crate) const Z_QUANTILE: f64 = 1.96;

/// 97.5% quantile of Student's t distribution of the mean of `n` values, for 2 to 19; `None` for other `n`.
pub(crate) fn t_quantile(n: usize) -> Option<f64> {
    n.checked_sub(2).and_then(|index| T_QUANTILES.get(index)).copied()
}

/// Student's t interval of the mean of independent values, 95%; `None` for fewer than three: that of two is too wide to show anything.
pub(crate) fn t_interval(values: &[f64]) -> Option<[f64; 2]> {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let half = t_quantile(values.len()).unwrap_or(Z_QUANTILE) * (squares / (n - 1.0) / n).sqrt();
    (values.len() > 2).then_some([mean - half, mean + half])
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Bootstrap {
    pub(crate) seed: u64,
    pub(crate) n_resamples: usize,
}

impl Bootstrap {
    /// The 95% interval of the mean of `values`, which are (group, value) pairs; `None` if there are none.
    ///
    /// Groups are sorted by name, so that systems with the same groups get the same resamples.
    pub(crate) fn interval<'a>(self, values: impl IntoIterator<Item = (&'a str, f64)>) -> Option<Interval> {
        let mut by_group: BTreeMap<&str, Cluster> = BTreeMap::new();
        for (group, value) in values {
            let cluster = by_group.entry(group).or_default();
            cluster.sum += value;
            cluster.count += 1.0;
        }
        let clusters: Vec<Cluster> = by_group.into_values().collect();
        let mean = mean_of(clusters.iter())?;
        self.resample(mean, &clusters, |drawn| mean_of(drawn.iter().copied()))
    }

    /// The 95% interval of a statistic of items, which is called with the indices of the drawn items (`groups` has the group of each
    /// item); `None` if there are no items. Resamples for which it is NaN are skipped.
    pub(crate) fn interval_of(self, groups: &[&str], statistic: impl Fn(&[usize]) -> f64) -> Option<Interval> {
        let mut members: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (index, group) in groups.iter().enumerate() {
            members.entry(group).or_default().push(index);
        }
        let clusters: Vec<Vec<usize>> = members.into_values().collect();
        let all: Vec<usize> = (0..groups.len()).collect();
        let mean = (!all.is_empty()).then(|| statistic(&all))?;
        self.resample(mean, &clusters, |drawn| {
            let figure = statistic(&drawn.iter().copied().flatten().copied().collect::<Vec<_>>());
            (!figure.is_nan()).then_some(figure)
        })
    }

    /// The 95% percentile interval of `figure` over resamples of clusters.
    fn resample<C>(self, mean: f64, clusters: &[C], figure: impl Fn(&[&C]) -> Option<f64>) -> Option<Interval> {
        let n_clusters = u32::try_from(clusters.len()).expect("fewer than 2^32 groups").max(1);
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let mut figures: Vec<f64> = (0..self.n_resamples)
            .filter_map(|_| {
                let drawn = clusters.iter().map(|_| &clusters[rng.random_range(0..n_clusters) as usize]);
                figure(&drawn.collect::<Vec<_>>())
            })
            .collect();
        figures.sort_by(f64::total_cmp);
        Some(Interval { mean, low: quantile(&figures, 0.025)?, high: quantile(&figures, 0.975)? })
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Cluster {
    sum: f64,
    count: f64,
}

fn mean_of<'a>(clusters: impl Iterator<Item = &'a Cluster>) -> Option<f64> {
    let total = clusters.fold(Cluster::default(), |total, cluster| Cluster {
        sum: total.sum + cluster.sum,
        count: total.count + cluster.count,
    });
    (total.count > 0.0).then(|| total.sum / total.count)
}

/// Quantile `at` (0 to 1) of sorted values with linear interpolation, as numpy's default; `None` if there are none.
pub(crate) fn quantile(sorted: &[f64], at: f64) -> Option<f64> {
    let position = at * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (sorted[position.floor() as usize], sorted[position.ceil() as usize]);
    Some(below + (above - below) * position.fract())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOTSTRAP: Bootstrap = Bootstrap { seed: 7, n_resamples: 1000 };

    fn grouped(values: &[f64], siblings: usize) -> Vec<(String, f64)> {
        values.iter().enumerate().map(|(index, value)| (format!("g{:03}", index / siblings), *value)).collect()
    }

    fn interval(values: &[(String, f64)], bootstrap: Bootstrap) -> Interval {
        bootstrap.interval(values.iter().map(|(group, value)| (group.as_str(), *value))).unwrap()
    }

    /// scipy: `stats.t.interval(0.95, 3, loc=np.mean(v), scale=stats.sem(v))` of these four values.
    #[test]
    fn an_interval_over_runs_is_that_of_student() {
        let [low, high] = t_interval(&[-0.216, 0.0, -0.079, -0.036]).unwrap();
        assert!((low + 0.23315).abs() < 1e-4 && (high - 0.06765).abs() < 1e-4, "{low} {high}");
        assert_eq!((t_interval(&[0.5, 0.4]), t_interval(&[0.5, 0.5, 0.5])), (None, Some([0.5, 0.5])));
    }

    #[test]
    fn no_values_have_no_interval() {
        assert_eq!(BOOTSTRAP.interval([]), None);
    }

    #[test]
    fn quantile_interpolates_as_numpy_does() {
        // numpy.quantile([1, 2, 4, 8], [0.025, 0.5, 0.975]) = [1.075, 3.0, 7.7]
        let sorted = [1.0, 2.0, 4.0, 8.0];
        for (at, expected) in [(0.025, 1.075), (0.5, 3.0), (0.975, 7.7)] {
            assert!((quantile(&sorted, at).unwrap() - expected).abs() < 1e-12);
        }
    }

    #[test]
    fn interval_of_a_coin_agrees_with_the_normal_approximation() {
        let values: Vec<f64> = (0..400).map(|index| f64::from(index % 2)).collect();
        let found = interval(&grouped(&values, 1), Bootstrap { seed: 1, n_resamples: 4000 });
        // 0.5 -+ 1.96 * sqrt(0.25 / 400) = 0.451, 0.549
        assert_eq!(found.mean, 0.5);
        assert!((found.low - 0.451).abs() < 0.006, "{found:?}");
        assert!((found.high - 0.549).abs() < 0.006, "{found:?}");
    }

    #[test]
    fn same_seed_gives_the_same_interval_and_another_seed_another() {
        let values = grouped(&[0.1, 0.9, 0.4, 0.7, 0.3, 0.8, 0.55, 0.21], 1);
        assert_eq!(interval(&values, BOOTSTRAP), interval(&values, BOOTSTRAP));
        assert_ne!(interval(&values, BOOTSTRAP), interval(&values, Bootstrap { seed: 8, ..BOOTSTRAP }));
    }

    #[test]
    fn copies_of_a_query_in_its_group_add_no_certainty() {
        let single: Vec<f64> = (0..30).map(|index| f64::from(index % 3)).collect();
        let copied: Vec<f64> = single.iter().flat_map(|value| [*value; 4]).collect();
        let (alone, siblings) = (interval(&grouped(&single, 1), BOOTSTRAP), interval(&grouped(&copied, 4), BOOTSTRAP));
        assert!((alone.low - siblings.low).abs() < 1e-12 && (alone.high - siblings.high).abs() < 1e-12);
        let as_if_independent = interval(&grouped(&copied, 1), BOOTSTRAP);
        assert!(as_if_independent.high - as_if_independent.low < 0.7 * (siblings.high - siblings.low));
    }

    #[test]
    fn a_figure_that_is_a_mean_has_the_interval_of_the_mean() {
        let values: Vec<f64> = (0..30).map(|index| f64::from(index % 4)).collect();
        let named = grouped(&values, 3);
        let groups: Vec<&str> = named.iter().map(|(group, _)| group.as_str()).collect();
        let mean = |indices: &[usize]| indices.iter().map(|&index| values[index]).sum::<f64>() / indices.len() as f64;
        assert_eq!(BOOTSTRAP.interval_of(&groups, mean).unwrap(), interval(&named, BOOTSTRAP));
        assert_eq!(BOOTSTRAP.interval_of(&[], mean), None);
    }

    /// 95% intervals of 400 samples of 40 groups of 2 with a shared effect must cover the true mean in about 95% of them.
    #[test]
    fn intervals_cover_the_true_mean_in_about_95_percent_of_samples() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let n_covered = (0..400)
            .filter(|trial| {
                let values: Vec<(String, f64)> = (0..40)
                    .flat_map(|group| {
                        let shared: f64 = rng.random_range(-1.0..1.0);
                        [0, 1].map(|_| (format!("g{group:02}"), shared + rng.random_range(-0.2..0.2)))
                    })
                    .collect();
                let found = interval(&values, Bootstrap { seed: *trial, n_resamples: 500 });
                found.low <= 0.0 && 0.0 <= found.high
            })
            .count();
        assert!((364..=392).contains(&n_covered), "covered {n_covered} of 400");
    }
}

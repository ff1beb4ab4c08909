//! From records to means, intervals and paired differences.

mod index;

use crate::bootstrap::{Bootstrap, Interval};
use crate::error::EvalError;
use crate::metric::Metric;
use index::{Index, QueryKey};
use querl_core::records::{EvalRecord, Split};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The systems that the pipeline makes, in the order of the tables. Others may appear; they come after these.
pub const SYSTEMS: [&str; 4] = ["raw", "teacher", "sft", "rl"];

/// Which systems are compared, as first minus second, in the order of the tables.
pub const PAIRS: [(&str, &str); 5] =
    [("rl", "sft"), ("rl", "teacher"), ("sft", "raw"), ("sft", "teacher"), ("teacher", "raw")];

/// How to evaluate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvalOptions {
    /// Which split the records are of.
    pub split: Split,
    /// Of the bootstrap.
    pub seed: u64,
    /// Of the bootstrap; at least 1, 2000 is plenty.
    pub n_resamples: usize,
}

/// What `eval.json` holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Which split the records are of.
    pub split: Split,
    /// Queries.
    pub n: usize,
    /// Groups of paraphrases among them: what the bootstrap draws.
    pub n_groups: usize,
    /// Queries with known gold passages: what top-1 accuracy and MRR are of.
    pub n_gold: usize,
    /// Of the bootstrap.
    pub seed: u64,
    /// Of the bootstrap.
    pub n_resamples: usize,
    /// By name: `raw`, `teacher`, `sft`, `rl`.
    pub systems: BTreeMap<String, SystemEvaluation>,
    /// By name: `rl-sft` is RL minus SFT. `None` for a metric that no query has for both.
    pub pairs: BTreeMap<String, BTreeMap<Metric, Option<Difference>>>,
}

/// One system's figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SystemEvaluation {
    /// Every metric; `None` where it does not apply.
    #[serde(flatten)]
    pub metrics: BTreeMap<Metric, Option<Interval>>,
    /// Parts of the reward by name, over the answers that have them.
    pub components: BTreeMap<String, Option<Interval>>,
    /// Mean probability of each style by its class, over the answers that have a style; empty without a style model.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub styles: BTreeMap<String, Option<Interval>>,
    /// Records with an answer that retrieval looked up.
    pub n_scored: usize,
    /// Records without: they count as misses for top-1 accuracy and MRR and are left out of the other means.
    pub n_failed: usize,
    /// Among the scored: retrieval answered, and found nothing.
    pub n_empty: usize,
    /// Failed records by reason.
    pub failures: BTreeMap<String, usize>,
}

/// A mean paired difference with its interval (see [`Interval`] for how it is made).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Mean of first minus second over the queries that both have a value for.
    pub mean: f64,
    /// 2.5% quantile.
    pub low: f64,
    /// 97.5% quantile.
    pub high: f64,
    /// Those queries.
    pub n: usize,
}

impl Difference {
    /// True where the interval lies wholly on one side of 0.
    pub fn excludes_zero(&self) -> bool {
        self.low > 0.0 || self.high < 0.0
    }
}

/// Several runs of one pipeline, each with its own seed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SeedsEvaluation {
    /// All runs together. Each query's value (or difference) is first averaged over the runs that have it, then bootstrapped
    /// over groups of queries. Counts of records (`n_scored`, `n_failed`, ...) are sums over runs. The intervals say how the
    /// figures would move with other queries, given these training runs; for how they move with other training seeds, look at
    /// the spread of `runs`.
    pub pooled: Evaluation,
    /// Each run alone, in the order given.
    pub runs: Vec<Evaluation>,
}

/// Evaluates one run. `records` hold one record per system and query, in any order; every system needs a record of every query.
///
/// # Errors
/// No records or no resamples, a query that a system has twice or not at all, a value that is not finite.
pub fn evaluate(records: &[EvalRecord], options: &EvalOptions) -> Result<Evaluation, EvalError> {
    pool(&[Index::new(records)?], options)
}

/// Evaluates several runs, together and one by one. The runs may have different test queries.
///
/// # Errors
/// As [`evaluate`], for any of the runs.
pub fn evaluate_seeds(runs: &[Vec<EvalRecord>], options: &EvalOptions) -> Result<SeedsEvaluation, EvalError> {
    let indexes = runs.iter().map(|records| Index::new(records)).collect::<Result<Vec<_>, _>>()?;
    let runs = indexes.iter().map(|index| pool(std::slice::from_ref(index), options)).collect::<Result<_, _>>()?;
    Ok(SeedsEvaluation { pooled: pool(&indexes, options)?, runs })
}

/// Below this many groups percentile intervals come out too narrow (simulations in Cameron, Gelbach and Miller 2008,
/// "Bootstrap-based improvements for inference with clustered errors").
pub(crate) const FEW_GROUPS: usize = 20;

impl Evaluation {
    /// A caution where there are too few groups for the intervals, and so the stars, to mean much.
    pub(crate) fn too_few_groups(&self) -> Option<String> {
        let n = self.n_groups;
        (n < FEW_GROUPS).then(|| format!("only {n} groups of queries: the intervals are too narrow to conclude from"))
    }

    /// Systems in the order of the tables.
    pub(crate) fn systems_in_order(&self) -> Vec<(&str, &SystemEvaluation)> {
        let mut systems: Vec<_> = self.systems.iter().map(|(name, system)| (name.as_str(), system)).collect();
        systems.sort_by_key(|(name, _)| SYSTEMS.iter().position(|known| known == name).unwrap_or(SYSTEMS.len()));
        systems
    }

    /// Pairs in the order of the tables, as (first, second, differences).
    pub(crate) fn pairs_in_order(
        &self,
    ) -> impl Iterator<Item = (&'static str, &'static str, &BTreeMap<Metric, Option<Difference>>)> {
        PAIRS.iter().filter_map(|(first, second)| Some((*first, *second, self.pairs.get(&pair_name(first, second))?)))
    }
}

fn pair_name(first: &str, second: &str) -> String {
    format!("{first}-{second}")
}

fn pool(runs: &[Index<'_>], options: &EvalOptions) -> Result<Evaluation, EvalError> {
    if runs.is_empty() {
        return Err(EvalError::NoRecords);
    }
    if options.n_resamples == 0 {
        return Err(EvalError::NoResamples);
    }
    let pooled = Pooled { runs, bootstrap: Bootstrap { seed: options.seed, n_resamples: options.n_resamples } };
    let queries: BTreeMap<QueryKey<'_>, &EvalRecord> = runs.iter().flat_map(Index::queries).collect();
    let systems: BTreeSet<&str> = runs.iter().flat_map(Index::systems).collect();
    let pairs = PAIRS.iter().filter(|(first, second)| systems.contains(first) && systems.contains(second));
    Ok(Evaluation {
        split: options.split,
        n: queries.len(),
        n_groups: queries.values().map(|record| &record.query.group).collect::<BTreeSet<_>>().len(),
        n_gold: queries.values().filter(|record| !record.query.gold_ids.is_empty()).count(),
        seed: options.seed,
        n_resamples: options.n_resamples,
        systems: systems.iter().map(|system| ((*system).to_owned(), pooled.system(system))).collect(),
        pairs: pairs.map(|(first, second)| (pair_name(first, second), pooled.pair(first, second))).collect(),
    })
}

/// One or several runs, as the bootstrap sees them.
struct Pooled<'r, 'a> {
    runs: &'r [Index<'a>],
    bootstrap: Bootstrap,
}

impl<'a> Pooled<'_, 'a> {
    fn system(&self, system: &str) -> SystemEvaluation {
        let metrics = Metric::ALL
            .map(|metric| (metric, self.interval(|index| index.values(system, metric)).map(|(interval, _)| interval)));
        let components = self.runs.iter().flat_map(|index| index.component_names(system)).collect::<BTreeSet<_>>();
        let components = components.into_iter().map(|name| {
            let interval = self.interval(|index| index.components(system, name)).map(|(interval, _)| interval);
            (name.to_owned(), interval)
        });
        let styles = self.runs.iter().flat_map(|index| index.style_names(system)).collect::<BTreeSet<_>>();
        let styles = styles.into_iter().map(|label| {
            let interval = self.interval(|index| index.styles(system, label)).map(|(interval, _)| interval);
            (label.to_owned(), interval)
        });
        let outcomes = index::count_outcomes(self.runs.iter().flat_map(|index| index.records(system)));
        SystemEvaluation {
            metrics: metrics.into(),
            components: components.collect(),
            styles: styles.collect(),
            n_scored: outcomes.n_scored,
            n_failed: outcomes.failures.values().sum(),
            n_empty: outcomes.n_empty,
            failures: outcomes.failures,
        }
    }

    fn pair(&self, first: &str, second: &str) -> BTreeMap<Metric, Option<Difference>> {
        let difference = |metric| {
            let (Interval { mean, low, high }, n) = self.interval(|index| {
                let seconds: BTreeMap<_, _> = index.values(second, metric).into_iter().collect();
                let firsts = index.values(first, metric).into_iter();
                firsts.filter_map(|(key, value)| Some((key, value - seconds.get(&key)?))).collect()
            })?;
            Some(Difference { mean, low, high, n })
        };
        Metric::COMPARED.iter().map(|metric| (*metric, difference(*metric))).collect()
    }

    /// The interval of the values that `of` reads from each run, averaged per query over the runs, with their number.
    fn interval(&self, of: impl Fn(&Index<'a>) -> Vec<(QueryKey<'a>, f64)>) -> Option<(Interval, usize)> {
        let mut per_query: BTreeMap<QueryKey<'a>, (f64, f64)> = BTreeMap::new();
        for (key, value) in self.runs.iter().flat_map(of) {
            let (sum, count) = per_query.entry(key).or_default();
            *sum += value;
            *count += 1.0;
        }
        let means = per_query.iter().map(|(key, (sum, count))| (key.group, sum / count));
        Some((self.bootstrap.interval(means)?, per_query.len()))
    }
}

//! From records to means, intervals and paired differences.

mod index;
mod style;

pub use style::{StyleEvaluation, StyleShift, Styles};

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

/// Whether rewrites were looked up at all: an answer that nobody looked up has found nothing and missed nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lookups {
    /// Retrieval was asked.
    #[default]
    Made,
    /// There is no retrieval: its metrics do not apply.
    None,
}

impl Lookups {
    fn are_made(&self) -> bool {
        *self == Self::Made
    }
}

/// How to evaluate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvalOptions {
    /// Which split the records are of.
    pub split: Split,
    /// Of the bootstrap.
    pub seed: u64,
    /// Of the bootstrap; at least 1, 2000 is plenty.
    pub n_resamples: usize,
    /// Whether rewrites were looked up.
    pub lookups: Lookups,
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
    /// Left out where they were made.
    #[serde(default, skip_serializing_if = "Lookups::are_made")]
    pub lookups: Lookups,
    /// By name: `raw`, `teacher`, `sft`, `rl`.
    pub systems: BTreeMap<String, SystemEvaluation>,
    /// By name: `rl-sft` is RL minus SFT. `None` for a metric that no query has for both.
    pub pairs: BTreeMap<String, BTreeMap<Metric, Option<Difference>>>,
    /// What the run's style models say of the answers; left out without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub style: Option<StyleEvaluation>,
}

/// One system's figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SystemEvaluation {
    /// Every metric; `None` where it does not apply.
    #[serde(flatten)]
    pub metrics: BTreeMap<Metric, Option<Interval>>,
    /// Parts of the reward by name, over the answers that have them.
    pub components: BTreeMap<String, Option<Interval>>,
    /// Records with an answer, and with hits where it was looked up.
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
    let bootstrap = Bootstrap { seed: options.seed, n_resamples: options.n_resamples };
    let pooled = Pooled { runs, bootstrap, lookups: options.lookups };
    let queries: BTreeMap<QueryKey<'_>, &EvalRecord> = runs.iter().flat_map(Index::queries).collect();
    let systems: BTreeSet<&str> = runs.iter().flat_map(Index::systems).collect();
    let pairs: Vec<(&str, &str)> =
        PAIRS.into_iter().filter(|(first, second)| systems.contains(first) && systems.contains(second)).collect();
    Ok(Evaluation {
        split: options.split,
        n: queries.len(),
        n_groups: queries.values().map(|record| &record.query.group).collect::<BTreeSet<_>>().len(),
        n_gold: queries.values().filter(|record| !record.query.gold_ids.is_empty()).count(),
        seed: options.seed,
        n_resamples: options.n_resamples,
        lookups: options.lookups,
        style: pooled.style(&systems, &pairs),
        systems: systems.iter().map(|system| ((*system).to_owned(), pooled.system(system))).collect(),
        pairs: pairs.iter().map(|(first, second)| (pair_name(first, second), pooled.pair(first, second))).collect(),
    })
}

/// One or several runs, as the bootstrap sees them.
struct Pooled<'r, 'a> {
    runs: &'r [Index<'a>],
    bootstrap: Bootstrap,
    lookups: Lookups,
}

impl<'a> Pooled<'_, 'a> {
    fn system(&self, system: &str) -> SystemEvaluation {
        let metrics = Metric::ALL
            .map(|metric| (metric, self.interval(|index| self.values(index, system, metric)).map(|(found, _)| found)));
        let components = self.runs.iter().flat_map(|index| index.component_names(system)).collect::<BTreeSet<_>>();
        let components = components.into_iter().map(|name| {
            let interval = self.interval(|index| index.components(system, name)).map(|(interval, _)| interval);
            (name.to_owned(), interval)
        });
        let outcomes = index::count_outcomes(self.runs.iter().flat_map(|index| index.records(system)));
        SystemEvaluation {
            metrics: metrics.into(),
            components: components.collect(),
            n_scored: outcomes.n_scored,
            n_failed: outcomes.failures.values().sum(),
            n_empty: if self.lookups.are_made() { outcomes.n_empty } else { 0 },
            failures: outcomes.failures,
        }
    }

    fn pair(&self, first: &str, second: &str) -> BTreeMap<Metric, Option<Difference>> {
        let difference = |metric| self.difference(|index, system| self.values(index, system, metric), first, second);
        Metric::COMPARED.iter().map(|metric| (*metric, difference(*metric))).collect()
    }

    /// The values of a metric that applies to the run.
    fn values(&self, index: &Index<'a>, system: &str, metric: Metric) -> Vec<(QueryKey<'a>, f64)> {
        match self.lookups.are_made() || !metric.is_of_lookups() {
            true => index.values(system, metric),
            false => Vec::new(),
        }
    }

    /// The paired difference of the values that `of` reads of two systems from each run.
    fn difference(
        &self,
        of: impl Fn(&Index<'a>, &str) -> Vec<(QueryKey<'a>, f64)>,
        first: &str,
        second: &str,
    ) -> Option<Difference> {
        let (Interval { mean, low, high }, n) = self.interval(|index| {
            let seconds: BTreeMap<_, _> = of(index, second).into_iter().collect();
            let firsts = of(index, first).into_iter();
            firsts.filter_map(|(key, value)| Some((key, value - seconds.get(&key)?))).collect()
        })?;
        Some(Difference { mean, low, high, n })
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

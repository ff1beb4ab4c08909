//! Means, confidence intervals and paired differences of the systems, computed from the records of the evaluation stage.

mod controls;
mod index;

pub use controls::{Controls, PassAtK, RewriteControls, SecondEvaluation};

use crate::bootstrap::{Bootstrap, Interval, t_interval};
use crate::error::EvalError;
use crate::metric::{Metric, is_left_out};
use index::{Index, QueryKey, StyleModel};
use querl_core::config::EVAL_SYSTEMS;
use querl_core::records::{EvalRecord, Split};
use querl_core::text::plural;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

/// Pairs of systems that are compared, as first minus second, in the order of the tables.
pub const PAIRS: [(&str, &str); 15] = [
    ("rl", "sft"),
    ("rl", "teacher"),
    ("rl", "raw"),
    ("rl", "with_history"),
    ("rl", "expanded"),
    ("rl", "prompted"),
    ("rl", "hyde"),
    ("rl", "best_of_n"),
    ("sft", "raw"),
    ("sft", "teacher"),
    ("sft", "prompted"),
    ("best_of_n", "sft"),
    ("teacher", "raw"),
    ("with_history", "raw"),
    ("expanded", "raw"),
];

/// Whether the run has retrieval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lookups {
    /// Rewrites were sent to retrieval.
    #[default]
    Made,
    /// The run has no retrieval, so retrieval metrics do not apply.
    None,
}

impl Lookups {
    fn are_made(&self) -> bool {
        *self == Self::Made
    }
}

/// Options of [`evaluate`] and [`evaluate_seeds`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvalOptions {
    /// The evaluated split, as written to the output.
    pub split: Split,
    /// Seed of the bootstrap.
    pub seed: u64,
    /// Number of bootstrap resamples, at least 1; 2000 is enough.
    pub n_resamples: usize,
    /// Whether the run has retrieval.
    pub lookups: Lookups,
}

/// The result of an evaluation: the contents of `eval.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// What changed after the evaluation, so that its figures are not those of the present model: one sentence for each run, filled in by
    /// the caller; omitted in the JSON if nothing has changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outdated: Vec<String>,
    /// The evaluated split.
    pub split: Split,
    /// Number of evaluated queries.
    pub n: usize,
    /// Number of groups of paraphrases; the bootstrap draws groups.
    pub n_groups: usize,
    /// Number of queries with known gold passages, over which top-1 accuracy and MRR are computed.
    pub n_gold: usize,
    /// Seed of the bootstrap.
    pub seed: u64,
    /// Number of bootstrap resamples.
    pub n_resamples: usize,
    /// Whether the run has retrieval; omitted in the JSON if it has.
    #[serde(default, skip_serializing_if = "Lookups::are_made")]
    pub lookups: Lookups,
    /// Metrics of each system; the keys are names of [`EVAL_SYSTEMS`].
    pub systems: BTreeMap<String, SystemEvaluation>,
    /// Paired differences by pair of systems (`rl-sft` is RL minus SFT); `None` for a metric that no query has for both systems. Queries
    /// without a rewrite of the teacher of the pair, or without retrieval of the second system because a call failed, are left out.
    pub pairs: BTreeMap<String, BTreeMap<Metric, Option<Difference>>>,
    /// Number of the least used reward components that are left out, if there are too many; omitted in the JSON if it is 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub n_components_left_out: usize,
    /// The styles of the answers; omitted for a run without a style model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub style: Option<StyleEvaluation>,
    /// Metrics of the same rewrites on a second retriever; omitted without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_retrieval: Option<SecondEvaluation>,
    /// Length and words of the rewrites; omitted where no system has an answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub controls: Option<Controls>,
    /// pass@k of each system that has samples; omitted if none has.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pass_at_k: BTreeMap<String, PassAtK>,
}

/// The metrics of one system.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SystemEvaluation {
    /// Mean of each metric with its 95% interval; `None` for a metric that does not apply.
    #[serde(flatten)]
    pub metrics: BTreeMap<Metric, Option<Interval>>,
    /// Mean of each reward component with its 95% interval, over the answers that have the component.
    pub components: BTreeMap<String, Option<Interval>>,
    /// Number of records with an answer and, in a run with retrieval, a successful retrieval.
    pub n_scored: usize,
    /// Number of all other records; they count as misses for top-1 accuracy and MRR, and not in the other means.
    pub n_failed: usize,
    /// Number of scored records whose retrieval returned no hits.
    pub n_empty: usize,
    /// Number of scored records without a reward, as where the teacher has no rewrite to compare with; omitted in the JSON if it is 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub n_without_reward: usize,
    /// Number of failed records by reason.
    pub failures: BTreeMap<String, usize>,
}

/// A mean paired difference with its 95% interval (see [`Interval`]).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Mean of first minus second system over the queries that have a value for both.
    pub mean: f64,
    /// 2.5% quantile of the resampled mean differences.
    pub low: f64,
    /// 97.5% quantile of the resampled mean differences.
    pub high: f64,
    /// Number of queries that have a value for both systems.
    pub n: usize,
    /// Number of groups of these queries.
    pub n_groups: usize,
    /// Of three or more runs, Student's t interval of the mean differences of the runs, 95%: the variation between training seeds, which the
    /// interval over queries lacks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over_runs: Option<[f64; 2]>,
}

impl Difference {
    /// True if the whole interval is above or below 0, and of three or more runs that over the runs as well. The interval of a single group has
    /// no width and shows nothing.
    pub fn excludes_zero(&self) -> bool {
        self.shown() != Ordering::Equal
    }

    /// The direction of a difference that is shown, as [`Difference::excludes_zero`] has it; `Equal` for any other.
    pub(crate) fn shown(&self) -> Ordering {
        let is_open = |[low, high]: [f64; 2]| low <= 0.0 && high >= 0.0;
        match self.n_groups < 2 || is_open([self.low, self.high]) || self.over_runs.is_some_and(is_open) {
            true => Ordering::Equal,
            false => self.mean.total_cmp(&0.0),
        }
    }
}

/// The styles of a run's answers, by the run's style model and by a second one that no reward uses.
///
/// A policy that is trained with a style model as its reward may learn the style or exploit the model (reward hacking); that model's
/// own scores cannot distinguish the two. The second model, the length of the answers and the share of distinct answers can.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StyleEvaluation {
    /// Class probabilities by the run's style model.
    pub model: Styles,
    /// Class probabilities by the second style model; omitted without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit: Option<Styles>,
    /// Mean number of characters per answer, by system.
    pub n_chars: BTreeMap<String, Option<Interval>>,
    /// Share of distinct answers of each system, 0 to 1; the mean over runs if there are several.
    pub distinct: BTreeMap<String, f64>,
}

/// The class probabilities of one style model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Styles {
    /// Mean probability of each class, by system.
    pub systems: BTreeMap<String, BTreeMap<String, Option<Interval>>>,
    /// Paired difference of the probability of each class, by pair of systems (`rl-sft` is RL minus SFT).
    pub shifts: BTreeMap<String, StyleShift>,
}

/// Paired difference of the probability of each style class; `None` if no query has an answer of both systems.
pub type StyleShift = BTreeMap<String, Option<Difference>>;

impl Styles {
    pub(crate) fn classes(&self) -> BTreeSet<&str> {
        self.systems.values().flat_map(|classes| classes.keys().map(String::as_str)).collect()
    }
}

impl StyleEvaluation {
    /// The class probabilities by each style model, with the suffix of that model in tables.
    pub(crate) fn models(&self) -> impl Iterator<Item = (&'static str, &Styles)> {
        [("", &self.model)].into_iter().chain(self.audit.as_ref().map(|audit| (" (audit)", audit)))
    }
}

/// Several runs of one pipeline with different seeds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SeedsEvaluation {
    /// All runs together. Each query's value (or difference) is averaged over the runs that have it, then bootstrapped over groups
    /// of queries. Counts of records (`n_scored`, `n_failed`, ...) are sums over runs. The intervals describe the variation over
    /// queries for these training runs; the variation over training seeds is in [`Difference::over_runs`].
    pub pooled: Evaluation,
    /// The evaluation of each run on its own, in the order of the arguments.
    pub runs: Vec<Evaluation>,
}

/// Evaluates one run. `records` has one record per system and query, in any order.
///
/// # Errors
/// No records or no resamples; a query that one system has twice or not at all; a value that is not finite.
pub fn evaluate(records: &[EvalRecord], options: &EvalOptions) -> Result<Evaluation, EvalError> {
    pool(&[Index::new(records)?], options)
}

/// Evaluates several runs, pooled and each on its own. Their test queries may differ.
///
/// # Errors
/// As [`evaluate`], for any of the runs.
pub fn evaluate_seeds(runs: &[Vec<EvalRecord>], options: &EvalOptions) -> Result<SeedsEvaluation, EvalError> {
    let indexes = runs.iter().map(|records| Index::new(records)).collect::<Result<Vec<_>, _>>()?;
    let runs = indexes.iter().map(|index| pool(std::slice::from_ref(index), options)).collect::<Result<_, _>>()?;
    Ok(SeedsEvaluation { pooled: pool(&indexes, options)?, runs })
}

/// Minimum number of groups for a percentile bootstrap interval: with fewer it is too narrow (simulations in Cameron, Gelbach and Miller
/// 2008, "Bootstrap-based improvements for inference with clustered errors").
pub(crate) const FEW_GROUPS: usize = 20;

impl Evaluation {
    /// Removes the values of `metric`, so that tables and plots leave it out.
    #[must_use]
    pub fn without(mut self, metric: Metric) -> Self {
        for system in self.systems.values_mut() {
            system.metrics.remove(&metric);
        }
        let length_matched = self.controls.iter_mut().flat_map(|controls| controls.length_matched.values_mut());
        for pair in self.pairs.values_mut().chain(length_matched) {
            pair.remove(&metric);
        }
        self
    }

    /// True if tables and plots have `metric`: [`Evaluation::without`] has not removed it.
    pub(crate) fn shows(&self, metric: Metric) -> bool {
        self.systems.values().any(|system| system.metrics.contains_key(&metric))
    }

    /// A warning if there are too few groups for the intervals of a pair; `None` if there are enough.
    pub(crate) fn too_few_groups(&self) -> Option<String> {
        let differences = self.pairs_in_order().flat_map(|(first, second, pair)| {
            let found = |(metric, found): (&Metric, &Option<Difference>)| Some((found.as_ref()?.n_groups, *metric));
            pair.iter().filter_map(found).map(move |(n, metric)| (n, metric, first, second))
        });
        let least = differences.min_by_key(|(n, ..)| *n).filter(|(n, ..)| *n < self.n_groups);
        let (n, what) = match least {
            Some((n, metric, first, second)) => (
                n,
                format!("{n} of {} groups have queries with {} for {first} - {second}", self.n_groups, metric.label()),
            ),
            None => (self.n_groups, format!("{} of queries", plural(self.n_groups, "group"))),
        };
        (n < FEW_GROUPS).then(|| {
            format!("only {what}: the intervals are narrower than the real uncertainty, and a `*` may be chance")
        })
    }

    /// The metrics of pairs of equal length that tables have.
    pub(crate) fn length_matched_metrics(&self) -> Vec<Metric> {
        Controls::METRICS.into_iter().filter(|metric| self.shows(*metric)).collect()
    }

    pub(crate) fn systems_in_order(&self) -> Vec<(&str, &SystemEvaluation)> {
        let mut systems: Vec<_> = self.systems.iter().map(|(name, system)| (name.as_str(), system)).collect();
        systems.sort_by_key(|(name, _)| order(name));
        systems
    }

    /// The compared pairs as (first system, second system, differences), in the order of [`PAIRS`].
    pub(crate) fn pairs_in_order(
        &self,
    ) -> impl Iterator<Item = (&'static str, &'static str, &BTreeMap<Metric, Option<Difference>>)> {
        PAIRS.iter().filter_map(|(first, second)| Some((*first, *second, self.pairs.get(&pair_name(first, second))?)))
    }
}

/// Position of a system in tables. Unknown names follow the known ones.
fn order(system: &str) -> usize {
    EVAL_SYSTEMS.iter().position(|known| *known == system).unwrap_or(EVAL_SYSTEMS.len())
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
    let (components, n_components_left_out) = most_used(runs, &systems);
    Ok(Evaluation {
        outdated: Vec::new(),
        split: options.split,
        n: queries.len(),
        n_groups: queries.values().map(|record| &record.query.group).collect::<BTreeSet<_>>().len(),
        n_gold: queries.values().filter(|record| !record.query.gold_ids.is_empty()).count(),
        seed: options.seed,
        n_resamples: options.n_resamples,
        lookups: options.lookups,
        style: pooled.style(&systems, &pairs),
        second_retrieval: pooled.second(&systems, &pairs),
        controls: pooled.controls(&systems, &pairs),
        pass_at_k: pooled.pass_at_k(&systems),
        systems: systems.iter().map(|system| ((*system).to_owned(), pooled.system(system, &components))).collect(),
        n_components_left_out,
        pairs: pairs.iter().map(|(first, second)| (pair_name(first, second), pooled.pair(first, second))).collect(),
    })
}

/// Maximum number of reward components for which means and intervals are computed: each costs a bootstrap for each system.
const MOST_COMPONENTS: usize = 64;

/// The names of the [`MOST_COMPONENTS`] reward components that the most records have (ties in alphabetical order), and the number of
/// names left out.
fn most_used<'a>(runs: &[Index<'a>], systems: &BTreeSet<&str>) -> (BTreeSet<&'a str>, usize) {
    let mut uses: BTreeMap<&str, usize> = BTreeMap::new();
    for system in systems {
        for name in runs.iter().flat_map(|index| index.component_names(system)) {
            *uses.entry(name).or_default() += 1;
        }
    }
    let n_left_out = uses.len().saturating_sub(MOST_COMPONENTS);
    let mut names: Vec<(&str, usize)> = uses.into_iter().collect();
    names.sort_by_key(|(_, n_uses)| std::cmp::Reverse(*n_uses));
    (names.into_iter().take(MOST_COMPONENTS).map(|(name, _)| name).collect(), n_left_out)
}

#[allow(clippy::trivially_copy_pass_by_ref)] // the signature that serde requires
pub(crate) fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// One or several runs whose values are averaged per query.
struct Pooled<'r, 'a> {
    runs: &'r [Index<'a>],
    bootstrap: Bootstrap,
    lookups: Lookups,
}

impl<'a> Pooled<'_, 'a> {
    fn system(&self, system: &str, shown: &BTreeSet<&str>) -> SystemEvaluation {
        let metrics = Metric::ALL.map(|metric| (metric, self.interval(|index| self.values(index, system, metric))));
        let components = self.runs.iter().flat_map(|index| index.component_names(system)).collect::<BTreeSet<_>>();
        let components = components.into_iter().filter(|name| shown.contains(name)).map(|name| {
            let interval = self.interval(|index| index.components(system, name));
            (name.to_owned(), interval)
        });
        let outcomes = index::count_outcomes(self.runs.iter().flat_map(|index| index.records(system)));
        SystemEvaluation {
            metrics: metrics.into(),
            components: components.collect(),
            n_scored: outcomes.n_scored,
            n_failed: outcomes.failures.values().sum(),
            n_without_reward: outcomes.n_without_reward,
            n_empty: if self.lookups.are_made() { outcomes.n_empty } else { 0 },
            failures: outcomes.failures,
        }
    }

    fn pair(&self, first: &str, second: &str) -> BTreeMap<Metric, Option<Difference>> {
        let difference =
            |metric| self.difference(|index, system| self.values(index, system, metric), [first, second], is_left_out);
        Metric::COMPARED.iter().map(|metric| (*metric, difference(*metric))).collect()
    }

    fn values(&self, index: &Index<'a>, system: &str, metric: Metric) -> Vec<(QueryKey<'a>, f64)> {
        if self.lookups.are_made() || !metric.needs_retrieval() { index.values(system, metric) } else { Vec::new() }
    }

    /// The paired difference of the values that `of` returns for two systems of each run, without the queries for whose records
    /// `is_left_out` is true.
    fn difference(
        &self,
        of: impl Fn(&Index<'a>, &str) -> Vec<(QueryKey<'a>, f64)>,
        [first, second]: [&str; 2],
        is_left_out: fn([&EvalRecord; 2]) -> bool,
    ) -> Option<Difference> {
        let of_run = |index: &Index<'a>| -> Vec<(QueryKey<'a>, f64)> {
            let seconds: BTreeMap<_, _> = of(index, second).into_iter().collect();
            let is_kept = |key: &QueryKey<'a>| !index.of_pair([first, second], key).is_some_and(is_left_out);
            let firsts = of(index, first).into_iter().filter(|(key, _)| is_kept(key));
            firsts.filter_map(|(key, value)| Some((key, value - seconds.get(&key)?))).collect()
        };
        let runs: Vec<_> = self.runs.iter().map(of_run).filter(|values| !values.is_empty()).collect();
        if runs.len() == 1 && self.runs.len() > 1 {
            // One of several runs shows nothing about the others.
            return None;
        }
        let Interval { mean, low, high } = self.averaged(&runs)?;
        let keys: BTreeSet<&QueryKey<'a>> = runs.iter().flatten().map(|(key, _)| key).collect();
        let n_groups = keys.iter().map(|key| key.group).collect::<BTreeSet<_>>().len();
        let mean_of =
            |run: &Vec<(QueryKey<'a>, f64)>| run.iter().map(|(_, value)| value).sum::<f64>() / run.len() as f64;
        let over_runs = t_interval(&runs.iter().map(mean_of).collect::<Vec<_>>());
        Some(Difference { mean, low, high, n: keys.len(), n_groups, over_runs })
    }

    /// The interval of the values that `of` returns for each run, averaged per query over the runs.
    fn interval(&self, of: impl Fn(&Index<'a>) -> Vec<(QueryKey<'a>, f64)>) -> Option<Interval> {
        self.averaged(&self.runs.iter().map(of).collect::<Vec<_>>())
    }

    fn averaged(&self, runs: &[Vec<(QueryKey<'a>, f64)>]) -> Option<Interval> {
        let mut per_query: BTreeMap<QueryKey<'a>, (f64, f64)> = BTreeMap::new();
        for (key, value) in runs.iter().flatten() {
            let (sum, count) = per_query.entry(*key).or_default();
            *sum += value;
            *count += 1.0;
        }
        self.bootstrap.interval(per_query.iter().map(|(key, (sum, count))| (key.group, sum / count)))
    }

    /// Class probabilities of the answers by the style models; `None` if no answer has a style.
    pub(super) fn style(&self, systems: &BTreeSet<&str>, pairs: &[(&str, &str)]) -> Option<StyleEvaluation> {
        let scores = self.styles(StyleModel::Model, systems, pairs)?;
        let n_chars = |system: &&str| {
            let interval = self.interval(|index| index.n_chars(system));
            ((*system).to_owned(), interval)
        };
        let distinct = |system: &&str| Some(((*system).to_owned(), self.distinct(system)?));
        Some(StyleEvaluation {
            model: scores,
            audit: self.styles(StyleModel::Audit, systems, pairs),
            n_chars: systems.iter().map(n_chars).collect(),
            distinct: systems.iter().filter_map(distinct).collect(),
        })
    }

    fn styles(&self, model: StyleModel, systems: &BTreeSet<&str>, pairs: &[(&str, &str)]) -> Option<Styles> {
        let classes: BTreeSet<&str> = self
            .runs
            .iter()
            .flat_map(|index| systems.iter().flat_map(|system| index.style_names(system, model)).collect::<Vec<_>>())
            .collect();
        if classes.is_empty() {
            return None;
        }
        let mean = |system: &str, class: &str| self.interval(|index| index.styles(system, model, class));
        let shift = |first: &str, second: &str, class: &str| {
            self.difference(
                |index: &Index<'_>, system| -> Vec<(QueryKey<'_>, f64)> { index.styles(system, model, class) },
                [first, second],
                // Styles are of answers, whatever retrieval found.
                |_| false,
            )
        };
        let by_class = |system: &&str| {
            let classes = classes.iter().map(|class| ((*class).to_owned(), mean(system, class)));
            ((*system).to_owned(), classes.collect())
        };
        let of_pair = |(first, second): &(&str, &str)| {
            let classes = classes.iter().map(|class| ((*class).to_owned(), shift(first, second, class)));
            (pair_name(first, second), classes.collect())
        };
        Some(Styles { systems: systems.iter().map(by_class).collect(), shifts: pairs.iter().map(of_pair).collect() })
    }

    fn distinct(&self, system: &str) -> Option<f64> {
        let shares: Vec<f64> = self.runs.iter().filter_map(|index| index.distinct(system)).collect();
        (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
    }
}

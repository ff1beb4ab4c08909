//! Controls of an evaluation: the rewrites on a second retriever, pairs of rewrites of equal length, copied and new words, pass@k.

use super::index::{Index, QueryKey};
use super::{Difference, Pooled, pair_name};
use crate::bootstrap::Interval;
use crate::metric::{Metric, answer, is_left_out, lacks_teacher};
use crate::terms::kept_terms;
use querl_core::records::{EvalRecord, SecondHits};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Metrics of all systems on a second retriever.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SecondEvaluation {
    /// Name of the second retriever: `lexical`, `semantic` or `semantic, the model of training`.
    pub retriever: String,
    /// Top-1 accuracy and MRR of each system; `None` if the metric does not apply.
    pub systems: BTreeMap<String, BTreeMap<Metric, Option<Interval>>>,
    /// Paired differences of top-1 accuracy and MRR, by pair of systems (`rl-sft`).
    pub pairs: BTreeMap<String, BTreeMap<Metric, Option<Difference>>>,
}

impl SecondEvaluation {
    /// The metrics that are computed on the second retriever.
    pub(crate) const METRICS: [Metric; 2] = [Metric::Top1, Metric::Mrr];

    /// True if the retriever of training used vectors of the same embedding model.
    pub(crate) fn is_of_training(&self) -> bool {
        self.retriever == SecondHits::MODEL_OF_TRAINING
    }
}

/// Length and words of the rewrites, and the comparison of rewrites of about equal length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Controls {
    /// Length and words of the rewrites of each system.
    pub systems: BTreeMap<String, RewriteControls>,
    /// Paired differences by pair of systems (`rl-sft`), only over queries whose two rewrites differ in length by at most 2 characters or
    /// a tenth of the longer one: differences that length does not explain.
    pub length_matched: BTreeMap<String, BTreeMap<Metric, Option<Difference>>>,
}

/// Length and words of the rewrites of one system, as means with 95% intervals.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RewriteControls {
    /// Number of characters per rewrite.
    pub n_chars: Option<Interval>,
    /// Share of the query's words that the rewrite keeps, 0 to 1.
    pub kept_terms: Option<Interval>,
    /// Share of the rewrite's words that a gold passage has and the query has not, 0 to 1; `None` if no gold passage is known.
    pub new_gold_terms: Option<Interval>,
    /// Number of answers in all runs.
    #[serde(default)]
    pub n_answers: usize,
    /// Number of answers whose rewrite equals the query.
    #[serde(default)]
    pub n_unchanged: usize,
}

impl Controls {
    /// The metrics of [`Controls::length_matched`].
    pub(crate) const METRICS: [Metric; 3] = [Metric::Top1, Metric::Mrr, Metric::Top1Score];

    /// True if two lengths in characters are about equal.
    fn is_matched(one: f64, other: f64) -> bool {
        (one - other).abs() <= (0.1 * one.max(other)).max(2.0)
    }
}

/// pass@k of a system: the probability that at least one of `k` samples retrieves a gold passage first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PassAtK {
    /// Number of samples per query; the maximum if queries have different numbers.
    pub n_samples: usize,
    /// pass@k for k = 1, 2, 4, ... and `n_samples`, as a mean over the queries with at least k samples.
    pub k: BTreeMap<usize, Interval>,
}

/// The unbiased estimator of pass@k from `n` samples with `n_correct` correct ones: `1 - C(n - c, k) / C(n, k)`, for k from 1 to n.
///
/// Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
fn pass_at_k(n: usize, n_correct: usize, k: usize) -> f64 {
    let n_wrong = n.saturating_sub(n_correct);
    if n_wrong < k {
        return 1.0;
    }
    1.0 - (0..k).map(|index| (n_wrong - index) as f64 / (n - index) as f64).product::<f64>()
}

impl<'a> Pooled<'_, 'a> {
    /// Metrics on the second retriever; `None` for a run without one.
    pub(super) fn second(&self, systems: &BTreeSet<&str>, pairs: &[(&str, &str)]) -> Option<SecondEvaluation> {
        let mut records = self.runs.iter().flat_map(Index::all_records);
        let retriever = records.find_map(|record| answer(record)?.second_retrieval.as_ref())?.retriever.clone();
        let metrics = |system: &&str| {
            let interval = |metric| self.interval(|index| second_values(index, system, metric));
            ((*system).to_owned(), SecondEvaluation::METRICS.map(|metric| (metric, interval(metric))).into())
        };
        let differences = |(first, second): &(&str, &str)| {
            let difference = |metric| {
                self.difference(|index, system| second_values(index, system, metric), [*first, *second], lacks_second)
            };
            let differences = SecondEvaluation::METRICS.map(|metric| (metric, difference(metric)));
            (pair_name(first, second), differences.into())
        };
        let (systems, pairs) = (systems.iter().map(metrics).collect(), pairs.iter().map(differences).collect());
        Some(SecondEvaluation { retriever, systems, pairs })
    }

    /// Length and words of the rewrites; `None` if no system has an answer.
    pub(super) fn controls(&self, systems: &BTreeSet<&str>, pairs: &[(&str, &str)]) -> Option<Controls> {
        let of_system = |system: &&str| {
            let interval =
                |value: fn(&EvalRecord) -> Option<f64>| self.interval(|index| index.of_records(system, value));
            let records = self.runs.iter().flat_map(Index::all_records).filter(|record| record.system == **system);
            let (mut n_answers, mut n_unchanged) = (0, 0);
            for record in records {
                let rewrite = answer(record).map(|answer| answer.candidate.rewrite.trim());
                n_answers += usize::from(rewrite.is_some());
                n_unchanged += usize::from(rewrite == Some(record.query.original_query.trim()));
            }
            let controls = RewriteControls {
                n_answers,
                n_unchanged,
                n_chars: self.interval(|index| index.n_chars(system)),
                kept_terms: interval(kept),
                new_gold_terms: interval(|record| answer(record)?.new_gold_terms),
            };
            ((*system).to_owned(), controls)
        };
        let systems: BTreeMap<String, RewriteControls> = systems.iter().map(of_system).collect();
        let matched = |(first, second): &(&str, &str)| {
            let difference = |metric| self.length_matched(first, second, metric);
            (pair_name(first, second), Controls::METRICS.map(|metric| (metric, difference(metric))).into())
        };
        let has_answers = systems.values().any(|controls| controls.n_chars.is_some());
        has_answers.then(|| Controls { systems, length_matched: pairs.iter().map(matched).collect() })
    }

    fn length_matched(&self, first: &str, second: &str, metric: Metric) -> Option<Difference> {
        let of = |index: &Index<'a>, system: &str| -> Vec<(QueryKey<'a>, f64)> {
            let lengths: BTreeMap<QueryKey<'a>, f64> = index.n_chars(second).into_iter().collect();
            let is_matched = |(key, length): &(QueryKey<'a>, f64)| {
                lengths.get(key).is_some_and(|other| Controls::is_matched(*length, *other))
            };
            let matched = index.n_chars(first).into_iter().filter(is_matched);
            let matched: BTreeSet<QueryKey<'a>> = matched.map(|(key, _)| key).collect();
            self.values(index, system, metric).into_iter().filter(|(key, _)| matched.contains(key)).collect()
        };
        self.difference(of, [first, second], is_left_out)
    }

    /// pass@k of each system that has samples.
    pub(super) fn pass_at_k(&self, systems: &BTreeSet<&str>) -> BTreeMap<String, PassAtK> {
        let of_system = |system: &&str| {
            let counts = self.runs.iter().flat_map(|index| index.records(system));
            let n_samples = counts.filter_map(|record| Some(answer(record)?.samples?.n)).max().filter(|n| *n > 0)?;
            let interval = |k: usize| {
                let passed = |record: &EvalRecord| {
                    let samples = answer(record)?.samples.filter(|samples| samples.n >= k)?;
                    Some(pass_at_k(samples.n, samples.n_gold_first, k))
                };
                Some((k, self.interval(|index| index.of_records(system, passed))?))
            };
            let powers = (0..usize::BITS).map(|power| 1usize << power).take_while(|k| *k < n_samples);
            let k = powers.chain([n_samples]).filter_map(interval).collect();
            Some(((*system).to_owned(), PassAtK { n_samples, k }))
        };
        systems.iter().filter_map(of_system).collect()
    }
}

fn kept(record: &EvalRecord) -> Option<f64> {
    kept_terms(&record.query.original_query, &answer(record)?.candidate.rewrite)
}

/// As top-1 accuracy and MRR on the first retriever: a failed answer is a miss. No values for a run without a second retriever.
fn second_values<'a>(index: &Index<'a>, system: &str, metric: Metric) -> Vec<(QueryKey<'a>, f64)> {
    let is_asked =
        index.all_records().any(|record| answer(record).is_some_and(|answer| answer.second_retrieval.is_some()));
    if !is_asked {
        return Vec::new();
    }
    let value = |record: &EvalRecord| {
        let rank = second_reciprocal_rank(record)?;
        Some(if metric == Metric::Top1 && rank < 1.0 { 0.0 } else { rank })
    };
    index.of_records(system, value)
}

/// True if differences on the second retriever leave a query out: the teacher has no rewrite of it, or the second retriever has not
/// searched the rewrite of the second system. Whether the first retriever failed has no part in it.
fn lacks_second([first, second]: [&EvalRecord; 2]) -> bool {
    lacks_teacher([first, second]) || answer(second).is_some_and(|answer| answer.second_retrieval.is_none())
}

/// 1 / rank of the first gold passage on the second retriever; `None` for a query without gold passages.
fn second_reciprocal_rank(record: &EvalRecord) -> Option<f64> {
    let gold = &record.query.gold_ids;
    if gold.is_empty() {
        return None;
    }
    let hits = answer(record).and_then(|answer| answer.second_retrieval.as_ref());
    let position = hits.and_then(|hits| hits.ids.iter().position(|id| gold.contains(id)));
    Some(position.map_or(0.0, |position| 1.0 / (position + 1) as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// scipy: 1 - comb(n - c, k) / comb(n, k).
    #[test]
    fn pass_at_k_is_the_unbiased_estimator() {
        let cases = [((10, 3, 1), 0.3), ((10, 3, 2), 0.533_333_333), ((10, 3, 5), 0.916_666_667), ((10, 3, 8), 1.0)];
        for ((n, n_correct, k), expected) in cases {
            let found = pass_at_k(n, n_correct, k);
            assert!((found - expected).abs() < 1e-9, "pass@{k} of {n_correct} in {n}: {found}");
        }
        assert_eq!((pass_at_k(4, 0, 4), pass_at_k(4, 4, 1)), (0.0, 1.0));
    }

    #[test]
    fn lengths_match_within_a_tenth_or_two_characters() {
        assert!(Controls::is_matched(5.0, 7.0) && Controls::is_matched(100.0, 90.0));
        assert!(!Controls::is_matched(5.0, 8.0) && !Controls::is_matched(100.0, 89.0));
    }
}

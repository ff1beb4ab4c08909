//! Expected standard error of the final comparison on the test split, and the number of groups of test queries that a difference of 5 points needs.

use super::advice::{Advice, Level, mean};
use super::headroom::LookedUpRow;
use querl_core::records::{Split, retrieval_quality};
use serde::Serialize;
use std::collections::BTreeMap;

/// The difference that should be detected.
const POINTS: f64 = 0.05;
/// Quantiles of the normal distribution: 95 % two-sided, and 80 % power.
const Z_95: f64 = 1.96;
const Z_POWER_80: f64 = 0.84;
/// Minimum number of groups for estimating the standard deviation of differences.
const MIN_GROUPS: usize = 8;
/// Standard deviation of the difference of two independent coin flips, the largest of an uncorrelated pair: `sqrt(2 * 0.25)`.
const WORST_CASE: f64 = std::f64::consts::FRAC_1_SQRT_2;

/// Source of the standard deviation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviationSource {
    /// Differences of teacher and raw query on the validation split: see [`ComparisonFacts::deviation`].
    ValidationRows,
    /// The worst case of an uncorrelated pair: two independent coin flips.
    WorstCase,
}

/// The final comparison of two systems on the same test queries.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ComparisonFacts {
    /// Number of query groups of the test split; paraphrases of one query form one group.
    pub n_test_groups: usize,
    /// Standard deviation, over groups, of the difference of two systems: that of teacher and raw query, or of a policy half-way between
    /// them if it is larger, at most the worst case.
    pub deviation: f64,
    /// Source of the standard deviation.
    pub source: DeviationSource,
    /// Expected standard error of the mean difference on the test split.
    pub standard_error: f64,
    /// Number of groups with which the 95 % interval of a difference of 5 points excludes 0.
    pub n_needed: usize,
    /// Number of groups with which a difference of 5 points is detected with a power of 80 %.
    pub n_needed_for_power: usize,
}

impl ComparisonFacts {
    pub(super) fn of(n_test_groups: usize, rows: &[LookedUpRow]) -> Self {
        let differences = differences(rows);
        let known = deviation_of(&differences).filter(|_| differences.len() >= MIN_GROUPS);
        // Equal on every row: the deviation for systems that differ is unknown.
        let (deviation, source) = match known.filter(|deviation| *deviation > 0.0) {
            Some(deviation) => (deviation, DeviationSource::ValidationRows),
            None => (WORST_CASE, DeviationSource::WorstCase),
        };
        let needed = |z: f64| (z * deviation / POINTS).powi(2).ceil() as usize;
        Self {
            n_test_groups,
            deviation,
            source,
            standard_error: deviation / (n_test_groups.max(1) as f64).sqrt(),
            n_needed: needed(Z_95),
            n_needed_for_power: needed(Z_95 + Z_POWER_80),
        }
    }

    /// The comparison as advice in words.
    pub fn advice(&self) -> Advice {
        let source = match self.source {
            DeviationSource::ValidationRows => "estimated from val",
            DeviationSource::WorstCase => "worst case",
        };
        let finding = format!(
            "standard error of a difference of two systems {:.1} points on {} groups of test queries ({source}); to show 5 points, a 95 % interval needs {} groups, and {} for a power of 80 %",
            100.0 * self.standard_error,
            self.n_test_groups,
            self.n_needed,
            self.n_needed_for_power
        );
        let (level, action) = if self.n_test_groups < self.n_needed {
            (
                Level::Weak,
                "add test queries that are no paraphrases (more rows, or a larger test share in data.split), or expect an inconclusive comparison",
            )
        } else if self.n_test_groups < self.n_needed_for_power {
            (Level::Ok, "a difference of 5 points may be missed; pool several seeds with `querl report`")
        } else {
            (Level::Ok, "nothing to do")
        };
        Advice::new("test", level, finding, action)
    }
}

/// Differences of teacher and raw query on the rows of each group: of top-1 if gold passages are known, else of the retrieval quality.
fn differences(rows: &[LookedUpRow]) -> Vec<Vec<f64>> {
    let val = || rows.iter().filter(|row| row.split == Split::Val);
    let has_gold = val().any(|row| !row.gold_ids.is_empty());
    let mut groups: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for row in val().filter(|row| !has_gold || !row.gold_ids.is_empty()) {
        let top1 = |hits: &[querl_core::records::Hit]| {
            f64::from(hits.first().is_some_and(|hit| row.gold_ids.contains(&hit.id)))
        };
        let difference = match has_gold {
            true => top1(&row.teacher.hits) - top1(&row.raw.hits),
            false => retrieval_quality(&row.teacher.hits) - retrieval_quality(&row.raw.hits),
        };
        groups.entry(&row.group).or_default().push(difference);
    }
    groups.into_values().collect()
}

/// Standard deviation `s` of the mean differences of the groups, which is 0 for a teacher that always wins, but at least that of a policy
/// half-way between teacher and raw query: one that retrieves on each row what either does, each with probability 0.5. Its variance is
/// `(s^2 + mean over groups of sum(d^2) / n^2) / 4` for the differences `d` of the `n` rows of a group. For groups of one row and a
/// teacher that never loses this is `p (1 - p)`, where `p` is half of the teacher's mean gain. At most the worst case.
fn deviation_of(groups: &[Vec<f64>]) -> Option<f64> {
    let means: Vec<f64> = groups.iter().filter_map(|group| mean(group.iter().copied())).collect();
    let measured = standard_deviation(&means)?;
    let within = |group: &Vec<f64>| group.iter().map(|d| d * d).sum::<f64>() / (group.len() as f64).powi(2);
    let half_way = 0.5 * (measured.powi(2) + mean(groups.iter().map(within))?).sqrt();
    Some(measured.max(half_way).min(WORST_CASE))
}

/// Sample standard deviation (divisor n - 1); `None` for fewer than two values.
pub(super) fn standard_deviation(values: &[f64]) -> Option<f64> {
    let n = values.len() as f64;
    if values.len() < 2 {
        return None;
    }
    let mean = values.iter().sum::<f64>() / n;
    Some((values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::super::headroom::Lookup;
    use super::*;
    use querl_core::records::Hit;

    fn row(group: &str, raw_hits: bool, teacher_hits: bool) -> LookedUpRow {
        let hit =
            |id: &str| Hit { id: id.into(), text: String::new(), reranker_score: 0.5, retrieval_score: None, rank: 1 };
        let lookup = |is_hit: bool| Lookup { hits: vec![hit(if is_hit { "g" } else { "x" })], deep_rank: None };
        let (raw, teacher) = (lookup(raw_hits), lookup(teacher_hits));
        LookedUpRow {
            split: Split::Val,
            group: group.into(),
            gold_ids: vec!["g".into()],
            raw,
            with_history: None,
            teacher,
        }
    }

    /// (1.96 * 0.7071 / 0.05)^2 = 768.3 and (2.8 * 0.7071 / 0.05)^2 = 1568.0.
    #[test]
    fn without_rows_the_worst_case_counts() {
        let facts = ComparisonFacts::of(100, &[]);
        assert_eq!((facts.source, facts.n_needed), (DeviationSource::WorstCase, 769));
        assert!((1568..=1569).contains(&facts.n_needed_for_power), "{facts:?}");
        assert!((facts.standard_error - 0.070_710_678).abs() < 1e-8, "{facts:?}");
        assert_eq!(facts.advice().level, Level::Weak);
        assert_eq!(ComparisonFacts::of(2000, &[]).advice().level, Level::Ok);
    }

    /// Differences 1, -1 and six times 0: the sum of squares is 2, over 7.
    #[test]
    fn validation_rows_give_the_deviation_of_pairs() {
        let mut rows = vec![row("a", false, true), row("b", true, false)];
        rows.extend(["c", "d", "e", "f", "g", "h"].map(|group| row(group, true, true)));
        let facts = ComparisonFacts::of(100, &rows);
        assert_eq!(facts.source, DeviationSource::ValidationRows);
        assert!((facts.deviation - (2.0_f64 / 7.0).sqrt()).abs() < 1e-12, "{facts:?}");
        assert_eq!(ComparisonFacts::of(100, &rows[..7]).source, DeviationSource::WorstCase, "seven groups are few");
        let train = rows.iter().map(|row| LookedUpRow { split: Split::Train, ..row.clone() }).collect::<Vec<_>>();
        assert_eq!(ComparisonFacts::of(100, &train).source, DeviationSource::WorstCase);
    }

    #[test]
    fn paraphrases_count_once() {
        let rows = [row("a", false, true), row("a", false, true), row("b", true, true)];
        assert_eq!(differences(&rows), [vec![1.0, 1.0], vec![0.0]]);
    }

    /// Symptom: where the teacher won nearly every row, 2.7 points were expected and 4.3 to 5.9 found. The variance of a coin flip is 1/4,
    /// and that of the mean of two 1/8.
    #[test]
    fn a_teacher_that_always_wins_does_not_make_policies_certain() {
        let groups = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let single = ComparisonFacts::of(100, &groups.map(|group| row(group, false, true)));
        assert_eq!((single.source, single.deviation), (DeviationSource::ValidationRows, 0.5));
        let pairs = ComparisonFacts::of(100, &groups.map(|group| [(); 2].map(|()| row(group, false, true))).concat());
        assert!((pairs.deviation - 0.125_f64.sqrt()).abs() < 1e-12, "{pairs:?}");
        // Differences of 1 and -1 in turn, whose sample deviation is above 1.
        let opposed: Vec<LookedUpRow> =
            groups.iter().enumerate().map(|(index, group)| row(group, index % 2 == 0, index % 2 == 1)).collect();
        assert_eq!(ComparisonFacts::of(100, &opposed).deviation, WORST_CASE);
    }
}

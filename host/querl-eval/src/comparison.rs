//! Paired comparison of two systems on queries that are held out in both runs, as evidence for a release (non-inferiority test).

use crate::bootstrap::{Bootstrap, Interval, Z_QUANTILE, t_quantile};
use crate::error::EvalError;
use crate::evaluation::FEW_GROUPS;
use crate::metric::{Metric, answer, failure_code, hits, is_left_out};
use crate::table::blocks;
use crate::text::printable;
use querl_core::records::{EvalRecord, Judgement, SystemAnswer};
use querl_core::text::plural;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// One of the two systems of a comparison.
#[derive(Debug, Clone, Copy)]
pub struct ComparedSystem<'a> {
    /// Name in messages, such as the run's folder.
    pub name: &'a str,
    /// `raw`, `teacher`, `sft` or `rl`.
    pub system: &'a str,
    /// Evaluation records of the system's run; those of other systems are ignored.
    pub records: &'a [EvalRecord],
    /// Ids of the queries that the system's run trained on or selected checkpoints with.
    pub seen: &'a BTreeSet<String>,
}

/// Metric, margin and bootstrap of a comparison.
#[derive(Debug, Clone, Copy)]
pub struct ComparisonOptions {
    /// The compared metric, one of [`Metric::COMPARED`].
    pub metric: Metric,
    /// Non-inferiority margin: the largest accepted loss of the first system, in units of the metric; at most a tenth of its scale.
    pub margin: f64,
    /// Seed of the bootstrap.
    pub seed: u64,
    /// Number of bootstrap resamples.
    pub n_resamples: usize,
}

/// Conclusion from the 95% interval of the difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ComparisonVerdict {
    /// Non-inferior: the interval excludes a loss above the margin.
    Passed,
    /// All of the interval is a loss above the margin.
    Lost,
    /// The interval includes losses above and below the margin: there are too few queries.
    Unclear,
}

/// Result of a paired comparison; differences are first minus second system.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The compared metric.
    pub metric: Metric,
    /// Non-inferiority margin, in units of the metric.
    pub margin: f64,
    /// The conclusion from `difference` and `margin`.
    pub verdict: ComparisonVerdict,
    /// Number of compared queries.
    pub n: usize,
    /// Number of groups of the compared queries; the bootstrap draws groups.
    pub n_groups: usize,
    /// Mean of the metric of the first and of the second system.
    pub means: [f64; 2],
    /// Paired difference with its 95% interval from a cluster bootstrap. With fewer than 20 groups it is at least as wide as Student's t
    /// interval; it is widened for groups with a loss or gain that the sample may lack. Exactly 0 if all rewrites are equal.
    pub difference: Interval,
    /// Estimated number of queries for a clear verdict, if mean difference and variance stay the same; `None` if the verdict is clear or
    /// the mean difference equals the margin.
    pub n_needed: Option<usize>,
    /// Number of queries with the same rewrite from both systems.
    pub n_equal_rewrites: usize,
    /// For each system the number of failed records by reason; a failure counts as the worst value of the metric.
    pub failures: [BTreeMap<String, usize>; 2],
    /// For each system the number of records whose retrieval returned no hits, as a response without a readable rewrite has none. They are
    /// results, not failures, as in [`SystemEvaluation`](crate::SystemEvaluation).
    pub n_empty: [usize; 2],
    /// For each system the number of queries left out because the other run has trained on them or selected checkpoints with them.
    pub n_seen_by_other: [usize; 2],
    /// For each system the number of queries left out because the other run does not have them.
    pub n_unpaired: [usize; 2],
    /// Number of queries left out because only one of the runs has gold passages for them, and the metric may depend on these.
    pub n_gold_of_one_side: usize,
    /// Number of queries left out because the metric applies to neither system.
    pub n_not_applicable: usize,
    /// Number of queries left out because a call or plugin of the second system failed: they would count as gains of the first.
    pub n_reference_failed: usize,
    /// Differences by group of queries, the largest loss first.
    pub groups: Vec<GroupDifference>,
}

/// The compared queries of one group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupDifference {
    /// Name of the group.
    pub group: String,
    /// Number of compared queries of the group.
    pub n: usize,
    /// Mean of the metric of the first and of the second system.
    pub means: [f64; 2],
    /// Mean of the first minus mean of the second system.
    pub difference: f64,
}

/// A query that both systems have, with both values of the metric.
struct Pair<'a> {
    records: [&'a EvalRecord; 2],
    values: [f64; 2],
}

/// Compares the first system with the second on the queries that both runs held out.
///
/// # Errors
/// A side has no records, no query is held out in both runs, gold passages differ, or the metric applies to no query.
pub fn compare(sides: [ComparedSystem<'_>; 2], options: &ComparisonOptions) -> Result<Comparison, EvalError> {
    let metric = options.metric;
    check_margin(metric, options.margin)?;
    sides.iter().try_for_each(|side| check_retrieval(side, metric))?;
    let [first, second] = [by_query(&sides[0])?, by_query(&sides[1])?];
    let is_seen = |id: &str| sides.iter().any(|side| side.seen.contains(id));
    let n_seen = |own: &ByQuery<'_>| own.keys().filter(|(id, _)| is_seen(id)).count();
    let n_alone = |own: &ByQuery<'_>, other: &ByQuery<'_>| {
        own.keys().filter(|key| !is_seen(key.0) && !other.contains_key(*key)).count()
    };
    let n_seen_by_other = [n_seen(&first), n_seen(&second)];
    let n_unpaired = [n_alone(&first, &second), n_alone(&second, &first)];
    let both = first.iter().filter_map(|(key, record)| Some([*record, *second.get(key)?]));
    let mut both: Vec<[&EvalRecord; 2]> = both.filter(|records| !is_seen(&records[0].query.id)).collect();
    if both.is_empty() {
        let [first, second] = sides.map(|side| side.name);
        let problem = format!("no query is held out in both {first} and {second}");
        return Err(EvalError::Comparison(format!("{problem}; make both runs with the same data and data.split_seed")));
    }
    let n_both = both.len();
    let has_gold = |record: &EvalRecord| !record.query.gold_ids.is_empty();
    let uses_gold = matches!(metric, Metric::Top1 | Metric::Mrr | Metric::Reward);
    both.retain(|[one, other]| !uses_gold || has_gold(one) == has_gold(other));
    let n_gold_of_one_side = n_both - both.len();
    if both.is_empty() {
        let [first, second] = sides.map(|side| side.name);
        let problem = format!("each of {n_both} queries has gold passages in {first} or {second} alone");
        return Err(EvalError::Comparison(format!("{problem}; make both runs with the same query table")));
    }
    let differs = |[one, other]: &&[&EvalRecord; 2]| has_gold(one) && has_gold(other) && gold(one) != gold(other);
    if let Some([record, other]) = both.iter().find(differs) {
        let (query, [first, second]) = (&record.query.original_query, sides.map(|side| side.name));
        let golds = [&record.query.gold_ids, &other.query.gold_ids].map(|ids| ids.join(", "));
        let problem =
            format!("query `{query}` has the gold passages [{}] in {first} and [{}] in {second}", golds[0], golds[1]);
        return Err(EvalError::Comparison(format!("{problem}; evaluate both on the same query table")));
    }
    let n_both = both.len();
    both.retain(|records| !is_reference_failed(metric, *records));
    let n_reference_failed = n_both - both.len();
    if both.is_empty() {
        let name = sides[1].name;
        let problem = format!("{name} has a failed call for each of {n_both} queries");
        return Err(EvalError::Comparison(format!("{problem}; run the evaluation again")));
    }
    let worst = worst_value(metric, &both);
    let pairs: Vec<Pair<'_>> = both
        .iter()
        .filter_map(|records| Some(Pair { records: *records, values: values(metric, *records, worst)? }))
        .collect();
    let n_not_applicable = both.len() - pairs.len();
    if pairs.is_empty() {
        // `win_rate` counts wins against the teacher.
        let applies = |other: &Metric| {
            (*other != Metric::WinRate || sides[1].system != "teacher")
                && both.iter().flatten().any(|record| other.value(record).is_some())
        };
        let names: Vec<&str> = Metric::COMPARED.into_iter().filter(applies).map(Metric::name).collect();
        let remedy = match names.is_empty() {
            true => "no other metric has values".to_owned(),
            false => format!("choose one of {}", names.join(", ")),
        };
        let problem = format!("{} applies to none of {} queries", metric.name(), both.len());
        return Err(EvalError::Comparison(format!("{problem}; {remedy}")));
    }
    let groups = group_names(&pairs);
    let by_group = by_group(&pairs, &groups);
    let bootstrap = Bootstrap { seed: options.seed, n_resamples: options.n_resamples };
    let differences = pairs.iter().zip(&groups).map(|(pair, group)| (*group, pair.values[0] - pair.values[1]));
    let drawn = bootstrap.interval(differences).ok_or(EvalError::NoResamples)?;
    let standard_error = standard_error(&by_group, drawn.mean);
    let unseen = UnseenGroups::new(&by_group, range(metric, &pairs));
    let n_equal_rewrites = both.iter().filter(|records| has_equal_rewrites(**records)).count();
    let is_same =
        n_equal_rewrites == both.len() && pairs.iter().all(|pair| (pair.values[0] - pair.values[1]).abs() <= TOLERANCE);
    let difference = match is_same {
        true => drawn,
        false => unseen.widened(widened(drawn, standard_error, by_group.len(), metric), by_group.len()),
    };
    let verdict = match is_same {
        true => ComparisonVerdict::Passed,
        false => verdict(&difference, by_group.len(), options.margin),
    };
    let count = |side: usize| {
        let codes = pairs.iter().filter_map(|pair| failure(metric, pair.records[side]));
        codes.fold(BTreeMap::new(), |mut counts, code| {
            *counts.entry(code).or_default() += 1;
            counts
        })
    };
    let is_empty = |record: &EvalRecord| hits(record).is_some_and(<[_]>::is_empty);
    let n_empty = |side: usize| pairs.iter().filter(|pair| is_empty(pair.records[side])).count();
    let mean = |side: usize| pairs.iter().map(|pair| pair.values[side]).sum::<f64>() / pairs.len() as f64;
    let is_unclear = verdict == ComparisonVerdict::Unclear;
    let n_needed = is_unclear.then(|| {
        let n_groups = unseen.n_groups_needed(drawn.mean, options.margin);
        n_needed(pairs.len(), by_group.len(), standard_error, drawn.mean + options.margin, n_groups)
    });
    Ok(Comparison {
        metric,
        margin: options.margin,
        verdict,
        n: pairs.len(),
        n_groups: by_group.len(),
        means: [mean(0), mean(1)],
        difference,
        n_needed: n_needed.flatten(),
        n_equal_rewrites,
        failures: [count(0), count(1)],
        n_empty: [n_empty(0), n_empty(1)],
        n_seen_by_other,
        n_unpaired,
        n_gold_of_one_side,
        n_not_applicable,
        n_reference_failed,
        groups: by_group,
    })
}

/// Records by query id and by the number of earlier rows with the same id, because a table may contain a query twice.
type ByQuery<'a> = BTreeMap<(&'a str, usize), &'a EvalRecord>;

fn by_query<'a>(side: &ComparedSystem<'a>) -> Result<ByQuery<'a>, EvalError> {
    let mut records: Vec<&EvalRecord> = side.records.iter().filter(|record| record.system == side.system).collect();
    if records.is_empty() {
        let ComparedSystem { name, system, .. } = side;
        let remedy = format!("add it to eval.systems and run `querl eval` of {name}");
        return Err(EvalError::Comparison(format!("{name}: system `{system}` was not evaluated; {remedy}")));
    }
    records.sort_by_key(|record| record.query.row);
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let keyed = records.into_iter().map(|record| {
        let n_before = counts.entry(&record.query.id).or_default();
        *n_before += 1;
        ((record.query.id.as_str(), *n_before), record)
    });
    Ok(keyed.collect())
}

/// Refuses records without retrieval or without passage ids, where every query would be a miss.
fn check_retrieval(side: &ComparedSystem<'_>, metric: Metric) -> Result<(), EvalError> {
    let refused = |problem: &str, others: &str| {
        let (name, metric) = (side.name, metric.name());
        Err(EvalError::Comparison(format!("{name}: {problem}, which {metric} needs; choose {others}")))
    };
    let mut found = side.records.iter().filter_map(hits).flatten().peekable();
    let is_looked_up = |record: &EvalRecord| answer(record).is_some_and(|answer| answer.candidate.retrieval.is_some());
    if metric.needs_retrieval() && !side.records.iter().any(is_looked_up) {
        return refused("the run has no retrieval", "judge_score or reward");
    }
    let needs_ids = matches!(metric, Metric::Top1 | Metric::Mrr);
    if needs_ids && found.peek().is_some() && found.all(|hit| hit.id.is_empty()) {
        return refused("the retrieval service returns no passage ids", "top1_score");
    }
    Ok(())
}

fn gold(record: &EvalRecord) -> BTreeSet<&str> {
    record.query.gold_ids.iter().map(String::as_str).collect()
}

/// Largest possible difference of two values; `None` for a reward, whose range is set by its plugin.
fn scale(metric: Metric) -> Option<f64> {
    match metric {
        Metric::Reward => None,
        Metric::JudgeScore => Some(5.0),
        _ => Some(1.0),
    }
}

/// Refuses margins above a tenth of the scale (0.1 for a reward): a larger loss must not be released.
fn check_margin(metric: Metric, margin: f64) -> Result<(), EvalError> {
    let largest = 0.1 * scale(metric).unwrap_or(1.0);
    if (0.0..=largest).contains(&margin) {
        return Ok(());
    }
    let message = format!("--margin is {margin}; expected 0 to {largest} for {}", metric.name());
    Err(EvalError::Comparison(message))
}

/// Largest possible difference of a group; for rewards, the largest observed difference, at least 1.
fn range(metric: Metric, pairs: &[Pair<'_>]) -> f64 {
    let observed = || {
        let values = || pairs.iter().flat_map(|pair| pair.values);
        let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
        (high - low).max(1.0)
    };
    scale(metric).unwrap_or_else(observed)
}

fn has_equal_rewrites(records: [&EvalRecord; 2]) -> bool {
    let [first, second] = records.map(|record| answer(record).map(|answer| &answer.candidate.rewrite));
    first.is_some() && first == second
}

/// True if a call or plugin of the second system failed: its value is then unknown instead of the worst one.
fn is_reference_failed(metric: Metric, [first, second]: [&EvalRecord; 2]) -> bool {
    let has_value = |record: &EvalRecord| metric.value(record).is_some();
    is_left_out([first, second]) || (second.outcome.is_ok() && has_value(first) && !has_value(second))
}

/// The reason why a record failed and has the worst value. A response without a readable rewrite is no failure: it has no hits.
fn failure(metric: Metric, record: &EvalRecord) -> Option<String> {
    let Some(SystemAnswer { candidate, .. }) = answer(record) else { return failure_code(record) };
    match &candidate.judgement {
        _ if candidate.retrieval_failure().is_some() => failure_code(record),
        Judgement::Failed(failed) if metric == Metric::JudgeScore => Some(format!("judge {}", failed.kind)),
        _ => None,
    }
}

/// The value of a failure: the lower end of the scale; for rewards, the lowest reward of both systems.
fn worst_value(metric: Metric, records: &[[&EvalRecord; 2]]) -> f64 {
    if scale(metric).is_some() {
        return 0.0;
    }
    let rewards = records.iter().flatten().filter_map(|record| metric.value(record));
    rewards.filter(|value| value.is_finite()).min_by(f64::total_cmp).unwrap_or(0.0)
}

/// Both values of a query, with failures as the worst value; `None` if the metric applies to neither system.
fn values(metric: Metric, records: [&EvalRecord; 2], worst: f64) -> Option<[f64; 2]> {
    let found = records.map(|record| metric.value(record).filter(|value| value.is_finite()));
    let needs_gold = matches!(metric, Metric::Top1 | Metric::Mrr);
    let has_failed = !needs_gold && records.iter().any(|record| failure_code(record).is_some());
    let applies = found.iter().any(Option::is_some) || has_failed;
    applies.then(|| found.map(|value| value.unwrap_or(worst)))
}

/// Group of each query, from the run with fewer groups: these are less likely to separate dependent queries.
fn group_names<'a>(pairs: &[Pair<'a>]) -> Vec<&'a str> {
    let of = |side: usize| pairs.iter().map(|pair| pair.records[side].query.group.as_str()).collect::<Vec<_>>();
    let n_distinct = |names: &[&str]| names.iter().collect::<BTreeSet<_>>().len();
    let (first, second) = (of(0), of(1));
    if n_distinct(&second) < n_distinct(&first) { second } else { first }
}

fn by_group(pairs: &[Pair<'_>], groups: &[&str]) -> Vec<GroupDifference> {
    let mut members: BTreeMap<&str, Vec<[f64; 2]>> = BTreeMap::new();
    for (pair, group) in pairs.iter().zip(groups) {
        members.entry(group).or_default().push(pair.values);
    }
    let difference = |(group, values): (&str, Vec<[f64; 2]>)| {
        let mean = |side: usize| values.iter().map(|pair| pair[side]).sum::<f64>() / values.len() as f64;
        let means = [mean(0), mean(1)];
        GroupDifference { group: group.to_owned(), n: values.len(), means, difference: means[0] - means[1] }
    };
    let mut groups: Vec<GroupDifference> = members.into_iter().map(difference).collect();
    groups.sort_by(|a, b| a.difference.total_cmp(&b.difference));
    groups
}

/// Standard error of the mean difference with groups as clusters; 0 for one group.
///
/// Source: Cameron and Miller 2015, "A practitioner's guide to cluster-robust inference", equation 11 for a mean.
fn standard_error(groups: &[GroupDifference], mean: f64) -> f64 {
    let (n_groups, n) = (groups.len() as f64, groups.iter().map(|group| group.n as f64).sum::<f64>());
    let squares: f64 = groups.iter().map(|group| (group.n as f64 * (group.difference - mean)).powi(2)).sum();
    (squares * n_groups / (n_groups - 1.0).max(1.0)).sqrt() / n
}

/// Widens a percentile interval to contain Student's t interval, because percentile intervals of few groups are too narrow.
fn widened(drawn: Interval, standard_error: f64, n_groups: usize, metric: Metric) -> Interval {
    let Some(t) = t_quantile(n_groups) else { return drawn };
    let (half, bound) = (t * standard_error, scale(metric).unwrap_or(f64::INFINITY));
    Interval {
        low: drawn.low.min(drawn.mean - half).max(-bound),
        high: drawn.high.max(drawn.mean + half).min(bound),
        ..drawn
    }
}

/// Unobserved groups that lose (or gain), if no observed group does.
///
/// With 95% confidence, groups unlike all of n observed ones are less than 3 / n of the population ("rule of three"; Hanley and
/// Lippman-Hand 1983, "If nothing goes wrong, is everything all right?"). A bootstrap and a standard error depend only on observed groups:
/// if all differences are equal, their intervals have no width.
struct UnseenGroups {
    /// Largest loss and gain of an unobserved group: those of the metric if all groups are equal, else the largest difference of a group.
    size: f64,
    can_lose: bool,
    can_gain: bool,
}

impl UnseenGroups {
    /// `groups` are in ascending order of their differences.
    fn new(groups: &[GroupDifference], range: f64) -> Self {
        let least = groups.first().map_or(0.0, |group| group.difference);
        let most = groups.last().map_or(0.0, |group| group.difference);
        let is_constant = most - least <= TOLERANCE;
        Self {
            size: if is_constant { range } else { least.abs().max(most.abs()) },
            can_lose: is_constant || least >= 0.0,
            can_gain: is_constant || most <= 0.0,
        }
    }

    fn widened(&self, interval: Interval, n_groups: usize) -> Interval {
        let (mean, share) = (interval.mean, (3.0 / n_groups as f64).min(1.0));
        let low = if self.can_lose { mean - share * (self.size + mean) } else { interval.low };
        let high = if self.can_gain { mean + share * (self.size - mean) } else { interval.high };
        Interval { low: interval.low.min(low), high: interval.high.max(high), mean }
    }

    /// Number of groups for which [`widened`](Self::widened) would end at the limit; the mean must differ from the limit.
    fn n_groups_needed(&self, mean: f64, margin: f64) -> f64 {
        match mean + margin {
            above if above > 0.0 && self.can_lose => 3.0 * (self.size + mean) / above,
            below if below < 0.0 && self.can_gain => 3.0 * (self.size - mean) / -below,
            _ => 0.0,
        }
    }
}

/// Tolerance for rounding errors of a mean.
const TOLERANCE: f64 = 1e-12;

fn verdict(difference: &Interval, n_groups: usize, margin: f64) -> ComparisonVerdict {
    match () {
        // A single group has no variance, so that nothing can be concluded.
        () if n_groups < 2 => ComparisonVerdict::Unclear,
        () if difference.low >= -margin - TOLERANCE => ComparisonVerdict::Passed,
        () if difference.high < -margin => ComparisonVerdict::Lost,
        () => ComparisonVerdict::Unclear,
    }
}

/// Number of queries for which the interval would end at the limit, which is `distance` from the mean: the width is inversely proportional
/// to the square root of the number, and at least `n_groups_needed` groups are needed. `None` if the mean equals the limit.
fn n_needed(n: usize, n_groups: usize, standard_error: f64, distance: f64, n_groups_needed: f64) -> Option<usize> {
    if distance.abs() <= TOLERANCE {
        return None;
    }
    let by_variance = n as f64 * (Z_QUANTILE * standard_error / distance).powi(2);
    let few_groups = if n_groups < FEW_GROUPS { FEW_GROUPS as f64 } else { 0.0 };
    let for_groups = n_groups_needed.ceil().max(few_groups) * n as f64 / n_groups as f64;
    Some((by_variance.max(for_groups).ceil() as usize).max(n + 1))
}

/// Maximum number of groups in a text.
const SHOWN_GROUPS: usize = 20;

impl Comparison {
    /// Renders the comparison as a table for a terminal; `names` are those of the two systems. Ends with a line break.
    pub fn to_text(&self, names: [&str; 2]) -> String {
        let metric = self.metric;
        let head = ["", metric.label(), "difference"].map(str::to_owned).to_vec();
        let row = |side: usize, last: String| vec![names[side].to_owned(), metric.format(self.means[side]), last];
        let mut text = blocks("", &vec![head, row(0, self.difference_text()), row(1, String::new())]);
        if self.n_groups < self.n {
            let mut grid = vec![["group", "queries", names[0], names[1], "difference"].map(str::to_owned).to_vec()];
            grid.extend(self.groups.iter().take(SHOWN_GROUPS).map(|group| {
                let [first, second] = group.means.map(|mean| metric.format(mean));
                vec![group.group.clone(), group.n.to_string(), first, second, metric.format_signed(group.difference)]
            }));
            let _ = write!(text, "\n{}", blocks("groups of queries, the largest loss first", &grid));
            if self.n_groups > SHOWN_GROUPS {
                let _ = writeln!(text, "{} further groups: --json", self.n_groups - SHOWN_GROUPS);
            }
        }
        text.push('\n');
        for line in self.notes(names) {
            let _ = writeln!(text, "{line}");
        }
        printable(&text)
    }

    /// The difference with its interval: `-55.0 [-62.1, -47.9]`.
    fn difference_text(&self) -> String {
        let Interval { mean, low, high } = self.difference;
        let [mean, low, high] = [mean, low, high].map(|value| self.metric.format_signed(value));
        format!("{mean} [{low}, {high}]")
    }

    /// One sentence on this comparison, for the output of a check by another metric; `names` are those of the two systems.
    pub fn by_gold(&self, names: [&str; 2]) -> String {
        let ([first, second], label, difference) = (names, self.metric.label(), self.difference_text());
        let sentence =
            format!("{label} of {first} against {second}, by the gold passages of {} queries: {difference}", self.n);
        match self.verdict == ComparisonVerdict::Lost {
            true => format!("warning: {sentence}, a loss; `querl release promote` does not count this check as passed"),
            false => sentence,
        }
    }

    fn notes(&self, names: [&str; 2]) -> Vec<String> {
        let (mut lines, metric) = (Vec::new(), self.metric);
        for (side, name) in names.iter().enumerate().filter(|(side, _)| !self.failures[*side].is_empty()) {
            let reasons =
                self.failures[side].iter().map(|(code, n)| format!("{code} {n}")).collect::<Vec<_>>().join(", ");
            lines.push(format!(
                "failed: {name} on {} of {} ({reasons}); each counts as a loss",
                self.failures[side].values().sum::<usize>(),
                self.n
            ));
        }
        for (name, n_empty) in names.iter().zip(self.n_empty).filter(|(_, n_empty)| *n_empty > 0) {
            let n = self.n;
            lines.push(format!("no hits: {name} on {n_empty} of {n}; misses, not failures"));
        }
        for (side, name) in names.iter().enumerate() {
            let (other, n_seen, n_unpaired) = (names[1 - side], self.n_seen_by_other[side], self.n_unpaired[side]);
            if n_seen > 0 {
                lines.push(format!("left out: {n_seen} queries of {name} that are in train or val of {other}"));
            }
            if n_unpaired > 0 {
                lines.push(format!("left out: {n_unpaired} queries of {name} that {other} does not have"));
            }
        }
        if self.n_gold_of_one_side > 0 {
            let n = self.n_gold_of_one_side;
            lines.push(format!(
                "left out: {n} queries with gold passages in one of {} and {} alone",
                names[0], names[1]
            ));
        }
        if self.n_reference_failed > 0 {
            let (n, name) = (self.n_reference_failed, names[1]);
            lines.push(format!("left out: {n} queries without a value of {name}, since a call or plugin failed"));
        }
        if self.n_not_applicable > 0 {
            lines.push(format!("left out: {} queries without {}", self.n_not_applicable, metric.name()));
        }
        if self.is_same() {
            lines.push("all rewrites are equal: the difference is 0, whatever the number of queries".to_owned());
        } else {
            lines.extend(self.cautions());
        }
        lines.push(format!(
            "{} queries in {}; the difference is the mean [95% interval] of pairs, bootstrapped by group",
            self.n,
            plural(self.n_groups, "group")
        ));
        lines
    }

    fn is_same(&self) -> bool {
        self.n_equal_rewrites == self.n + self.n_not_applicable
            && self.difference.high - self.difference.low <= TOLERANCE
    }

    /// The reasons why the interval is wider than the bootstrap's.
    fn cautions(&self) -> Vec<String> {
        let (mut lines, n_groups) = (Vec::new(), self.n_groups);
        if n_groups < FEW_GROUPS {
            lines.push(format!(
                "only {} of queries: the interval is that of Student's t where it is wider",
                plural(n_groups, "group")
            ));
        }
        let unseen = UnseenGroups::new(&self.groups, 0.0);
        let what = match (unseen.can_lose, unseen.can_gain) {
            (true, true) => "the same difference in all groups",
            (true, false) => "no group loses",
            (false, true) => "no group gains",
            (false, false) => return lines,
        };
        let share = (300.0 / n_groups as f64).min(100.0);
        lines.push(format!(
            "{what}: up to {share:.1}% of unseen groups may (3 of {n_groups}, rule of three), for which the interval has room"
        ));
        lines
    }

    /// The verdict as a sentence; `names` are those of the two systems.
    pub fn conclusion(&self, names: [&str; 2]) -> String {
        let ([first, second], name) = (names, self.metric.name());
        let limit = match self.margin == 0.0 {
            true => "a loss".to_owned(),
            false => format!("a loss of more than {} in {name}", self.margin),
        };
        match (self.verdict, self.n_needed) {
            (ComparisonVerdict::Passed, _) => {
                format!("passed: the interval excludes {limit} of {first} against {second}")
            }
            (ComparisonVerdict::Lost, _) => {
                format!("{first} loses to {second}: the whole interval of {name} is {limit}")
            }
            (_, Some(n_needed)) => format!(
                "the interval does not exclude {limit} of {first} against {second}: {} queries cannot tell, about {n_needed} would",
                self.n
            ),
            (_, None) => format!(
                "the interval does not exclude {limit} of {first} against {second}: the mean difference is at the limit, where no number of \
                 queries can tell without a larger --margin; these {} exclude a loss of more than {:.4}",
                self.n,
                (-self.difference.low * 1e4).ceil() / 1e4
            ),
        }
    }
}

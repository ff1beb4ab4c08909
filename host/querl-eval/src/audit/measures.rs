//! Measures of each episode: the reward and its components, measures that do not depend on the reward, and properties of the text.

use super::rows::{AuditRow, AuditRows};
use super::second_retriever::SecondRetriever;
use super::trends::{Change, change, correlation};
use super::words::units;
use crate::bootstrap::Bootstrap;
use crate::terms::terms;
use querl_core::records::{Candidate, reciprocal_rank};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Number of top passages of the second retriever that are compared if no gold passages are known.
const N_OVERLAP: usize = 5;

/// Maximum number of reward components that are audited.
const MOST_COMPONENTS: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MeasureKind {
    /// The total reward.
    Reward,
    /// A component of the reward.
    Component,
    /// A quality measure that does not depend on the reward, such as the rank of the gold passage; the rules compare the reward with it.
    Quality,
    /// A weaker quality measure that does not depend on the reward; it counts only if no measure of kind `Quality` rises.
    Hint,
    /// A property of the rewrite's text, such as its length.
    Text,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Measure {
    pub(crate) name: String,
    pub(crate) kind: MeasureKind,
    /// Change from the early to the late window; `None` if a window has too few values.
    pub(crate) change: Option<Change>,
    /// Correlation of this measure with the total reward within queries.
    pub(crate) r_reward: Option<f64>,
    /// The largest correlation of this measure with a measure of quality within queries, in the direction of `r_reward`.
    pub(crate) r_quality: Option<f64>,
    /// The value of each row, in the order of [`AuditRows`].
    #[serde(skip)]
    pub(super) values: Vec<Option<f64>>,
}

/// All measures that have a value for at least one row, in the order of the tables.
pub(super) fn measures(rows: &AuditRows<'_>, second: Option<&SecondRetriever>, bootstrap: Bootstrap) -> Vec<Measure> {
    let mut columns = vec![total(rows)];
    columns.extend(components(rows));
    columns.extend(retrieval_columns(rows, second));
    columns.push(column("judge_score", MeasureKind::Hint, rows, |row| row.episode().policy.judgement.score()));
    columns.extend(text_columns(rows));
    columns.retain(|one| one.values.iter().any(Option::is_some));
    let Some(total) = columns.first().map(|total| total.values.clone()) else { return columns };
    let qualities: Vec<Vec<Option<f64>>> = qualities(&columns).map(|one| one.values.clone()).collect();
    let ends = rows.early().zip(rows.late());
    for one in &mut columns {
        one.change = ends.and_then(|ends| change(&one.values, rows, ends, bootstrap));
        one.r_reward = correlation(&one.values, &total, rows);
        let direction = one.r_reward.unwrap_or(0.0).signum();
        let with_quality = qualities.iter().filter_map(|quality| correlation(&one.values, quality, rows));
        one.r_quality = with_quality.max_by(|a, b| (direction * a).total_cmp(&(direction * b)));
    }
    columns
}

/// The total and the measures of retrieval that have a value, without changes and correlations.
pub(super) fn reward_and_retrieval(rows: &AuditRows<'_>, second: Option<&SecondRetriever>) -> Vec<Measure> {
    let mut columns = vec![total(rows)];
    columns.extend(retrieval_columns(rows, second));
    columns.retain(|one| one.values.iter().any(Option::is_some));
    columns
}

pub(super) fn qualities(measures: &[Measure]) -> impl Iterator<Item = &Measure> {
    measures.iter().filter(|one| one.kind == MeasureKind::Quality)
}

fn column(
    name: &str,
    kind: MeasureKind,
    rows: &AuditRows<'_>,
    value: impl Fn(&AuditRow<'_>) -> Option<f64>,
) -> Measure {
    let values = rows.rows.iter().map(|row| value(row).filter(|value| value.is_finite())).collect();
    Measure { name: name.to_owned(), kind, change: None, r_reward: None, r_quality: None, values }
}

fn total(rows: &AuditRows<'_>) -> Measure {
    column("total", MeasureKind::Reward, rows, |row| Some(row.reward.total))
}

fn components(rows: &AuditRows<'_>) -> Vec<Measure> {
    let parts = rows.rows.iter().flat_map(|row| &row.reward.components);
    let names: BTreeSet<&str> = parts.map(|part| part.name.as_str()).collect();
    let of = |name: &str| {
        let value =
            |row: &AuditRow<'_>| row.reward.components.iter().find(|part| part.name == name).map(|part| part.value);
        column(&format!("component/{name}"), MeasureKind::Component, rows, value)
    };
    names.into_iter().take(MOST_COMPONENTS).map(of).collect()
}

/// Measures of retrieval. With gold passages, their ranks; without, the reranker score of the best hit (0 without hits), which is computed
/// for the original query and cannot be changed by a rewrite.
fn retrieval_columns(rows: &AuditRows<'_>, second: Option<&SecondRetriever>) -> Vec<Measure> {
    let weaker = if rows.has_gold { MeasureKind::Hint } else { MeasureKind::Quality };
    let top1 = |row: &AuditRow<'_>| {
        let hits = row.episode().policy.found()?;
        Some(hits.first().map_or(0.0, |hit| hit.reranker_score))
    };
    let mut columns =
        vec![column("gold_rank", MeasureKind::Quality, rows, gold_rank), column("top1_score", weaker, rows, top1)];
    let Some(second) = second else { return columns };
    let gold = |row: &AuditRow<'_>| {
        let episode = row.episode();
        second.reciprocal_rank(&episode.policy.rewrite, &episode.gold_ids)
    };
    columns.insert(1, column("second_retriever", MeasureKind::Quality, rows, gold));
    if !rows.has_gold {
        let values = overlaps(rows, second);
        columns.push(Measure { values, ..column("second_retriever_overlap", MeasureKind::Hint, rows, |_| None) });
    }
    columns
}

/// 1 / rank of the first gold passage among the recorded hits, 0 if there is none.
fn gold_rank(row: &AuditRow<'_>) -> Option<f64> {
    reciprocal_rank(row.episode().policy.found()?, &row.episode().gold_ids)
}

/// Jaccard similarity of the second retriever's best passages for the rewrite and for the query in its context.
fn overlaps(rows: &AuditRows<'_>, second: &SecondRetriever) -> Vec<Option<f64>> {
    let mut of_queries: HashMap<usize, BTreeSet<usize>> = HashMap::new();
    let overlap = |row: &AuditRow<'_>| {
        let of_query = of_queries.entry(row.query).or_insert_with(|| second.best(&asked(row), N_OVERLAP));
        let of_rewrite = second.best(&row.episode().policy.rewrite, N_OVERLAP);
        let n_union = of_query.union(&of_rewrite).count();
        (n_union > 0).then(|| of_query.intersection(&of_rewrite).count() as f64 / n_union as f64)
    };
    rows.rows.iter().map(overlap).collect()
}

/// The query with profile and history.
fn asked(row: &AuditRow<'_>) -> String {
    let episode = row.episode();
    format!("{} {} {}", episode.query, episode.context.user_profile, episode.context.history_summary)
}

fn text_columns(rows: &AuditRows<'_>) -> Vec<Measure> {
    let text = |name, value: fn(&AuditRow<'_>) -> Option<f64>| column(name, MeasureKind::Text, rows, value);
    let shared = Measure { values: shared_text(rows), ..text("shared_text", |_| None) };
    vec![
        text("length", |row| Some(units(&row.episode().policy.rewrite).len() as f64)),
        text("copied_terms", copied_terms),
        text("distinct_share", |row| distinct_share(&row.episode().policy.rewrite)),
        text("marks", |row| Some(marks(&row.episode().policy.rewrite))),
        text("truncated", |row| truncated(&row.episode().policy)),
        text("teacher_overlap", teacher_overlap),
        shared,
    ]
}

/// Share of the rewrite's terms that also occur in the query, the profile or the history; 0 without terms.
fn copied_terms(row: &AuditRow<'_>) -> Option<f64> {
    let known: BTreeSet<String> = terms(&asked(row)).into_iter().collect();
    let own = terms(&row.episode().policy.rewrite);
    let n_copied = own.iter().filter(|term| known.contains(*term)).count();
    Some(n_copied as f64 / own.len().max(1) as f64)
}

/// Number of distinct pairs of adjacent units divided by all pairs (distinct-2); `None` without a pair. Of a word that stands several
/// times in a row one is left out, since learned expansions may have it twice.
fn distinct_share(text: &str) -> Option<f64> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let runs = words.chunk_by(|one, next| one == next);
    let words: Vec<&str> = runs.flat_map(|run| &run[usize::from(run.len() > 1)..]).copied().collect();
    let units = units(&words.join(" "));
    let pairs: Vec<&[String]> = units.windows(2).collect();
    let distinct: BTreeSet<&&[String]> = pairs.iter().collect();
    (!pairs.is_empty()).then(|| distinct.len() as f64 / pairs.len() as f64)
}

/// Number of characters that are neither letters nor digits, such as spaces, punctuation and brackets.
fn marks(text: &str) -> f64 {
    text.trim().chars().filter(|c| !c.is_alphanumeric()).count() as f64
}

fn truncated(candidate: &Candidate) -> Option<f64> {
    candidate.finish_reason.as_ref().map(|_| if candidate.is_truncated() { 1.0 } else { 0.0 })
}

/// Dice similarity of the terms of the rewrite and of the teacher's; `None` without a teacher's rewrite.
fn teacher_overlap(row: &AuditRow<'_>) -> Option<f64> {
    let set = |text: &str| -> BTreeSet<String> { terms(text).into_iter().collect() };
    let (own, teacher) = (set(&row.episode().policy.rewrite), set(&row.episode().baseline.as_ref()?.rewrite));
    Some(2.0 * own.intersection(&teacher).count() as f64 / (own.len() + teacher.len()).max(1) as f64)
}

/// The part of a rewrite that does not depend on the query: the share of rewrites for queries with other targets that contain a term,
/// averaged over the terms. Computed within each window; `None` outside of them.
fn shared_text(rows: &AuditRows<'_>) -> Vec<Option<f64>> {
    let mut values = vec![None; rows.rows.len()];
    for window in &rows.windows {
        let indices: Vec<usize> = rows.within(window).collect();
        let own: Vec<BTreeSet<String>> = indices
            .iter()
            .map(|index| terms(&rows.rows[*index].episode().policy.rewrite).into_iter().collect())
            .collect();
        let (mut with_term, mut of_target) = (BTreeMap::<&str, f64>::new(), BTreeMap::<(usize, &str), f64>::new());
        let mut n_of_target = BTreeMap::<usize, f64>::new();
        for (index, own) in indices.iter().zip(&own) {
            let target = rows.rows[*index].target;
            *n_of_target.entry(target).or_default() += 1.0;
            for term in own {
                *with_term.entry(term.as_str()).or_default() += 1.0;
                *of_target.entry((target, term.as_str())).or_default() += 1.0;
            }
        }
        for (index, own) in indices.iter().zip(&own) {
            let target = rows.rows[*index].target;
            let n_others = indices.len() as f64 - n_of_target[&target];
            let elsewhere = own.iter().map(|term| with_term[term.as_str()] - of_target[&(target, term.as_str())]);
            let n_shared: f64 = elsewhere.sum();
            values[*index] = (n_others > 0.0).then(|| n_shared / n_others / own.len().max(1) as f64);
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_pairs_lower_the_distinct_share() {
        assert_eq!(distinct_share("鱼油 鱼油 鱼油"), Some(2.0 / 3.0));
        assert_eq!(distinct_share("鱼油鱼油鱼油"), Some(0.4));
        assert_eq!(distinct_share("refund refund refund refund"), Some(0.5));
        assert_eq!(distinct_share("怎么退 退款 退款 航线卡 航线卡"), Some(1.0));
        assert_eq!((distinct_share("fish oil dose"), distinct_share("鱼")), (Some(1.0), None));
        assert_eq!((marks(" 鱼油 用量。"), marks("鱼油")), (2.0, 0.0));
    }
}
